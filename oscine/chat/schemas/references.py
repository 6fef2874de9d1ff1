"""Resolves `$ref` within a JSON schema: JSON pointers, anchors, and URIs relative to `$id`.

Nothing outside the schema is ever read.
"""

import re
from typing import Any
from urllib.parse import unquote, urljoin

_NEWEST_DRAFT = 2020
_VALUES = {"const", "enum", "default", "examples"}  # keywords whose values are no schemas, even if they look like one
_BY_NAME = {"properties", "patternProperties", "dependentSchemas", "dependencies", "$defs", "definitions"}
_DRAFT = re.compile(r"json-schema\.org/draft[-/]0?(\d{1,4})")
_INDEX = re.compile(r"0|[1-9][0-9]{0,9}")
_CONTAINERS = (dict, list)
_MAX_SHOWN = 80  # characters of a reference that an error repeats
_MAX_JOINED = 1 << 22  # characters of bases: each `$id` and reference makes a copy of its base, which may be long


class References:
    """The references of one root schema. Its parts are identified by id(), so they must not be copied."""

    def __init__(self, root: dict[str, Any]) -> None:
        found = _DRAFT.search(str(root.get("$schema")))
        self.draft = int(found[1]) if found else _NEWEST_DRAFT
        self._left = _MAX_JOINED
        self._bases: dict[int, str] = {}  # URI of the resource that a schema belongs to, by the schema's id()
        self._places: dict[tuple[str, str], Any] = {("", ""): root}  # by the URIs of resources, and their anchors
        left: list[tuple[Any, str, bool]] = [(root, "", False)]  # whether the keys are names of schemas
        while left:
            node, base, by_name = left.pop()
            if isinstance(node, list):
                left += [(part, base, False) for part in node if isinstance(part, _CONTAINERS)]
                continue
            base = base if by_name else self._note(node, base)
            left += [
                (part, base, key in _BY_NAME and not by_name)
                for key, part in node.items()
                if isinstance(part, _CONTAINERS) and (by_name or key not in _VALUES)
            ]

    def _note(self, node: dict[str, Any], base: str) -> str:
        """Registers the names of a schema, and returns its base URI."""
        identifier = node.get("$id" if self.draft > 4 else "id")
        if isinstance(identifier, str) and not identifier.startswith("#"):
            base = self._joined(base, identifier).partition("#")[0]
            self._places.setdefault((base, ""), node)
        for anchor in (node.get("$anchor"), node.get("$dynamicAnchor"), identifier):
            if isinstance(anchor, str):
                self._places.setdefault((base, anchor.removeprefix("#")), node)
        self._bases[id(node)] = base
        return base

    def uri(self, reference: str, schema: dict[str, Any]) -> str:
        """The absolute URI of a `$ref` in `schema`. Raises ValueError if it is no URI."""
        return self._joined(self._bases.get(id(schema), ""), reference)

    def _joined(self, base: str, reference: str) -> str:
        self._left -= len(base)
        if self._left < 0:
            raise ValueError("its '$id's are too long")
        if reference.startswith("#"):  # urljoin would drop the base of a URN
            return base + reference
        try:
            return urljoin(base, reference)
        except ValueError:
            raise ValueError(f"{reference[:_MAX_SHOWN]!r} is no URI") from None

    def target(self, uri: str) -> tuple[Any, tuple[str, ...]]:
        """The part of the root that a URI names, and its path. Raises ValueError if there is none."""
        document, _, fragment = uri.partition("#")  # urldefrag would drop line breaks
        node = self._places.get((document, ""))
        if node is None:
            shown = repr(uri[:_MAX_SHOWN])
            raise ValueError(
                f"the '$ref' {shown} names another document; only references within the schema are followed"
            )
        segments = [part.replace("~1", "/").replace("~0", "~") for part in unquote(fragment).split("/")]
        try:
            if segments[0]:
                node = self._places[document, segments[0]]
            for segment in segments[1:]:
                node = node[_index(segment)] if isinstance(node, list) else node[segment]
        except (KeyError, IndexError, TypeError):
            raise ValueError(f"the '$ref' {f'#{fragment}'[:_MAX_SHOWN]!r} leads nowhere") from None
        return node, tuple(filter(None, segments))


def _index(segment: str) -> int:
    """Raises KeyError for what JSON pointers do not have, such as -1 and 01."""
    if not _INDEX.fullmatch(segment):
        raise KeyError(segment)
    return int(segment)
