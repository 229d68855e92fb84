"""What the tests of fusions share: runs with all gradients, the names in a plan, a fusion of any
two operations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import Any

import torch
from reference import assert_close

import ligature as te

Tensor = torch.Tensor

REGISTER = {
    "forward": te.ops.register_forward_fusion,
    "backward": te.ops.register_backward_fusion,
    "joint": te.ops.register_forward_backward_fusion,
}


class Pair(te.ops.FusedOperation):
    """Two operations, run one after the other in both directions, whatever they are."""

    def __init__(self, *ops: te.ops.FusibleOperation) -> None:
        super().__init__(ops)

    def fuser_forward(self, basic_op_ctxs, input_, *, basic_op_extra_inputs, **unused):
        x = input_
        for op, ctx, extra in zip(
            self.basic_ops, basic_op_ctxs, basic_op_extra_inputs, strict=True
        ):
            x, _ = op.fuser_forward([ctx], x, basic_op_extra_inputs=[extra])
        return x, [() for _ in self.basic_ops]

    def fuser_backward(self, basic_op_ctxs, grad_output, *, basic_op_grad_extra_outputs):
        grads, dy = [], grad_output
        for op, ctx in reversed(list(zip(self.basic_ops, basic_op_ctxs, strict=True))):
            dy, (params,), _ = op.fuser_backward([ctx], dy, basic_op_grad_extra_outputs=[()])
            grads.insert(0, params)
        return dy, grads, [() for _ in self.basic_ops]


def leaf(tensor: Tensor) -> Tensor:
    """A leaf of its own with the same values, strides apart."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def parameters_of(fuser: te.ops.OperationFuser) -> list[torch.nn.Parameter]:
    found: dict[int, torch.nn.Parameter] = {}
    for op in fuser._basic_ops:
        for parameter in op._parameter_owner.parameters():
            found[id(parameter)] = parameter
    return list(found.values())


def run(fuser: te.ops.OperationFuser, inputs: Sequence[Tensor]) -> tuple[list[Tensor], list[Any]]:
    """Outputs, and the gradients of all inputs and parameters."""
    leaves = [leaf(x) for x in inputs]
    parameters = parameters_of(fuser)
    for parameter in parameters:
        parameter.grad = None
    outputs = fuser(*leaves)
    outputs = list(outputs) if isinstance(outputs, tuple) else [outputs]
    generator = torch.Generator().manual_seed(5)
    grads = [
        torch.randn(y.shape, generator=generator, device="cpu").to(y.device, y.dtype) / 2
        for y in outputs
    ]
    used = [k for k, y in enumerate(outputs) if y.requires_grad]
    if used:
        torch.autograd.backward([outputs[k] for k in used], [grads[k] for k in used])
    # What an operation wrote into is no leaf any more.
    results = [x.grad if x.is_leaf else None for x in leaves]
    results += [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    return outputs, results


def check_equal_to_unfused(
    ops: Iterable[te.ops.FusibleOperation],
    *inputs: Tensor,
    scale: float = 2.0,
    recompute: str = "none",
    precision: torch.dtype | None = None,
) -> te.ops.OperationFuser:
    """Runs the operations fused and one by one; returns the fuser, for its plan.

    ``precision``: of the computation, where that is not each result's own dtype.
    """

    def compare(a: Tensor | None, b: Tensor | None, what: str) -> None:
        if a is None or b is None or precision is None:
            assert_close(a, b, None if b is None else b.dtype, scale=scale, what=what)
            return
        assert a.dtype == b.dtype, what
        assert_close(a.to(precision), b, precision, scale=scale, what=what)

    ops = list(ops)
    fused = te.ops.OperationFuser(ops, recompute=recompute)
    plain = te.ops.OperationFuser(ops, fuse=False)
    wanted, wanted_grads = run(plain, inputs)
    got, got_grads = run(fused, inputs)
    assert len(plain._forward_ops) == len(plain._basic_ops)
    assert len(plain._backward_ops) == len(plain._basic_ops)
    for k, (a, b) in enumerate(zip(got, wanted, strict=True)):
        assert a.requires_grad == b.requires_grad
        compare(a, b, f"output {k}")
    for k, (a, b) in enumerate(zip(got_grads, wanted_grads, strict=True)):
        compare(a, b, f"gradient {k}")
    return fused


def names(steps: list[tuple[Any, list[int]]]) -> list[str]:
    return [type(op).__name__ for op, _ in steps]


def forward_names(fuser: te.ops.OperationFuser) -> list[str]:
    return names(fuser._forward_ops)


def backward_names(fuser: te.ops.OperationFuser) -> list[str]:
    return names(fuser._backward_ops)


def check_indices(fuser: te.ops.OperationFuser) -> None:
    """Both plans list every basic operation once, in order, and the operation that covers it."""
    for steps in (fuser._forward_ops, fuser._backward_ops):
        assert [i for _, indices in steps for i in indices] == list(range(fuser._num_basic_ops))
        for op, indices in steps:
            covered = list(op.basic_ops) if op.is_fused_op else [op]
            assert len(covered) == len(indices)
            for i, part in zip(indices, covered, strict=True):
                assert part is fuser._basic_ops[i]


def freezing_patterns(parameters: Sequence[torch.nn.Parameter]) -> Iterator[None]:
    """Freezes every subset of the parameters in turn."""
    for flags in product([True, False], repeat=len(parameters)):
        for parameter, flag in zip(parameters, flags, strict=True):
            parameter.requires_grad_(flag)
        yield


def saved_bytes(module: Any, *inputs: Tensor) -> int:
    """Bytes that a forward holds for backward, besides inputs and parameters."""
    known = {x.untyped_storage().data_ptr() for x in inputs}
    known |= {p.untyped_storage().data_ptr() for p in module.parameters()}
    storages: dict[int, int] = {}
    kept = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept.append(tensor)
        if storage.data_ptr() not in known:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        module(*inputs)
    assert kept
    return sum(storages.values())
