"""Pictures of how a router shares out tokens among its experts: now, and in the course of training.

Each is drawn twice, as charts are.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import pairwise

from charts import BOTTOM, LEFT, NARROW, RIGHT, TOP, WIDE, figure

Shares = Sequence[float]  # of each expert; together 1


def shares(counts: Sequence[Sequence[int]]) -> list[float]:
    """Of each expert, in several steps together."""
    sums = [sum(column) for column in zip(*counts, strict=True)]
    return [count / max(1, sum(sums)) for count in sums]


def bars(runs: Sequence[tuple[str, str, Shares]], size: tuple[int, int]) -> str:
    """A group of bars per expert, a bar per run (name, class in the style sheet, shares)."""
    width, height = size
    experts = len(runs[0][2])
    top = max(max(part) for _, _, part in runs)
    room = (width - LEFT - RIGHT) / experts
    bottom = height - BOTTOM

    def tall(share: float) -> float:
        return share / top * (bottom - TOP)

    out = [f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">']
    for share in (0.0, 1 / experts, top):
        y = bottom - tall(share)
        out.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{width - RIGHT}"/>')
    for share in {1 / experts, top} if top > 1.15 / experts else {top}:
        y = bottom - tall(share)
        out.append(f'<text x="{LEFT - 7}" y="{y + 4:.1f}" text-anchor="end">{share:.0%}</text>')
    for expert in range(experts):
        for place, (name, kind, part) in enumerate(runs):
            thick = 0.8 * room / len(runs)
            x = LEFT + (expert + 0.1) * room + place * thick
            tip = f"{name}, expert {expert}: {part[expert]:.1%}"
            out.append(
                f'<rect class="bar {kind}" x="{x:.1f}" y="{bottom - tall(part[expert]):.1f}" '
                f'width="{0.9 * thick:.1f}" height="{tall(part[expert]):.1f}">'
                f"<title>{escape(tip)}</title></rect>"
            )
        x = LEFT + (expert + 0.5) * room
        out.append(f'<text x="{x:.1f}" y="{bottom + 19}" text-anchor="middle">{expert}</text>')
    out.append(f'<text x="{width - RIGHT}" y="{height - 6}" text-anchor="end">expert</text>')
    key = LEFT + 8
    for name, kind, _ in runs:
        out.append(f'<rect class="bar {kind}" x="{key}" y="6" width="12" height="12"/>')
        out.append(f'<text x="{key + 18}" y="16">{escape(name)}</text>')
        key += 40 + 8 * len(name)
    return "".join([*out, "</svg>"])


def course(counts: Sequence[Sequence[int]], size: tuple[int, int], columns: int) -> str:
    """A row per expert and a column for some steps; the darker, the more tokens it had."""
    width, height = size
    experts, steps = len(counts[0]), len(counts)
    columns = min(columns, steps)
    cuts = [steps * i // columns for i in range(columns + 1)]
    parts = [shares(counts[a:b]) for a, b in pairwise(cuts)]
    most = max(max(part) for part in parts)
    across, down = (width - LEFT - RIGHT) / columns, (height - TOP - BOTTOM) / experts
    out = [f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">']
    for column, part in enumerate(parts):
        for expert, share in enumerate(part):
            x, y = LEFT + column * across, TOP + expert * down
            out.append(
                f'<rect class="cell" x="{x:.1f}" y="{y:.1f}" '
                f'width="{across + 0.2:.1f}" height="{down:.1f}" opacity="{share / most:.2f}">'
                f"<title>steps {cuts[column] + 1} to {cuts[column + 1]}, expert {expert}: "
                f"{share:.1%}</title></rect>"
            )
    for expert in range(experts):
        y = TOP + (expert + 0.5) * down + 4
        out.append(f'<text x="{LEFT - 7}" y="{y:.1f}" text-anchor="end">{expert}</text>')
    bottom = height - BOTTOM
    for step in (0, steps // 2, steps):
        x = LEFT + step / steps * (width - LEFT - RIGHT)
        out.append(f'<text x="{x:.1f}" y="{bottom + 19}" text-anchor="middle">{step:,}</text>')
    out.append(f'<text x="{width - RIGHT}" y="{height - 6}" text-anchor="end">step</text>')
    out.append(f'<text x="{LEFT - 7}" y="16" text-anchor="end">expert</text>')
    out.append(f'<text x="{width - RIGHT}" y="16" text-anchor="end">darkest: {most:.0%}</text>')
    return "".join([*out, "</svg>"])


def bar_figure(runs: Sequence[tuple[str, str, Shares]], caption: str) -> str:
    """The bars for wide pages and for narrow ones."""
    return figure(bars(runs, WIDE), bars(runs, NARROW), caption)


def course_figure(counts: Sequence[Sequence[int]], caption: str) -> str:
    """The course for wide pages and for narrow ones."""
    return figure(course(counts, WIDE, 60), course(counts, NARROW, 30), caption)
