"""The demo's report: one HTML page that needs nothing but itself."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from charts import POINTS, Line, Reduce, chart, in_bins
from load import bar_figure, course_figure, shares

EARLY = 50


@dataclass
class Run:
    """What one model's training left behind."""

    name: str
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)  # of each step
    sample: str = ""
    #: Of each step and each block with experts: the tokens of each expert.
    counts: list[list[list[int]]] = field(default_factory=list)

    def load(self, block: int) -> list[float]:
        """The share of each expert of a block in the last EARLY steps."""
        return shares([step[block] for step in self.counts[-EARLY:]])


@dataclass
class LowPrecision:
    """The run in low precision, and how far from Ligature's own it may end."""

    run: Run
    recipe: str
    limit: float  # of the mean loss of the last EARLY steps
    formats: str  # of what goes from step to step, or where it is quantized
    explanation: Any


@dataclass
class Result:
    """What the report tells. ``explanation`` is what ``explain()`` of a part returned."""

    runs: tuple[Run, Run]
    tolerances: tuple[float, float]  # of the losses of the first EARLY steps, and of all later ones
    figures: list[tuple[str, ...]]  # what, of PyTorch, and of each other run with its ratio
    explanation: Any
    prompt: str
    environment: dict[str, str]
    low: LowPrecision | None = None
    part: str = "MLP"  # what stands behind attention in a block
    checks: list[tuple[str, bool]] = field(default_factory=list)  # more sentences; are they good?
    how: str = ""  # the runs, in words; else they are PyTorch's and Ligature's
    sections: list[str] = field(default_factory=list)  # of the page, that others made

    @property
    def all_runs(self) -> list[Run]:
        return [*self.runs, *([self.low.run] if self.low else [])]

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
    def distance(self) -> float:
        """How much higher the loss of the run in low precision ends."""
        assert self.low is not None
        ends = [statistics.fmean(run.losses[-EARLY:]) for run in (self.low.run, self.runs[1])]
        return ends[0] - ends[1]

    @property
    def verdicts(self) -> list[tuple[str, bool]]:
        """Sentences, and whether each tells something good."""
        told = [*self.checks, (self.verdict, self.agree)]
        if self.low is not None:
            name, count = self.low.run.name, min(EARLY, len(self.low.run.losses))
            sentence = (
                f"In {name} ({self.low.recipe}) the loss of the last {count} steps is "
                f"{self.distance:+.4f} from that without (allowed {self.low.limit:g})."
            )
            told.append((sentence, abs(self.distance) <= self.low.limit))
        return told

    @property
    def good(self) -> bool:
        return all(good for _, good in self.verdicts)

    @property
    def samples_alike(self) -> str:
        a, b = (run.sample for run in self.runs)
        same = next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))
        which = f"All {same}" if same == len(a) else f"The first {same} of {len(a)}"
        return f"{which} letters of the first two are the same."


# -- the page

STYLE = """
:root { color-scheme: light dark; --ink: #1d2330; --soft: #5b6475; --page: #fbfaf7; --card: #fff;
  --edge: #dedbd2; --torch: #e8884a; --ligature: #1b4fc4; --low: #a21caf;
  --good: #1d7a43; --bad: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9f0; --soft: #9aa3b5; --page: #14171d;
  --card: #1c2028; --edge: #343a46; --torch: #b9622b; --ligature: #9cc0ff; --low: #f0abfc;
  --good: #6fd398; --bad: #ff8a80; } }
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
.low { stroke: var(--low); stroke-width: 2; }
.bar.below { fill: var(--torch); stroke: none; } .bar.above { fill: var(--ligature);
  stroke: none; } .computes { fill: var(--ligature); } .waits { fill: var(--edge); }
.travels { fill: var(--torch); } .because { stroke: var(--soft); stroke-dasharray: 3 3; }
.dot { fill: var(--soft); } .bar.low { fill: var(--low); stroke: none; }
.cell { fill: var(--ligature); }
.limit { stroke: var(--bad); stroke-width: 1.5; stroke-dasharray: 2 5; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .75rem .35rem 0; text-align: left; vertical-align: top;
  border-bottom: 1px solid var(--edge); }
tr:last-child > * { border-bottom: 0; }
th { font-weight: 600; } tbody th { font-weight: 400; }
.number { text-align: right; white-space: nowrap; }
.samples { display: grid; grid-template-columns: repeat(auto-fit, minmax(18rem, 1fr)); gap: 1rem; }
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


def low_section(result: Result) -> list[str]:
    """The plan in low precision, where there was such a run."""
    if result.low is None:
        return []
    return [
        section(
            "low",
            f"The same in {result.low.run.name}",
            f"<p>In forward: {escape(result.low.formats)}.</p>",
            '<details class="card"><summary>The plan as text</summary>'
            f"<pre>{escape(str(result.low.explanation))}</pre></details>",
        )
    ]


def load_section(result: Result) -> list[str]:
    """How routers shared out the tokens, where there are experts."""
    counts = result.runs[1].counts
    if not counts or not counts[0]:
        return []
    figures = []
    for block in range(len(counts[0])):
        kinds = zip(("below", "above", "low"), result.all_runs, strict=False)
        runs = [(run.name, kind, run.load(block)) for kind, run in kinds]
        steps = min(EARLY, len(counts))
        figures += [
            bar_figure(
                runs,
                f"Block {block + 1}: share of the tokens that each expert had in the last {steps} "
                "steps. The line between is where all are equal.",
            ),
            course_figure(
                [step[block] for step in counts],
                f"Block {block + 1} with {result.runs[1].name}, in the course of training: the "
                "darker, the more tokens an expert had.",
            ),
        ]
    return [section("load", "What each expert had to do", *figures)]


def html_report(result: Result) -> str:
    """The whole page."""
    plain, fused = result.runs
    size = math.ceil(len(plain.losses) / POINTS)
    group = f" Each point stands for {size} steps." if size > 1 else ""

    def lines(of: Callable[[Run], list[float]], reduce: Reduce) -> list[Line]:
        kinds = zip(("below", "above", "low"), result.all_runs, strict=False)
        return [Line(run.name, kind, in_bins(of(run), reduce)) for kind, run in kinds]

    low_losses = result.low.run.losses if result.low else []
    apart = [abs(x - y) for x, y in zip(low_losses, fused.losses, strict=False)]
    low_line = [Line(result.low.run.name, "low", in_bins(apart, max))] if result.low else []
    low_words = f", thin {result.low.run.name}" if result.low else ""

    losses = chart(
        lines(lambda run: run.losses, statistics.fmean),
        f"Loss of every run: broad {plain.name}, dashed {fused.name}{low_words}.{group}",
    )
    differences = chart(
        [
            Line("difference", "only", in_bins(result.differences, max)),
            Line("allowed", "limit", in_bins(result.limits, max)),
            *low_line,
        ],
        f"Largest difference of the losses of {plain.name} and {fused.name}, on a logarithmic "
        "axis; where they are equal to the last bit the curve lies at the bottom."
        + (f" {result.low.run.name}: from {fused.name}." if result.low else ""),
        log=True,
    )
    times = chart(
        lines(lambda run: [1e3 * s for s in run.seconds], statistics.median),
        "Median time of a step, forward, backward and optimizer. The models take turns, so that "
        "what else the machine does hits all alike.",
        "ms",
        from_zero=True,
    )
    samples = "".join(
        f'<div class="card"><h3>{escape(run.name)}</h3>'
        f"<pre><mark>{escape(result.prompt)}</mark>{escape(unwrapped(run.sample))}</pre></div>"
        for run in result.all_runs
    )
    fired = ", ".join(result.explanation.fusions) or "none"
    times_word = "twice" if result.low is None else "three times"
    how = result.how or "in plain PyTorch and with Ligature"
    heads = ["", plain.name, fused.name, "ratio"]
    if result.low is not None:
        if not result.how:
            how = f"in plain PyTorch, with Ligature and with Ligature in {result.low.run.name}"
        heads += [result.low.run.name, "ratio"]
    what = "" if result.part == "MLP" else " with mixtures of experts"
    verdicts = [
        f'<p class="verdict {"good" if fit else "bad"}">{escape(sentence)}</p>'
        for sentence, fit in result.verdicts
    ]
    body = [
        f"<h1>One model, trained {times_word}</h1>",
        f"<p>A small transformer{what} learned one text {times_word}, {escape(how)}, from "
        "the same start and with the same batches; this page shows what came of it.</p>",
        *verdicts,
        section("losses", "Losses", losses, differences),
        section(
            "figures",
            "Figures",
            table(heads, result.figures, numbers=True),
            '<p class="soft">Medians; all take turns. A ratio below 1.00 says that less is needed '
            f"than by {escape(plain.name)}.</p>",
        ),
        section("speed", "Time per step", times),
        section(
            "plan",
            f"The plan of {'an' if result.part == 'MLP' else 'a'} {result.part}",
            f"<p>Fusions that fired: {escape(fired)}.</p>",
            f'<div class="card plan">{result.explanation.svg()}</div>',
            '<details class="card"><summary>The plan as text</summary>'
            f"<pre>{escape(str(result.explanation))}</pre></details>",
        ),
        *load_section(result),
        *result.sections,
        *low_section(result),
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
        "<title>Ligature: one model, trained side by side</title>"
        f"<style>{STYLE}</style></head>\n<body>\n" + "\n".join(body) + "\n</body></html>\n"
    )
