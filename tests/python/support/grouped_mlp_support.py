"""Blocks of experts, what they should compute, and runs of them, for tests."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from fusion_support import backward_names, forward_names, leaf, parameters_of
from reference import (
    _WITH_OPTIONS,
    ACTIVATIONS,
    GLU_ACTIVATIONS,
    float64_copy,
    srelu,
)

import ligature as te

Tensor = torch.Tensor
ops = te.ops

HIDDEN, INNER, GROUPS, ROWS = 24, 16, 4, 13
SPLITS = (5, 0, 3, 4)  # a row past the last group
SCALED = ("ScaledSwiGLU", "ScaledSiTUGLU", "ScaledClampedQGeGLU", "ScaledSReLU")
UNGATED = [name for name in ACTIVATIONS if name not in GLU_ACTIVATIONS]


def is_gated(activation: str) -> bool:
    return activation != "ScaledSReLU" and activation not in UNGATED


def experts(
    activation: str = "SwiGLU",
    *,
    dtype: torch.dtype = torch.float32,
    bias: bool = True,
    scale_bias: bool = False,
    groups: int = GROUPS,
    act_options: dict[str, Any] | None = None,
    **options: Any,
) -> list[ops.FusibleOperation]:
    """Two grouped linears and what is between them."""
    width = INNER * (1 + is_gated(activation))
    block = [
        ops.GroupedLinear(groups, HIDDEN, width, bias=bias, dtype=dtype, **options),
        getattr(ops, activation)(**(act_options or {})),
        ops.GroupedLinear(
            groups, INNER, HIDDEN, bias=bias, dtype=dtype, scale_bias=scale_bias, **options
        ),
    ]
    for op in block:
        for name, parameter in op.named_parameters():
            if name.startswith("bias"):
                torch.nn.init.normal_(parameter)
    return block


def joined(block: Sequence[Any], *, to_caller: bool = False) -> list[ops.FusibleOperation]:
    """With the routing around it, on channels."""
    dispatch, combine = ops.Dispatch(block[0].num_groups), ops.Combine()
    for index, channel in enumerate(("splits", "probabilities", "map")):
        dispatch.set_extra_output_channel(index, channel, output_to_caller=to_caller)
    for op in block:
        if isinstance(op, ops.GroupedLinear):
            op.set_extra_input_channel(0, "splits")
            if op.num_extra_inputs == 2:
                op.set_extra_input_channel(1, "probabilities")
        elif op.num_extra_inputs:
            op.set_extra_input_channel(0, "probabilities")
    combine.set_extra_input_channel(0, "map")
    return [dispatch, *block, combine]


class Ran:
    """Outputs and all gradients of a few steps."""

    def __init__(
        self,
        modules: Sequence[Any],
        inputs: Sequence[Tensor],
        *,
        recipe: Any = None,
        steps: int = 1,
        kwargs: Any = None,
        **options: Any,
    ) -> None:
        self.fuser = ops.OperationFuser(list(modules), **options)
        self.parameters = parameters_of(self.fuser)
        for step in range(steps):
            # One tensor given twice stays one.
            leaves = {id(t): leaf(t) for t in inputs}
            for parameter in self.parameters:
                parameter.grad = None
            torch.manual_seed(step)
            with te.autocast(recipe=recipe) if recipe is not None else nullcontext():
                more = {} if kwargs is None else {"basic_op_kwargs": kwargs}
                outputs = self.fuser(*(leaves[id(t)] for t in inputs), **more)
            self.outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            given = [y for y in self.outputs if y.requires_grad]
            grads = [torch.randn(y.shape).to(y.dtype) for y in given]
            if given:
                torch.autograd.backward(given, grads)
        self.results: dict[str, Tensor | None] = {
            f"output {k}": y.detach() for k, y in enumerate(self.outputs)
        }
        floats = [t for t in leaves.values() if t.is_floating_point()]
        for k, t in enumerate(floats):
            self.results[f"gradient of input {k}"] = t.grad
        for k, p in enumerate(self.parameters):
            self.results[f"gradient of parameter {k}"] = p.grad

    @property
    def names(self) -> list[str]:
        assert forward_names(self.fuser) == backward_names(self.fuser)
        return forward_names(self.fuser)


def same_bits(got: Ran, wanted: Ran, what: str = "") -> None:
    assert got.results.keys() == wanted.results.keys()
    for name, a in got.results.items():
        b = wanted.results[name]
        assert (a is None) == (b is None), f"{what} {name}: {a} instead of {b}"
        if a is None or b is None:
            continue
        assert a.dtype == b.dtype, f"{what} {name}"
        assert a.shape == b.shape, f"{what} {name}"
        same = (a == b) | (a.isnan() & b.isnan()) if a.is_floating_point() else a == b
        assert same.all(), f"{what} {name} differs: {(~same).sum()} of {same.numel()}"


def check_bits(modules: Sequence[Any], *inputs: Tensor, names: Any = None, **more: Any) -> Ran:
    fused = Ran(modules, inputs, **more)
    plain = Ran(modules, inputs, fuse=False, **more)
    assert fused.names == (["GroupedMLP"] if names is None else names)
    same_bits(fused, plain)
    return fused


def inputs_of(
    block: Sequence[Any],
    *,
    rows: int = ROWS,
    splits: Sequence[int] = SPLITS,
    dtype: torch.dtype = torch.float32,
    requires_grad: bool = True,
) -> list[Tensor]:
    """The input and the extra inputs; scales of an activation and of a bias are the same tensor."""
    x = torch.randn(rows, HIDDEN).to(dtype).requires_grad_(requires_grad)
    sizes = torch.tensor(splits)
    scales = torch.rand(rows).to(dtype).requires_grad_(requires_grad)
    found = [x]
    for op in block:
        if isinstance(op, ops.GroupedLinear):
            found += [sizes, scales][: op.num_extra_inputs]
        elif op.num_extra_inputs:
            found.append(scales)
    return found


def formula_of(activation: str) -> Any:
    if activation in ACTIVATIONS:
        return ACTIVATIONS[activation]
    return srelu if activation == "ScaledSReLU" else _WITH_OPTIONS[activation][0]


def expected(
    block: Sequence[Any],
    x: Tensor,
    splits: Sequence[int],
    scales: Tensor | None,
    bias_scales: Tensor | None = None,
    act_options: dict[str, Any] | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """In plain PyTorch in float64; also copies of all parameters."""
    copies = [[float64_copy(p) for p in op.parameters()] for op in (block[0], block[2])]
    out, at = [], 0
    act = formula_of(type(block[1]).__name__)

    def linear(rows: Tensor, op: Any, params: list[Tensor], g: int, s: Tensor | None) -> Tensor:
        y = rows @ params[g].T
        if not op.has_bias:
            return y
        return y + (params[op.num_groups + g] if s is None else s * params[op.num_groups + g])

    for g, size in enumerate(splits):
        rows = slice(at, at + size)
        a = act(linear(x[rows], block[0], copies[0], g, None), **(act_options or {}))
        if scales is not None:
            a = a * scales[rows, None]
        of_bias = None if bias_scales is None else bias_scales[rows, None]
        out.append(linear(a, block[2], copies[1], g, of_bias))
        at += size
    out.append(torch.zeros(x.shape[0] - at, HIDDEN, dtype=torch.float64))
    return torch.cat(out), [p for own in copies for p in own]


def wide_experts(activation: str, dtype: torch.dtype, scale_bias: bool) -> list[Any]:
    """Of sizes that are no multiples of a format's blocks, nor the same."""
    width = 40 * (1 + is_gated(activation))
    return [
        ops.GroupedLinear(GROUPS, 48, width, dtype=dtype),
        getattr(ops, activation)(),
        ops.GroupedLinear(GROUPS, 40, 56, dtype=dtype, scale_bias=scale_bias),
    ]


def widened(inputs: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    x = torch.randn(inputs[0].shape[0], 48).to(dtype).requires_grad_()
    return [x, *inputs[1:]]


def frozen_cases(block: Sequence[Any], inputs: Sequence[Tensor]) -> list[list[Tensor]]:
    floats = list({id(t): t for t in inputs if t.is_floating_point()}.values())
    parts = [[t] for t in floats]
    for op in (block[0], block[2]):
        for kind in ("weight", "bias"):
            parts.append([p for name, p in op.named_parameters() if name.startswith(kind)])
    return parts


def routed_inputs(
    tokens: int = 7,
    top_k: int = 2,
    *,
    groups: int = GROUPS,
    dtype: torch.dtype = torch.float32,
    width: int = HIDDEN,
) -> list[Tensor]:
    """The input, expert indices (some of no expert) and probabilities."""
    x = torch.randn(tokens, width).to(dtype).requires_grad_()
    indices = torch.stack([torch.randperm(groups)[:top_k] for _ in range(max(tokens, 1))])[:tokens]
    indices = torch.where(torch.rand(indices.shape) < 0.1, -1, indices)
    indices[indices == 1] = 2  # nobody goes to expert 1
    return [x, indices, torch.rand(tokens, top_k).to(dtype).requires_grad_()]
