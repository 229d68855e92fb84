"""Charts as SVG, from a few lines of arithmetic.

Each is drawn twice, for a wide and for a narrow page, so that its letters keep their size; the
style sheet of the page shows the one that fits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape

Reduce = Callable[[Sequence[float]], float]

WIDE, NARROW = (760, 300), (380, 260)
LEFT, RIGHT, TOP, BOTTOM = 46, 24, 34, 42
POINTS = 150
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass
class Line:
    """A curve of a chart. ``kind`` is its class in the style sheet."""

    name: str
    kind: str
    points: list[tuple[float, float]]  # step, value


def in_bins(values: Sequence[float], reduce: Reduce) -> list[tuple[float, float]]:
    """At most ``POINTS`` points (step, value); each stands for equally many neighbouring steps."""
    size = math.ceil(len(values) / POINTS)
    parts = [(i, values[i : i + size]) for i in range(0, len(values), size)]
    return [(i + (len(part) + 1) / 2, reduce(part)) for i, part in parts]


def ticks(low: float, high: float, count: int) -> list[float]:
    """Round numbers around low and high, about ``count`` of them."""
    raw = (high - low or abs(high) or 1.0) / count
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(unit * m for m in (1, 2, 5, 10) if raw <= unit * m * 1.0001)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, max(last, first + 1) + 1)]


def path(points: Iterable[tuple[float, float]]) -> str:
    """An SVG path through the points; a lone one becomes a dot."""
    places = [f"{x:.1f} {y:.1f}" for x, y in points]
    return "M" + "L".join(places * 2 if len(places) == 1 else places) if places else ""


def draw(lines: list[Line], size: tuple[int, int], unit: str, log: bool, from_zero: bool) -> str:
    """One chart of that many pixels."""
    width, height = size
    ys = [y for line in lines for _, y in line.points if math.isfinite(y) and (y > 0 or not log)]
    ys = ys or [1.0]
    if log:
        first, end = math.floor(math.log10(min(ys))), math.ceil(math.log10(max(ys)))
        end = max(end, first + 1)
        y_ticks = [float(e) for e in range(first, end + 1, math.ceil((end - first) / 6))]
        low, high = float(first), float(end)
        labels = ["10" + f"{e:.0f}".translate(SUPERSCRIPTS) for e in y_ticks]
    else:
        y_ticks = ticks(0.0 if from_zero else min(ys), max(ys), 5)
        low, high = y_ticks[0], y_ticks[-1]
        labels = [f"{y:.6g}" for y in y_ticks]
    last = max(x for line in lines for x, _ in line.points)
    x_ticks = [x for x in ticks(0.0, last, 5 if width > 500 else 4) if x <= last * 1.02]
    right = max(last, x_ticks[-1])

    def across(x: float) -> float:
        return LEFT + x / right * (width - LEFT - RIGHT)

    def down(y: float) -> float:
        return height - BOTTOM - (y - low) / (high - low) * (height - TOP - BOTTOM)

    def place(y: float) -> float:
        return down(math.log10(y) if y > 0 else low) if log else down(y)

    out = [f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">']
    for y, label in zip(y_ticks, labels, strict=True):
        out.append(f'<path class="grid" d="M{LEFT} {down(y):.1f}H{width - RIGHT}"/>')
        out.append(f'<text x="{LEFT - 7}" y="{down(y) + 4:.1f}" text-anchor="end">{label}</text>')
    bottom = height - BOTTOM
    for x in x_ticks:
        out.append(f'<path class="axis" d="M{across(x):.1f} {bottom}v5"/>')
        out.append(
            f'<text x="{across(x):.1f}" y="{bottom + 19}" text-anchor="middle">{x:,.0f}</text>'
        )
    out.append(f'<path class="axis" d="M{LEFT} {bottom}H{width - RIGHT}"/>')
    out.append(f'<text x="{width - RIGHT}" y="{height - 6}" text-anchor="end">step</text>')
    out.append(f'<text x="{LEFT - 7}" y="16" text-anchor="end">{escape(unit)}</text>')
    key = LEFT + 8
    for line in lines:
        points = [(across(x), place(y)) for x, y in line.points if math.isfinite(y)]
        out.append(f'<path class="line {line.kind}" d="{path(points)}"/>')
        out.append(f'<path class="line {line.kind}" d="M{key} 12h30"/>')
        out.append(f'<text x="{key + 38}" y="16">{escape(line.name)}</text>')
        key += 60 + 8 * len(line.name)
    return "".join([*out, "</svg>"])


def chart(
    lines: list[Line], caption: str, unit: str = "", log: bool = False, from_zero: bool = False
) -> str:
    """A figure that holds the chart for wide pages and the one for narrow pages."""
    wide, narrow = (draw(lines, size, unit, log, from_zero) for size in (WIDE, NARROW))
    return figure(wide, narrow, caption)


def figure(wide: str, narrow: str, caption: str) -> str:
    """The same picture for wide pages and for narrow ones."""
    return (
        f'<figure><div class="wide">{wide}</div><div class="narrow">{narrow}</div>'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
    )
