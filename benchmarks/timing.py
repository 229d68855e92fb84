"""What the benchmarks share: measuring in turns, a GPU's own time, and the machine's name."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile


def interleaved(runs: list[Callable[[], object]], device: str, seconds: float) -> list[float]:
    """Median seconds of each, measured in turns."""

    def timed(run: Callable[[], object]) -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    for run in runs:
        for _ in range(5):
            run()
    times: list[list[float]] = [[] for _ in runs]
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[0]) < 5:
        for run, result in zip(runs, times, strict=True):
            result.append(timed(run))
    return [statistics.median(result) for result in times]


def kernel_seconds(
    run: Callable[[], object], repeat: int, wanted: Callable[[str], object] = lambda name: True
) -> float:
    """Seconds that the GPU is busy with one run, in the kernels whose names are wanted."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as measured:
        for _ in range(repeat):
            run()
        torch.cuda.synchronize()
    events = [event for event in measured.events() if event.device_type == DeviceType.CUDA]
    return sum(event.device_time_total for event in events if wanted(event.name)) / repeat / 1e6


def gpu_seconds(runs: list[Callable[[], object]], seconds: float) -> list[float]:
    """Median seconds of each, of many runs that follow each other without waiting, in turns."""

    def timed(run: Callable[[], object], count: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(count):
            run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / count

    counts = []
    for run in runs:
        timed(run, 3)
        counts.append(max(1, int(0.02 / timed(run, 3))))
    times: list[list[float]] = [[] for _ in runs]
    finish = time.perf_counter() + seconds
    while time.perf_counter() < finish or len(times[0]) < 3:
        for run, count, result in zip(runs, counts, times, strict=True):
            result.append(timed(run, count))
    return [statistics.median(result) for result in times]


def host_seconds(run: Callable[[], object], count: int = 200) -> float:
    """Median seconds until a call returns, with the GPU's work still under way."""
    times = []
    for i in range(count + 20):
        if i % 20 == 0:
            torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times[20:])


def forward_backward(model: nn.Module, x: torch.Tensor, dy: torch.Tensor) -> None:
    x.grad = None
    for parameter in model.parameters():
        parameter.grad = None
    model(x).backward(dy)


def cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as info:
            for line in info:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor()
