"""Recipes: fields, defaults, checks, and what changes when one is set."""

from __future__ import annotations

import copy
import dataclasses
import enum
import gc
import pickle

import pytest
import torch

import ligature as te
from ligature import _C
from ligature.common.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MMParams,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QParams,
    Recipe,
)


def nothing(role):
    return None


DEFAULTS = {
    DelayedScaling: {
        "margin": 0,
        "fp8_format": Format.HYBRID,
        "amax_history_len": 1024,
        "amax_compute_algo": "max",
        "scaling_factor_compute_algo": None,
        "reduce_amax": True,
        "fp8_dpa": False,
        "fp8_mha": False,
        "backward_override": None,
    },
    Float8CurrentScaling: {
        "use_power_2_scales": False,
        "fp8_format": Format.HYBRID,
        "fp8_gemm_fprop": MMParams(use_split_accumulator=False),
        "fp8_gemm_dgrad": MMParams(use_split_accumulator=True),
        "fp8_gemm_wgrad": MMParams(use_split_accumulator=True),
        "fp8_dpa": False,
        "fp8_mha": False,
        "backward_override": None,
    },
    Float8BlockScaling: {
        "use_f32_scales": False,
        "fp8_format": Format.E4M3,
        "x_block_scaling_dim": 1,
        "w_block_scaling_dim": 2,
        "grad_block_scaling_dim": 1,
        "fp8_gemm_fprop": MMParams(),
        "fp8_gemm_dgrad": MMParams(),
        "fp8_gemm_wgrad": MMParams(),
        "fp8_dpa": False,
        "fp8_mha": False,
        "backward_override": None,
    },
    MXFP8BlockScaling: {
        "margin": 0,
        "fp8_format": Format.E4M3,
        "fp8_dpa": False,
        "fp8_mha": False,
        "backward_override": None,
        "enable_2d_quantization": False,
    },
    NVFP4BlockScaling: {
        "disable_rht": False,
        "disable_stochastic_rounding": False,
        "disable_2d_quantization": False,
        "row_scaled_activation": False,
        "nvfp4_4over6": "none",
        "nvfp4_4over6_e4m3_use_256": "all",
        "nvfp4_4over6_err_mode": "MAE",
        "fp4_format": Format.E2M1,
        "fp8_format": Format.E4M3,
        "fp8_dpa": False,
        "fp8_mha": False,
        "backward_override": None,
    },
}
KINDS = {
    DelayedScaling: {"delayed", "float8_per_tensor_scaling"},
    Float8CurrentScaling: {"float8_current_scaling", "float8_per_tensor_scaling"},
    Float8BlockScaling: {"float8_block_scaling"},
    MXFP8BlockScaling: {"mxfp8"},
    NVFP4BlockScaling: {"nvfp4"},
    CustomRecipe: {"custom"},
}


def make(cls: type[Recipe]) -> Recipe:
    return cls(nothing) if cls is CustomRecipe else cls()


def formats(recipe: Recipe) -> dict[str, dict]:
    """The fields of the format for each role of a linear layer."""
    out = {}
    for kind in ("input", "weight", "grad_output"):
        role = te.QuantizerRole("linear", kind, "Linear")
        quantizer = recipe._native.make_quantizer(role, torch.get_default_device())
        out[kind] = quantizer._handle.fields
    return out


@pytest.mark.parametrize("cls", DEFAULTS)
def test_defaults_and_order(cls) -> None:
    assert {f.name: f.default for f in dataclasses.fields(cls)} == DEFAULTS[cls]
    assert [f.name for f in dataclasses.fields(cls)] == list(DEFAULTS[cls])


# Accepted without an effect, or with one value alone.
ONLY_IN_PYTHON = {
    DelayedScaling: {"scaling_factor_compute_algo", "fp8_dpa", "fp8_mha", "backward_override"},
    Float8CurrentScaling: {"fp8_dpa", "fp8_mha"},
    Float8BlockScaling: {"fp8_dpa", "fp8_mha"},
    MXFP8BlockScaling: {"margin", "fp8_dpa", "fp8_mha"},
    NVFP4BlockScaling: {"fp4_format", "fp8_format", "fp8_dpa", "fp8_mha"},
}


@pytest.mark.parametrize("cls", DEFAULTS)
def test_the_core_has_the_same_fields_and_defaults(cls) -> None:
    core = _C.recipe_fields(cls.__name__)
    assert DEFAULTS[cls].keys() - core.keys() == ONLY_IN_PYTHON[cls]
    for name, value in DEFAULTS[cls].items():
        if name in core:
            plain = value.name if isinstance(value, Format) else value
            plain = plain.use_split_accumulator if isinstance(plain, MMParams) else plain
            assert core[name] == plain
    params = {name for name in core if "." in name}
    assert core.keys() - params - DEFAULTS[cls].keys() <= {"amax_epsilon"}
    fields = {field.name for field in dataclasses.fields(QParams)}
    assert {name.split(".")[1] for name in params} <= fields


@pytest.mark.parametrize("cls", DEFAULTS)
def test_every_field_that_has_an_effect_is_part_of_the_key(cls) -> None:
    other = {
        "amax_compute_algo": "most_recent",
        "backward_override": "dequantized",
        "nvfp4_4over6": "all",
        "nvfp4_4over6_e4m3_use_256": "none",
        "nvfp4_4over6_err_mode": "MSE",
        "fp8_format": Format.E5M2,
    }
    for name, value in DEFAULTS[cls].items():
        if name in ONLY_IN_PYTHON[cls]:
            continue
        # One of the three may have square blocks.
        recipe = cls(**{"w_block_scaling_dim": 1} if "block_scaling_dim" in name else {})
        before = recipe._native.key
        if isinstance(value, bool):
            setattr(recipe, name, not value)
        elif isinstance(value, MMParams):
            setattr(recipe, name, MMParams(not value.use_split_accumulator))
        else:
            setattr(recipe, name, other.get(name, 2))
        assert recipe._native.key != before
    for name in cls._params:
        recipe = cls()
        setattr(recipe, name, getattr(recipe, name))
        assert recipe._native.key != cls()._native.key


REPRS = [
    "DelayedScaling(margin=0, fp8_format=HYBRID, amax_history_len=1024, amax_compute_algo='max', "
    "scaling_factor_compute_algo=None, reduce_amax=True, fp8_dpa=False, fp8_mha=False, "
    "backward_override=None)",
    "Float8CurrentScaling(fp8_format=HYBRID, use_power_2_scales=False, "
    "fp8_gemm_fprop=MMParams(use_split_accumulator=False), "
    "fp8_gemm_dgrad=MMParams(use_split_accumulator=True), "
    "fp8_gemm_wgrad=MMParams(use_split_accumulator=True), fp8_dpa=False, fp8_mha=False, "
    "backward_override=None)",
    "Float8BlockScaling(fp8_format=E4M3, use_f32_scales=False, x_block_scaling_dim=1, "
    "w_block_scaling_dim=2, grad_block_scaling_dim=1, "
    "fp8_gemm_fprop=MMParams(use_split_accumulator=True), "
    "fp8_gemm_dgrad=MMParams(use_split_accumulator=True), "
    "fp8_gemm_wgrad=MMParams(use_split_accumulator=True), fp8_dpa=False, fp8_mha=False, "
    "backward_override=None)",
    "MXFP8BlockScaling(fp8_format=E4M3, enable_2d_quantization=False, margin=0, fp8_dpa=False, "
    "fp8_mha=False, backward_override=None)",
    "NVFP4BlockScaling(disable_rht=False, disable_stochastic_rounding=False, "
    "disable_2d_quantization=False, row_scaled_activation=False, nvfp4_4over6='none', "
    "nvfp4_4over6_e4m3_use_256='all', nvfp4_4over6_err_mode='MAE', fp4_format=E2M1, "
    "fp8_format=E4M3, fp8_dpa=False, fp8_mha=False, backward_override=None)",
]


@pytest.mark.parametrize(("cls", "text"), list(zip(DEFAULTS, REPRS, strict=True)))
def test_reprs(cls, text) -> None:
    assert repr(cls()) == text


class Choice(enum.IntEnum):
    ONE = 1


class Mode(str, enum.Enum):  # noqa: UP042
    MSE = "MSE"


def test_subclasses_of_plain_types_are_taken() -> None:
    recipe = Float8BlockScaling(w_block_scaling_dim=Choice.ONE)
    assert recipe._native.key == Float8BlockScaling(w_block_scaling_dim=1)._native.key
    recipe = NVFP4BlockScaling(nvfp4_4over6_err_mode=Mode.MSE)
    assert recipe._native.key == NVFP4BlockScaling(nvfp4_4over6_err_mode="MSE")._native.key


def test_params_are_made_plain() -> None:
    recipe = Float8CurrentScaling(fp8_gemm_fprop=MMParams(use_split_accumulator=1))
    assert recipe._native.key == Float8CurrentScaling(fp8_gemm_fprop=MMParams())._native.key
    recipe.fp8_quant_fwd_inp = QParams(power_2_scale=1, amax_epsilon=1, fp4_2d_quantization=True)
    assert formats(recipe)["input"]["power_of_2_scales"] is True
    assert formats(recipe)["input"]["amax_epsilon"] == 1.0


def test_no_environment_variable_changes_a_default(monkeypatch) -> None:
    for name in (
        "NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES",
        "NVTE_FP8_BLOCK_SCALING_FP32_SCALES",
        "NVTE_NVFP4_DISABLE_RHT",
        "NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING",
        "NVTE_NVFP4_DISABLE_2D_QUANTIZATION",
    ):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("NVTE_BACKWARD_OVERRIDE", "dequantized")
    monkeypatch.setenv("NVTE_NVFP4_4OVER6_E4M3_USE_256", "none")
    for cls, defaults in DEFAULTS.items():
        for name, value in defaults.items():
            assert getattr(cls(), name) == value


def test_formats_tell_their_largest_values() -> None:
    assert Format.E4M3.value.max_fwd == torch.finfo(torch.float8_e4m3fn).max
    assert Format.E5M2.value.max_bwd == torch.finfo(torch.float8_e5m2).max
    assert Format.HYBRID.value == (448, 57344)
    assert Format.E2M1.value.max_fwd == 6


@pytest.mark.parametrize("cls", KINDS)
def test_which_kind(cls) -> None:
    names = set().union(*KINDS.values())
    for subject in (cls, make(cls), type("Own", (cls,), {})):
        assert {name for name in names if getattr(subject, name)()} == KINDS[cls]


@pytest.mark.parametrize("cls", KINDS)
def test_equality_repr_and_copies(cls) -> None:
    recipe = make(cls)
    for other in (make(cls), copy.copy(recipe), copy.deepcopy(recipe)):
        assert other == recipe
        assert other is not recipe
        assert repr(other) == repr(recipe)
        assert other._native.key == recipe._native.key
    assert pickle.loads(pickle.dumps(recipe)) == recipe
    other = copy.copy(recipe)
    other.fp8_dpa = True
    assert other != recipe
    assert not recipe.fp8_dpa
    for wrong in KINDS:
        assert (make(wrong) == recipe) == (wrong is cls)
    assert repr(recipe).startswith(f"{cls.__name__}(")
    assert "fp8_dpa=False" in repr(recipe)


def test_repr_names_formats() -> None:
    assert "fp8_format=HYBRID" in repr(DelayedScaling())


WRONG = [
    (DelayedScaling, "margin", 0.5, TypeError, "margin must be an int, got 0.5"),
    (DelayedScaling, "margin", True, TypeError, "margin must be an int, got True"),
    (DelayedScaling, "fp8_format", "HYBRID", TypeError, "fp8_format must be a Format"),
    (DelayedScaling, "fp8_format", Format.E2M1, ValueError, "E4M3, E5M2 or HYBRID"),
    (DelayedScaling, "amax_history_len", 0, ValueError, "amax_history_len must be positive, got 0"),
    (DelayedScaling, "amax_compute_algo", "min", ValueError, "'max', 'most_recent' or a function"),
    (DelayedScaling, "amax_compute_algo", 3, TypeError, "a str or a function, got 3"),
    (DelayedScaling, "scaling_factor_compute_algo", 3, TypeError, "a function or None, got 3"),
    (DelayedScaling, "reduce_amax", 1, TypeError, "reduce_amax must be a bool, got 1"),
    (Float8CurrentScaling, "use_power_2_scales", 1, TypeError, "must be a bool"),
    (Float8CurrentScaling, "fp8_gemm_fprop", True, TypeError, "an MMParams, got True"),
    (Float8BlockScaling, "x_block_scaling_dim", 3, ValueError, "must be 1 or 2, got 3"),
    (Float8BlockScaling, "w_block_scaling_dim", "2", TypeError, "must be an int, got '2'"),
    (MXFP8BlockScaling, "fp8_format", None, TypeError, "must be a Format, got None"),
    (NVFP4BlockScaling, "nvfp4_4over6", "some", ValueError, "'weights', 'activations' or 'all'"),
    (NVFP4BlockScaling, "nvfp4_4over6_e4m3_use_256", True, TypeError, "must be a str, got True"),
    (NVFP4BlockScaling, "nvfp4_4over6_e4m3_use_256", "", ValueError, "'activations' or 'all'"),
    (NVFP4BlockScaling, "nvfp4_4over6_err_mode", "MAX", ValueError, "'MAE' or 'MSE', got 'MAX'"),
    (NVFP4BlockScaling, "fp4_format", Format.E4M3, ValueError, "must be Format.E2M1"),
    (DelayedScaling, "backward_override", "dequantized", ValueError, "must be None with delayed"),
    (MXFP8BlockScaling, "backward_override", "bf16", ValueError, "or 'dequantized', got 'bf16'"),
    (NVFP4BlockScaling, "backward_override", "", TypeError, "or 'dequantized', got ''"),
    (CustomRecipe, "fp8_format", "HYBRID", TypeError, "fp8_format must be a Format"),
    (CustomRecipe, "qfactory", None, TypeError, "qfactory must be a function, got None"),
]


@pytest.mark.parametrize(("cls", "name", "value", "error", "message"), WRONG)
def test_every_field_is_checked(cls, name, value, error, message) -> None:
    given = {**({"qfactory": nothing} if cls is CustomRecipe else {}), name: value}
    with pytest.raises(error, match=message) as made:
        cls(**given)
    assert f"[{cls.__name__}]" in str(made.value)
    recipe = make(cls)
    before = getattr(recipe, name)
    with pytest.raises(error, match=message):
        setattr(recipe, name, value)
    assert getattr(recipe, name) == before
    assert recipe == make(cls)


def test_there_are_no_other_fields() -> None:
    with pytest.raises(AttributeError, match=r"\[DelayedScaling\] there is no field 'magrin'"):
        DelayedScaling().magrin = 3
    with pytest.raises(AttributeError):
        _ = DelayedScaling().fp8_quant_fwd_inp


def test_block_dims_must_leave_a_row_of_blocks() -> None:
    with pytest.raises(ValueError, match="1x128"):
        Float8BlockScaling(x_block_scaling_dim=2, grad_block_scaling_dim=2)


# -- which format for which tensor


def test_hybrid_and_single_formats() -> None:
    for recipe in (DelayedScaling(), Float8CurrentScaling()):
        got = {kind: fields["element"] for kind, fields in formats(recipe).items()}
        assert got == {"input": "e4m3", "weight": "e4m3", "grad_output": "e5m2"}
    for fmt, name in ((Format.E4M3, "e4m3"), (Format.E5M2, "e5m2")):
        got = {f["element"] for f in formats(MXFP8BlockScaling(fp8_format=fmt)).values()}
        assert got == {name}


def test_formats_of_blocks() -> None:
    got = formats(Float8BlockScaling(use_f32_scales=True))
    assert [got[k]["block_2d"] for k in got] == [False, True, False]
    assert not any(fields["power_of_2_scales"] for fields in got.values())
    got = formats(MXFP8BlockScaling(enable_2d_quantization=True))
    assert [got[k]["block_2d"] for k in got] == [False, True, False]
    got = formats(NVFP4BlockScaling())
    assert [got[k]["hadamard"] for k in got] == [True, False, True]
    assert [got[k]["stochastic_rounding"] for k in got] == [False, False, True]
    assert [got[k]["block_2d"] for k in got] == [False, True, False]
    recipe = NVFP4BlockScaling(True, True, True, True, "all", "all", "MSE")
    got = formats(recipe)
    assert not any(fields["scales_to_448"] for fields in got.values())
    assert [got[k]["row_scaled"] for k in got] == [True, False, False]
    assert [got[k]["four_over_six"] for k in got] == ["mean_square", "mean_square", "none"]
    assert not any(f["hadamard"] or f["stochastic_rounding"] or f["block_2d"] for f in got.values())


def test_settings_of_one_role() -> None:
    recipe = Float8CurrentScaling()
    assert recipe.fp8_quant_fwd_inp == QParams()
    recipe.use_power_2_scales = True
    assert recipe.fp8_quant_fwd_weight == QParams(power_2_scale=True)
    key = recipe._native.key
    recipe.fp8_quant_fwd_weight = QParams(power_2_scale=False, amax_epsilon=0.5)
    assert recipe._native.key != key
    got = formats(recipe)
    assert [got[k]["power_of_2_scales"] for k in got] == [True, False, True]
    assert [got[k]["amax_epsilon"] for k in got] == [0, 0.5, 0]
    assert recipe != Float8CurrentScaling(use_power_2_scales=True)
    assert formats(copy.deepcopy(recipe)) == got
    with pytest.raises(TypeError, match="fp8_quant_bwd_grad must be a QParams, got 3"):
        recipe.fp8_quant_bwd_grad = 3


def test_settings_of_one_role_in_fp4() -> None:
    recipe = NVFP4BlockScaling()
    assert recipe.fp4_quant_fwd_inp == QParams(random_hadamard_transform=True)
    assert recipe.fp4_quant_fwd_weight == QParams(fp4_2d_quantization=True)
    grad = QParams(random_hadamard_transform=True, stochastic_rounding=True)
    assert recipe.fp4_quant_bwd_grad == grad
    recipe.fp4_quant_bwd_grad = QParams()
    assert not formats(recipe)["grad_output"]["stochastic_rounding"]
    before = repr(recipe)
    with pytest.raises(ValueError, match="square blocks"):
        recipe.fp4_quant_fwd_weight = QParams(
            fp4_2d_quantization=True, random_hadamard_transform=True
        )
    assert repr(recipe) == before


# -- changes


def test_a_set_field_makes_another_twin() -> None:
    recipe = DelayedScaling()
    before = recipe._native
    assert recipe._native is before
    recipe.margin = 2
    assert recipe._native is not before
    assert recipe._native.key != before.key
    recipe.margin = 0
    assert recipe._native.key == before.key


@pytest.mark.parametrize("name", ["fp8_gemm_fprop", "fp8_gemm_dgrad", "fp8_gemm_wgrad"])
@pytest.mark.parametrize("cls", [Float8CurrentScaling, Float8BlockScaling])
def test_accumulation_is_part_of_a_recipe(cls, name) -> None:
    """Of each product by itself: what was planned with another is not used."""
    split, fast = (cls(**{name: MMParams(use_split_accumulator=on)}) for on in (True, False))
    assert split._native.key != fast._native.key
    assert cls()._native.key in (split._native.key, fast._native.key)


@pytest.mark.parametrize("pass_", ["forward", "backward", "forward_backward"])
def test_fusions_are_given_the_recipe(pass_) -> None:
    seen = []

    def look(ops, recipe=None):
        seen.append(recipe)
        return ops

    linear = te.ops.Linear(32, 32)
    x = torch.randn(32, 32)
    recipe = Float8CurrentScaling()
    with getattr(te.ops, f"register_{pass_}_fusion")(look):
        linear(x)
        with te.autocast(recipe=recipe):
            linear(x)
        with te.autocast(enabled=False, calibrating=True, recipe=recipe):
            linear(x)
        with te.autocast(recipe=recipe):
            recipe.use_power_2_scales = True
            linear(x)
    assert len(seen) == 4
    assert seen[0] is None
    assert seen[1] is recipe
    assert seen[2] is None
    assert seen[3] is recipe


def test_the_recipe_is_known_when_its_object_is_gone() -> None:
    """A plan may be made in backward, for a recomputation."""
    seen = []

    def look(ops, recipe=None):
        seen.append(recipe)
        return ops

    linear = te.ops.Linear(32, 32)
    x = torch.randn(32, 32, requires_grad=True)
    with te.autocast(recipe=MXFP8BlockScaling(enable_2d_quantization=True)):
        y = te.checkpoint(linear, x, use_reentrant=True)
    gc.collect()
    with te.ops.register_forward_fusion(look):
        y.sum().backward()
    assert seen == [MXFP8BlockScaling(enable_2d_quantization=True)]


def test_recipes_are_not_kept_alive() -> None:
    import weakref

    class Own(DelayedScaling):
        pass

    recipe = Own()
    recipe.margin = 1
    gone = weakref.ref(recipe)
    linear = te.ops.Linear(32, 32)
    with te.autocast(recipe=recipe):
        linear(torch.randn(4, 32))
    del recipe
    gc.collect()
    assert gone() is None
