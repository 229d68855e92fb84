"""A linear with a gated activation beside it as one kernel, at sizes for which the GPU has it."""

from __future__ import annotations

import pytest
import torch

import ligature as te

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a Hopper GPU",
)


@pytest.fixture(autouse=True)
def device() -> str:
    return "cuda"


T, H, F = 4096, 2048, 16384


def make(kind: str, recompute: str) -> te.ops.Sequential:
    torch.manual_seed(0)
    options = {"dtype": torch.bfloat16, "device": "cuda"}
    return te.ops.Sequential(
        te.ops.LayerNorm(H, **options),
        te.ops.Linear(H, F, bias=False, **options),
        getattr(te.ops, kind)(),
        te.ops.Linear(F // 2, H, bias=False, **options),
        recompute=recompute,
    )


def reference(
    model: te.ops.Sequential, kind: str, x: torch.Tensor, dy: torch.Tensor
) -> list[torch.Tensor]:
    """Plain PyTorch in float64, which rounds only what it is given."""
    weights = [p.detach().double().requires_grad_() for p in model.parameters()]
    x = x.detach().double().requires_grad_()
    w, b, w1, w2 = weights
    z = torch.nn.functional.layer_norm(x, (H,), w, b) @ w1.t()
    gate, linear = z.chunk(2, dim=-1)
    if kind == "SwiGLU":
        gate = torch.nn.functional.silu(gate)
    else:
        gate = torch.nn.functional.gelu(gate, approximate="tanh")
    y = (gate * linear) @ w2.t()
    return [y, *torch.autograd.grad(y, [x, *weights], dy.double())]


@pytest.mark.parametrize("recompute", ["none", "cheap"])
@pytest.mark.parametrize("kind", ["SwiGLU", "GEGLU"])
def test_block(kind: str, recompute: str) -> None:
    model = make(kind, recompute)
    x = torch.randn(T, H, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    dy = torch.randn(T, H, dtype=torch.bfloat16, device="cuda")
    wanted = reference(model, kind, x, dy)
    # The graph is kept, then not: what is saved is overwritten in the second backward alone.
    y = model(x)
    y.backward(dy, retain_graph=True)
    first = [x.grad, *(p.grad for p in model.parameters())]
    x.grad = None
    for parameter in model.parameters():
        parameter.grad = None
    y.backward(dy)
    second = [x.grad, *(p.grad for p in model.parameters())]
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)
    for got, want in zip([y, *second], wanted, strict=True):
        error = (got.double() - want).abs().max() / want.abs().max()
        assert error < 2e-2, f"{tuple(got.shape)}: {float(error)}"
    text = str(model.explain())
    assert "linear_gated_forward" in text
    assert "linear_gated_backward" in text


RECIPES = {
    "delayed": te.recipe.DelayedScaling,
    "current": te.recipe.Float8CurrentScaling,
}


def fp8_step(
    model: torch.nn.Module, recipe: te.recipe.Recipe, x: torch.Tensor, dy: torch.Tensor
) -> list[torch.Tensor]:
    for _ in range(2):  # delayed scaling has its factors from the first
        x.grad = None
        model.zero_grad()
        with te.autocast(enabled=True, recipe=recipe):
            y = model(x)
        y.backward(dy)
    assert x.grad is not None
    return [y, x.grad, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("recompute", ["none", "cheap"])
@pytest.mark.parametrize("kind", ["SwiGLU", "GEGLU"])
@pytest.mark.parametrize("name", RECIPES)
def test_fp8_block(name: str, kind: str, recompute: str) -> None:
    model = make(kind, recompute)
    x = torch.randn(T, H, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    dy = torch.randn(T, H, dtype=torch.bfloat16, device="cuda")
    got = fp8_step(model, RECIPES[name](), x, dy)
    for value, want in zip(got, reference(model, kind, x, dy), strict=True):
        error = (value.double() - want).norm() / want.norm()
        assert error < 0.12, f"{tuple(value.shape)}: {float(error)}"
    assert "linear_gated_forward_quantize" in str(model.explain())

    # The same operations one by one, with a product of cuBLASLt, the activation and a cast.
    apart = torch.nn.Sequential(*make(kind, "none"))
    wanted = fp8_step(apart, RECIPES[name](), x, dy)
    for value, want in zip(got, wanted, strict=True):
        assert torch.equal(value, want), tuple(value.shape)


def test_fp8_without_gradients() -> None:
    model = make("SwiGLU", "none")
    x = torch.randn(T, H, dtype=torch.bfloat16, device="cuda")
    recipe = te.recipe.Float8CurrentScaling()
    with te.autocast(enabled=True, recipe=recipe):
        with_gradients = model(x.clone().requires_grad_())
        with torch.no_grad():
            without = model(x)
    assert torch.equal(with_gradients, without)
    assert "linear_gated_forward_quantize" in str(model.explain())


def test_small_sizes_take_two_kernels() -> None:
    model = make("SwiGLU", "none")
    x = torch.randn(64, H, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    model(x).sum().backward()
    assert "linear_gated" not in str(model.explain())
