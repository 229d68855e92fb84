"""The same random pipeline with nothing fused: a second model under the same recipe.

Each run of operations is one OperationFuser(fuse=False). It takes the same values, gradients and
random numbers, so that both should agree up to roundings in high precision and what those carry
over the border of two codes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from pipeline_case import Call, Case, every_op
from pipeline_model import Given, Model

import ligature as te

Tensor = torch.Tensor


@dataclass
class Pass:
    """One call of it."""

    given: list[Given]
    outputs: list[Tensor]


class Unfused:
    def __init__(self, case: Case) -> None:
        self.model = Model(replace(case, fuser=False, copied=False, recompute="none"))
        self.parameters = dict(self.model.root.named_parameters())
        self.fusers: dict[tuple[int, int], te.ops.OperationFuser] = {}

    def forward(
        self, call: Call, given: list[Given], mode: Callable[[], AbstractContextManager[None]]
    ) -> Pass:
        self.model.freeze(call.frozen)
        fresh = [replace(item) for item in given]
        extras = [item.passed for item in fresh[1:]]
        outputs: list[Tensor] = []
        with mode():
            y = self._walk(self.model.root, fresh[0].passed, extras, outputs)
        assert not extras
        return Pass(fresh, [y, *outputs])

    def _walk(self, container: Any, x: Tensor, extras: list[Tensor], outputs: list[Tensor]) -> Any:
        run: list[Any] = []
        for at, module in enumerate([*container, None]):
            if isinstance(module, te.ops.FusibleOperation):
                run.append(module)
                continue
            if run:
                x = self._run(container, at, run, x, extras, outputs)
                run = []
            if isinstance(module, (te.ops.Sequential, torch.nn.Sequential)):
                x = self._walk(module, x, extras, outputs)
            elif module is not None:
                x = module(x)
        return x

    def _run(
        self, container: Any, at: int, run: list[Any], x: Tensor, extras: Any, outputs: Any
    ) -> Tensor:
        key = id(container), at
        if key not in self.fusers:
            self.fusers[key] = te.ops.OperationFuser(run, fuse=False)
        fuser = self.fusers[key]
        count = sum(
            not op._handle.extra_input_channel(i)
            for op in fuser._basic_ops
            for i in range(op.num_extra_inputs)
        )
        inputs = [extras.pop(0) for _ in range(count)]
        result = fuser(x, *inputs)
        if isinstance(result, tuple):
            outputs += result[1:]
            return result[0]
        return result

    def main_grads(self) -> set[int]:
        return {id(parameter) for parameter in self.model.main_grads()}


def has_quantize(case: Case) -> bool:
    """Formats between operations that the reference in float64 does not follow."""
    return any(op.kind == "Quantize" for op in every_op(case.ops))
