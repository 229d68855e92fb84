"""A fuser as traced code knows it: where its parameters are read, and what cannot be traced."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ... import _C
from ...quantization.scope import RECIPES


@dataclass
class Source:
    """Where one basic operation's parameters and mode are read."""

    owner: torch.nn.Module
    names: tuple[str, ...]
    uses_training: bool
    optional: bool = False  # its parameters may be None


@dataclass
class Traced:
    """A fuser as traced code knows it."""

    number: str  # a string: a compiler must not make a variable of it
    sources: tuple[Source, ...]
    label: str
    #: The eager call, where it cannot be traced: a compiler breaks its graph there and says why.
    outside: Callable[..., Any] | None = None
    #: The same for a call that is given buffers.
    with_buffers: Callable[..., Any] | None = None
    #: By recipe: factors, largest values and histories of delayed scaling, inputs of a graph.
    delayed: dict[str, tuple[list[torch.Tensor], ...]] = field(default_factory=dict)
    #: By device: what a graph holds so that its operations outlive the model, an input of it.
    owners: dict[str, torch.Tensor] = field(default_factory=dict)

    def prepare_owner(self, device: torch.device) -> str:
        key = str(device)
        if key not in self.owners:
            self.owners[key] = _C.owner_of(int(self.number), device)
            _mark_static(self.owners[key])
        return key

    # A compiler runs it once, while it traces.
    prepare_owner._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def prepare_delayed(self, recipe: str, device: torch.device) -> str:
        self.delayed[recipe] = _C.delayed_tensors(int(self.number), RECIPES[recipe], device)
        return "delayed" if self.delayed[recipe][0] else ""

    # A compiler runs it once, while it traces.
    prepare_delayed._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _mark_static(owner: torch.Tensor) -> None:
    """A CUDA graph need not copy it."""
    from torch._dynamo import mark_static_address

    mark_static_address(owner, guard=False)


def register(fuser: Any) -> tuple[int, str]:
    """The number under which graphs know a fuser, and the names of its operations."""
    known: tuple[int, str] | None = fuser.__dict__.get("_known_as")
    if known is None:
        parts = fuser._basic_ops
        known = (fuser._number, ", ".join(part._op.name for part in parts))
        python_ops = [weakref.ref(p) for p in parts if isinstance(p._op, _C.PythonOperation)]
        _PYTHON_OPS[known[0]] = python_ops
        weakref.finalize(fuser, _forget).atexit = False
        fuser.__dict__["_known_as"] = known
    return known


def traced(fuser: Any) -> Traced:
    """Prepares a fuser for traced code."""
    parts = fuser._basic_ops
    sources = []
    for part in parts:
        is_python_op = isinstance(part._op, _C.PythonOperation)
        names = _python_op_names(part) if is_python_op else tuple(part._handle.parameter_names)
        owner = part._parameter_owner
        optional = owner is not part and part._handle.parameters_are_optional
        sources.append(Source(owner, names, is_python_op or part._op.uses_training, optional))
    number, label = register(fuser)
    reason = why_not(parts)
    outside = torch.compiler.disable(fuser.__call__, reason=reason) if reason else None
    reason = reason or "the call writes into buffers that it was given as keyword arguments"
    with_buffers = torch.compiler.disable(fuser.__call__, reason=reason)
    return Traced(str(number), tuple(sources), label, outside, with_buffers)


#: By fuser: the operations written in Python, which read their parameters for themselves.
_PYTHON_OPS: dict[int, list[Any]] = {}
#: By fuser and number: the calls that were traced in this process, for their shapes. No tensors.
CALLS: dict[int, dict[int, Any]] = {}


def _forget() -> None:
    """What no graph can call any more. A graph may outlive its model."""
    for table in (_PYTHON_OPS, CALLS):
        for fuser in [number for number in table if not _C.is_known(number)]:
            del table[fuser]


def has_python_ops(fuser: int) -> bool:
    """Whether operations written in Python are among those of the fuser."""
    return bool(_PYTHON_OPS.get(fuser))


def _python_op_names(part: Any) -> tuple[str, ...]:
    """Its parameters, in the order in which the core collects them."""
    names = [name for name, value in part._parameters.items() if value is not None]
    for key, module in part._modules.items():
        if module is not None and key == "parametrizations":
            names += list(module.keys())
        elif module is not None:
            names += [f"{key}.{name}" for name, _ in module.named_parameters()]
    return tuple(names)


def why_not(parts: Any) -> str:
    """Why these operations cannot be part of a graph; empty when they can."""
    for part in parts:
        form = part._guest_form() if isinstance(part._op, _C.PythonOperation) else ""
        if form.endswith("classic") or form == "none":
            kind = form.partition("_")[0]
            return (
                f"{type(part).__name__} defines {kind}_forward, whose context a graph cannot hold; "
                f"to compile it, write its forward in the split form ({kind}_forward_compute and "
                f"{kind}_forward_save_ctx)"
            )
        for name, value in part._parameter_owner._parameters.items():
            if value is not None and _C.quantized_of(value) is not None:
                return (
                    f"the {name} of {type(part._parameter_owner).__name__} is kept in low "
                    "precision (quantized_model_init), which compiled graphs do not take yet"
                )
        if part._handle.options().get("accumulate_into_main_grad"):
            return f"{type(part._parameter_owner).__name__} adds into main_grad in backward"
        if part._handle.options().get("delay_wgrad_compute"):
            return f"{type(part).__name__} keeps its weight gradients for backward_dw()"
    return ""


@contextlib.contextmanager
def without_memory(fuser: int) -> Iterator[None]:
    """While shapes are asked for, operations in Python have parameters without memory."""
    from torch.nn.utils.stateless import _reparametrize_module

    with contextlib.ExitStack() as stack:
        stack.enter_context(_disable_current_modes())
        for reference in _PYTHON_OPS.get(fuser, ()):
            part = reference()
            if part is not None:
                twins = {
                    n: torch.empty(tuple(p.shape), dtype=p.dtype, device="meta")
                    for n, p in part.named_parameters()
                }
                stack.enter_context(_reparametrize_module(part, twins))
        yield
