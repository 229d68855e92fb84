"""What every benchmark uses: measuring in turns, and the machine's name."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn


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
