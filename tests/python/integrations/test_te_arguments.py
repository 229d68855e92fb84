"""Arguments that te.ops takes and that change nothing here, and those of its newer recipes."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch

import ligature as te
from ligature.common.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)
from ligature.quantization import recipe_base

ops = te.ops


# -- userbuffers_options


class MegatronMLP:
    """What Megatron's fused MLP does at its first forward, in a group of one process."""

    def __init__(self, overlap: bool) -> None:
        self.overlap = overlap
        self.norm = torch.nn.Parameter(torch.randn(64))
        self.fc1 = torch.nn.Parameter(torch.randn(192, 64) / 8)
        self.fc2 = torch.nn.Parameter(torch.randn(64, 96) / 8)
        self.bias = torch.nn.Parameter(torch.randn(64))

    def make(self) -> torch.nn.Module:
        model = ops.Sequential()
        norm = ops.RMSNorm(64, eps=1e-5, device="meta", dtype=torch.float32)
        norm.weight = self.norm
        model.append(norm)
        for name, weight, activation in (("fc1", self.fc1, ops.SwiGLU), ("fc2", self.fc2, None)):
            linear = ops.BasicLinear(
                weight.size(1),
                weight.size(0),
                device="meta",
                dtype=weight.dtype,
                tensor_parallel_mode=None,
                tensor_parallel_group=None,
                sequence_parallel=False,
                rng_state_tracker_function=None,
                accumulate_into_main_grad=False,
                userbuffers_options={"comm_name": name} if self.overlap else None,
            )
            linear.weight = weight
            model.append(linear)
            if activation is not None:
                model.append(activation(cache_quantized_input=False))
        bias = ops.Bias(64, device="meta", dtype=torch.float32)
        bias.bias = self.bias
        model.append(bias)
        return model

    def formula(self, x: torch.Tensor) -> torch.Tensor:
        h = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * self.norm.double()
        gate, up = (h @ self.fc1.double().t()).chunk(2, -1)
        return (torch.nn.functional.silu(gate) * up) @ self.fc2.double().t() + self.bias.double()


@pytest.mark.parametrize("overlap", [False, True])
def test_megatrons_fused_mlp(overlap: bool) -> None:
    mlp = MegatronMLP(overlap)
    model = mlp.make()
    x = torch.randn(16, 64)
    torch.testing.assert_close(model(x).double(), mlp.formula(x.double()), rtol=1e-4, atol=1e-4)
    note = "userbuffers_options have no effect"
    for plan in (model.explain(), model.explain((16, 64))):
        text = " ".join(str(plan).split())  # lines are broken
        assert text.count(note) == (2 if overlap else 0)
        assert ("1 BasicLinear: userbuffers_options" in text) is overlap
        assert (note in (plan.parts[0]["note"] or "")) is overlap


def test_userbuffers_options_are_kept() -> None:
    given = {"comm_name": "fc1"}
    linear = ops.BasicLinear(8, 4, userbuffers_options=given)
    assert linear._userbuffers_options == given
    again = copy.deepcopy(linear)
    assert again._userbuffers_options == given
    assert "userbuffers_options" in str(ops.Sequential(again).explain((2, 8)))
    assert ops.BasicLinear(8, 4)._userbuffers_options is None
    assert ops.Linear(8, 4).basic_ops[0]._userbuffers_options is None
    with pytest.raises(TypeError, match=r"\[BasicLinear\] userbuffers_options must be a dict"):
        ops.BasicLinear(8, 4, userbuffers_options="fc1")


# -- names that recipes do not know

RECIPES = [
    DelayedScaling,
    Float8CurrentScaling,
    Float8BlockScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    CustomRecipe,
]


@pytest.fixture(autouse=True)
def _nothing_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipe_base, "_warned", set())


def make(cls: type[Recipe], **given: Any) -> Recipe:
    return cls(**({"qfactory": lambda role: None} if cls is CustomRecipe else {}), **given)


@pytest.mark.parametrize("cls", RECIPES)
def test_names_that_are_ignored(cls: type[Recipe]) -> None:
    with pytest.warns(UserWarning, match="'override_linear_precision' is not one of its fields"):
        recipe = make(cls, override_linear_precision=(False, False, True), fp8_mha=True)
    assert recipe == (recipe if cls is CustomRecipe else make(cls, fp8_mha=True))
    assert not hasattr(recipe, "override_linear_precision")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(cls, override_linear_precision=(False, False, False))  # once
    with pytest.warns(UserWarning, match=f"\\[{cls.__name__}\\] the argument 'interval'"):
        make(cls, interval=2)


def test_ignored_names_of_a_subclass() -> None:
    """As Megatron's, whose constructor hands them on."""

    class Own(DelayedScaling):
        def __init__(self, length: int, override: tuple[bool, ...] = (False, False, False)) -> None:
            super().__init__(
                margin=1,
                fp8_format=Format.HYBRID,
                amax_history_len=length,
                override_linear_precision=override,
                interval=1,
            )

    with pytest.warns(UserWarning, match=r"\[Own\]") as seen:
        recipe = Own(16)
    assert len(seen) == 2
    assert seen[0].filename == __file__
    assert (recipe.margin, recipe.amax_history_len) == (1, 16)
    with te.autocast(recipe=recipe):
        assert ops.Linear(32, 32)(torch.randn(8, 32)).isfinite().all()


def test_what_is_known_is_still_checked() -> None:
    with (
        pytest.warns(UserWarning, match="interval"),
        pytest.raises(TypeError, match="amax_history_len must be an int"),
    ):
        DelayedScaling(amax_history_len="16", interval=1)
    with pytest.raises(TypeError, match="positional arguments"):
        MXFP8BlockScaling(0, Format.E4M3, False, False, None, False, 3)


# -- newer fields


@pytest.mark.parametrize("cls", RECIPES[1:])
@pytest.mark.parametrize("override", ["high_precision", "dequantized"])
def test_backward_override_is_part_of_a_recipe(cls: type[Recipe], override: str) -> None:
    recipe = make(cls)
    key = recipe._native.key
    recipe.backward_override = override
    assert recipe._native.key != key
    assert f"backward_override='{override}'" in repr(recipe)
    assert copy.deepcopy(recipe) == recipe
    recipe.backward_override = None
    assert recipe._native.key == key


class Saved:
    """Which tensors a forward saves, by their dtypes and sizes."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []

    def __enter__(self) -> Saved:
        def pack(tensor: torch.Tensor) -> torch.Tensor:
            self.tensors.append(tensor)
            return tensor

        self._hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
        self._hooks.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._hooks.__exit__(*exception)

    def has(self, dtype: torch.dtype, *shape: int) -> bool:
        return any(t.dtype == dtype and tuple(t.shape) == shape for t in self.tensors)


@pytest.mark.parametrize("norm", [False, True])
def test_what_an_overridden_backward_saves(norm: bool) -> None:
    """And no operation in front quantizes what is wanted in high precision."""
    model = ops.Sequential(*([ops.LayerNorm(64)] if norm else []), ops.Linear(64, 128))
    x = torch.randn(32, 64, requires_grad=True)
    seen = {}
    for override in (None, "high_precision", "dequantized"):
        recipe = Float8CurrentScaling(backward_override=override)
        with Saved() as saved, te.autocast(recipe=recipe):
            y = model(x)
        seen[override] = saved
        plan = model.explain().parts[0]
        edge = plan["forward"][-1]["input"]["dtype"]
        assert edge.startswith("fp8" if norm and override != "high_precision" else "float32")
        name = "Float8CurrentScaling"
        wanted = name if override is None else f"{name}, backward {override}"
        assert plan["situation"]["recipe"] == wanted
        y.sum().backward()
    assert seen[None].has(torch.uint8, 32, 64) or seen[None].has(torch.uint8, 64, 32)
    assert seen["dequantized"].has(torch.uint8, 32, 64)
    assert seen["dequantized"].has(torch.uint8, 128, 64)
    assert not any(t.dtype == torch.uint8 for t in seen["high_precision"].tensors)
    assert seen["high_precision"].has(torch.float32, 128, 64)


def test_gradients_stay_in_high_precision() -> None:
    """Between two linears too, and for Quantize."""
    model = ops.Sequential(
        ops.Linear(64, 64),
        ops.GELU(),
        ops.Quantize(forward=False, backward=True),
        ops.Linear(64, 64),
    )
    x = torch.randn(32, 64, requires_grad=True)
    for override in ("high_precision", "dequantized"):
        with te.autocast(recipe=MXFP8BlockScaling(backward_override=override)):
            model(x).sum().backward()
            for op in (model[0].basic_ops[0], model[2], model[3].basic_ops[0]):
                assert op.get_quantizer("backward", 0) is None
        for step in model.explain().parts[0]["backward"]:
            assert step["grad_output"]["dtype"] == step["grad_input"]["dtype"] == "float32"


@pytest.mark.parametrize("override", ["high_precision", "dequantized"])
def test_an_overridden_backward_of_quantized_weights(override: str) -> None:
    """The weight is what there is of it."""
    recipe = Float8CurrentScaling(backward_override=override)
    with te.quantized_model_init(recipe=recipe):
        linear = ops.Linear(64, 32, bias=False)
    x, dy = torch.randn(16, 64, requires_grad=True), torch.randn(16, 32)
    with te.autocast(recipe=recipe):
        linear(x).backward(dy)
    wanted = dy.double() @ linear.weight.dequantize().double()
    torch.testing.assert_close(x.grad.double(), wanted, rtol=1e-5, atol=1e-5)


def test_custom_recipe_has_a_format() -> None:
    """Without an effect: the quantizers decide."""

    def factory(role: te.QuantizerRole) -> te.Quantizer:
        return te.MXFP8Quantizer(te.DType.kFloat8E4M3)

    x = torch.randn(32, 64)
    linear = ops.Linear(64, 64)
    results = []
    for fmt in (Format.HYBRID, Format.E4M3):
        recipe = CustomRecipe(qfactory=factory, fp8_format=fmt)
        assert recipe.fp8_format is fmt
        with te.autocast(recipe=recipe):
            results.append(linear(x))
    assert torch.equal(*results)


def test_block_scales_to_448() -> None:
    """One block scale of the tensor's largest block is the bound itself."""
    x = torch.randn(64, 64)
    largest = {}
    for scope in ("all", "none", "weights", "activations"):
        recipe = NVFP4BlockScaling(
            nvfp4_4over6="all", nvfp4_4over6_e4m3_use_256=scope, disable_2d_quantization=True
        )
        for role in ("input", "weight"):
            quantizer = recipe._native.make_quantizer(te.QuantizerRole("", role, ""), x.device)
            scales = quantizer(x)._rowwise_scale_inv.view(torch.float8_e4m3fn).float()
            largest[scope, role] = (float(scales.max()), quantizer.nvfp4_e4m3_max)
    for scope, role in largest:
        to_256 = scope in ("all", {"input": "activations", "weight": "weights"}[role])
        most, bound = largest[scope, role]
        assert bound == (256 if to_256 else 448)
        assert most == 448 if not to_256 else 256 <= most <= 384  # that times 6 / 4
