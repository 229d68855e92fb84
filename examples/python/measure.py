"""What the demo measures that is not time: the machine, and the bytes kept for backward."""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Callable

import torch


def saved_bytes(run: Callable[[], torch.Tensor], besides: list[torch.Tensor]) -> int:
    """What autograd keeps between forward and backward, each storage counted once."""
    sizes: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = run()
    for tensor in besides:
        sizes.pop(tensor.untyped_storage().data_ptr(), None)
    del result
    return sum(sizes.values())


def size(count: float) -> str:
    return f"{count / 2**20:.2f} MiB" if count >= 2**20 else f"{count / 2**10:.1f} KiB"


def machine(where: torch.device) -> str:
    if where.type == "cuda":
        return torch.cuda.get_device_name(where)
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as info:
        for line in info:
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
