"""A picture of one step over several processes: who computed, what travelled, who waited for whom.

It is drawn twice, as charts are.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Any

from charts import NARROW, RIGHT, WIDE, figure, ticks

LEFT, TOP, LANE, THIN, ROW, FOOT = 58, 52, 24, 10, 62, 30


@dataclass
class Entry:
    """A collective as one rank saw it, in seconds."""

    name: str
    op: str
    begin: float
    end: float
    wait_begin: float
    wait_end: float
    bytes: int

    @classmethod
    def of(cls, noted: dict[str, Any], began: float) -> Entry:
        """Of ``ligature.distributed.timeline()``, whose recording began then."""
        times = {k: noted[k] + began for k in ("begin", "end", "wait_begin", "wait_end")}
        return cls(noted["name"], noted["op"], bytes=noted["bytes"], **times)

    def moved(self, by: float) -> Entry:
        times = {k: getattr(self, k) + by for k in ("begin", "end", "wait_begin", "wait_end")}
        return replace(self, **times)


@dataclass
class Step:
    begin: float
    backward: float  # where it begins
    rest: float  # where gradients are complete but for those of other ranks
    end: float


@dataclass
class Wait:
    """What one rank did not compute during, and why."""

    entry: Entry
    begin: float
    end: float
    whom: int  # the rank that came last
    until: float  # when that one came


@dataclass
class Course:
    """One rank's step, in seconds since the first rank began it."""

    step: Step
    entries: list[Entry]  # in the order in which they began
    waits: list[Wait]

    @property
    def length(self) -> float:
        return self.step.end - self.step.begin

    @property
    def waited(self) -> float:
        return sum(wait.end - wait.begin for wait in self.waits)

    @property
    def waited_for_others(self) -> float:
        return sum(wait.until - wait.begin for wait in self.waits)

    @property
    def in_flight(self) -> float:
        return sum(entry.end - entry.begin for entry in self.entries)


def courses(ranks: Sequence[tuple[list[Entry], list[Step]]]) -> list[Course]:
    """Of the step that took the median time: each rank's."""
    together = zip(*(steps for _, steps in ranks), strict=True)
    lengths = [max(step.end - step.begin for step in steps) for steps in together]
    place = lengths.index(statistics.median_low(lengths))
    zero = min(steps[place].begin for _, steps in ranks)
    of_step = []
    for entries, steps in ranks:
        step = steps[place]
        inside = [e.moved(-zero) for e in entries if step.begin <= e.begin <= step.end]
        times = (getattr(step, k) - zero for k in ("begin", "backward", "rest", "end"))
        of_step.append((Step(*times), sorted(inside, key=lambda e: e.begin)))
    out = []
    for rank, (step, entries) in enumerate(of_step):
        waits = []
        for i, entry in enumerate(entries):
            # The n-th collective of every rank is the same one.
            begins = [(own[i].begin, r) for r, (_, own) in enumerate(of_step) if i < len(own)]
            came, whom = max(begins)
            until = min(max(came, entry.wait_begin), entry.wait_end)
            whom, until = (rank, entry.wait_begin) if whom == rank else (whom, until)
            waits.append(Wait(entry, entry.wait_begin, entry.wait_end, whom, until))
        out.append(Course(step, entries, waits))
    return out


# -- words


def ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"


def table(ranks: Sequence[Course]) -> list[tuple[str, ...]]:
    """Of each rank: what it did in the step, ready to be printed."""
    rows = []
    for rank, course in enumerate(ranks):
        hidden = 1 - course.waited / course.in_flight if course.in_flight else 0.0
        rows.append(
            (
                f"rank {rank}",
                ms(course.length - course.waited),
                ms(course.waited_for_others),
                ms(course.waited - course.waited_for_others),
                ms(course.in_flight),
                f"{hidden:.0%}",
            )
        )
    return rows


HEAD = (
    "",
    "computed",
    "waited for others",
    "waited for data",
    "collectives under way",
    "of that hidden",
)


# -- the picture


def draw(ranks: Sequence[Course], width: int) -> str:
    """One picture of that many pixels."""
    end = max(course.step.end for course in ranks)
    height = TOP + ROW * len(ranks) + FOOT

    def across(seconds: float) -> float:
        return LEFT + seconds / end * (width - LEFT - RIGHT)

    def bar(kind: str, y: float, tall: float, begin: float, until: float, tip: str) -> str:
        long = max(across(until) - across(begin), 0.3)
        return (
            f'<rect class="{kind}" x="{across(begin):.1f}" y="{y:.1f}" width="{long:.1f}" '
            f'height="{tall}"><title>{escape(tip)}</title></rect>'
        )

    out = [f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">']
    bottom = height - FOOT
    step = ranks[0].step
    last = "sums, optimizer" if across(end) - across(step.rest) > 110 else "rest"
    phases = [("forward", step.begin), ("backward", step.backward), (last, step.rest)]
    for name, begin in phases:
        out.append(f'<path class="grid" d="M{across(begin):.1f} {TOP - 20}V{bottom}"/>')
        if across(end) - across(begin) > 40:
            out.append(f'<text x="{across(begin) + 4:.1f}" y="{TOP - 9}">{name}</text>')
    for rank, course in enumerate(ranks):
        y = TOP + ROW * rank
        out.append(f'<text x="{LEFT - 8}" y="{y + 17}" text-anchor="end">rank {rank}</text>')
        tip = f"rank {rank} computes, but where it waits"
        out.append(bar("computes", y, LANE, course.step.begin, course.step.end, tip))
        for wait in course.waits:
            entry = wait.entry
            tip = f"rank {rank} waits {ms(wait.end - wait.begin)} in {entry.name} of {entry.op}"
            if wait.until > wait.begin:
                tip += f", {ms(wait.until - wait.begin)} of it for rank {wait.whom}"
            out.append(bar("waits", y, LANE, wait.begin, wait.end, tip))
        lanes = [0.0, 0.0]
        for entry in course.entries:
            # Two that are under way together lie in two lanes.
            lane = 0 if entry.begin >= lanes[0] else 1
            lanes[lane] = entry.end
            tip = (
                f"rank {rank}: {entry.name} of {entry.op}, {entry.bytes:,} bytes, "
                f"{ms(entry.end - entry.begin)}"
            )
            place = y + LANE + 2 + lane * (THIN + 1)
            out.append(bar("travels", place, THIN, entry.begin, entry.end, tip))
    for rank, course in enumerate(ranks):
        for wait in course.waits:
            if wait.until - wait.begin > 0.01 * end:
                y = [TOP + ROW * r + LANE / 2 for r in (rank, wait.whom)]
                x = across(wait.until)
                out.append(f'<path class="because" d="M{x:.1f} {y[0]}V{y[1]}"/>')
                out.append(f'<circle class="dot" cx="{x:.1f}" cy="{y[1]}" r="3"/>')
    out.append(f'<path class="axis" d="M{LEFT} {bottom}H{width - RIGHT}"/>')
    for at in ticks(0.0, 1e3 * end, 6 if width > 500 else 3):
        if at <= 1e3 * end:
            x = across(at / 1e3)
            out.append(f'<path class="axis" d="M{x:.1f} {bottom}v5"/>')
            out.append(f'<text x="{x:.1f}" y="{bottom + 19}" text-anchor="middle">{at:.6g}</text>')
    out.append(f'<text x="{LEFT - 8}" y="{bottom + 19}" text-anchor="end">ms</text>')
    key = LEFT
    for kind, name in (("computes", "computes"), ("waits", "waits"), ("travels", "under way")):
        out.append(f'<rect class="{kind}" x="{key}" y="6" width="12" height="12"/>')
        out.append(f'<text x="{key + 18}" y="16">{name}</text>')
        key += 40 + 8 * len(name)
    return "".join([*out, "</svg>"])


def step_figure(ranks: Sequence[Course], caption: str) -> str:
    """The picture for wide pages and for narrow ones."""
    return figure(draw(ranks, WIDE[0]), draw(ranks, NARROW[0]), caption)
