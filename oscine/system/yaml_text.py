"""YAML as people write it. An error is one line that names the line at fault."""

from collections.abc import Callable
from typing import Any


class YamlError(ValueError):
    """Text that is not YAML. PyYAML's own message has several lines and names every text "<unicode string>"."""

    def __init__(self, problem: str, line: int) -> None:
        super().__init__(f"line {line}: {problem}")
        self.problem, self.line = problem, line


def parse_yaml(text: str, parse: Callable[[str], Any] | None = None) -> Any:
    """What the text says, by a function of PyYAML (default: safe_load). Raises ValueError, mostly a YamlError."""
    import yaml

    try:
        return (parse or yaml.safe_load)(text)
    except yaml.MarkedYAMLError as error:
        problem = " ".join(filter(None, (error.problem, error.context)))
        raise YamlError(problem, error.problem_mark.line + 1 if error.problem_mark else 1) from None
    except yaml.reader.ReaderError as error:  # a character that YAML forbids
        raise YamlError(str(error).splitlines()[0], text.count("\n", 0, error.position) + 1) from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
