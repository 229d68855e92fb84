"""What torch's ``FlopCounterMode`` counts of operations: their GEMMs, as it counts torch's own."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, register_flop_formula

from ... import _C

_ops = torch.ops.ligature


def _counted(fuser: int, count: Any, *args: Any) -> int:
    """Runs without memory; what operations in Python call is counted as torch does."""
    from .group import has_python_ops, without_memory

    with without_memory(fuser):
        if not has_python_ops(fuser):
            return int(count(fuser, *args))
        with FlopCounterMode(display=False) as counter:
            ours = int(count(fuser, *args))
        return ours + counter.get_total_flops()


@register_flop_formula([_ops.pipeline_forward, _ops.pipeline_forward_no_cudagraph])
def _forward(
    input: Any,
    params: Any,
    extra_inputs: Any,
    scales: Any,
    owner: Any,
    fuser: int,
    call: int,
    structure: int,
    **unused: Any,
) -> int:
    sizes = [size for shape in (input, *extra_inputs) for size in shape]
    return _counted(fuser, _C.forward_flops, call, sizes)


@register_flop_formula([_ops.pipeline_backward, _ops.pipeline_backward_no_cudagraph])
def _backward(
    grads: Any,
    kept: Any,
    owner: Any,
    sizes: Any,
    fuser: int,
    call: int,
    structure: int,
    **unused: Any,
) -> int:
    given = [grad is not None for grad in grads]
    return _counted(fuser, _C.backward_flops, call, list(sizes), given)


@register_flop_formula(_ops.gemms)
def _gemms(flops: int, **unused: Any) -> int:
    return flops
