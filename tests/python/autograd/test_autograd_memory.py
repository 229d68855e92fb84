"""Backward writes over what only the node owns: never over anything that somebody can see."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from reference import make_input, make_mlp
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import ligature as te
import ligature.ops as ops

ACTIVATIONS = ["GELU", "QGELU", "ReLU", "SReLU", "SiLU", "GLU", "GEGLU", "QGEGLU", "ReGLU"]
ACTIVATIONS += ["SReGLU", "SwiGLU", "ClampedSwiGLU", "SiTUGLU"]


def leaves(model: torch.nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    return [x, *model.parameters()]


def gradients(
    model: torch.nn.Module, x: torch.Tensor, *, keep: bool = False
) -> tuple[torch.Tensor, ...]:
    y = model(x)
    y = y[0] if isinstance(y, tuple) else y
    return torch.autograd.grad(y, leaves(model, x), torch.cos(y.detach()), retain_graph=keep)


def assert_same(got, wanted) -> None:
    for a, b in zip(got, wanted, strict=True):
        assert torch.equal(a, b)


def memory_events(run: Callable[[], object]) -> list[int]:
    """Bytes that are taken, and those given back as negative numbers, in order; on the CPU."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as measured:
        run()
    events = [e for e in measured.profiler.kineto_results.events() if e.name() == "[memory]"]
    return [event.nbytes() for event in sorted(events, key=lambda e: e.start_ns())]


def peak_bytes(run: Callable[[], object]) -> int:
    held = peak = 0
    for taken in memory_events(run):
        held += taken
        peak = max(peak, held)
    return peak


# -- the same values


@pytest.mark.parametrize("recompute", ["none", "cheap"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_same_gradients_whether_the_graph_is_kept(device, name, bias, dtype, recompute):
    gated = name.endswith("GLU")
    model = ops.Sequential(
        ops.LayerNorm(16, dtype=dtype),
        ops.Linear(16, 32, bias=bias, dtype=dtype),
        getattr(ops, name)(),
        ops.Linear(16 if gated else 32, 16, bias=bias, dtype=dtype),
        recompute=recompute,
    )
    x = make_input(6, 16, dtype=dtype)
    assert_same(gradients(model, x), gradients(model, x, keep=True))


@pytest.mark.parametrize("recompute", ["none", "cheap"])
def test_a_kept_graph_serves_again(device, recompute):
    model = make_mlp(recompute=recompute)
    x = make_input(6, 8)
    y = model(x)
    first = torch.autograd.grad(y.sum(), leaves(model, x), retain_graph=True)
    second = torch.autograd.grad(y.sum(), leaves(model, x), retain_graph=True)
    last = torch.autograd.grad(y.sum(), leaves(model, x))
    assert_same(first, second)
    assert_same(first, last)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y.sum(), leaves(model, x))


@pytest.mark.parametrize("recompute", ["none", "cheap"])
def test_gradients_asked_for_one_after_the_other(device, recompute):
    model = make_mlp(recompute=recompute)
    x = make_input(6, 8)
    wanted = gradients(model, x)
    y = model(x)
    dy = torch.cos(y.detach())
    for i, leaf in enumerate(leaves(model, x)):
        (got,) = torch.autograd.grad(y, leaf, dy, retain_graph=True)
        assert torch.equal(got, wanted[i])


@pytest.mark.parametrize("frozen", range(7))
@pytest.mark.parametrize("recompute", ["none", "cheap"])
def test_with_one_leaf_frozen(device, recompute, frozen):
    model = make_mlp(recompute=recompute)
    x = make_input(6, 8)
    wanted = gradients(model, x)
    all_leaves = leaves(model, x)
    all_leaves[frozen].requires_grad_(False)
    y = model(x)
    y.backward(torch.cos(y.detach()))
    for i, leaf in enumerate(all_leaves):
        assert leaf.grad is None if i == frozen else torch.equal(leaf.grad, wanted[i])


@pytest.mark.parametrize("recompute", ["none", "cheap"])
def test_under_autocast(device, recompute):
    model = make_mlp(recompute=recompute)
    x = make_input(6, 8)
    with torch.autocast(device, torch.bfloat16):
        kept = gradients(model, x, keep=True)
        assert_same(gradients(model, x), kept)


# -- nothing that somebody can see


def test_the_input_is_left_alone(device):
    model = ops.Sequential(ops.SwiGLU(), ops.Linear(8, 8), ops.GELU())
    x = make_input(6, 16)
    before = x.detach().clone()
    gradients(model, x)
    assert torch.equal(x, before)


def test_memory_of_an_input_from_outside_is_left_alone(device):
    if device != "cpu":
        pytest.skip("numpy's memory is the CPU's")
    memory = np.linspace(-1, 1, 96, dtype=np.float32).reshape(6, 16)
    before = memory.copy()
    model = ops.Sequential(ops.SwiGLU(), ops.Linear(8, 8), ops.SiLU())
    model(torch.from_numpy(memory).requires_grad_()).sum().backward()
    assert np.array_equal(memory, before)


class Lender(ops.BasicOperation):
    """Gives out memory of its own, and holds no tensor of it."""

    memory = np.linspace(-1, 1, 96, dtype=np.float32).reshape(6, 16)

    def op_forward(self, ctx, input_, **unused):
        return torch.from_numpy(self.memory)

    def op_backward(self, ctx, grad_output):
        return grad_output.clone(), ()


def test_memory_that_an_operation_lends_is_left_alone(device):
    if device != "cpu":
        pytest.skip("numpy's memory is the CPU's")
    before = Lender.memory.copy()
    model = ops.Sequential(ops.Linear(8, 16), Lender(), ops.SwiGLU(), ops.Linear(8, 8))
    model(make_input(6, 8)).sum().backward()
    assert np.array_equal(Lender.memory, before)


@pytest.mark.parametrize("recompute", ["none", "cheap"])
def test_outputs_are_left_alone(device, recompute):
    model = ops.Sequential(
        ops.LayerNorm(8),
        ops.Linear(8, 16),
        ops.MakeExtraOutput(),
        ops.GELU(),
        ops.Linear(16, 8),
        ops.ReLU(),
        recompute=recompute,
    )
    x = make_input(6, 8)
    y, extra = model(x)
    before = y.detach().clone(), extra.detach().clone()
    view = extra.detach().view(-1)
    (y.sum() + extra.sum()).backward()
    assert torch.equal(y, before[0])
    assert torch.equal(extra, before[1])
    assert torch.equal(view, before[1].view(-1))


def test_a_channel_carries_what_was_put_in(device):
    fork, join = ops.MakeExtraOutput(), ops.AddExtraInput()
    fork.set_extra_output_channel(0, "skip", output_to_caller=False)
    join.set_extra_input_channel(0, "skip")
    model = ops.Sequential(ops.Linear(8, 8), fork, ops.GELU(), ops.SReLU(), join, ops.SiLU())
    x = make_input(6, 8)
    assert_same(gradients(model, x), gradients(model, x, keep=True))


@pytest.mark.parametrize("recompute", ["none", "cheap"])
def test_what_hooks_packed_is_left_alone(device, recompute):
    model = make_mlp(recompute=recompute)
    x = make_input(6, 8)
    wanted = gradients(model, x)
    packed: list[tuple[torch.Tensor, torch.Tensor]] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append((tensor, tensor.detach().clone()))
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        y = model(x)
    got = torch.autograd.grad(y, leaves(model, x), torch.cos(y.detach()))
    assert_same(got, wanted)
    assert packed
    for tensor, before in packed:
        assert torch.equal(tensor, before)


def test_memory_that_hooks_lend_is_left_alone(device):
    if device != "cpu":
        pytest.skip("numpy's memory is the CPU's")
    model = make_mlp()
    x = make_input(6, 8)
    arrays: list[tuple[np.ndarray, np.ndarray]] = []

    def pack(tensor: torch.Tensor) -> int:
        array = tensor.detach().numpy().copy()
        arrays.append((array, array.copy()))
        return len(arrays) - 1

    with saved_tensors_hooks(pack, lambda i: torch.from_numpy(arrays[i][0])):
        y = model(x)
    y.sum().backward()
    for array, before in arrays:
        assert np.array_equal(array, before)


class Keeper(ops.BasicOperation):
    """Doubles, and keeps what goes in and out."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def keep(self, tensor: torch.Tensor) -> None:
        self.kept.append((tensor, tensor.detach().clone()))

    def op_forward(self, ctx, input_, **unused):
        y = 2 * input_
        self.keep(input_)
        self.keep(y)
        ctx.save_for_backward(input_)
        return y

    def op_backward(self, ctx, grad_output):
        (x,) = ctx.saved_tensors
        self.keep(x)
        self.keep(grad_output)
        return 2 * grad_output, ()


def test_what_an_operation_keeps_is_left_alone(device):
    keepers = Keeper(), Keeper()
    model = ops.Sequential(
        ops.Linear(8, 16), keepers[0], ops.GELU(), ops.Linear(16, 16), keepers[1], ops.SwiGLU()
    )
    x = make_input(6, 8)
    gradients(model, x)
    for keeper in keepers:
        assert len(keeper.kept) == 4
        for tensor, before in keeper.kept:
            assert torch.equal(tensor, before)


@pytest.mark.parametrize("recompute", ["none", "cheap"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_under_a_checkpoint(device, reentrant, recompute):
    model = make_mlp(recompute=recompute)
    x = make_input(6, 8)
    y = model(x)
    y.backward(torch.cos(y.detach()))
    wanted = [leaf.grad for leaf in leaves(model, x)]
    for leaf in leaves(model, x):
        leaf.grad = None
    y = checkpoint(model, x, use_reentrant=reentrant)
    y.backward(torch.cos(y.detach()))
    assert_same([leaf.grad for leaf in leaves(model, x)], wanted)


def test_the_gradient_given_is_left_alone(device):
    model = ops.Sequential(ops.Identity(), ops.Linear(8, 16), ops.SwiGLU(), ops.Reshape((3, 2, 8)))
    x = make_input(6, 8)
    dy = torch.randn(3, 2, 8)
    before = dy.clone()
    y = model(x)
    y.backward(dy)
    y = model(x)
    y.backward(dy)
    assert torch.equal(dy, before)


def test_a_gradient_in_the_memory_of_the_one_given_is_a_copy(device):
    """Also where the tensor that was given is gone when the result is looked at."""
    model = ops.Sequential(ops.Reshape((4, 12)), ops.Reshape((2, 24)), ops.Reshape((48,)))
    x = make_input(6, 8)
    dy = torch.randn(48)
    before = dy.clone()
    for _ in range(2):  # the second is added to the first in place
        model(x).view(-1, 1).backward(dy.view(-1, 1))
    assert torch.equal(dy, before)
    assert torch.equal(x.grad, 2 * dy.view(6, 8))


# -- and it is done


@pytest.mark.parametrize("recompute", ["none", "cheap"])
def test_peak_of_a_block(device, recompute):
    if device != "cpu":
        pytest.skip("an allocator of blocks has its own books")
    t, h, f = 256, 16, 64
    model = ops.Sequential(
        ops.LayerNorm(h), ops.Linear(h, f, bias=False), ops.SwiGLU(),
        ops.Linear(f // 2, h, bias=False), recompute=recompute,
    )  # fmt: skip
    x = make_input(t, h)
    dy = torch.randn(t, h)

    def step(keep: bool = False) -> None:
        for leaf in leaves(model, x):
            leaf.grad = None
        model(x).backward(dy, retain_graph=keep)

    step()
    for leaf in leaves(model, x):
        leaf.grad = None
    # y, fc1's output, SwiGLU's output or its gradient, fc2's weight gradient, mean and rstd; and
    # what the norm gave, unless it is made again
    floats = t * h + t * f + t * f // 2 + h * f // 2 + 2 * t
    floats += t * h if recompute == "none" else 0
    assert peak_bytes(step) == 4 * floats
    assert peak_bytes(lambda: step(keep=True)) >= 4 * floats + 4 * t * f // 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_takes_memory_for_results_and_what_is_saved_alone(device, dtype):
    if device != "cpu":
        pytest.skip("the profiler's events are the CPU's")
    t, h, f = 64, 256, 512
    model = make_mlp(h, f, dtype=dtype)
    x = torch.randn(t, h, dtype=dtype, requires_grad=True)
    if "linear_forward [cpu]" not in str(model.explain(x)):
        pytest.skip("torch makes the products on this processor, with memory of its own")
    dy = torch.randn(t, h, dtype=dtype)

    def step() -> None:
        for leaf in leaves(model, x):
            leaf.grad = None
        model(x).backward(dy)

    step()
    step()
    for leaf in leaves(model, x):
        leaf.grad = None
    taken = sorted(n for n in memory_events(step) if n > 0)
    # The norm, the first linear, the activation, the output; between them two gradients: that of
    # the first linear is written over its result.
    made = [t * h, t * f, t * f, t * h, t * f, t * h]
    gradients = [leaf.numel() for leaf in leaves(model, x)]
    wanted = [n * dtype.itemsize for n in (*made, *gradients)]
    assert taken == sorted([*wanted, 4 * t, 4 * t])  # and the norm's statistics


@pytest.mark.parametrize("recipe", ["DelayedScaling", "Float8CurrentScaling", "MXFP8BlockScaling"])
def test_small_buffers_of_a_step_are_taken_together(device, recipe):
    if device != "cpu":
        pytest.skip("the profiler's events are the CPU's")
    model = make_mlp(64, 128, dtype=torch.bfloat16)
    x = make_input(32, 64, dtype=torch.bfloat16)
    dy = torch.randn(32, 64, dtype=torch.bfloat16)

    def step() -> None:
        for leaf in leaves(model, x):
            leaf.grad = None
        with te.autocast(recipe=getattr(te.recipe, recipe)()):
            y = model(x)
        y.backward(dy)

    def taken() -> int:
        return sum(n > 0 for n in memory_events(step))

    for _ in range(3):  # until delayed scaling has settled
        step()
    model.recompute = "none"  # plans are made anew, weights stay as they are
    apart, together = taken(), taken()
    # In forward the inputs of two linears, in backward the gradients of two outputs: data and
    # factors, and where those of rows and columns differ both. After the first step they are one
    # piece in forward and one in backward.
    pieces = 4 * (4 if recipe == "MXFP8BlockScaling" else 2)
    assert apart - together == pieces - 2
