"""Mappings of a YAML file whose every key knows its line, so that an error can name it.

Keys are written with hyphens or underscores.
"""

from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import yaml

from oscine.cli.error import USAGE, CommandError
from oscine.settings.option import Option, OptionError, Options, options_of
from oscine.system.yaml_text import YamlError, parse_yaml

T = TypeVar("T", bound=Options)
_NOUNS: dict[type, str] = {str: "text", int: "a whole number", list: "a list"}


class Section:
    """One mapping. Each key is taken once; `end` refuses those that were not. Errors are CommandErrors."""

    def __init__(self, file: Path, node: yaml.Node, path: str = "") -> None:
        self.file = file
        self._node, self._path = node, path
        self._entries: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        self._left: set[str] = set()
        if not isinstance(node, yaml.MappingNode):
            raise self._error(node, f"{path or 'the file'} must be a mapping of keys to values")
        for key, value in node.value:
            name = str(key.value).replace("_", "-")
            if name in self._entries:
                raise self._error(key, f"{self._named(name)} is there twice")
            self._entries[name] = key, value
            self._left.add(name)

    @classmethod
    def read(cls, file: Path) -> "Section":
        try:
            node = parse_yaml(file.read_text(), partial(yaml.compose, Loader=yaml.SafeLoader))
        except OSError as error:
            raise CommandError(f"{file}: {error.strerror}", USAGE) from None
        except YamlError as error:
            raise CommandError(f"{file}:{error.line}: {error.problem}", USAGE) from None
        except ValueError as error:
            raise CommandError(f"{file} is not YAML: {error}", USAGE) from None
        if node is None:
            raise CommandError(f"{file} is empty", USAGE)
        return cls(file, node)

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    @property
    def keys(self) -> Iterable[str]:
        return self._entries

    def error(self, key: str, message: str) -> CommandError:
        """At the line of the key, or of this mapping where it has no such key."""
        key_node, _ = self._entries.get(key, (self._node, None))
        return self._error(key_node, f"{self._path}: {message}" if self._path else message)

    def _error(self, node: yaml.Node, message: str) -> CommandError:
        return CommandError(f"{self.file}:{node.start_mark.line + 1}: {message}", USAGE)

    def _named(self, key: str) -> str:
        return f"{self._path}.{key}" if self._path else key

    # ---- values ----

    def _value(self, node: yaml.Node) -> Any:
        try:
            return yaml.SafeLoader("").construct_document(node)
        except yaml.MarkedYAMLError as error:  # a tag or a key that no plain value has
            raise self._error(node, str(error.problem)) from None
        except ValueError as error:  # a date that does not exist
            raise self._error(node, str(error)) from None

    def take(self, key: str, *kinds: type) -> Any:
        """The value of a key that is there, which must be of one of the types."""
        node = self._take(key)
        value = self._value(node)
        if not isinstance(value, kinds) or isinstance(value, bool):
            wanted = " or ".join(_NOUNS[kind] for kind in kinds)
            raise self._error(node, f"{self._named(key)} must be {wanted}, not {value!r}")
        return value

    def _take(self, key: str) -> yaml.Node:
        self._left.discard(key)
        return self._entries[key][1]

    def is_mapping(self, key: str) -> bool:
        return isinstance(self._entries[key][1], yaml.MappingNode)

    def section(self, key: str) -> "Section":
        """The mapping of a key; an empty one, with this one's line, where there is none."""
        self._left.discard(key)
        mark = self._node.start_mark
        empty = yaml.MappingNode("tag:yaml.org,2002:map", [], mark, mark)
        key_node, node = self._entries.get(key, (empty, empty))
        if isinstance(node, yaml.ScalarNode) and node.value == "":  # `decode:` alone
            node = yaml.MappingNode(empty.tag, [], key_node.start_mark, key_node.end_mark)
        return Section(self.file, node, self._named(key))

    def sections(self, key: str) -> list["Section"]:
        """The mappings of a list that is there."""
        node = self._take(key)
        if not isinstance(node, yaml.SequenceNode):
            raise self._error(node, f"{self._named(key)} must be a list")
        return [Section(self.file, item, f"{self._named(key)}[{i}]") for i, item in enumerate(node.value)]

    def rest(self) -> Iterator[tuple[str, Any]]:
        """Takes all that is left, as written."""
        for key in [key for key in self._entries if key in self._left]:
            yield key, self._value(self._take(key))

    # ---- records ----

    def record(self, kind: type[T], **given: Any) -> T:
        """A dataclass of what is left, whose options are keys, and of what is given."""
        for declared in options_of(kind):
            if declared.name in self._left and declared.field not in given:
                given[declared.field] = self.take_option(declared)
        self.end()
        try:
            return kind(**given)
        except OptionError as error:
            raise self.error(error.option, f"{error.option} {error.rule}") from None

    def take_option(self, declared: Option) -> Any:
        """The value of an option that is there."""
        node = self._take(declared.name)
        try:
            return declared.read(self._value(node))
        except OptionError as error:
            raise self._error(node, f"{self._named(declared.name)} {error.rule}") from None

    def end(self) -> None:
        for key in self._entries:
            if key in self._left:
                raise self.error(key, f"unknown key {key!r}")
