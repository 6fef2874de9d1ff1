"""Draws a ramp: load and replicas above, times to first tokens below. Needs matplotlib (the extra `bench`)."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

Points = Sequence[tuple[float, float]]

LOAD, REPLICAS, FIRST = "#94a3b8", "#c2410c", "#1d4ed8"


def draw(load: Points, wanted: Points, replicas: Points, first_tokens: Points, image: Path) -> None:
    figure = Figure(figsize=(9.0, 5.4), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    above.fill_between(*_columns(load), color=LOAD, alpha=0.4, linewidth=0, label="requests/s asked")
    above.step(*_columns(wanted), where="post", color=REPLICAS, linestyle=":", label="replicas wanted")
    above.step(*_columns(replicas), where="post", color=REPLICAS, label="replicas in service")
    above.set(ylabel="replicas; requests/s", ylim=(0, None))
    above.legend(loc="upper right", frameon=False)
    below.plot(*_columns(first_tokens), ".", color=FIRST, markersize=4)
    below.set(xlabel="seconds", ylabel="time to first token (s)", ylim=(0, None))
    for axes in (above, below):
        axes.grid(True, color="#e2e8f0", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    image.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(image, dpi=130)


def _columns(points: Points) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]
