"""Linear, BasicLinear and Bias against float64, and Linear as a drop-in for torch.nn.Linear."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from reference import FLOAT_DTYPES, check_against_reference, make_input

import ligature as te

pytestmark = pytest.mark.usefixtures("device")

SHAPES = [(24,), (5, 24), (2, 3, 24), (2, 1, 3, 24), (0, 24), (2, 0, 24)]


def strided_inputs(dtype: torch.dtype) -> list[torch.Tensor]:
    """Inputs with 24 as their last dimension, none of them contiguous."""
    return [
        torch.randn(24, 5, dtype=dtype).t(),
        torch.randn(5, 48, dtype=dtype)[:, ::2],
        torch.randn(1, 24, dtype=dtype).expand(5, 24),
        torch.randn(3, 4, 24, dtype=dtype).transpose(0, 1),
        torch.randn(6, 30, dtype=dtype)[1:, 3:27],
    ]


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("kind", ["Linear", "Linear without bias", "BasicLinear", "Bias"])
def test_forward_and_gradients(kind: str, dtype: torch.dtype) -> None:
    op = {
        "Linear": lambda: te.ops.Linear(24, 17, dtype=dtype),
        "Linear without bias": lambda: te.ops.Linear(24, 17, bias=False, dtype=dtype),
        "BasicLinear": lambda: te.ops.BasicLinear(24, 17, dtype=dtype),
        "Bias": lambda: te.ops.Bias(24, dtype=dtype),
    }[kind]()
    if kind == "Bias":
        torch.nn.init.normal_(op.bias)
    for shape in SHAPES:
        check_against_reference(op, make_input(*shape, dtype=dtype), scale=3)
    for x in strided_inputs(dtype):
        assert not x.is_contiguous()
        check_against_reference(op, x.requires_grad_(), scale=3)


def test_every_subset_of_gradients() -> None:
    for x_grad in (True, False):
        for w_grad in (True, False):
            for b_grad in (True, False):
                op = te.ops.Linear(24, 8)
                op.weight.requires_grad_(w_grad)
                op.bias.requires_grad_(b_grad)
                check_against_reference(op, make_input(3, 24, requires_grad=x_grad))


def test_strided_gradient_of_the_output() -> None:
    op = te.ops.Linear(24, 8)
    for grad in (torch.randn(8, 5).t(), torch.randn(()).expand(5, 8)):
        check_against_reference(op, make_input(5, 24), grad_outputs=[grad])


def test_parameters_may_have_another_dtype_than_the_input() -> None:
    op = te.ops.Linear(24, 8, dtype=torch.float32)
    x = make_input(5, 24, dtype=torch.bfloat16)
    check_against_reference(op, x, dtype=torch.float32, scale=3)
    # A sum of bfloat16 gradients is rounded to bfloat16, as under torch.autocast.
    bias = te.ops.Bias(24, dtype=torch.float32)
    y = bias(x)
    assert y.dtype is torch.bfloat16
    grad = torch.randn_like(y)
    y.backward(grad)
    assert bias.bias.grad.dtype is torch.float32
    assert torch.equal(x.grad, grad)
    wanted = grad.double().sum(0)
    torch.testing.assert_close(bias.bias.grad.double(), wanted, rtol=1e-2, atol=1e-2)


def test_strided_parameters() -> None:
    op = te.ops.Linear(24, 8)
    op.weight = torch.nn.Parameter(torch.randn(24, 8).t())
    op.bias = torch.nn.Parameter(torch.randn(16)[::2])
    check_against_reference(op, make_input(5, 24))


@pytest.mark.parametrize("bias", [True, False])
def test_initial_values_are_those_of_torch(bias: bool) -> None:
    torch.manual_seed(7)
    wanted = torch.nn.Linear(24, 8, bias=bias)
    torch.manual_seed(7)
    got = te.ops.Linear(24, 8, bias=bias)
    assert torch.equal(got.weight, wanted.weight)
    if bias:
        assert torch.equal(got.bias, wanted.bias)
    torch.manual_seed(7)
    assert torch.equal(te.ops.BasicLinear(24, 8).weight, wanted.weight)
    assert not te.ops.Bias(8).bias.any()
    got.weight.data.zero_()
    torch.manual_seed(7)
    got.reset_parameters()
    assert torch.equal(got.weight, wanted.weight)


@pytest.mark.parametrize("bias", [True, False])
def test_checkpoints_go_both_ways(bias: bool) -> None:
    ours, theirs = te.ops.Linear(24, 8, bias=bias), torch.nn.Linear(24, 8, bias=bias)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(5, 24)
    torch.testing.assert_close(ours(x), theirs(x))
    torch.nn.init.normal_(ours.weight)
    theirs.load_state_dict(ours.state_dict())
    assert torch.equal(ours.weight, theirs.weight)


def test_checkpoint_of_te_ops() -> None:
    weight, bias = torch.randn(8, 24), torch.randn(8)
    checkpoint = {"basic_ops.0.weight": weight, "basic_ops.1.bias": bias}
    op = te.ops.Linear(24, 8)
    op.load_state_dict(checkpoint)
    assert torch.equal(op.weight, weight)
    assert torch.equal(op.bias, bias)
    assert list(checkpoint) == ["basic_ops.0.weight", "basic_ops.1.bias"]

    model = te.ops.Sequential(te.ops.ReLU(), te.ops.Linear(24, 8, bias=False))
    model.load_state_dict({"1.basic_ops.0.weight": weight})
    assert torch.equal(model[1].weight, weight)
    with pytest.raises(RuntimeError, match=r"basic_ops\.0\.weight|size mismatch"):
        model.load_state_dict({"1.basic_ops.0.weight": weight[:4]})
    with pytest.raises(RuntimeError, match="Missing key"):
        op.load_state_dict({"basic_ops.0.weight": weight})


def test_checkpoint_assigned() -> None:
    op = te.ops.Linear(24, 8)
    x = torch.randn(5, 24)
    op(x)
    weight = torch.randn(8, 24)
    op.load_state_dict({"weight": weight, "bias": torch.zeros(8)}, assign=True)
    torch.testing.assert_close(op(x), x @ weight.t())


def test_parts_compute_with_the_composite_parameters() -> None:
    op = te.ops.Linear(24, 8)
    linear, bias = op.basic_ops
    assert type(linear) is te.ops.BasicLinear
    assert type(bias) is te.ops.Bias
    assert linear.weight is op.weight
    assert bias.bias is op.bias
    assert [n for n, _ in op.named_parameters()] == ["weight", "bias"]
    assert op.is_fused_op
    assert not linear.is_fused_op
    op.weight = torch.nn.Parameter(torch.zeros(8, 24))
    assert linear.weight is op.weight
    x = torch.randn(5, 24)
    torch.testing.assert_close(op(x), op.bias.expand(5, 8))
    assert len(te.ops.Linear(24, 8, bias=False).basic_ops) == 1


def test_bias_cannot_appear_later() -> None:
    op = te.ops.Linear(24, 8, bias=False)
    with pytest.raises(ValueError, match=r"\[Linear\] it was made with bias=False"):
        op.bias = torch.nn.Parameter(torch.zeros(8))
    op.bias = None


def test_rng_state_tracker_surrounds_the_initialization() -> None:
    class Tracker:
        forks = 0

        @contextmanager
        def fork(self):
            self.forks += 1
            with torch.random.fork_rng():
                torch.manual_seed(99)
                yield

    tracker = Tracker()
    before = torch.get_rng_state()
    a = te.ops.Linear(24, 8, rng_state_tracker_function=lambda: tracker)
    b = te.ops.BasicLinear(24, 8, rng_state_tracker_function=lambda: tracker)
    assert tracker.forks == 2
    assert torch.equal(a.weight, b.weight)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("kind", ["Linear", "BasicLinear"])
def test_main_grad(kind: str, overwrite: bool) -> None:
    op = getattr(te.ops, kind)(24, 8, dtype=torch.bfloat16, accumulate_into_main_grad=True)
    op.weight.main_grad = torch.ones(8, 24)
    op.weight.overwrite_main_grad = overwrite
    x, grad = make_input(5, 24, dtype=torch.bfloat16), torch.randn(5, 8, dtype=torch.bfloat16)
    op(x).backward(grad)
    wanted = grad.double().t() @ x.detach().double() + (0 if overwrite else 1)
    torch.testing.assert_close(op.weight.main_grad.double(), wanted, rtol=2e-2, atol=2e-2)
    assert op.weight.grad is None
    assert x.grad is not None


def test_main_grad_is_missing() -> None:
    op = te.ops.Linear(24, 8, accumulate_into_main_grad=True)
    y = op(make_input(5, 24))
    with pytest.raises(RuntimeError, match=r"\[Linear\].*the weight has no main_grad"):
        y.sum().backward()
