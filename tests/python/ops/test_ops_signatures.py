"""Every signature that a te.ops script relies on: names, order and defaults, in one table."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from repository import ROOT

import ligature as te
from ligature.common.recipe import Format, MMParams

REQUIRED = inspect.Parameter.empty
PLACE = {"device": None, "dtype": None}
CACHE = {"cache_quantized_input": False}
INTERLEAVE = {"glu_interleave_size": None}
RECOMPUTE = {"activation_recompute_in_mlp": False}
CLAMP = {"limit": 7.0, "alpha": 1.702, "glu_linear_offset": 1.0}
BETAS = {"beta1": 4.0, "beta2": 25.0}
PARALLEL = {
    "tensor_parallel_mode": None,
    "tensor_parallel_group": None,
    "sequence_parallel": False,
    "rng_state_tracker_function": None,
    "accumulate_into_main_grad": False,
}
FEATURES = {"in_features": REQUIRED, "out_features": REQUIRED}
NORM = {"eps": 1e-5, **PLACE, "zero_centered_gamma": False, "sm_margin": 0}
BIAS_PARALLEL = {"tensor_parallel": False, "tensor_parallel_group": None}

#: class: (positional arguments in order, keyword-only arguments)
SIGNATURES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Linear": (FEATURES, {"bias": True, **PLACE, **PARALLEL}),
    "BasicLinear": (FEATURES, {**PLACE, **PARALLEL, "userbuffers_options": None}),
    "Bias": ({"size": REQUIRED}, {**PLACE, **BIAS_PARALLEL}),
    "LayerNorm": ({"normalized_shape": REQUIRED}, NORM),
    "RMSNorm": ({"normalized_shape": REQUIRED}, NORM),
    "L2Normalization": ({}, {"eps": 1e-6, "seq_length": None, "micro_batch_size": None}),
    **{
        name: ({}, CACHE)
        for name in (
            "GELU GLU GEGLU QGELU QGEGLU ReLU ReGLU SReLU SReGLU SiLU".split()  # noqa: SIM905
        )
    },
    "SwiGLU": ({}, {**CACHE, **INTERLEAVE}),
    "ClampedSwiGLU": ({}, {**CLAMP, **CACHE, **INTERLEAVE}),
    "SiTUGLU": ({}, {**BETAS, **CACHE, **INTERLEAVE}),
    "ScaledSwiGLU": (INTERLEAVE, RECOMPUTE),
    "ScaledSiTUGLU": (INTERLEAVE, {**RECOMPUTE, **BETAS}),
    "ScaledClampedQGeGLU": (INTERLEAVE, {**RECOMPUTE, **CLAMP}),
    "ScaledSReLU": ({}, RECOMPUTE),
    "Dropout": ({"p": REQUIRED}, {}),
    "Identity": ({}, {}),
    "Reshape": ({"shape": REQUIRED}, {}),
    "ConstantScale": ({"scale": REQUIRED}, {}),
    "AddExtraInput": ({}, {"in_place": False}),
    "MakeExtraOutput": ({}, {"in_place": False}),
    "Quantize": ({"forward": True, "backward": False}, {}),
    "AllGather": ({"process_group": None}, {}),
    "ReduceScatter": ({"process_group": None}, {}),
    "AllReduce": ({"process_group": None, "reduce_in_backward": True}, {}),
    "GroupedLinear": (
        {"num_groups": REQUIRED, **FEATURES},
        {
            "bias": True,
            **PLACE,
            "rng_state_tracker_function": None,
            "accumulate_into_main_grad": False,
            "single_grouped_weight": False,
            "single_grouped_bias": False,
            "delay_wgrad_compute": False,
            "scale_bias": False,
        },
    ),
}
#: Names of te.ops that are no operations; these have tests of their own below.
OTHERS = {
    *("BasicOperation", "FusedOperation", "FusibleOperation", "OperationContext"),
    *("OperationFuser", "Sequential", "basic", "fused", "fuser"),
    *("register_forward_fusion", "register_backward_fusion", "register_forward_backward_fusion"),
}
#: What te.ops has not.
OWN = {"Fusion", "FusionHandle", "optional"}
OWN |= {"Combine", "Dispatch", "TopKRouter", "mixture_of_experts"}

ATTENTION = {"fp8_dpa": False, "fp8_mha": False, "backward_override": None}
SPLIT, FAST = MMParams(use_split_accumulator=True), MMParams(use_split_accumulator=False)
USAGE = {"rowwise": True, "columnwise": True}
REDUCTION = {"with_amax_reduction": False, "amax_reduction_group": None}
AUTOCAST = {"enabled": True, "calibrating": False}

#: As above, of classes and functions of the package and of its recipes. A third entry: arguments
#: that te's have not, after the others.
MORE: dict[str, tuple[Any, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "DelayedScaling": (
        te.recipe.DelayedScaling,
        {
            "margin": 0,
            "fp8_format": Format.HYBRID,
            "amax_history_len": 1024,
            "amax_compute_algo": "max",
            "scaling_factor_compute_algo": None,
            "reduce_amax": True,
            **ATTENTION,
        },
        {},
        {},
    ),
    "Float8CurrentScaling": (
        te.recipe.Float8CurrentScaling,
        {
            "use_power_2_scales": False,
            "fp8_format": Format.HYBRID,
            "fp8_gemm_fprop": FAST,
            "fp8_gemm_dgrad": SPLIT,
            "fp8_gemm_wgrad": SPLIT,
            **ATTENTION,
        },
        {},
        {},
    ),
    "Float8BlockScaling": (
        te.recipe.Float8BlockScaling,
        {
            "use_f32_scales": False,
            "fp8_format": Format.E4M3,
            "x_block_scaling_dim": 1,
            "w_block_scaling_dim": 2,
            "grad_block_scaling_dim": 1,
            "fp8_gemm_fprop": SPLIT,
            "fp8_gemm_dgrad": SPLIT,
            "fp8_gemm_wgrad": SPLIT,
            **ATTENTION,
        },
        {},
        {},
    ),
    "MXFP8BlockScaling": (
        te.recipe.MXFP8BlockScaling,
        {"margin": 0, "fp8_format": Format.E4M3, **ATTENTION, "enable_2d_quantization": False},
        {},
        {},
    ),
    "NVFP4BlockScaling": (
        te.recipe.NVFP4BlockScaling,
        {
            "disable_rht": False,
            "disable_stochastic_rounding": False,
            "disable_2d_quantization": False,
            "row_scaled_activation": False,
            "nvfp4_4over6": "none",
            "nvfp4_4over6_e4m3_use_256": "all",
            "nvfp4_4over6_err_mode": "MAE",
            "fp4_format": Format.E2M1,
            "fp8_format": Format.E4M3,
            **ATTENTION,
        },
        {},
        {},
    ),
    "CustomRecipe": (
        te.recipe.CustomRecipe,
        {"qfactory": REQUIRED, "fp8_format": Format.HYBRID, **ATTENTION},
        {},
        {},
    ),
    "QuantizerRole": (
        te.QuantizerRole,
        {"module_type": "", "tensor_type": "", "name": ""},
        {},
        {},
    ),
    "autocast": (
        te.autocast,
        {**AUTOCAST, "recipe": None, "amax_reduction_group": None},
        {},
        {"only_where_faster": False},
    ),
    "fp8_autocast": (te.fp8_autocast, {**AUTOCAST, "fp8_recipe": None, "fp8_group": None}, {}, {}),
    "quantized_model_init": (
        te.quantized_model_init,
        {"enabled": True, "recipe": None, "preserve_high_precision_init_val": False},
        {},
        {},
    ),
    "fp8_model_init": (
        te.fp8_model_init,
        {"enabled": True, "recipe": None, "preserve_high_precision_init_val": False},
        {},
        {},
    ),
    "Float8Quantizer": (
        te.Float8Quantizer,
        {"scale": REQUIRED, "amax": REQUIRED, "fp8_dtype": REQUIRED},
        USAGE,
        {},
    ),
    "Float8CurrentScalingQuantizer": (
        te.Float8CurrentScalingQuantizer,
        {"fp8_dtype": REQUIRED, "device": None},
        {**USAGE, "force_pow_2_scales": False, "amax_epsilon": 0.0, **REDUCTION},
        {},
    ),
    "Float8BlockQuantizer": (
        te.Float8BlockQuantizer,
        {"fp8_dtype": REQUIRED},
        {**USAGE, "amax_epsilon": 0.0, "force_pow_2_scales": True, "block_scaling_dim": 2},
        {},
    ),
    "MXFP8Quantizer": (
        te.MXFP8Quantizer,
        {"fp8_dtype": REQUIRED},
        {**USAGE, "with_2d_quantization": False},
        {},
    ),
    "NVFP4Quantizer": (
        te.NVFP4Quantizer,
        {
            "fp4_dtype": te.DType.kFloat4E2M1,
            **USAGE,
            **REDUCTION,
            "with_rht": False,
            "with_post_rht_amax": None,
            "with_2d_quantization": False,
            "stochastic_rounding": False,
            "row_scaled_nvfp4": False,
            "nvfp4_use_4over6": False,
            "nvfp4_e4m3_max": None,
            "nvfp4_4over6_err_mode": "MAE",
            "with_random_sign_mask": True,
        },
        {},
        {},
    ),
    "Quantizer.make_empty": (
        te.Quantizer.make_empty,
        {"shape": REQUIRED},
        {"dtype": torch.float32, "device": None, "requires_grad": False},
        {},
    ),
    "Quantizer.update_quantized": (
        te.Quantizer.update_quantized,
        {"src": REQUIRED, "dst": REQUIRED},
        {"noop_flag": None},
        {},
    ),
    "Quantizer.set_usage": (
        te.Quantizer.set_usage,
        {},
        {"rowwise": None, "columnwise": None},
        {},
    ),
    "QuantizedTensor.dequantize": (te.QuantizedTensor.dequantize, {"dtype": None}, {}, {}),
}


def split(function: Callable[..., Any]) -> tuple[list[tuple[str, Any]], dict[str, Any]]:
    """Positional arguments in order, and keyword-only ones."""
    given = inspect.signature(function).parameters.values()
    public = [p for p in given if not p.name.startswith("_") and p.name != "self"]
    positional = [(p.name, p.default) for p in public if p.kind is p.POSITIONAL_OR_KEYWORD]
    keywords = {p.name: p.default for p in public if p.kind is p.KEYWORD_ONLY}
    assert len(public) == len(positional) + len(keywords)
    return positional, keywords


@pytest.mark.parametrize("name", MORE)
def test_signature(name: str) -> None:
    function, positional, keywords, own = MORE[name]
    got_positional, got_keywords = split(function)
    assert got_positional == list(positional.items())
    assert got_keywords == {**keywords, **own}


def test_the_table_has_every_name() -> None:
    """An operation that is added without its signature here is one that nobody compared."""
    assert set(te.ops.__all__) == {*SIGNATURES, *OTHERS, *OWN}
    recipes = {n for n in te.common.recipe.__all__ if n.endswith(("Scaling", "Recipe"))}
    assert recipes - {"Recipe"} <= set(MORE)
    assert {n for n in te.__all__ if n.endswith("Quantizer")} - {"Quantizer"} <= set(MORE)


@pytest.mark.parametrize("name", SIGNATURES)
def test_constructor(name: str) -> None:
    positional, keywords = SIGNATURES[name]
    got_positional, got_keywords = split(getattr(te.ops, name))
    assert got_positional == list(positional.items())
    assert got_keywords == keywords


@pytest.mark.parametrize("name", SIGNATURES)
def test_is_a_module_and_public(name: str) -> None:
    cls = getattr(te.ops, name)
    assert name in te.ops.__all__
    assert issubclass(cls, te.ops.FusibleOperation)
    assert issubclass(cls, torch.nn.Module)
    base = te.ops.FusedOperation if name == "Linear" else te.ops.BasicOperation
    assert issubclass(cls, base)


def test_base_class_methods() -> None:
    def names(function: Any) -> list[str]:
        return [p for p in inspect.signature(function).parameters if p != "self"]

    basic, fusible = te.ops.BasicOperation, te.ops.FusibleOperation
    assert names(fusible.pre_first_fuser_forward) == []
    assert names(fusible.pre_fuser_forward) == ["requires_grad"]
    assert names(fusible.get_input_quantizer) == []
    assert names(fusible.get_grad_output_quantizer) == []
    assert (basic.num_extra_inputs, basic.num_extra_outputs) == (0, 0)
    assert names(basic.num_quantizers) == ["mode"]
    assert names(basic.get_quantizer) == ["mode", "index"]
    assert names(basic.get_quantizer_roles) == ["mode"]
    assert names(basic.reset_recipe_state) == ["recipe"]
    assert names(basic.set_extra_input_channel) == ["index", "channel"]
    output = inspect.signature(basic.set_extra_output_channel).parameters
    assert list(output) == ["self", "index", "channel", "output_to_caller"]
    assert output["output_to_caller"].default is True
    assert output["output_to_caller"].kind is inspect.Parameter.KEYWORD_ONLY
    assert names(te.ops.FusedOperation.__init__) == ["basic_ops"]
    quantizers = ["prev_op_grad_output_quantizer", "next_op_input_quantizer"]
    lists = ["basic_op_extra_inputs", *quantizers, "basic_op_kwargs"]
    accepted = {
        "op_forward_compute": ["input_", "requires_grad", *quantizers],
        "op_forward_save_ctx": ["ctx", "input_", "tensors_to_save", "requires_grad", *quantizers],
        "op_backward": ["ctx", "grad_output"],
        "fuser_forward": ["basic_op_ctxs", "input_", *lists],
        "fuser_backward": ["basic_op_ctxs", "grad_output", "basic_op_grad_extra_outputs"],
    }
    for method, arguments in accepted.items():
        parameters = inspect.signature(getattr(te.ops.GELU, method)).parameters
        open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        for argument in arguments:
            assert argument in parameters or open_ended, (method, argument)


def test_containers() -> None:
    sequential = inspect.signature(te.ops.Sequential.forward).parameters
    assert list(sequential)[1:] == ["input", "extra_inputs", "op_kwargs"]
    assert sequential["extra_inputs"].kind is inspect.Parameter.VAR_POSITIONAL
    assert sequential["op_kwargs"].default is None
    made = inspect.signature(te.ops.Sequential).parameters
    assert made["args"].kind is inspect.Parameter.VAR_POSITIONAL
    assert next(iter(inspect.signature(te.ops.OperationFuser).parameters)) == "ops"
    for method in "append extend insert pop __add__ __iadd__ __mul__ __rmul__ __imul__".split():  # noqa: SIM905
        assert hasattr(te.ops.Sequential, method)


@pytest.mark.parametrize(
    "name",
    ["register_forward_fusion", "register_backward_fusion", "register_forward_backward_fusion"],
)
def test_registration(name: str) -> None:
    parameters = inspect.signature(getattr(te.ops, name)).parameters
    assert [(p.name, p.default) for p in parameters.values()] == [
        ("func", REQUIRED),
        ("prepend", False),
    ]


def test_submodules_of_the_package() -> None:
    import ligature.ops.basic
    import ligature.ops.fused
    import ligature.ops.fuser

    assert ligature.ops.basic.BasicLinear is te.ops.BasicLinear
    assert ligature.ops.fuser.OperationFuser is te.ops.OperationFuser
    for name in [
        "ForwardBiasActivation",
        "ForwardLinearBiasActivation",
        "ForwardLinearBiasAdd",
        "ForwardLinearScaleAdd",
        "BackwardActivationBias",
        "BackwardAddRMSNorm",
        "BackwardLinearActivation",
        "BackwardLinearAdd",
        "BackwardLinearBias",
        "BackwardLinearScale",
    ]:
        assert issubclass(getattr(ligature.ops.fused, name), te.ops.FusedOperation)


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("ops.op", ["BasicOperation", "FusedOperation", "FusibleOperation", "OperationContext"]),
        ("ops.fusible", ["FusibleOperation"]),
        ("ops.linear", ["Linear"]),
        ("ops.sequential", ["Sequential"]),
        ("ops.activation", ["GELU", "SwiGLU", "ScaledSwiGLU"]),
    ],
)
def test_modules_where_te_ops_has_them(module: str, names: list[str]) -> None:
    found = importlib.import_module(f"ligature.{module}")
    for name in names:
        assert getattr(found, name) is getattr(te.ops, name)


def test_modules_that_the_binding_imports_by_name() -> None:
    sources = [path.read_text() for path in (ROOT / "python" / "src").glob("*.cpp")]
    names = {name for text in sources for name in re.findall(r'import\("(ligature\.[\w.]+)"', text)}
    assert len(names) > 4
    for name in names:
        importlib.import_module(name)


def test_module_of_graphed_callables() -> None:
    from ligature.graph import make_graphed_callables

    assert make_graphed_callables is te.make_graphed_callables


def test_dtype_and_device_defaults() -> None:
    assert te.ops.Linear(4, 4).weight.dtype is torch.float32
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert te.ops.Linear(4, 4).bias.dtype is torch.bfloat16
        assert te.ops.LayerNorm(4).weight.dtype is torch.bfloat16
    finally:
        torch.set_default_dtype(torch.float32)
    assert te.ops.RMSNorm(4, dtype=torch.float16).weight.dtype is torch.float16
    with torch.device("meta"):
        assert te.ops.Linear(4, 4).weight.device.type == "meta"
        assert te.ops.Bias(4).bias.device.type == "meta"
    assert te.ops.BasicLinear(4, 4, device="meta").weight.device.type == "meta"
    assert te.ops.LayerNorm(4, device=torch.device("cpu")).weight.device.type == "cpu"


def test_options_can_be_read_back() -> None:
    norm = te.ops.LayerNorm((2, 4), eps=0.5, zero_centered_gamma=True, sm_margin={"forward": 2})
    assert (norm.normalized_shape, norm.eps, norm.zero_centered_gamma) == ((2, 4), 0.5, True)
    linear = te.ops.Linear(3, 5, bias=False)
    assert (linear.in_features, linear.out_features, linear.bias) == (3, 5, None)
    assert te.ops.ConstantScale(3).scale == 3.0
    assert te.ops.Dropout(0.25).p == 0.25
    assert te.ops.Reshape([2, -1]).shape == (2, -1)
    assert te.ops.SwiGLU(glu_interleave_size=8).glu_interleave_size == 8
    assert te.ops.SwiGLU().glu_interleave_size is None
    assert te.ops.ClampedSwiGLU(limit=2).limit == 2.0
    assert te.ops.SiTUGLU(beta2=3).beta2 == 3.0
    assert te.ops.AddExtraInput(in_place=True).in_place is True


@pytest.mark.parametrize("name", SIGNATURES)
def test_repr_names_the_class(name: str) -> None:
    values = {"in_features": 3, "out_features": 5, "size": 4, "normalized_shape": 4}
    values |= {"p": 0.25, "shape": (2, -1), "scale": 2.0, "num_groups": 2}
    required = [key for key, default in SIGNATURES[name][0].items() if default is REQUIRED]
    op = getattr(te.ops, name)(**{key: values[key] for key in required})
    text = repr(op)
    assert text.startswith(f"{name}(")
    for key in required:
        assert key in text
