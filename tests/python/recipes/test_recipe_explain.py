"""Explanations under recipes: the formats on the edges, the bytes saved, and no side effects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fusion_support import saved_bytes
from quantized_reference import RECIPES, SOME_RECIPES, format_of, is_native

import ligature as te
from ligature.common.recipe import (
    CustomRecipe,
    Float8BlockScaling,
    Float8CurrentScaling,
    MMParams,
    Recipe,
)

pytestmark = pytest.mark.usefixtures("one_thread")

Tensor = torch.Tensor
ops = te.ops

EVERY = pytest.mark.parametrize("name", RECIPES)
SOME = pytest.mark.parametrize("name", SOME_RECIPES)
BF16 = torch.bfloat16
ROWS = 256


def product_backends(part: dict[str, Any]) -> list[str]:
    return [
        kernel["backend"]
        for s in [*part["forward"], *part["backward"]]
        for kernel in s["kernels"]
        if kernel["name"].startswith("linear_")
    ]


def block(recompute: str = "none", **options: Any) -> Any:
    return ops.Sequential(
        ops.LayerNorm(64, dtype=BF16),
        ops.Linear(64, 192, dtype=BF16),
        ops.SwiGLU(**options),
        ops.Linear(96, 64, dtype=BF16),
        recompute=recompute,
    )


def branched() -> Any:
    fork, join = ops.MakeExtraOutput(), ops.AddExtraInput()
    fork.set_extra_output_channel(0, "residual", output_to_caller=False)
    join.set_extra_input_channel(0, "residual")
    return ops.Sequential(
        fork,
        ops.RMSNorm(64, dtype=BF16),
        ops.Quantize(),
        ops.Linear(64, 80, bias=False, dtype=BF16),
        ops.GELU(),
        ops.BasicLinear(80, 64, dtype=BF16),
        join,
    )


MODELS: dict[str, Callable[[], Any]] = {
    "block": block,
    "recomputed": lambda: block("cheap"),
    "cached": lambda: block(cache_quantized_input=True),
    "branched": branched,
}


def format_name(recipe: Recipe, role: str) -> str:
    f = format_of(recipe, role)
    size = {"block": 128, "mx": 32, "nv": 16}.get(f["scaling"], 0)
    square = f" {size}x{size}" if f["block_2d"] else ""
    if f["scaling"] == "block":
        return f"fp8 {f['element']}{square or ' 1x128'}"
    if f["scaling"] == "mx":
        return f"mxfp8 {f['element']}{square}"
    if f["scaling"] == "nv":
        return f"nvfp4{square}{' by row' if f['row_scaled'] else ''}"
    return f"fp8 {f['element']}"


def example(shape: tuple[int, ...] = (ROWS, 64)) -> Tensor:
    return torch.randn(shape, dtype=BF16).requires_grad_()


def step(model: Any, recipe: Recipe, x: Tensor) -> list[Tensor]:
    leaf = x.detach().clone().requires_grad_()
    model.zero_grad()
    with te.autocast(recipe=recipe):
        y = model(leaf)
    torch.manual_seed(3)
    y.backward(torch.randn(y.shape).to(y.dtype))
    assert leaf.grad is not None
    return [y.detach(), leaf.grad, *(p.grad for p in model.parameters())]


@EVERY
def test_the_format_on_every_edge(name: str, device: str) -> None:
    recipe = RECIPES[name]()
    x_format, w_format = format_name(recipe, "input"), format_name(recipe, "weight")
    dy_format = format_name(recipe, "grad_output")
    with te.autocast(recipe=recipe):
        explained = block().explain((ROWS, 64))
    (part,) = explained.parts
    assert part["situation"]["recipe"] == type(recipe).__name__
    forward = {s["op"] + str(s["covers"][0]): s for s in part["forward"]}
    norm, first, second = forward.values()
    assert norm["output"]["dtype"] == x_format
    assert norm["kernels"][0]["name"] == "layer_norm_forward_quantize"
    assert first["input"]["dtype"] == first["output"]["dtype"] == x_format
    assert first["kernels"][-1]["name"] == "activation_forward_quantize"
    assert second["output"]["dtype"] == "bfloat16"
    saved = [(s["op"], s["dtype"], tuple(s["shape"])) for s in first["saved"]]
    assert saved == [
        (1, x_format, (ROWS, 64)),
        (1, w_format, (192, 64)),
        (3, "bfloat16", (ROWS, 192)),
    ]
    backward = {tuple(s["covers"]): s for s in part["backward"]}
    assert backward[2, 3]["grad_input"]["dtype"] == dy_format
    assert backward[2, 3]["kernels"][-1]["name"] == "activation_backward_quantize"
    assert backward[1,]["grad_output"]["dtype"] == dy_format
    assert backward[1,]["grad_input"]["dtype"] == "bfloat16"
    assert backward[4,]["grad_output"]["dtype"] == "bfloat16"
    assert "quantize" in [k["name"] for k in backward[4,]["kernels"]]
    products = product_backends(part)
    backend = "cublaslt" if is_native(recipe, device) else "emulated"
    forward = backend
    if backend == "cublaslt" and not isinstance(recipe, Float8BlockScaling):
        forward = "cublaslt, fast accumulation"
    assert products == [forward] * 2 + [backend] * 4
    text, svg = str(explained), explained.svg()
    for shown in (x_format, w_format, dy_format):
        assert shown in text
    assert x_format in svg
    assert dy_format in svg
    assert f"recipe {type(recipe).__name__}" in text
    assert f"[{backend}]" in text
    warned = "use_split_accumulator has no effect" in " ".join(text.split())
    assert warned == ("[emulated]" in text) == (backend == "emulated")


def test_accumulation_as_the_recipe_has_it(device: str) -> None:
    recipe = Float8CurrentScaling(
        fp8_gemm_fprop=MMParams(use_split_accumulator=True),
        fp8_gemm_dgrad=MMParams(use_split_accumulator=False),
        fp8_gemm_wgrad=MMParams(use_split_accumulator=False),
    )
    with te.autocast(recipe=recipe):
        explained = block().explain((ROWS, 64))
    (part,) = explained.parts
    native = is_native(recipe, device)
    split, fast = "cublaslt", "cublaslt, fast accumulation"
    wanted = [split] * 2 + [fast] * 4 if native else ["emulated"] * 6
    assert product_backends(part) == wanted
    warned = "use_split_accumulator has no effect" in " ".join(str(explained).split())
    assert warned == (not native)


def test_without_a_recipe() -> None:
    explained = block().explain((ROWS, 64))
    assert explained.parts[0]["situation"]["recipe"] is None
    assert "emulated" not in str(explained)
    assert "fp8" not in str(explained)
    with te.autocast(enabled=False, recipe=RECIPES["mxfp8"]()):
        assert str(block().explain((ROWS, 64))) == str(explained)


@EVERY
@pytest.mark.parametrize("kind", MODELS)
def test_saved_bytes_are_those_that_autograd_holds(kind: str, name: str) -> None:
    model, recipe = MODELS[kind](), RECIPES[name]()
    x = example()
    plain = model.explain(x).saved_bytes
    with te.autocast(recipe=recipe):
        explained = model.explain(x)
        assert explained.saved_bytes == saved_bytes(model, x)
        assert str(explained) == str(model.explain((ROWS, 64)))
        after = model.explain()
    assert str(explained) == str(after)
    if kind != "recomputed":  # which keeps the input and the activation's input only
        assert explained.saved_bytes < plain
    with te.autocast(recipe=recipe):
        x.requires_grad_(False)
        assert model.explain(x).saved_bytes == saved_bytes(model, x)
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        x.requires_grad_(True)
        assert model.explain(x).saved_bytes == saved_bytes(model, x)


@EVERY
def test_other_sizes(name: str) -> None:
    """Of blocks that are not whole."""
    recipe = RECIPES[name]()
    model = ops.Sequential(ops.RMSNorm(33), ops.Linear(33, 19), ops.ReLU(), ops.Linear(19, 7))
    for shape in ((2, 5, 33), (33,), (130, 33)):
        x = torch.randn(shape).requires_grad_()
        with te.autocast(recipe=recipe):
            explained = model.explain(shape)
            assert explained.saved_bytes == saved_bytes(model, x)
            assert str(explained) == str(model.explain())


@EVERY
@pytest.mark.parametrize("called", [False, True])
def test_explaining_changes_nothing(name: str, called: bool) -> None:
    model, recipe, x = block(), RECIPES[name](), example()
    other = block()
    other.load_state_dict(model.state_dict())
    if called:
        step(model, recipe, x)
        step(other, recipe, x)

    def states() -> list[Any]:
        found = []
        for op in model:
            for part in getattr(op, "basic_ops", (op,)):
                for _, *directions in part._handle.recipe_states():
                    found += [[t.clone() for t in s] for d in directions for s in d if s]
        return found

    before = states()
    versions = [p._version for p in model.parameters()]
    torch.manual_seed(11)
    random = torch.get_rng_state()
    for _ in range(2):
        with te.autocast(recipe=recipe):
            model.explain(x)
            model.explain((7, 64))
    assert torch.equal(torch.get_rng_state(), random)
    assert [p._version for p in model.parameters()] == versions
    assert x.grad is None
    after = states()
    if called:
        assert len(before) == len(after)
        for was, now in zip(before, after, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(was, now, strict=True))
    for _ in range(2):
        for a, b in zip(step(model, recipe, x), step(other, recipe, x), strict=True):
            assert torch.equal(a, b)


@SOME
def test_the_difference_of_two_plans(name: str) -> None:
    model = block()
    plain = model.explain((ROWS, 64))
    with te.autocast(recipe=RECIPES[name]()):
        quantized = model.explain((ROWS, 64))
    diff = plain.diff(quantized)
    assert diff
    assert type(RECIPES[name]()).__name__ in str(diff)
    assert format_name(RECIPES[name](), "input") in str(diff)


def test_a_custom_recipe_with_gaps() -> None:
    """What has no quantizer stays in high precision, and the plan says so."""

    def factory(role: te.QuantizerRole) -> Any:
        if role.tensor_type == "grad_output":
            return None
        return te.MXFP8Quantizer(te.DType.kFloat8E4M3)

    model = block()
    with te.autocast(recipe=CustomRecipe(qfactory=factory)):
        explained = model.explain((ROWS, 64))
    (part,) = explained.parts
    assert part["situation"]["recipe"] == "CustomRecipe"
    assert [s["output"]["dtype"] for s in part["forward"]] == [
        "mxfp8 e4m3",
        "mxfp8 e4m3",
        "bfloat16",
    ]
    assert {s["grad_output"]["dtype"] for s in part["backward"]} == {"bfloat16"}
