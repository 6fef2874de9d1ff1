"""One HTML page that needs no other file: a picture, tables, and the rows that they come from."""

import base64
import html
import io
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib.figure import Figure

from oscine.extensions.bench.serve.row import Row

Size = tuple[float, float]  # inches
_WIDE, _NARROW = (9.0, 6.0), (4.2, 5.6)
_NARROW_SCREEN = "(max-width:600px)"
_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:70em;margin:2em auto;padding:0 1em;color:#1e293b;"
    "overflow-wrap:anywhere}img{max-width:100%;height:auto}table{border-collapse:collapse}"
    "th,td{padding:.2em .8em;text-align:right;overflow-wrap:normal}"
    "th{border-bottom:1px solid #94a3b8}pre{overflow:auto;font-size:12px}"
    # On a phone each row is a list of names and values.
    f"@media{_NARROW_SCREEN}{{table,tbody,tr,td{{display:block}}thead{{display:none}}"
    "tr{margin-top:1em;border-top:1px solid #94a3b8}td{display:flex;justify-content:space-between;padding:.2em 0}"
    "td::before{content:attr(data-name)}td:first-child{font-weight:600}}"
)


class Table(NamedTuple):
    title: str  # empty: none
    columns: Sequence[str]
    lines: Sequence[Sequence[str]]  # cells


def pictures(draw: Callable[[Size], Figure]) -> tuple[bytes, bytes]:
    """PNG for a wide screen and for a narrow one."""
    return _png(draw(_WIDE)), _png(draw(_NARROW))


def write_page(
    path: Path, heading: str, text: str, found: tuple[bytes, bytes], tables: Sequence[Table], rows: Sequence[Row]
) -> None:
    """`found`: of pictures(). `text`: may have several lines; the first is the title too. Raises OSError."""
    path.write_text("".join(_page(heading, text, found, tables, rows)), encoding="utf-8")


def _png(figure: Figure) -> bytes:
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=150)
    return image.getvalue()


def _page(
    heading: str, text: str, found: tuple[bytes, bytes], tables: Sequence[Table], rows: Sequence[Row]
) -> Iterator[str]:
    wide, narrow = found
    lines = [html.escape(line) for line in text.splitlines()]
    yield f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{lines[0]}</title><style>{_STYLE}</style>'
    yield '<meta name="viewport" content="width=device-width,initial-scale=1">'
    yield f"<h1>{html.escape(heading)}</h1><p>{'<br>'.join(lines)}</p>"
    yield f'<picture><source media="{_NARROW_SCREEN}" srcset="{_data(narrow)}">'
    yield f'<img alt="tokens per second against those per user" src="{_data(wide)}"></picture>'
    for table in tables:
        yield f"<h2>{html.escape(table.title)}</h2>" if table.title else ""
        yield f"<table><thead><tr>{''.join(f'<th>{html.escape(name)}</th>' for name in table.columns)}</tr></thead>"
        yield f"<tbody>{''.join(_table_row(table.columns, line) for line in table.lines)}</tbody></table>"
    yield "<details><summary>rows</summary><pre>"
    yield html.escape("\n".join(map(json.dumps, rows)))
    yield "</pre></details></html>\n"


def _data(image: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(image).decode()}"


def _table_row(names: Sequence[str], values: Sequence[str]) -> str:
    named = zip(names, values, strict=True)
    cells = (f'<td data-name="{html.escape(name)}">{html.escape(value)}</td>' for name, value in named)
    return f"<tr>{''.join(cells)}</tr>"
