"""The demo's report: one HTML page that needs nothing but itself.

The charts are SVG from a few lines of arithmetic. Each is drawn twice, for a wide and for a narrow
page, so that its letters keep their size; the style sheet shows the one that fits.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

Reduce = Callable[[Sequence[float]], float]

WIDE, NARROW = (760, 300), (380, 260)
LEFT, RIGHT, TOP, BOTTOM = 46, 24, 34, 42
POINTS = 150
EARLY = 50
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass
class Line:
    """A curve of a chart. ``kind`` is its class in the style sheet."""

    name: str
    kind: str
    points: list[tuple[float, float]]  # step, value


@dataclass
class Run:
    """What one model's training left behind."""

    name: str
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)  # of each step
    sample: str = ""


@dataclass
class Result:
    """What the report tells. ``explanation`` is what ``explain()`` of an MLP returned."""

    runs: tuple[Run, Run]
    tolerances: tuple[float, float]  # of the losses of the first EARLY steps, and of all later ones
    figures: list[tuple[str, str, str, str]]  # what, PyTorch, Ligature, ratio
    explanation: Any
    prompt: str
    environment: dict[str, str]

    @property
    def differences(self) -> list[float]:
        a, b = self.runs
        return [abs(x - y) for x, y in zip(a.losses, b.losses, strict=True)]

    @property
    def limits(self) -> list[float]:
        return [self.tolerances[i >= EARLY] for i in range(len(self.differences))]

    @property
    def agree(self) -> bool:
        # Written so that a loss that is no number disagrees.
        return all(d <= limit for d, limit in zip(self.differences, self.limits, strict=True))

    @property
    def verdict(self) -> str:
        word = "agree" if self.agree else "disagree"
        parts = self.differences[:EARLY], self.differences[EARLY:]
        names = f"in the first {len(parts[0])} steps", "later"
        told = [
            f"{max(part):.1e} {name} (allowed {limit:g})"
            for part, name, limit in zip(parts, names, self.tolerances, strict=True)
            if part
        ]
        return f"The losses of the two runs {word}. They differ by at most {' and '.join(told)}."

    @property
    def samples_alike(self) -> str:
        a, b = (run.sample for run in self.runs)
        same = next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))
        which = f"All {same}" if same == len(a) else f"The first {same} of {len(a)}"
        return f"{which} letters of the two are the same."


# -- charts


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
    return (
        f'<figure><div class="wide">{wide}</div><div class="narrow">{narrow}</div>'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
    )


# -- the page

STYLE = """
:root { color-scheme: light dark; --ink: #1d2330; --soft: #5b6475; --page: #fbfaf7; --card: #fff;
  --edge: #dedbd2; --torch: #e8884a; --ligature: #1b4fc4; --good: #1d7a43; --bad: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9f0; --soft: #9aa3b5; --page: #14171d;
  --card: #1c2028; --edge: #343a46; --torch: #b9622b; --ligature: #9cc0ff; --good: #6fd398;
  --bad: #ff8a80; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2rem 1.25rem 4rem; max-width: 60rem; background: var(--page);
  color: var(--ink); font: 16px/1.55 system-ui, sans-serif; overflow-wrap: break-word; }
h1 { font-size: 1.8rem; line-height: 1.2; margin: 0 0 .5rem; }
h2 { font-size: 1.2rem; margin: 2.5rem 0 .75rem; }
p { margin: .5rem 0; max-width: 46rem; }
.verdict { font-weight: 600; } .good { color: var(--good); } .bad { color: var(--bad); }
.soft, figcaption { color: var(--soft); font-size: .9rem; }
figure, .card { margin: 0 0 1rem; padding: 1rem; background: var(--card);
  border: 1px solid var(--edge); border-radius: 8px; overflow-x: auto; }
figcaption { margin-top: .4rem; }
figure svg { display: block; width: 100%; height: auto; }
.plan svg { display: block; min-width: 640px; margin: 0 auto; }
.plan .lg-plan .lg-back { fill: none; }
.narrow { display: none; }
figure text { fill: var(--soft); font: 13px system-ui, sans-serif; }
.grid { stroke: var(--edge); } .axis { stroke: var(--soft); }
.line { fill: none; stroke-linejoin: round; stroke-linecap: round; }
.below { stroke: var(--torch); stroke-width: 6; }
.above { stroke: var(--ligature); stroke-width: 2; stroke-dasharray: 7 6; }
.only { stroke: var(--ligature); stroke-width: 2; }
.limit { stroke: var(--bad); stroke-width: 1.5; stroke-dasharray: 2 5; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .75rem .35rem 0; text-align: left; vertical-align: top;
  border-bottom: 1px solid var(--edge); }
tr:last-child > * { border-bottom: 0; }
th { font-weight: 600; } tbody th { font-weight: 400; }
.number { text-align: right; white-space: nowrap; }
.samples { display: grid; grid-template-columns: 1fr 1fr; gap: 1rem; }
.samples h3 { margin: 0 0 .5rem; font-size: 1rem; }
pre { margin: 0; font: 13px/1.5 ui-monospace, monospace; white-space: pre-wrap; }
details pre { white-space: pre; overflow-x: auto; margin-top: .75rem; }
summary { cursor: pointer; }
mark { background: none; color: var(--soft); }
@media (max-width: 640px) { body { padding: 1.25rem .75rem 3rem; } h1 { font-size: 1.45rem; }
  .wide { display: none; } .narrow { display: block; } figure, .card { padding: .75rem; }
  .samples { grid-template-columns: 1fr; } th, td { padding-right: .5rem; }
  table { font-size: .9rem; } }
"""


def table(head: Sequence[str], rows: Iterable[Sequence[str]], numbers: bool = False) -> str:
    kind = ' class="number"' if numbers else ""
    titles = "".join(f"<th{kind if i else ''}>{escape(title)}</th>" for i, title in enumerate(head))
    lines = []
    for first, *rest in rows:
        cells = "".join(f"<td{kind}>{escape(cell)}</td>" for cell in rest)
        # Long names of fusions may be broken between their words.
        name = re.sub("(?<=[a-z])(?=[A-Z])", "<wbr/>", escape(first))
        lines.append(f'<tr><th scope="row">{name}</th>{cells}</tr>')
    head_row = f"<thead><tr>{titles}</tr></thead>" if any(head) else ""
    body = f"<tbody>{''.join(lines)}</tbody>"
    return f'<div class="card"><table>{head_row}{body}</table></div>'


def unwrapped(text: str) -> str:
    """Paragraphs without the ends of lines inside them."""
    return re.sub(r"(?<!\n)\n(?!\n)", " ", text)


def section(name: str, title: str, *parts: str) -> str:
    return f'<section id="{name}"><h2>{escape(title)}</h2>{"".join(parts)}</section>'


def considered(explanation: Any) -> str:
    """Which fusions were taken where, and for each of the others what did not match."""
    taken: dict[tuple[str, str], list[str]] = {}
    refused: dict[tuple[str, str], list[str]] = {}
    for part in explanation.to_dict()["parts"]:
        for entry in part["considered"]:
            key, place = (entry["fusion"], entry["pass"]), " + ".join(entry["ops"])
            if entry["taken"]:
                taken.setdefault(key, []).append(f"taken for {place}")
            else:
                refused.setdefault(key, []).append(f"not at {place}: {entry['reason']}")
    rows = {**taken, **{key: why for key, why in refused.items() if key not in taken}}
    lines = [
        (f"{name} ({way})", "; ".join(dict.fromkeys(why))) for (name, way), why in rows.items()
    ]
    return table(["fusion", "outcome"], lines)


def html_report(result: Result) -> str:
    """The whole page."""
    plain, fused = result.runs
    size = math.ceil(len(plain.losses) / POINTS)
    group = f" Each point stands for {size} steps." if size > 1 else ""

    def lines(of: Callable[[Run], list[float]], reduce: Reduce) -> list[Line]:
        kinds = zip(("below", "above"), result.runs, strict=True)
        return [Line(run.name, kind, in_bins(of(run), reduce)) for kind, run in kinds]

    losses = chart(
        lines(lambda run: run.losses, statistics.fmean),
        f"Loss of both runs: broad {plain.name}, dashed {fused.name}.{group}",
    )
    differences = chart(
        [
            Line("difference", "only", in_bins(result.differences, max)),
            Line("allowed", "limit", in_bins(result.limits, max)),
        ],
        "Largest difference of the two losses, on a logarithmic axis; where they are equal to the "
        "last bit the curve lies at the bottom.",
        log=True,
    )
    times = chart(
        lines(lambda run: [1e3 * s for s in run.seconds], statistics.median),
        "Median time of a step, forward, backward and optimizer. The two take turns, so that what "
        "else the machine does hits both alike.",
        "ms",
        from_zero=True,
    )
    samples = "".join(
        f'<div class="card"><h3>{escape(run.name)}</h3>'
        f"<pre><mark>{escape(result.prompt)}</mark>{escape(unwrapped(run.sample))}</pre></div>"
        for run in result.runs
    )
    fired = ", ".join(result.explanation.fusions) or "none"
    body = [
        "<h1>One model, trained twice</h1>",
        "<p>A small transformer learned one text twice, in plain PyTorch and with Ligature, from "
        "the same start and with the same batches; this page shows what came of it.</p>",
        f'<p class="verdict {"good" if result.agree else "bad"}">{escape(result.verdict)}</p>',
        section("losses", "Losses", losses, differences),
        section(
            "figures",
            "Figures",
            table(["", plain.name, fused.name, "ratio"], result.figures, numbers=True),
            '<p class="soft">Medians of one process in which both take turns. A ratio below 1.00 '
            "says that Ligature needs less.</p>",
        ),
        section("speed", "Time per step", times),
        section(
            "plan",
            "The plan of an MLP",
            f"<p>Fusions that fired: {escape(fired)}.</p>",
            f'<div class="card plan">{result.explanation.svg()}</div>',
            '<details class="card"><summary>The plan as text</summary>'
            f"<pre>{escape(str(result.explanation))}</pre></details>",
        ),
        section("considered", "Fusions that were considered", considered(result.explanation)),
        section(
            "samples",
            "What they write after training",
            f'<div class="samples">{samples}</div><p class="soft">{result.samples_alike}</p>',
        ),
        section("environment", "Where this was measured", table([], result.environment.items())),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        "<title>Ligature: one model, trained twice</title>"
        f"<style>{STYLE}</style></head>\n<body>\n" + "\n".join(body) + "\n</body></html>\n"
    )
