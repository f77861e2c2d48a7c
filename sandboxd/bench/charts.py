"""Plots as inline SVG: lines and stacked bars. Pure; nothing of them is loaded from anywhere.

Colours and sizes are those of `style`: `c0` to `c7` are the classes of the series, in order. A plot is drawn
for a phone's width and grows with its box.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 440, 250
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 10, 38
COLOURS = 8
# Values that lie further apart than this are drawn on a logarithmic axis.
DECADES_APART = 50.0
# And no further than this, whatever the least of them.
WIDEST = 1e6
# Less is nothing: a nanosecond.
LEAST = 1e-9
BAR_HEIGHT, BAR_GAP = 20, 12


@dataclass(frozen=True, slots=True)
class Series:
    """One line; `colour` is the number of its class. A dashed one goes with the plain one of its colour."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: int
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Axis:
    """What is written beside an axis, and from where to where it goes."""

    label: str
    low: float
    high: float
    logarithmic: bool = False

    @classmethod
    def over(cls, label: str, values: Iterable[float], *, may_be_logarithmic: bool = False) -> Axis:
        """From 0 to a little beyond the largest value; or from the smallest, where that is far away."""
        found = [value for value in values if value >= LEAST]
        high = max(found, default=1.0)
        low = max(min(found, default=high), high / WIDEST)
        if may_be_logarithmic and high / low > DECADES_APART:
            return cls(label, 10 ** math.floor(math.log10(low)), high * 1.05, logarithmic=True)
        return cls(label, 0.0, high * 1.05)

    def part(self, value: float) -> float:
        """Where a value lies between the ends, from 0 to 1."""
        if self.logarithmic:
            span = math.log(self.high / self.low)
            return min(1.0, max(0.0, math.log(max(value, self.low) / self.low) / span))
        return min(1.0, max(0.0, (value - self.low) / (self.high - self.low)))

    def ticks(self) -> list[float]:
        """Round values, about five of them."""
        if self.logarithmic:
            first, last = math.floor(math.log10(self.low)), math.floor(math.log10(self.high))
            return [10.0**power for power in range(first, last + 1)]
        rough = (self.high - self.low) / 5
        unit = 10 ** math.floor(math.log10(rough))
        step = unit * min((factor for factor in (1, 2, 5, 10) if factor * unit >= rough), default=10)
        return [self.low + number * step for number in range(int((self.high - self.low) / step) + 1)]


def lines(series: Sequence[Series], across: Axis, up: Axis) -> str:
    """A plot of lines, with its legend."""
    shown = [one for one in series if one.points]
    if not shown:
        return '<p class="none">nothing was measured</p>'
    parts = [_grid(across, up)]
    for one in shown:
        points = " ".join(f"{_x(across, x):.1f},{_y(up, y):.1f}" for x, y in one.points)
        dashed = " dashed" if one.dashed else ""
        parts.append(
            f'<polyline class="line c{one.colour % COLOURS}{dashed}" points="{points}">'
            f"<title>{escape(one.name)}</title></polyline>"
        )
        # A line of one point shows nothing, and a few want to be told from the line between them.
        if len(one.points) <= 12:
            parts += [_dot(one, x, y, across, up) for x, y in one.points]
    return _legend((one.name, one.colour, one.dashed) for one in shown) + _svg(
        HEIGHT, "".join(parts), up.label
    )


def stacked(rows: Sequence[tuple[str, dict[str, float]]], across: Axis) -> str:
    """A horizontal bar for each row, of parts in the order of the first row, with their legend."""
    # A part has its colour whether or not others are there.
    colours = {name: colour for colour, name in enumerate(rows[0][1])} if rows else {}
    names = [name for name in colours if any(parts.get(name) for _, parts in rows)]
    if not names:
        return '<p class="none">nothing was measured</p>'
    height = TOP + BOTTOM + len(rows) * (BAR_HEIGHT + BAR_GAP + 14)
    drawn = [_scale(across, height)]
    for number, (label, parts) in enumerate(rows):
        top = TOP + number * (BAR_HEIGHT + BAR_GAP + 14)
        drawn.append(f'<text class="label" x="4" y="{top + 11}">{escape(label)}</text>')
        begin = 0.0
        for name in names:
            seconds = parts.get(name, 0.0)
            left, right = _wide(across, begin), _wide(across, begin + seconds)
            begin += seconds
            told = escape(f"{label}, {name}: {seconds:.3g} s")
            drawn.append(
                f'<rect class="c{colours[name] % COLOURS}" x="{left:.1f}" y="{top + 16}"'
                f' height="{BAR_HEIGHT}" width="{max(0.0, right - left):.1f}"><title>{told}</title></rect>'
            )
    return _legend((name, colours[name], False) for name in names) + _svg(
        height, "".join(drawn), across.label
    )


def _svg(height: int, inner: str, label: str) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(label)}">{inner}</svg>'


def _legend(entries: Iterable[tuple[str, int, bool]]) -> str:
    keys = "".join(
        f'<li><span class="key c{colour % COLOURS}{" dashed" if dashed else ""}"></span>{escape(name)}</li>'
        for name, colour, dashed in entries
    )
    return f'<ul class="legend">{keys}</ul>'


def _dot(one: Series, x: float, y: float, across: Axis, up: Axis) -> str:
    told = escape(f"{one.name}: {short(x)}, {short(y)}")
    centre = f'cx="{_x(across, x):.1f}" cy="{_y(up, y):.1f}"'
    return f'<circle class="c{one.colour % COLOURS}" {centre} r="3.5"><title>{told}</title></circle>'


def _grid(across: Axis, up: Axis) -> str:
    parts, base = [], HEIGHT - BOTTOM
    for tick in up.ticks():
        y = _y(up, tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(_text("tick", LEFT - 6, y + 4, "end", short(tick)))
    parts += [_text("tick", _x(across, tick), base + 16, "middle", short(tick)) for tick in across.ticks()]
    parts.append(f'<line class="base" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{base}" y2="{base}"/>')
    return "".join(parts) + _text("label", WIDTH - RIGHT, HEIGHT - 6, "end", across.label)


def _scale(across: Axis, height: int) -> str:
    parts = []
    for tick in across.ticks():
        x = _wide(across, tick)
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{height - BOTTOM}"/>')
        parts.append(_text("tick", x, height - BOTTOM + 16, "middle", short(tick)))
    return "".join(parts) + _text("label", WIDTH - RIGHT, height - 6, "end", across.label)


def _text(kind: str, x: float, y: float, anchor: str, text: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _x(across: Axis, value: float) -> float:
    return LEFT + across.part(value) * (WIDTH - LEFT - RIGHT)


def _wide(across: Axis, value: float) -> float:
    """As `_x`, where the labels stand above the bars and not beside them."""
    return 8 + across.part(value) * (WIDTH - 8 - RIGHT - 12)


def _y(up: Axis, value: float) -> float:
    return HEIGHT - BOTTOM - up.part(value) * (HEIGHT - TOP - BOTTOM)


def short(value: float) -> str:
    """Short, as on an axis."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
