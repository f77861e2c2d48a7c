"""The bench's results as one picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from rl.bench.arms import ARMS, RATES, SANDBOXES, TAILS
from rl.bench.cell import Outcome
from rl.charts import COLOURS

ROWS: tuple[tuple[str, Callable[[Outcome], float]], ...] = (
    ("tokens trained, over sync", lambda each: each.speedup_tokens),
    ("trainer waits", lambda each: each.wait_ratio),
    ("length bias", lambda each: each.length_bias),
)


def plot(outcomes: Sequence[Outcome], path: Path) -> None:
    """Writes a PNG: each measure over the rates, a column a tail, and last over the sandboxes."""
    figure = Figure(figsize=(4.0 * (len(TAILS) + 1), 3.0 * len(ROWS)), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(ROWS), len(TAILS) + 1, sharey="row", squeeze=False)
    for (label, value), axes in zip(ROWS, grid, strict=True):
        axes[0].set_ylabel(label)
        for tail, place in zip(TAILS, axes, strict=False):
            chosen = [each for each in outcomes if each.tail == tail and each.sandboxes == "warm"]
            _lines(place, chosen, value)
            place.set_xscale("log", base=2)
            place.set_xticks(RATES, [f"{rate:g}" for rate in RATES])
        by_boxes = [each for each in outcomes if each.rate == 1.0 and each.tail == list(TAILS)[-1]]
        _lines(axes[-1], by_boxes, value, by_boxes=True)
        axes[-1].set_xticks(range(len(SANDBOXES)), list(SANDBOXES))
    for place, tail in zip(grid[0], [*TAILS, "by sandbox start, rates equal"], strict=True):
        place.set_title(tail)
    for place in grid[-1][:-1]:
        place.set_xlabel("generator's rate / trainer's")
    handles, labels = grid[0][-1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", frameon=False)
    figure.savefig(path, dpi=110)


def _lines(
    axes: Axes, outcomes: Sequence[Outcome], value: Callable[[Outcome], float], *, by_boxes: bool = False
) -> None:
    for number, arm in enumerate(ARMS):
        found = [each for each in outcomes if each.arm == arm.name]
        if value is ROWS[0][1]:
            found = [each for each in found if each.speedup]
        places = [list(SANDBOXES).index(each.sandboxes) if by_boxes else each.rate for each in found]
        points = sorted(zip(places, map(value, found), strict=True))
        axes.plot(
            [x for x, _ in points],
            [y for _, y in points],
            label=arm.name,
            marker="o",
            markersize=3,
            color=COLOURS[number % len(COLOURS)],
            linestyle="-" if number < len(COLOURS) else "--",
        )
    axes.grid(alpha=0.3)
