"""What is installed only with `oscine[bench]`."""

from importlib.util import find_spec

from oscine.cli.error import CommandError


def need_matplotlib(what: str) -> None:
    """Raises CommandError if `what` cannot be drawn."""
    if find_spec("matplotlib") is None:
        raise CommandError(f"the {what} needs matplotlib: pip install 'oscine[bench]'")
