"""The results of a sweep: a Pareto plot beside other systems, and one HTML page that needs no other file."""

import base64
import html
import io
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from oscine.bench import plot
from oscine.bench.anchors import VLLM
from oscine.bench.serve.report import COLUMNS
from oscine.bench.serve.row import Row

_PEERS = ("#15803d", "#7e22ce", "#0e7490")  # colours of peers
_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:70em;margin:2em auto;padding:0 1em;color:#1e293b}"
    "img{max-width:100%}table{border-collapse:collapse}th,td{padding:.2em .8em;text-align:right}"
    "th{border-bottom:1px solid #94a3b8}pre{overflow:auto;font-size:12px}"
)


def write(folder: Path, title: str, rows: Sequence[Row], peers: Sequence[Row], lines: Sequence[Sequence[str]]) -> None:
    """pareto.png and index.html in `folder`. `lines`: the cells of the table."""
    image = io.BytesIO()
    draw(rows, peers).savefig(image, format="png", dpi=150)
    (folder / "pareto.png").write_bytes(image.getvalue())
    (folder / "index.html").write_text("".join(_page(title, image.getvalue(), lines, rows)), encoding="utf-8")


def draw(rows: Sequence[Row], peers: Sequence[Row]) -> Figure:
    """Tokens/s per GPU against tokens/s per user at the median TPOT, both axes logarithmic."""
    figure = Figure(figsize=(9.0, 6.0), layout="constrained")
    axes = figure.subplots()
    name = str(rows[0]["model"])
    axes.set(xscale="log", yscale="log", title=name)
    axes.set(xlabel="tokens/s per user (1 / median TPOT)", ylabel="generated tokens/s per GPU")
    size = next((size for size in plot.MODELS if size in name), None)  # "20b" is in "120b", which comes first
    if size is not None:
        plot.draw_vllm(axes, size, f"{VLLM}, one H200 (all requests at once)")
    others = itertools.groupby(sorted(peers, key=_name), _name)
    for (peer, found), color in zip(others, itertools.cycle(_PEERS), strict=False):
        plot.curve(axes, _points(found), color, peer, "s", below=True)
    plot.curve(axes, _points(rows), plot.OURS, _name(rows[0]), "o", below=False)
    if size is not None:
        plot.draw_published(axes, size)
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


def _page(title: str, image: bytes, lines: Sequence[Sequence[str]], rows: Sequence[Row]) -> Iterator[str]:
    name = html.escape(title)
    yield f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{name}</title><style>{_STYLE}</style>'
    yield f"<h1>{html.escape(str(rows[0]['model']))}</h1><p>{name}</p>"
    picture = base64.b64encode(image).decode()
    yield f'<img alt="tokens per second per GPU against those per user" src="data:image/png;base64,{picture}">'
    yield f"<table>{_table_row('th', COLUMNS)}{''.join(_table_row('td', line) for line in lines)}</table>"
    yield "<details><summary>rows</summary><pre>"
    yield html.escape("\n".join(map(json.dumps, rows)))
    yield "</pre></details></html>\n"


def _table_row(cell: str, values: Iterable[str]) -> str:
    return f"<tr>{''.join(f'<{cell}>{html.escape(value)}</{cell}>' for value in values)}</tr>"
