"""Where a step's time goes on a GPU: its kernels in their order, with the gaps between them.

The products are numbered, so that one can be set beside the same product of a floor. The steps that
count come after others of the same kind, within one profile: the GPU is as warm as in training.
"""

from __future__ import annotations

import itertools
import re
import statistics
from collections import defaultdict
from typing import Any

from floors import ORDER
from timing import PRODUCT, Run, gpu_seconds, kernel_events

WIDTH = 64
# What some products need beside them: factors laid out, parts added up.
BESIDE = re.compile(r"scale|coefficient|reduce", re.IGNORECASE)


def short(name: str) -> str:
    """A kernel's name without what all have: namespaces, return type, arguments."""
    name = re.sub(r"^void |\(anonymous namespace\)::|\b(ligature|at|native|cuda|std)::", "", name)
    name = re.sub(r"\((?:int|bool|long|unsigned int)\)", "", name.replace("__nv_bfloat16", "bf16"))
    depth = 0
    for i, letter in enumerate(name):
        if letter == "(" and depth == 0 and i > 0:
            name = name[:i]
            break
        depth += (letter == "<") - (letter == ">")
    return name if len(name) <= WIDTH else f"{name[: WIDTH - 15]}..{name[-13:]}"


Event = tuple[str, float, float, float]  # name, start, microseconds, idle microseconds before


def with_gaps(events: list[tuple[str, float, float]]) -> list[Event]:
    made = []
    end = events[0][1]
    for name, start, us in events:
        made.append((name, start, us, max(0.0, start - end)))
        end = max(end, start + us)
    return made


def steps_of(run: Run, count: int) -> list[list[Event]]:
    """The events of the last ``count`` steps, one list per step; [] if steps differ in kernels."""
    (once,) = gpu_seconds([run], rounds=1, lead=0.05, measured=0.05)
    total = count + min(100, max(3, round(0.25 / once)))
    events = with_gaps(kernel_events(run, total))
    size, rest = divmod(len(events), total)
    steps = [events[i * size : (i + 1) * size] for i in range(total - count, total)]
    names = {tuple(event[0] for event in step) for step in steps}
    if rest or len(names) > 1:
        print(f"  {len(events)} kernels in {total} steps: the steps differ")
        return []
    return steps


def profile_step(
    what: str, run: Run, in_order: bool = True, count: int = 10
) -> dict[str, Any] | None:
    """Prints the kernels of a step, medians over ``count``: microseconds, and idle time before.
    ``in_order``: the products come in the order of a floor's."""
    steps = steps_of(run, count)
    if not steps:
        return None
    rows: list[dict[str, Any]] = []
    for same in zip(*steps, strict=True):
        us, idle = (statistics.median(event[i] for event in same) for i in (2, 3))
        rows.append({"kernel": same[0][0], "us": us, "idle_us": idle})
    spans = [after[0][1] - before[0][1] for before, after in itertools.pairwise(steps)]
    step_us = statistics.median(spans)
    busy = sum(row["us"] for row in rows)
    products = [row for row in rows if PRODUCT.search(row["kernel"])]
    product_us = sum(row["us"] for row in products)
    print(
        f"\n{what}: {step_us:.0f} µs a step; busy {busy:.0f}, products {product_us:.0f},"
        f" other kernels {busy - product_us:.0f}, idle {step_us - busy:.0f}"
    )
    whole = [row for row in products if not BESIDE.search(row["kernel"])]
    names = iter(ORDER if in_order and len(whole) == len(ORDER) else ["product"] * len(whole))
    for row in rows:
        row["label"] = label = next(names) if any(row is each for each in whole) else ""
        print(f"  {row['us']:9.1f} {row['idle_us']:6.1f} {label:<8} {short(row['kernel'])}")
    others: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        if not row["label"]:
            others[row["kernel"]].append(row["us"])
    repeated = {name: times for name, times in others.items() if len(times) > 1}
    for name, times in sorted(repeated.items(), key=lambda pair: -sum(pair[1])):
        print(f"  {sum(times):9.1f} in {len(times):>3}          {short(name)}")
    return {"what": what, "step_us": step_us, "busy_us": busy, "kernels": rows}
