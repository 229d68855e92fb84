"""Linears on CUDA: products through cuBLASLt in steps, without waiting, on streams, in graphs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from quantized_reference import RECIPES

import ligature as te

Tensor = torch.Tensor
ops = te.ops

HAS_CUDA = torch.cuda.is_available() and te.show_config("dict")["cuda"]["built"]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}
FP8 = ["delayed", "current", "current 2^n", "block", "block f32"]
EMULATED = ["delayed e5m2", "mxfp8", "nvfp4 nearest"]


@pytest.fixture(autouse=True)
def _on_cuda(device: str) -> None:
    if device != "cuda" or not HAS_CUDA:
        pytest.skip("no CUDA device, or a build without CUDA")


@pytest.fixture
def _no_waiting() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


def close(actual: Tensor, expected: Tensor, factor: float = 1.0) -> None:
    assert actual.shape == expected.shape
    scale = max(expected.abs().max().item(), 1e-3) if expected.numel() else 1e-3
    allowed = TOLERANCE[actual.dtype] * factor
    torch.testing.assert_close(
        actual.double(), expected.double(), rtol=allowed, atol=allowed * scale
    )


def step(model: Any, x: Tensor, dy: Tensor, name: str | None = None) -> list[Tensor]:
    leaf = x.detach().requires_grad_()
    for parameter in model.parameters():
        parameter.grad = None
    if name is None:
        y = model(leaf)
    else:
        with te.autocast(recipe=RECIPES[name]()):
            y = model(leaf)
    y.backward(dy)
    assert leaf.grad is not None
    return [y.detach(), leaf.grad, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(64, 96), (3, 5, 96), (1, 96), (96,), (0, 96)])
def test_linear_step(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    model = ops.Linear(96, 40, dtype=dtype)
    x = torch.randn(shape, dtype=dtype)
    dy = torch.randn((*shape[:-1], 40), dtype=dtype)
    y, dx, dw, db = step(model, x, dy)
    w, b = model.weight.detach().double(), model.bias.detach().double()
    rows, drows = x.double().reshape(-1, 96), dy.double().reshape(-1, 40)
    close(y, (rows @ w.t() + b).view(y.shape))
    close(dx, (drows @ w).view(x.shape))
    close(dw, drows.t() @ rows)
    close(db, drows.sum(0))


@pytest.mark.parametrize("name", FP8 + EMULATED)
@pytest.mark.parametrize("sizes", [(128, 256, 384), (13, 144, 48)])
def test_the_step_of_a_recipe_is_that_of_the_cpu(name: str, sizes: tuple[int, int, int]) -> None:
    """The CPU's emulation is exact, so only sums in another order and their rounding differ."""
    t, k, n = sizes
    model = ops.Linear(k, n, dtype=torch.bfloat16)
    twin = ops.Linear(k, n, dtype=torch.bfloat16, device="cpu")
    twin.load_state_dict({key: value.cpu() for key, value in model.state_dict().items()})
    x, dy = torch.randn(t, k, dtype=torch.bfloat16), torch.randn(t, n, dtype=torch.bfloat16)
    on_cuda = step(model, x, dy, name)
    on_cpu = step(twin, x.cpu(), dy.cpu(), name)
    for actual, expected in zip(on_cuda, on_cpu, strict=True):
        close(actual.cpu(), expected)


@pytest.mark.usefixtures("_no_waiting")
@pytest.mark.parametrize("name", [None, *FP8, *EMULATED])
def test_a_step_waits_for_nothing(name: str | None) -> None:
    model = ops.Linear(128, 256, dtype=torch.bfloat16)
    x, dy = torch.randn(64, 128).bfloat16(), torch.randn(64, 256).bfloat16()
    step(model, x, dy, name)
    torch.cuda.set_sync_debug_mode("error")
    step(model, x, dy, name)


@pytest.mark.parametrize("name", [None, "current", "block"])
def test_streams(name: str | None) -> None:
    model = ops.Linear(512, 1024, dtype=torch.bfloat16)
    inputs = [(torch.randn(256, 512).bfloat16(), torch.randn(256, 1024).bfloat16()) for _ in "1234"]
    expected = [step(model, x, dy, name) for x, dy in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    for _ in range(5):
        results: list[list[Tensor]] = []
        for stream, (x, dy) in zip(streams, inputs, strict=True):
            with torch.cuda.stream(stream):
                results.append(step(model, x, dy, name))
        torch.cuda.synchronize()
        for result, wanted in zip(results, expected, strict=True):
            for a, b in zip(result, wanted, strict=True):
                assert torch.equal(a, b)


@pytest.mark.parametrize("name", [None, "current", "block"])
def test_a_captured_step(name: str | None) -> None:
    model = ops.Linear(128, 256, dtype=torch.bfloat16)
    x, dy = torch.randn(64, 128).bfloat16(), torch.randn(64, 256).bfloat16()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(model, x, dy, name)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(model, x, dy, name)
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        dy.copy_(torch.randn_like(dy))
        graph.replay()
        results = [t.clone() for t in captured]
        for a, b in zip(results, step(model, x, dy, name), strict=True):
            close(a, b)


@pytest.mark.parametrize("name", [None, "current", "block", "mxfp8"])
@pytest.mark.parametrize("main", [torch.float32, torch.bfloat16])
def test_gradients_add_up_in_main_grad(name: str | None, main: torch.dtype) -> None:
    model = ops.Linear(128, 256, bias=False, dtype=torch.bfloat16, accumulate_into_main_grad=True)
    other = ops.Linear(128, 256, bias=False, dtype=torch.bfloat16)
    with torch.no_grad():
        other.weight.copy_(model.weight)
    model.weight.main_grad = torch.full((256, 128), 0.5, dtype=main)
    expected = model.weight.main_grad.double()
    for _ in range(3):
        x, dy = torch.randn(64, 128).bfloat16(), torch.randn(64, 256).bfloat16()
        step(model, x, dy, name)
        expected += step(other, x, dy, name)[2].double()
    close(model.weight.main_grad, expected, factor=1.0 if main is torch.bfloat16 else 300.0)


@pytest.mark.parametrize("name", [None, "current", "block"])
def test_the_same_bits_every_time(name: str | None) -> None:
    model = ops.Linear(1000, 512, dtype=torch.bfloat16)
    x, dy = torch.randn(336, 1000).bfloat16(), torch.randn(336, 512).bfloat16()
    first = step(model, x, dy, name)
    for _ in range(5):
        for a, b in zip(step(model, x, dy, name), first, strict=True):
            assert torch.equal(a, b)


def test_tf32_is_torchs_choice() -> None:
    model = ops.Linear(2048, 64, bias=False)
    x = torch.randn(64, 2048)
    exact = x.double() @ model.weight.detach().double().t()
    before = torch.backends.cuda.matmul.allow_tf32
    try:
        errors = []
        for allowed in (False, True):
            torch.backends.cuda.matmul.allow_tf32 = allowed
            with torch.no_grad():
                errors.append((model(x).double() - exact).abs().max().item())
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    assert errors[0] < 1e-4
    assert errors[1] > 2 * errors[0]


def test_accumulation_as_the_recipe_has_it() -> None:
    """A long sum is less exact where it is never moved to float32."""
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("products of FP8 are emulated")
    recipes = {
        split: te.recipe.Float8CurrentScaling(
            fp8_gemm_fprop=te.recipe.MMParams(use_split_accumulator=split)
        )
        for split in (False, True)
    }
    linear = ops.BasicLinear(8192, 128)
    x = torch.rand(128, 8192)
    errors = {}
    for split, recipe in recipes.items():
        with te.autocast(recipe=recipe), torch.no_grad():
            y = linear(x).double()
            qx, qw = (linear.get_quantizer("forward", i) for i in range(2))
        w = qw(linear.weight.detach()).dequantize().double()
        wanted = qx(x).dequantize().double() @ w.t()
        errors[split] = float((y - wanted).norm() / wanted.norm())
    assert errors[True] < errors[False] < 1e-2, errors


def backends(explained: Any) -> set[str]:
    (part,) = explained.parts
    return {
        kernel["backend"]
        for s in [*part["forward"], *part["backward"]]
        for kernel in s["kernels"]
        if kernel["name"].startswith("linear_")
    }


def test_explanations_name_the_backend() -> None:
    model = ops.Sequential(ops.Linear(64, 192, dtype=torch.bfloat16))
    assert backends(model.explain((64, 64))) == {"cublaslt"}
    double = ops.Sequential(ops.Linear(64, 192, dtype=torch.float64))
    assert backends(double.explain((64, 64))) == {"aten"}
    if torch.cuda.get_device_capability() >= (8, 9):
        with te.autocast(recipe=RECIPES["current"]()):
            assert backends(model.explain((64, 64))) == {"cublaslt", "cublaslt, fast accumulation"}
    with te.autocast(recipe=RECIPES["delayed e5m2"]()):
        assert backends(model.explain((64, 64))) == {"emulated"}


def test_search() -> None:
    """In a process of its own, since plans are kept."""
    code = """
import torch, ligature as te
torch.manual_seed(1)
model = te.ops.Linear(256, 512, dtype=torch.bfloat16, device="cuda")
x = torch.randn(128, 256, device="cuda", dtype=torch.bfloat16)
for _ in range(2):
    y = model(x)
expected = torch.nn.functional.linear(x.double(), model.weight.double(), model.bias.double())
assert (y - expected).abs().max().item() < 0.05
"""
    env = {**os.environ, "LIGATURE_GEMM_SEARCH": "1"}
    subprocess.run([sys.executable, "-c", code], check=True, env=env, timeout=120)
