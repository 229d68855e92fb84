"""What the benchmarks share: measuring in turns, a GPU's own time, and the machine's name."""

from __future__ import annotations

import platform
import random
import re
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

Run = Callable[[], object]
PRODUCT = re.compile(r"gemm|nvjet|cutlass|xmma|splitk|s16816", re.IGNORECASE)


def interleaved(runs: Sequence[Run], device: str, seconds: float, warm_up: int = 5) -> list[float]:
    """Median seconds of each, measured in turns; ``warm_up`` turns are not counted.

    Each turn has another order: what ran before decides what is in the caches.
    """
    order = random.Random(0)

    def timed(run: Run) -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    for _ in range(warm_up):
        for run in runs:
            run()
    times: list[list[float]] = [[] for _ in runs]
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[0]) < 5:
        for i in order.sample(range(len(runs)), len(runs)):
            times[i].append(timed(runs[i]))
    return [statistics.median(result) for result in times]


def kernel_events(run: Run, repeat: int, warm_up: int = 3) -> list[tuple[str, float, float]]:
    """(name, start, microseconds) of what the GPU did in ``repeat`` runs, in its own order."""
    for _ in range(warm_up):
        run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as measured:
        for _ in range(repeat):
            run()
        torch.cuda.synchronize()
    return sorted(
        (
            (event.name, event.time_range.start, event.device_time_total)
            for event in measured.events()
            if event.device_type == DeviceType.CUDA
        ),
        key=lambda event: event[1],
    )


def kernel_seconds(
    run: Run, repeat: int, wanted: Callable[[str], object] = lambda name: True
) -> float:
    """Seconds that the GPU is busy with one run, in the kernels whose names are wanted."""
    return sum(us for name, _, us in kernel_events(run, repeat) if wanted(name)) / repeat / 1e6


def gpu_seconds(
    runs: Sequence[Run], rounds: int = 3, lead: float = 0.15, measured: float = 0.15
) -> list[float]:
    """Median seconds of each, of many runs that follow each other without waiting.

    A GPU at its power limit is as fast as what it did in the last tenths of a second lets it be. So
    each turn begins with ``lead`` seconds of the same work that are not timed, and the turns of a
    round come in an order that moves on from round to round.
    """

    def timed(run: Run, before: int, count: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(before):
            run()
        start.record()
        for _ in range(count):
            run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / count

    once = [timed(run, 3, 3) for run in runs]
    times: list[list[float]] = [[] for _ in runs]
    for turn in range(rounds):
        for i in range(len(runs)):
            i = (i + turn * max(1, len(runs) // rounds)) % len(runs)
            before, count = (max(1, round(wanted / once[i])) for wanted in (lead, measured))
            times[i].append(timed(runs[i], before, count))
    return [statistics.median(result) for result in times]


def host_seconds(run: Run, count: int = 200) -> float:
    """Median seconds until a call returns, with the GPU's work still under way."""
    times = []
    for i in range(count + 20):
        if i % 20 == 0:
            torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times[20:])


def cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as info:
            for line in info:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor()
