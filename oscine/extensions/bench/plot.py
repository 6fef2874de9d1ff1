"""`python -m oscine.extensions.bench.plot`: tokens/s per GPU against tokens/s per user, ours beside other systems."""

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

from oscine.extensions.bench.anchors import ANCHORS, VLLM, Anchor
from oscine.extensions.bench.result import Result, latest, of_one_gpu, parse_results

PROMPT = 1024  # tokens; points with other prompts are not drawn
IMAGE = Path("docs/img/pareto.svg")
MODELS = ("120b", "20b")

LoadPoint = tuple[float, float, float]  # tokens/s of one user, another measure, and the load

OURS, PEER, PUBLISHED, QUIET = "#c2410c", "#1d4ed8", "#475569", "#94a3b8"


def draw(results: Iterable[Result]) -> Figure:
    """One panel per model, both axes logarithmic."""
    matplotlib.rcParams["svg.hashsalt"] = "oscine"  # equal pictures give equal files
    matplotlib.rcParams["svg.fonttype"] = "none"
    newest = list(latest(of_one_gpu(results)).values())
    counted = any(result.watts is not None for result in newest)
    num_rows = 2 if counted else 1
    figure = Figure(figsize=(12.0, 5.2 * num_rows), layout="constrained")
    panels = figure.subplots(num_rows, len(MODELS), squeeze=False)
    for index, model in enumerate(MODELS):
        results_of_model = [result for result in newest if result.model == model]
        _panel(panels[0, index], model, results_of_model)
        if counted:
            _energy_panel(panels[1, index], model, results_of_model)
    return figure


def _energy_panel(axes: Axes, model: str, results: Sequence[Result]) -> None:
    """Prompts are in the energy, so only points with equal prompts are in one curve."""
    axes.set(xscale="log", yscale="log", title=f"gpt-oss-{model}, one H200: energy")
    axes.set(xlabel="tokens/s of one user (1 / decode step)", ylabel="joules per generated token")
    points = [
        (result.tok_s_user, result.joules_per_output_token, result.concurrency)
        for result in results
        if result.isl == PROMPT and result.joules_per_output_token is not None
    ]
    if points:
        curve(axes, points, OURS, "Oscine", "o", below=False, low_is_better=True)
        finish(axes, ticks="{x:,.3g}")


def _panel(axes: Axes, model: str, results: Sequence[Result]) -> None:
    short = [result for result in results if result.isl == PROMPT]
    ours = [(result.tok_s_user, result.output_tok_s, result.concurrency) for result in short]
    axes.set(xscale="log", yscale="log", title=f"gpt-oss-{model}, one H200")
    axes.set(xlabel="tokens/s of one user (1 / decode step)", ylabel="generated tokens/s of a GPU")
    draw_vllm(axes, model, f"{VLLM}, same machine and load")
    if ours:
        curve(axes, ours, OURS, "Oscine", "o", below=False)
    draw_published(axes, model)
    finish(axes)


def draw_vllm(axes: Axes, model: str, label: str) -> None:
    """Its curve for a model, which is 120b or 20b."""
    points = [
        (anchor.tok_s_user, anchor.output_tok_s, anchor.concurrency)
        for anchor in ANCHORS
        if (anchor.system, anchor.model) == (VLLM, model)
        and anchor.tok_s_user
        and anchor.output_tok_s
        and anchor.concurrency
    ]
    curve(axes, points, PEER, label, "s", below=True)


def draw_published(axes: Axes, model: str) -> None:
    """The figures of other systems for a model."""
    for anchor in ANCHORS:
        if anchor.model == model and anchor.system != VLLM:
            _published(axes, anchor)


def finish(axes: Axes, ticks: str = "{x:,.0f}") -> None:
    """Ticks, margins and legend, when everything is drawn."""
    _plain_ticks(axes, ticks)
    axes.margins(x=0.12, y=0.12)
    axes.grid(True, which="major", color="#e2e8f0", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower left", frameon=False, fontsize=8)


def _plain_ticks(axes: Axes, ticks: str) -> None:
    """1, 2, 5, 10, 20 ... in full."""
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=20))
        axis.set_major_formatter(StrMethodFormatter(ticks))
        axis.set_minor_locator(NullLocator())


def front(points: Sequence[LoadPoint], *, low_is_better: bool = False) -> list[LoadPoint]:
    """The points that no other point beats in x and in y, by x. A high x is better."""
    found: list[LoadPoint] = []
    for point in sorted(points, key=lambda p: (p[0], -p[1] if low_is_better else p[1]), reverse=True):
        y = found[-1][1] if found else None
        if y is None or (point[1] < y if low_is_better else point[1] > y):
            found.append(point)
    return found[::-1]


def curve(
    axes: Axes,
    points: Sequence[LoadPoint],
    color: str,
    label: str,
    marker: str,
    *,
    below: bool,
    low_is_better: bool = False,
) -> None:
    """Draws all points, each with its load beside it, and a line through those that no other point beats."""
    best = front(points, low_is_better=low_is_better)
    axes.plot([x for x, _, _ in best], [y for _, y, _ in best], marker=marker, color=color, label=label)
    others = [point for point in points if point not in best]
    axes.plot([x for x, _, _ in others], [y for _, y, _ in others], marker=marker, color=color, linestyle="", alpha=0.5)
    for x, y, load in points:
        _label(axes, f"{load:g}", (x, y), color, place=(-5, -11) if below else (5, 5))


def _published(axes: Axes, anchor: Anchor) -> None:
    """A point, or a line if the source has no figure per user."""
    assert anchor.output_tok_s is not None
    if anchor.tok_s_user is None:
        text = f"{anchor.system}, {anchor.gpu}, offline: {anchor.output_tok_s:,.0f} (published)"
        axes.axhline(anchor.output_tok_s, color=QUIET, linestyle="--", linewidth=1)
        place = axes.get_yaxis_transform()
        axes.text(1.0, anchor.output_tok_s * 1.04, text, transform=place, color=PUBLISHED, fontsize=7, ha="right")
        return
    point = (anchor.tok_s_user, anchor.output_tok_s)
    known = {line.get_label() for line in axes.get_lines()}
    name = f"{anchor.system}, published"
    label = "_" if name in known else name  # once in the legend
    marker = "*" if anchor.concurrency is None else "D"
    axes.plot(*point, marker=marker, markersize=5, linestyle="", color=PUBLISHED, label=label)
    load = "" if anchor.concurrency is None else f"{anchor.concurrency} on "
    _label(axes, load + anchor.gpu, point, PUBLISHED, place=(6, -3))


def _label(axes: Axes, text: str, point: tuple[float, float], color: str, *, place: tuple[int, int]) -> None:
    """`place` in points from the point."""
    align = "right" if place[0] < 0 else "left"
    axes.annotate(text, point, place, textcoords="offset points", color=color, fontsize=7, ha=align)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m oscine.extensions.bench.plot", description="Draws results beside other systems' figures."
    )
    parser.add_argument(
        "--output", type=Path, default=IMAGE, help=f"image to write: svg, png or pdf (default: {IMAGE})"
    )
    args, results = parse_results(parser, argv)
    figure = draw(results)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.output, metadata={"Date": None} if args.output.suffix == ".svg" else None, dpi=150)


if __name__ == "__main__":
    main()
