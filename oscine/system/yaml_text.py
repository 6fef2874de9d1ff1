"""YAML as people write it. An error is one line that names the line at fault."""

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from yaml import MappingNode, SafeLoader


class YamlError(ValueError):
    """Text that is not YAML. PyYAML's own message has several lines and names every text "<unicode string>"."""

    def __init__(self, problem: str, line: int) -> None:
        super().__init__(f"line {line}: {problem}")
        self.problem, self.line = problem, line


def parse_yaml(text: str, parse: Callable[[str], Any] | None = None) -> Any:
    """What the text says, by a function of PyYAML (default: load, which refuses a key that is there twice).

    Raises ValueError, mostly a YamlError.
    """
    import yaml

    try:
        return parse(text) if parse else yaml.load(text, _loader())
    except yaml.MarkedYAMLError as error:
        problem = " ".join(filter(None, (error.problem, error.context)))
        raise YamlError(problem, error.problem_mark.line + 1 if error.problem_mark else 1) from None
    except yaml.reader.ReaderError as error:  # a character that YAML forbids
        raise YamlError(str(error).splitlines()[0], text.count("\n", 0, error.position) + 1) from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


@cache
def _loader() -> "type[SafeLoader]":
    import yaml

    class Loader(yaml.SafeLoader):
        """Refuses a key that is there twice, as YAML does. PyYAML takes its last value.

        Numbers have no colons: 1:2:3 is text, as in YAML 1.2. YAML 1.1 takes it for a number to the base 60.
        """

        def compose_mapping_node(self, anchor: Any) -> "MappingNode":
            node = super().compose_mapping_node(anchor)
            seen = set()
            for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
                if (key.tag, key.value) in seen:
                    raise yaml.composer.ComposerError(None, None, f"{key.value} is there twice", key.start_mark)
                seen.add((key.tag, key.value))
            return node

    def without_colon(construct: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        return lambda loader, node: node.value if ":" in node.value else construct(loader, node)

    for kind in ("int", "float"):
        tag = f"tag:yaml.org,2002:{kind}"
        Loader.add_constructor(tag, without_colon(yaml.SafeLoader.yaml_constructors[tag]))
    return Loader
