"""The results of a sweep: a Pareto plot beside other systems, and one HTML page that needs no other file."""

import base64
import html
import io
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from oscine.extensions.bench import plot
from oscine.extensions.bench.anchors import VLLM
from oscine.extensions.bench.serve.report import columns
from oscine.extensions.bench.serve.row import Row

_PEERS = ("#15803d", "#7e22ce", "#0e7490")  # colours of peers
_WIDE, _NARROW = (9.0, 6.0), (4.2, 5.6)  # inches
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


def write(
    folder: Path,
    title: str,
    rows: Sequence[Row],
    peers: Sequence[Row],
    lines: Sequence[Sequence[str]],
    gpus: int | None,
) -> None:
    """pareto.png and index.html in `folder`. `lines`: the cells of the table. `gpus`: of the server, if it has some."""
    wide, narrow = (_png(draw(rows, peers, gpus, size)) for size in (_WIDE, _NARROW))
    (folder / "pareto.png").write_bytes(wide)
    page = "".join(_page(title, wide, narrow, columns(gpus), lines, rows))
    (folder / "index.html").write_text(page, encoding="utf-8")


def _png(figure: Figure) -> bytes:
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=150)
    return image.getvalue()


def draw(rows: Sequence[Row], peers: Sequence[Row], gpus: int | None, size: tuple[float, float] = _WIDE) -> Figure:
    """Tokens/s, per GPU if there are some, against tokens/s per user at the median TPOT; both axes logarithmic."""
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    name = str(rows[0]["model"])
    axes.set(xscale="log", yscale="log", title=name)
    axes.set(xlabel="tokens/s per user (1 / median TPOT)", ylabel=f"generated tokens/s{' per GPU' if gpus else ''}")
    model = next((model for model in plot.MODELS if model in name), None)  # "20b" is in "120b", which comes first
    if model is not None:
        plot.draw_vllm(axes, model, f"{VLLM}, one H200 (all requests at once)")
    others = itertools.groupby(sorted(peers, key=_name), _name)
    for (peer, found), color in zip(others, itertools.cycle(_PEERS), strict=False):
        plot.curve(axes, _points(found), color, peer, "s", below=True)
    plot.curve(axes, _points(rows), plot.OURS, _name(rows[0]), "o", below=False)
    if model is not None:
        plot.draw_published(axes, model)
    plot.finish(axes)
    return figure


def _name(row: Row) -> str:
    parts = (str(row.get(key, "unknown")) for key in ("framework", "hw"))
    return ", ".join(part for part in parts if part != "unknown") or "this server"


def _points(rows: Iterable[Row]) -> list[tuple[float, float, float]]:
    """(tokens/s per user, tokens/s per GPU, concurrency or rate) of each row that has tokens."""
    return [
        (row["median_intvty"], row["output_tput_per_gpu"], row.get("conc") or row.get("rate") or 0)
        for row in rows
        if row.get("median_intvty") and row.get("output_tput_per_gpu")
    ]


def _page(
    title: str,
    wide: bytes,
    narrow: bytes,
    names: Sequence[str],
    lines: Sequence[Sequence[str]],
    rows: Sequence[Row],
) -> Iterator[str]:
    text = html.escape(title)
    yield f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{text}</title><style>{_STYLE}</style>'
    yield '<meta name="viewport" content="width=device-width,initial-scale=1">'
    yield f"<h1>{html.escape(str(rows[0]['model']))}</h1><p>{text}</p>"
    yield f'<picture><source media="{_NARROW_SCREEN}" srcset="{_data(narrow)}">'
    yield f'<img alt="tokens per second against those per user" src="{_data(wide)}"></picture>'
    yield f"<table><thead><tr>{''.join(f'<th>{html.escape(name)}</th>' for name in names)}</tr></thead>"
    yield f"<tbody>{''.join(_table_row(names, line) for line in lines)}</tbody></table>"
    yield "<details><summary>rows</summary><pre>"
    yield html.escape("\n".join(map(json.dumps, rows)))
    yield "</pre></details></html>\n"


def _data(image: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(image).decode()}"


def _table_row(names: Sequence[str], values: Sequence[str]) -> str:
    named = zip(names, values, strict=True)
    cells = (f'<td data-name="{html.escape(name)}">{html.escape(value)}</td>' for name, value in named)
    return f"<tr>{''.join(cells)}</tr>"
