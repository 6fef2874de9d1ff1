"""The results of a sweep: a Pareto plot beside other systems, and one HTML page that needs no other file."""

import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from oscine.extensions.bench import plot
from oscine.extensions.bench.anchors import VLLM
from oscine.extensions.bench.serve.page import Table, pictures, write_page
from oscine.extensions.bench.serve.report import columns
from oscine.extensions.bench.serve.row import Row

_PEERS = ("#15803d", "#7e22ce", "#0e7490")  # colours of peers
_WIDE = (9.0, 6.0)  # inches


def write(
    folder: Path,
    title: str,
    rows: Sequence[Row],
    peers: Sequence[Row],
    lines: Sequence[Sequence[str]],
    gpus: int | None,
) -> None:
    """pareto.png and index.html in `folder`. `lines`: the cells of the table. `gpus`: of the server, if it has some."""
    found = pictures(lambda size: draw(rows, peers, gpus, size))
    (folder / "pareto.png").write_bytes(found[0])
    write_page(folder / "index.html", str(rows[0]["model"]), title, found, [Table("", columns(gpus), lines)], rows)


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
