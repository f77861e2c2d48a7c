"""Line and bar charts as SVG text that follows the page's colours, light or dark."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

# Drawn in this colour, then replaced: the page decides what it looks like.
INK = "#010203"
# Distinguishable for colour-blind readers on white and on near-black (after Okabe and Ito, 2008).
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6bb1", "#7f7f7f")
DASHES = ("-", "--", "-.", ":")
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


@dataclass(frozen=True, slots=True)
class Chart:
    """One picture: each line is a list of (x, y) points. `unit` labels the y axis."""

    title: str
    unit: str
    lines: Mapping[str, Sequence[tuple[float, float]]]
    bottom: float | None = 0.0
    top: float | None = None
    marks: Mapping[str, float] = field(default_factory=dict)
    """Horizontal reference lines, by what they mean."""


def line_chart(chart: Chart, *, x_label: str = "step") -> str:
    """The chart as an `<svg>` element with a title for screen readers."""
    with matplotlib.rc_context(STYLE):
        figure, axes = _figure(4.2)
        for index, (name, points) in enumerate(chart.lines.items()):
            axes.plot(
                [x for x, _ in points],
                [y for _, y in points],
                label=name,
                color=COLOURS[index % len(COLOURS)],
                linestyle=DASHES[index // len(COLOURS) % len(DASHES)],
                marker="o",
                markersize=3,
                linewidth=1.6,
            )
        for value in chart.marks.values():
            axes.axhline(value, color=INK, linewidth=0.8, linestyle=":")
        axes.set_ylim(bottom=chart.bottom, top=chart.top)
        axes.set_ylabel(chart.unit)
        axes.set_xlabel(x_label)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if len(chart.lines) > 1:
            axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
        return _svg(figure, chart.title)


def paired_bars(title: str, before: Mapping[str, float], after: Mapping[str, float]) -> str:
    """Two bars a name, from 0 to 1, with the values written on them."""
    names = list(dict.fromkeys([*before, *after]))
    with matplotlib.rc_context(STYLE):
        figure, axes = _figure(0.5 * len(names) + 1.2)
        for offset, values, label, colour in (
            (0.2, before, "before", "#7f7f7f"),
            (-0.2, after, "after", COLOURS[0]),
        ):
            places = [len(names) - 1 - index + offset for index in range(len(names))]
            widths = [values.get(name, 0.0) for name in names]
            bars = axes.barh(places, widths, height=0.38, color=colour, label=label)
            axes.bar_label(bars, [f" {width:.2f}" for width in widths], fontsize=9)
        axes.set_yticks(range(len(names)), list(reversed(names)))
        axes.set_xlim(0, 1.1)
        axes.set_xlabel("solve rate")
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
        return _svg(figure, title)


def _figure(height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(8.0, height), layout="constrained")
    FigureCanvasSVG(figure)
    figure.patch.set_alpha(0.0)
    axes = figure.add_subplot()
    axes.patch.set_alpha(0.0)
    return figure, axes


def _svg(figure: Figure, title: str) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :].replace(INK, "currentColor")
    # Ids repeat between charts of one page: each keeps its own.
    mark = re.sub(r"[^a-z0-9]+", "-", title.lower())
    text = re.sub(r'(id="|url\(#|href="#)', rf"\1{mark}-", text)
    head, _, rest = text.partition(">")
    head = re.sub(r' (width|height)="[^"]*"', "", head)
    return f'{head} role="img" aria-label="{title}"><title>{title}</title>{rest}'
