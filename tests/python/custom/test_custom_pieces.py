"""Fused operations in Python that run the pieces of built-in ones: autocast, channels, flags."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pipeline_ops import FilledLinearSiLU, OwnSiLU, Pieces, RowScales, SplitPieces
from reference import assert_close, make_input

import ligature as te

pytestmark = pytest.mark.usefixtures("device")

BF16 = torch.bfloat16


def channel(fork: Any, join: Any) -> None:
    fork.set_extra_output_channel(0, "r", output_to_caller=False)
    join.set_extra_input_channel(0, "r")


@pytest.mark.parametrize("kind", ["forward", "joint"])
@pytest.mark.parametrize("cls", [Pieces, SplitPieces])
def test_autocast(device: str, kind: str, cls: type, registered: Any) -> None:
    ops = [te.ops.BasicLinear(8, 16), te.ops.SwiGLU(), te.ops.LayerNorm(8)]
    registered(kind, te.ops.Fusion([type(op) for op in ops], cls), prepend=True)
    fused, plain = te.ops.OperationFuser(ops), te.ops.OperationFuser(ops, fuse=False)
    results = []
    for fuser in (fused, plain):
        x = make_input(5, 8, requires_grad=False).fill_(0.3).requires_grad_()
        with torch.autocast(device, dtype=BF16):
            y = fuser(x)
        assert y.dtype == BF16
        leaves = [x, *(p for op in ops for p in op.parameters())]
        results.append([y, *torch.autograd.grad(y, leaves, torch.ones_like(y))])
    assert len(fused._forward_ops) == 1
    for got, wanted in zip(*results, strict=True):
        assert_close(got, wanted, wanted.dtype, scale=4 if wanted.dtype == BF16 else 1e4)


def test_autocast_of_an_overridden_operation(device: str) -> None:
    with torch.autocast(device, dtype=BF16):
        assert te.ops.SiLU()(make_input(3, 8)).dtype == BF16
        y = OwnSiLU()(make_input(3, 8))
    assert y.dtype == BF16
    y.sum().backward()


@pytest.mark.parametrize("kind", ["forward", "joint"])
def test_an_extra_input_from_a_channel_keeps_its_gradient(
    kind: str,
    registered: Any,
) -> None:
    """The tensor in a channel does not say that it needs one; the context does."""
    fork, join = te.ops.MakeExtraOutput(), te.ops.AddExtraInput()
    channel(fork, join)
    pattern = [te.ops.AddExtraInput, te.ops.SiLU]
    registered(kind, te.ops.Fusion(pattern, Pieces), prepend=True)
    scale = te.ops.ConstantScale
    fuser = te.ops.OperationFuser([scale(0.5), fork, scale(2.0), join, te.ops.SiLU()])
    x = make_input(3, 8)
    y = fuser(x)
    assert type(fuser._forward_ops[-1][0]) is Pieces
    leaf = x.detach().requires_grad_()
    wanted = torch.nn.functional.silu(1.5 * leaf)
    torch.testing.assert_close(y, wanted)
    y.sum().backward()
    wanted.sum().backward()
    torch.testing.assert_close(x.grad, leaf.grad)


def test_scales_from_a_channel_keep_their_gradient(registered: Any) -> None:
    scales, act = RowScales(), te.ops.ScaledSReLU()
    channel(scales, act)
    registered("joint", te.ops.Fusion([te.ops.ScaledSReLU], Pieces))
    ops = [scales, te.ops.ConstantScale(-1.0), act]
    fused, plain = te.ops.OperationFuser(ops), te.ops.OperationFuser(ops, fuse=False)
    x = make_input(3, 8)
    grads = [torch.autograd.grad(run(x).sum(), x)[0] for run in (fused, plain)]
    assert type(fused._forward_ops[-1][0]) is Pieces
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("frozen", ["weight", "input"])
def test_frozen_parts_are_not_computed(frozen: str, registered: Any) -> None:
    """The flags of the fuser reach the pieces."""
    linear = te.ops.BasicLinear(8, 4)
    linear.weight.requires_grad_(frozen != "weight")
    registered("forward", te.ops.Fusion([te.ops.BasicLinear], Pieces), prepend=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        x = make_input(3, 8, requires_grad=frozen != "input")
        y = te.ops.OperationFuser([linear])(x)
    assert [tuple(t.shape) for t in saved] == [(4, 8) if frozen == "weight" else (3, 8)]
    y.sum().backward()


def test_main_grad_behind_a_context_filled_by_hand(registered: Any) -> None:
    """What the fusion saved does not name the weight; the module does."""
    pattern = [te.ops.BasicLinear, te.ops.SiLU]
    registered("forward", te.ops.Fusion(pattern, FilledLinearSiLU), prepend=True)
    for make in (te.ops.BasicLinear, lambda *a, **k: te.ops.Linear(*a, bias=False, **k)):
        linear = make(8, 4, accumulate_into_main_grad=True)
        linear.weight.main_grad = torch.zeros(4, 8)
        fuser = te.ops.OperationFuser([linear, te.ops.SiLU()])
        x = make_input(3, 8)
        fuser(x).sum().backward()
        assert type(fuser._forward_ops[0][0]) is FilledLinearSiLU
        leaf = linear.weight.detach().requires_grad_()
        torch.nn.functional.silu(x.detach() @ leaf.t()).sum().backward()
        torch.testing.assert_close(linear.weight.main_grad, leaf.grad)
        assert linear.weight.grad is None
