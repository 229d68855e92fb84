"""What graphed callables rest on and a CPU can show: who updates delayed scaling, and errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ligature as te
from ligature import _C

RECIPE = te.recipe.DelayedScaling(amax_history_len=3)


def step(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    with te.autocast(recipe=RECIPE):
        y = model(x)
    y.backward(torch.ones_like(y))
    return y.detach()


def entries(linear: te.ops.BasicLinear) -> dict[str, torch.Tensor]:
    return {k: v.clone() for k, v in linear.state_dict().items() if "_recipe_state" in k}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert list(a) == list(b)
    for key, value in a.items():
        assert torch.equal(value, b[key]), key


def make() -> tuple[te.ops.BasicLinear, te.ops.BasicLinear]:
    linear = te.ops.BasicLinear(32, 16)
    step(linear, torch.randn(4, 32))
    twin = te.ops.BasicLinear(32, 16)
    twin.load_state_dict(linear.state_dict())
    return linear, twin


def test_a_part_leaves_no_trace() -> None:
    linear, _ = make()
    before = entries(linear)
    part = _C.CapturedPart()
    part.begin()
    try:
        for i in range(3):
            step(linear, torch.randn(4, 32) * 2**i)
    finally:
        part.end()
    assert any(not torch.equal(v, before[k]) for k, v in entries(linear).items())  # amax
    part.forget()
    same(entries(linear), before)


@pytest.mark.parametrize("inside", [True, False])
def test_what_a_part_met_is_updated_by_its_caller(inside: bool) -> None:
    """The operations stand for graphs here: they note largest values and update nothing."""
    linear, twin = make()
    forward, backward = _C.CapturedPart(), _C.CapturedPart()

    class Run(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.x = x.detach().clone().requires_grad_()
            forward.begin()
            try:
                with torch.enable_grad(), te.autocast(recipe=RECIPE):
                    ctx.y = linear(ctx.x)
            finally:
                forward.end()
            return ctx.y.detach()

        @staticmethod
        def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
            backward.begin()
            try:
                ctx.y.backward(dy)
            finally:
                backward.end()
            backward.ran_backward()
            return ctx.x.grad

    def run(x: torch.Tensor) -> torch.Tensor:
        y = Run.apply(x)
        noted = entries(linear)
        if not inside:
            forward.ran_forward()
            return y
        with te.autocast(recipe=RECIPE):
            forward.ran_forward()
            same(entries(linear), noted)  # it is the end of the context that counts
        return y

    for i in range(4):
        x = (torch.randn(4, 32) * 2**i).requires_grad_()
        with torch.no_grad():
            for one in (linear, twin):
                one.weight.mul_(1.5)
        y = run(x)
        y.backward(torch.ones_like(y))
        mine, x.grad = x.grad, None
        wanted = step(twin, x)
        torch.testing.assert_close(y.detach(), wanted, rtol=0, atol=0)
        torch.testing.assert_close(mine, x.grad, rtol=0, atol=0)
        same(entries(linear), entries(twin))


def test_parts_are_recorded_one_at_a_time_and_outside_of_autocast() -> None:
    part = _C.CapturedPart()
    with te.autocast(recipe=RECIPE), pytest.raises(RuntimeError, match="outside of autocast"):
        part.begin()
    part.begin()
    try:
        with pytest.raises(RuntimeError, match="another part"):
            _C.CapturedPart().begin()
    finally:
        part.end()


@pytest.fixture
def _without_cuda(device: str) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")


@pytest.mark.usefixtures("_without_cuda")
def test_needs_a_gpu() -> None:
    with pytest.raises(RuntimeError, match="CUDA graphs need a CUDA device"):
        te.make_graphed_callables(te.ops.Linear(4, 4), (torch.ones(2, 4),))


def test_wrong_arguments() -> None:
    linear, x = te.ops.Linear(4, 4), torch.ones(2, 4)
    with pytest.raises(TypeError, match="modules must be callables, got int"):
        te.make_graphed_callables(3, (x,))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="sample_args must be a tuple or a list, got Tensor"):
        te.make_graphed_callables(linear, x)
    with pytest.raises(ValueError, match="sample_args must be a tuple with an entry per callable"):
        te.make_graphed_callables((linear, linear), ((x,),))
    with pytest.raises(TypeError, match="enabled was given twice"):
        te.make_graphed_callables(linear, (x,), enabled=True, fp8_enabled=True)
    with pytest.raises(TypeError, match="recipe must be a Recipe"):
        te.make_graphed_callables(linear, (x,), recipe="fp8")  # type: ignore[arg-type]
    with pytest.raises(NotImplementedError, match="_order is not available"):
        te.make_graphed_callables(linear, (x,), _order=[1, -1])
    handle = linear.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="has hooks"):
        te.make_graphed_callables(linear, (x,))
    handle.remove()
