"""The tables of options in docs/configuration.md: `python -m tests.cli.option_table` prints them."""

from collections.abc import Iterator

from oscine.cli.serve.options import GROUPS
from oscine.settings.config import OPTIONS
from oscine.settings.option import Option


def tables() -> Iterator[str]:
    for group in GROUPS:
        yield f"\n### {group[0].upper()}{group[1:]}\n\n| option | what it is | default |\n|---|---|---|"
        yield from (_row(option) for option in OPTIONS.values() if option.group == group)


def _row(option: Option) -> str:
    given = f"--{option.name}" if option.is_flag else f"--{option.name} {option.value_text}"
    given = "MODEL" if option.name == "model" else given
    cells = (f"`{given}`", option.help, "" if option.is_flag else option.default_text)
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


if __name__ == "__main__":
    print("\n".join(tables()).strip())
