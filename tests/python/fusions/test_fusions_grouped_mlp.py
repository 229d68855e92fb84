"""GroupedMLP: the experts of a mixture, saving their input and the first linear's output only."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from fusion_support import forward_names, leaf, parameters_of
from grouped_mlp_support import (
    GROUPS,
    HIDDEN,
    ROWS,
    SCALED,
    SPLITS,
    Ran,
    check_bits,
    expected,
    experts,
    frozen_cases,
    inputs_of,
    joined,
    routed_inputs,
    same_bits,
    wide_experts,
    widened,
)
from quantized_reference import EVERY_RECIPE, SOME_RECIPES
from reference import (
    ACTIVATIONS,
    FLOAT_DTYPES,
    assert_close,
    float64_copy,
)

import ligature as te

pytestmark = pytest.mark.usefixtures("one_thread")

Tensor = torch.Tensor
ops = te.ops


@pytest.mark.parametrize("scale_bias", [False, True])
@pytest.mark.parametrize("activation", [*ACTIVATIONS, *SCALED])
def test_against_float64(activation: str, scale_bias: bool) -> None:
    for dtype in FLOAT_DTYPES:
        block = experts(activation, dtype=dtype, scale_bias=scale_bias)
        inputs = inputs_of(block, dtype=dtype)
        got = check_bits(block, *inputs)
        x, scales = float64_copy(inputs[0]), torch.ones(ROWS)
        for t in inputs[1:]:
            if t.is_floating_point():
                scales = float64_copy(t)
        y, parameters = expected(
            block,
            x,
            SPLITS,
            scales if activation in SCALED else None,
            scales if scale_bias else None,
        )
        torch.manual_seed(0)
        y.backward(torch.randn(y.shape).to(dtype).double())
        leaves = [x, *([scales] if scales.requires_grad else []), *parameters]
        values = list(got.results.values())
        assert_close(values[0], y, dtype, scale=4, what="output")
        grads = [g for g in values[1:] if g is not None]
        assert len(grads) == len(leaves)
        for k, (a, t) in enumerate(zip(grads, leaves, strict=True)):
            wanted = torch.zeros_like(t) if t.grad is None else t.grad
            assert_close(a, wanted, dtype, scale=12, what=f"{activation} gradient {k}")


@pytest.mark.parametrize("bias", [False, True])
def test_it_fires_by_default_and_not_with_fuse_false(bias: bool) -> None:
    block = experts(bias=bias)
    fused = Ran(block, inputs_of(block))
    assert fused.names == ["GroupedMLP"]
    (forward,), (backward,) = fused.fuser._forward_ops, fused.fuser._backward_ops
    assert forward[0] is backward[0]
    assert Ran(block, inputs_of(block), fuse=False).names == [
        "GroupedLinear",
        "SwiGLU",
        "GroupedLinear",
    ]
    for recompute in ("none", "cheap"):
        assert Ran(block, inputs_of(block), recompute=recompute).names == ["GroupedMLP"]


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("activation", ["SwiGLU", "ScaledSwiGLU", "ScaledSReLU", "GELU"])
def test_single_parameters_and_interleaving(activation: str, single: bool) -> None:
    choices: list[dict[str, Any]] = [{}]
    if activation.endswith("SwiGLU"):
        choices.append({"glu_interleave_size": 4})
    for act_options in choices:
        block = experts(
            activation,
            act_options=act_options,
            scale_bias=True,
            single_grouped_weight=single,
            single_grouped_bias=single,
        )
        check_bits(block, *inputs_of(block))


@pytest.mark.parametrize(
    "splits",
    [(0, 0, 0, 0), (ROWS, 0, 0, 0), (0, 0, 0, ROWS), (1, 0, 0, 1), (3, 4, 5, 1), (2, 2, 2, 2)],
)
@pytest.mark.parametrize("scaled", [False, True])
def test_groups(splits: tuple[int, ...], scaled: bool) -> None:
    block = experts("ScaledSwiGLU" if scaled else "GELU", scale_bias=scaled)
    got = check_bits(block, *inputs_of(block, splits=splits))
    for name, grad in got.results.items():
        if "parameter" in name:
            assert grad is not None, name


@pytest.mark.parametrize("rows", [0, 1])
def test_few_rows(rows: int) -> None:
    for splits in ((0, 0, 0, 0), (0, rows, 0, 0)):
        block = experts("ScaledSwiGLU", scale_bias=True)
        check_bits(block, *inputs_of(block, rows=rows, splits=splits))


def test_many_groups() -> None:
    block = experts("ScaledSwiGLU", groups=200)
    splits = [0] * 200
    splits[3], splits[150] = 5, 4
    check_bits(block, *inputs_of(block, splits=splits))


def test_more_dimensions_strides_and_dtypes_of_splits() -> None:
    block = experts("ScaledSwiGLU", scale_bias=True)
    scales = torch.rand(2, 6).requires_grad_()
    x = torch.randn(HIDDEN, 6, 2).permute(2, 1, 0).requires_grad_()
    for dtype in (torch.int32, torch.int64, torch.int16, torch.uint8):
        sizes = torch.tensor(SPLITS, dtype=dtype)
        check_bits(block, x, sizes, scales, sizes, scales)
    fuser = ops.OperationFuser(block)
    y = fuser(x, sizes, scales, sizes, scales)
    y.sum().backward()  # an expanded gradient
    plain = ops.OperationFuser(block, fuse=False)
    before = x.grad.clone()
    x.grad = None
    plain(x, sizes, scales, sizes, scales).sum().backward()
    assert torch.equal(before, x.grad)


@pytest.mark.parametrize("activation", ["ScaledSwiGLU", "GELU"])
def test_nan_past_the_last_group(activation: str) -> None:
    block = experts(activation, scale_bias=activation == "ScaledSwiGLU")
    inputs = inputs_of(block)
    with torch.no_grad():
        for t in inputs:
            if t.is_floating_point():
                t[sum(SPLITS) :] = float("nan")
    got = check_bits(block, *inputs)
    for name, t in got.results.items():
        if t is None or ("input" in name and t.dim() == 1):
            continue  # a scale is multiplied in the activation, whatever row it is of
        assert not t.isnan().any(), name
    assert not got.outputs[0][sum(SPLITS) :].any()


def test_two_split_tensors() -> None:
    """Each linear computes with its own; the same tensor is one."""
    block = experts("ScaledSwiGLU", scale_bias=True)
    x, sizes, scales = inputs_of(block)[:3]
    same = Ran(block, [x, sizes, scales, sizes.clone(), scales])
    same_bits(same, Ran(block, [x, sizes, scales, sizes, scales]))
    check_bits(block, x, sizes, scales, torch.tensor((1, 6, 0, 6)), scales)


def test_two_tensors_of_scales() -> None:
    """te.ops gives the sum of both gradients to the activation's."""
    block = experts("ScaledSwiGLU", scale_bias=True)
    x, sizes, scales = inputs_of(block)[:3]
    other = torch.rand(ROWS, requires_grad=True)
    got = check_bits(block, x, sizes, scales, sizes, other)
    s, o = float64_copy(scales), float64_copy(other)
    y, _ = expected(block, float64_copy(x), SPLITS, s, o)
    torch.manual_seed(0)
    y.backward(torch.randn(y.shape).double())
    grads = [g for name, g in got.results.items() if "input" in name and g is not None]
    assert_close(grads[1], s.grad, torch.float32, scale=10)
    assert_close(grads[2], o.grad, torch.float32, scale=10)


@pytest.mark.parametrize("routed", [False, True])
@pytest.mark.parametrize("activation", ["ScaledSwiGLU", "GELU"])
def test_every_frozen_subset(activation: str, routed: bool) -> None:
    block = experts(activation, scale_bias=activation == "ScaledSwiGLU")
    modules = joined(block) if routed else block
    inputs = routed_inputs() if routed else inputs_of(block)
    parts = frozen_cases(block, inputs)
    for flags in product([True, False], repeat=len(parts)):
        for part, flag in zip(parts, flags, strict=True):
            for t in part:
                t.requires_grad_(flag)
        check_bits(modules, *inputs)


def test_dtypes_that_differ() -> None:
    for first, second, given in (
        (torch.float32, torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16, torch.float32),
        (torch.float32, torch.float32, torch.float64),
    ):
        block = experts("ScaledSwiGLU", dtype=first)
        block[2] = experts("ScaledSwiGLU", dtype=second)[2]
        inputs = inputs_of(block)
        inputs[0] = inputs[0].detach().to(given).requires_grad_()
        check_bits(block, *inputs)


@pytest.mark.parametrize("routed", [False, True])
def test_under_torch_autocast(routed: bool, device: str) -> None:
    block = experts("ScaledSwiGLU", scale_bias=True)
    modules = joined(block) if routed else block
    inputs = routed_inputs() if routed else inputs_of(block)
    with torch.autocast(device, torch.bfloat16):
        got = check_bits(modules, *inputs)
    assert got.outputs[0].dtype == torch.bfloat16


def test_a_graph_that_is_kept() -> None:
    block = experts("ScaledSwiGLU", scale_bias=True)
    parameters = parameters_of(ops.OperationFuser(block))
    given = inputs_of(block)
    dy = torch.randn(ROWS, HIDDEN)
    grads = []
    for fuse in (True, False):
        for p in parameters:
            p.grad = None
        inputs = [leaf(t) for t in given]
        y = ops.OperationFuser(block, fuse=fuse)(*inputs)
        y.backward(dy, retain_graph=True)
        y.backward(dy)
        grads.append([inputs[0].grad, *(p.grad for p in parameters)])
    for a, b in zip(*grads, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("routed", [False, True])
def test_scaled_biases_of_the_first_linear(routed: bool) -> None:
    for activation in ("ScaledSwiGLU", "GELU"):
        block = experts(activation, scale_bias=True)
        width = block[0].out_features
        block[0] = ops.GroupedLinear(GROUPS, HIDDEN, width, scale_bias=True)
        torch.nn.init.normal_(block[0].bias0)
        if routed:
            check_bits(joined(block), *routed_inputs())
        else:
            check_bits(block, *inputs_of(block))


def test_compiled_with_changing_counts() -> None:
    """In one graph each, which is not compiled again."""
    for routed in (False, True):
        block = experts("ScaledSwiGLU", scale_bias=True)
        model = ops.Sequential(*(joined(block) if routed else block))
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        parameters = list(model.parameters())
        for splits in ((5, 0, 3, 4), (1, 2, 3, 4), (0, 0, ROWS, 0)):
            inputs = routed_inputs() if routed else inputs_of(block, splits=splits)
            found = []
            for run in (model, compiled):
                for t in [*parameters, inputs[0]]:
                    t.grad = None
                with torch._dynamo.config.patch(
                    error_on_recompile=len(found) > 0 and splits[0] != 5
                ):
                    y = run(*inputs)
                y.square().sum().backward()
                found.append([y, inputs[0].grad, *(p.grad for p in parameters)])
            for a, b in zip(*found, strict=True):
                assert torch.equal(a, b)
        torch._dynamo.reset()


def test_without_gradients() -> None:
    block = experts("ScaledSwiGLU", scale_bias=True)
    inputs = inputs_of(block)
    with torch.no_grad():
        fused = ops.OperationFuser(block)
        y = fused(*inputs)
        assert torch.equal(y, ops.OperationFuser(block, fuse=False)(*inputs))
    assert not y.requires_grad
    assert forward_names(fused) == ["GroupedMLP"]


@pytest.mark.parametrize("name", EVERY_RECIPE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_recipe(name: str, dtype: torch.dtype) -> None:
    """Fused is unfused, bit for bit, over steps in which delayed scaling learns."""
    for activation, scale_bias in (("ScaledSwiGLU", True), ("GELU", False)):
        torch.manual_seed(1)
        ran = []
        for fuse in (True, False):
            torch.manual_seed(2)
            block = wide_experts(activation, dtype, scale_bias)
            inputs = inputs_of(block, rows=70, splits=(33, 0, 5, 30), dtype=dtype)
            inputs = widened(inputs, dtype)
            ran.append(Ran(block, inputs, recipe=EVERY_RECIPE[name](), steps=3, fuse=fuse))
        assert ran[0].names == ["GroupedMLP"]
        same_bits(*ran, what=f"{name} {activation}")


@pytest.mark.parametrize("name", SOME_RECIPES)
def test_every_activation_in_low_precision(name: str) -> None:
    for activation in (*ACTIVATIONS, *SCALED):
        ran = []
        for fuse in (True, False):
            torch.manual_seed(2)
            block = wide_experts(activation, torch.bfloat16, False)
            inputs = widened(inputs_of(block, dtype=torch.bfloat16), torch.bfloat16)
            ran.append(Ran(block, inputs, recipe=EVERY_RECIPE[name](), fuse=fuse))
        assert ran[0].names == ["GroupedMLP"]
        same_bits(*ran, what=f"{name} {activation}")
