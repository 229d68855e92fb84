"""Calls in eager mode that tools of torch watch or record.

What a fuser computes does not pass torch's dispatcher, so a mode (``FlopCounterMode``, a selective
checkpoint, ``make_fx``, ``FakeTensorMode``, one of a user's) would see only what is left of it.
While a mode is active a call is therefore one call of ``ligature::pipeline_forward``, and its
backward one of ``ligature::pipeline_backward``: the functions that compiled graphs call, too.

What those functions cannot hold runs as ever where a mode only looks on: it sees what operations in
Python call, and ``ligature::gemms``, which says how much each step has multiplied. Where calls are
recorded, to be made again with other values, or have no values at all, it is refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._compile import _disable_dynamo
from torch._ops import mode_stack_state_for_pre_dispatch
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from ... import _C
from ...quantization.scope import RECIPES
from ..fuser import REGISTERED
from . import calls
from .group import has_python_ops, register, why_not
from .odd_tensors import is_fake

_FAKE = "FakeTensorMode"


def refuse_onnx() -> None:
    """Refuses torch's exporter to ONNX."""
    if torch.onnx.is_in_onnx_export():
        raise RuntimeError(
            "torch.onnx cannot export operations of Ligature: ONNX has no operators for them; "
            "export a model of torch.nn modules that has the same weights"
        )


def _recorder() -> str:
    """The name of a mode that makes a graph, or tensors without values; empty without one."""
    if mode_stack_state_for_pre_dispatch().count():
        return "PreDispatch"
    stack = _get_current_dispatch_mode_stack()
    names = [type(m).__name__ for m in stack if getattr(m, "_mode_key", None) is not None]
    names.sort(key=_FAKE.__eq__)  # others make graphs of its tensors
    return names[0] if names else ""


def _scope() -> tuple[str, str, bool]:
    enabled, calibrating, recipe, _ = _C.autocast_state()
    if recipe is None or not (enabled or calibrating):
        return ("", "", False)
    recipe._be_known()
    return (recipe._native.key, "enabled" if enabled else "calibrating", False)


@_disable_dynamo  # a compiled function, which torch runs as it is while modes are active, gets here
def call(
    fuser: Any,
    x: torch.Tensor,
    params: list[torch.Tensor],
    extra_inputs: list[torch.Tensor],
    kwargs: Any,
    counts: tuple[int, ...],
    training: tuple[bool, ...],
    high_precision: bool,
) -> Any:
    """A call while modes are active; NotImplemented where it is to run as ever."""
    with _disable_current_modes():
        number, label = register(fuser)
        reason = why_not(fuser._basic_ops) or _why_no_function(x, extra_inputs)
    recorder = _recorder() or (_FAKE if is_fake(x) else "")
    only_shapes = recorder == _FAKE
    if not recorder and (reason or has_python_ops(number)):
        return NotImplemented
    if reason and only_shapes:
        raise NotImplementedError(f"[{label}] cannot be called with FakeTensors: {reason}")
    if reason:
        raise RuntimeError(
            f"[{label}] {recorder} cannot hold a call of these operations: {reason}; "
            "use torch.compile, or call them outside of it"
        )
    _check_fake(label, x, extra_inputs)
    scope = ("", "", False) if high_precision else _scope()
    static = (str(number), label, counts, training, scope, REGISTERED.version)
    made = calls.trace(static, kwargs or [], x, params, extra_inputs)
    try:
        made.layout(calls.sizes_of(x, extra_inputs))
    except (RuntimeError, ValueError, TypeError):
        if recorder:
            raise
        return NotImplemented  # there it fails, too, or what comes out is no plain tensor
    # The device of a FakeTensor need not be there.
    owner = _C.owner_of(number, torch.device("cpu") if only_shapes else x.device)
    scales: list[torch.Tensor] = []
    amaxes: list[torch.Tensor] = []
    if scope[0] and not only_shapes:
        scales, amaxes, _ = _C.delayed_tensors(number, RECIPES[scope[0]], x.device)
        if _C.is_recomputing():
            amaxes = []  # the first run noted them
    return calls.run(made, scope, owner, scales, amaxes, x, params, extra_inputs)


def _check_fake(label: str, x: torch.Tensor, extra_inputs: list[torch.Tensor]) -> None:
    """In FakeTensorMode inputs are FakeTensors; parameters may be real ones."""
    for mode in calls.fake_modes():
        if not mode.allow_non_fake_inputs and not all(map(is_fake, (x, *extra_inputs))):
            raise TypeError(
                f"[{label}] inputs must be FakeTensors inside FakeTensorMode, got a tensor with "
                "memory"
            )


def _why_no_function(x: torch.Tensor, extra_inputs: list[torch.Tensor]) -> str:
    if any(_C.quantized_of(t) is not None for t in (x, *extra_inputs)):
        return "an input is in low precision already"
    return ""
