"""Resolves `$ref` within a JSON schema: JSON pointers, anchors, and URIs relative to `$id`.

Nothing outside the schema is ever read.
"""

import re
from typing import Any
from urllib.parse import unquote, urljoin

NEWEST_DRAFT = 2020
VALUES = {"const", "enum", "default", "examples"}  # keywords whose values are no schemas, even if they look like one
_DRAFT = re.compile(r"json-schema\.org/draft[-/]0?(\d+)")
_CONTAINERS = (dict, list)
_MOST_SHOWN = 80  # characters of a reference that an error repeats


class References:
    """The references of one root schema. Its parts are identified by id(), so they must not be copied."""

    def __init__(self, root: dict[str, Any]) -> None:
        found = _DRAFT.search(str(root.get("$schema")))
        self.draft = int(found[1]) if found else NEWEST_DRAFT
        self._bases: dict[int, str] = {}  # URI of the resource that a schema belongs to, by the schema's id()
        self._places: dict[str, Any] = {"": root}  # resources and anchors by their URI
        left: list[tuple[Any, str]] = [(root, "")]
        while left:
            node, base = left.pop()
            if isinstance(node, list):
                left += [(part, base) for part in node if isinstance(part, _CONTAINERS)]
                continue
            base = self._note(node, base)
            left += [(part, base) for key, part in node.items() if isinstance(part, _CONTAINERS) and key not in VALUES]

    def _note(self, node: dict[str, Any], base: str) -> str:
        """Registers the names of a schema, and returns its base URI."""
        identifier = node.get("$id" if self.draft > 4 else "id")
        if isinstance(identifier, str) and not identifier.startswith("#"):
            base = urljoin(base, identifier).partition("#")[0]
            self._places[base] = node
        for anchor in (node.get("$anchor"), node.get("$dynamicAnchor"), identifier):
            if isinstance(anchor, str):
                self._places.setdefault(f"{base}#{anchor.removeprefix('#')}", node)
        self._bases[id(node)] = base
        return base

    def uri(self, reference: str, schema: dict[str, Any]) -> str:
        """The absolute URI of a `$ref` in `schema`."""
        base = self._bases.get(id(schema), "")
        return base + reference if reference.startswith("#") else urljoin(base, reference)

    def target(self, uri: str) -> tuple[Any, tuple[str, ...]]:
        """The part of the root that a URI names, and its path. Raises ValueError if there is none."""
        document, _, fragment = uri.partition("#")  # urldefrag would drop line breaks
        node = self._places.get(document)
        if node is None:
            shown = repr(uri[:_MOST_SHOWN])
            raise ValueError(
                f"the '$ref' {shown} names another document; only references within the schema are followed"
            )
        segments = [part.replace("~1", "/").replace("~0", "~") for part in unquote(fragment).split("/")]
        try:
            if segments[0]:
                node = self._places[f"{document}#{segments[0]}"]
            for segment in segments[1:]:
                node = node[int(segment)] if isinstance(node, list) else node[segment]
        except (KeyError, IndexError, TypeError, ValueError):
            raise ValueError(f"the '$ref' {f'#{fragment}'[:_MOST_SHOWN]!r} leads nowhere") from None
        return node, tuple(filter(None, segments))
