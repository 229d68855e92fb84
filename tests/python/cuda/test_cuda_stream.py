"""What holds on a GPU alone: no step waits for it, and kernels run on the caller's stream."""

from __future__ import annotations

import pytest
import torch
from reference import make_input

import ligature as te


@pytest.fixture(autouse=True)
def _needs_gpu(device: str) -> None:
    if device != "cuda":
        pytest.skip("needs a GPU")


def make_model(h: int, dtype: torch.dtype) -> torch.nn.Module:
    ops = te.ops
    return ops.Sequential(
        ops.LayerNorm(h, dtype=dtype),
        ops.Linear(h, 4 * h, dtype=dtype),
        ops.SwiGLU(),
        ops.Linear(2 * h, h, dtype=dtype),
        ops.RMSNorm(h, dtype=dtype),
        ops.Linear(h, h, dtype=dtype),
        ops.GELU(),
        ops.Dropout(0.1),
        ops.L2Normalization(),
    )


def step(model: torch.nn.Module, x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    model.zero_grad(set_to_none=True)
    y = model(x)
    y.backward(dy)
    return y.detach()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_step_does_not_wait_for_the_gpu(dtype: torch.dtype) -> None:
    model = make_model(64, dtype)
    x, dy = make_input(32, 64, dtype=dtype), torch.randn(32, 64, dtype=dtype)
    step(model, x, dy)  # what is made once may wait
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(model, x, dy)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_kernels_run_on_the_current_stream() -> None:
    h = 512
    model = te.ops.Sequential(te.ops.LayerNorm(h), te.ops.SiLU(), te.ops.RMSNorm(h))
    x, dy = torch.randn(256, h, requires_grad=True), torch.randn(256, h)
    wanted = step(model, x, dy)
    wanted_dx, x.grad = x.grad, None
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    late = torch.zeros_like(x)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late.copy_(x.detach())  # a kernel on another stream would see zeros
        y = step(model, late.requires_grad_(), dy)
    stream.synchronize()
    torch.testing.assert_close(y, wanted, rtol=0, atol=0)
    torch.testing.assert_close(late.grad, wanted_dx, rtol=0, atol=0)


def test_a_step_can_be_captured_in_a_graph() -> None:
    model = te.ops.Sequential(te.ops.LayerNorm(64), te.ops.SwiGLU(), te.ops.RMSNorm(32))
    x, dy = torch.randn(16, 64, requires_grad=True), torch.randn(16, 32)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            x.grad = None
            step(model, x, dy)
    torch.cuda.current_stream().wait_stream(stream)
    x.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = step(model, x, dy)
    with torch.no_grad():
        x.copy_(torch.randn(16, 64))
    graph.replay()
    assert x.grad is not None
    dx = x.grad.clone()
    got = y.clone()
    x.grad = None
    wanted = step(model, x, dy)
    torch.testing.assert_close(got, wanted, rtol=0, atol=0)
    torch.testing.assert_close(dx, x.grad, rtol=0, atol=0)


def test_a_captured_dropout_draws_anew() -> None:
    op = te.ops.Dropout(0.5)
    x = torch.ones(64, 65, requires_grad=True)
    op(x).sum().backward()
    x.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first, second = op(x), op(x)
        (first + second).sum().backward()
    assert x.grad is not None
    torch.manual_seed(7)
    seen = []
    for _ in range(2):
        graph.replay()
        torch.testing.assert_close(x.grad, (first + second).detach())  # backward has the masks
        seen += [first.detach().clone(), second.detach().clone()]
    assert len({tuple(y.flatten().tolist()) for y in seen}) == 4
    torch.manual_seed(7)
    graph.replay()
    assert torch.equal(first, seen[0])
    torch.manual_seed(7)
    assert torch.equal(op(x), seen[0])  # and outside of the graph


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_explain_names_the_backend(dtype: torch.dtype) -> None:
    built = te.show_config("dict")["cuda"]["built"]
    wanted = "cuda" if built and dtype is not torch.float64 else "aten"
    model = te.ops.Sequential(
        te.ops.LayerNorm(32, dtype=dtype), te.ops.SwiGLU(), te.ops.Dropout(0.5)
    )
    part = model.explain(torch.randn(4, 32, dtype=dtype, requires_grad=True)).parts[0]
    kernels = [k for s in [*part["forward"], *part["backward"]] for k in s["kernels"]]
    own = [
        f"{name}_{way}"
        for name in ("layer_norm", "activation", "dropout")
        for way in ("forward", "backward")
    ]
    assert sorted(k["name"] for k in kernels) == sorted(own)
    assert {k["backend"] for k in kernels} == {wanted}
