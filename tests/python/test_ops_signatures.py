"""Constructors: the names, the order and the defaults that a te.ops script relies on."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

import ligature as te

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
    "BasicLinear": (FEATURES, {**PLACE, **PARALLEL}),
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
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_constructor(name: str) -> None:
    positional, keywords = SIGNATURES[name]
    given = inspect.signature(getattr(te.ops, name)).parameters.values()
    public = [p for p in given if not p.name.startswith("_")]
    got_positional = [(p.name, p.default) for p in public if p.kind is p.POSITIONAL_OR_KEYWORD]
    got_keywords = {p.name: p.default for p in public if p.kind is p.KEYWORD_ONLY}
    assert got_positional == list(positional.items())
    assert got_keywords == keywords
    assert len(public) == len(positional) + len(keywords)


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
    values |= {"p": 0.25, "shape": (2, -1), "scale": 2.0}
    required = [key for key, default in SIGNATURES[name][0].items() if default is REQUIRED]
    op = getattr(te.ops, name)(**{key: values[key] for key in required})
    text = repr(op)
    assert text.startswith(f"{name}(")
    for key in required:
        assert key in text
