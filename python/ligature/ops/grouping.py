"""How a ``Sequential`` divides its modules: runs of operations become fusers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.compiler import is_compiling

from ._hooks import GLOBAL_HOOKS, has_hooks
from .fuser import OperationFuser
from .fusible import FusibleOperation
from .op import BasicOperation, FusedOperation, basic_ops_of


def _called_by_itself(op: FusibleOperation) -> bool:
    """Whether what happens around its call, or in its ``forward``, asks for a call of its own."""
    usual = FusedOperation.forward if isinstance(op, FusedOperation) else BasicOperation.forward
    forward = getattr(type(op), "forward", usual)
    own = "forward" in vars(op) or not forward.__module__.startswith("ligature.")
    return own or any(map(len, GLOBAL_HOOKS)) or any(map(has_hooks, [op, *basic_ops_of(op)]))


@dataclass
class Group:
    """A fuser or a plain module, and how its extra inputs and outputs are joined to others'."""

    module: Any
    ops: list[FusibleOperation] = field(default_factory=list)  # of a fuser or a single operation
    run: int = 0  # channels reach over one run of operations
    inputs: list[str] = field(default_factory=list)  # channel of each extra input, or ""
    outputs: list[str] = field(default_factory=list)
    output_to_user: list[bool] = field(default_factory=list)
    traced: Any = None  # the fuser as traced code knows it

    def call(self, x: Any, inputs: list[torch.Tensor], part_kwargs: list[dict[str, Any]]) -> Any:
        """Of the operations; keyword arguments for each basic one."""
        given = part_kwargs if any(part_kwargs) else None
        if self.traced is not None and is_compiling():
            from ._traced import calls

            return calls.call(self.traced, x, inputs, given)
        if isinstance(self.module, BasicOperation):
            return self.module(x, *inputs, **part_kwargs[0])
        if isinstance(self.module, FusedOperation):
            extra = {} if given is None else {"basic_op_kwargs": given}
            return self.module(x, *inputs, **extra)
        return self.module(x, *inputs, basic_op_kwargs=given)


class CachedFusers:
    """Fusers of exported programs: torch.export takes back what is set while it traces."""

    def __init__(self) -> None:
        self.fusers: list[OperationFuser] = []


KeptFusers = CachedFusers  # the name in models that 0.1.0 pickled


def group_run(
    ops: list[FusibleOperation], run: int, recompute: str, strict: Sequence[str]
) -> list[Group]:
    """Neighbouring operations in one fuser, unless one of them has to be called by itself."""
    whole = OperationFuser(ops, recompute=recompute, strict=strict)
    if not any(map(_called_by_itself, ops)):
        return [_fuser_group(whole, ops, run)]
    segments: list[tuple[bool, list[FusibleOperation]]] = []
    for op in ops:
        hooked = _called_by_itself(op)
        if hooked or not segments or segments[-1][0]:
            segments.append((hooked, []))
        segments[-1][1].append(op)
    open_channels = _crossing_channels([part for _, part in segments])
    groups = []
    for hooked, part in segments:
        if hooked:
            groups.append(_hooked_group(part[0], run))
        else:
            fuser = OperationFuser(part, recompute=recompute, open_channels=open_channels)
            groups.append(_fuser_group(fuser, part, run))
    return groups


def _fuser_group(fuser: OperationFuser, ops: list[FusibleOperation], run: int) -> Group:
    return Group(
        fuser, ops, run, fuser._caller_inputs, fuser._caller_outputs, fuser._output_to_user
    )


def _hooked_group(op: FusibleOperation, run: int) -> Group:
    group = Group(op, [op], run)
    for part in basic_ops_of(op):
        handle = part._handle
        for i in range(handle.num_extra_inputs):
            group.inputs.append(handle.extra_input_channel(i))
        for i in range(handle.num_extra_outputs):
            group.outputs.append(handle.extra_output_channel(i))
            group.output_to_user.append(handle.extra_output_to_caller(i))
    return group


def _crossing_channels(segments: list[list[FusibleOperation]]) -> list[str]:
    seen: dict[str, set[int]] = {}
    for number, ops in enumerate(segments):
        for part in (part for op in ops for part in basic_ops_of(op)):
            handle = part._handle
            names = [handle.extra_input_channel(i) for i in range(handle.num_extra_inputs)]
            names += [handle.extra_output_channel(i) for i in range(handle.num_extra_outputs)]
            for name in names:
                seen.setdefault(name, set()).add(number)
    return [name for name, numbers in seen.items() if name and len(numbers) > 1]
