"""Every registered operation is proven against its formula in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import routing_reference as routing
import torch
import torch.nn.functional as F
from reference import (
    _WITH_OPTIONS,
    ACTIVATIONS,
    l2_normalization,
    layer_norm,
    rms_norm,
    srelu,
)

import ligature as te
from ligature import _C
from ligature.testing import check_fusion, check_operation

pytestmark = pytest.mark.usefixtures("one_thread")

Tensor = torch.Tensor
SHAPES = [(5, 8), (2, 3, 8), (0, 8)]


def activation(name: str, **options: Any) -> tuple[Any, ...]:
    cls = getattr(te.ops, name)
    if name.startswith("Scaled"):
        formula = srelu if name == "ScaledSReLU" else _WITH_OPTIONS[name][0]
        return (
            lambda: cls(**options),
            lambda x, scales: formula(x, **options) * scales.unsqueeze(-1),
        )
    return lambda: cls(**options), lambda x: ACTIVATIONS[name](x, **options)


def norm(cls: type, formula: Callable[..., Tensor], **options: Any) -> tuple[Any, ...]:
    return (
        lambda dtype, device: cls(8, dtype=dtype, device=device, **options),
        lambda x, **params: formula(x, **params, **options),
    )


def dropout(x: Tensor) -> Tensor:
    return torch.ops.aten.native_dropout(x, 0.5, True)[0]


def routed(x: Tensor, experts: Tensor, probs: Tensor) -> tuple[Tensor, ...]:
    """Dispatch to three experts."""
    routing_map = routing.routing_map_of(experts, 3).view(2, *x.shape[:-1], experts.shape[1])
    rows, of_rows = routing.dispatch(x, experts, probs, 3)
    return rows, routing.splits_of(experts, 3), of_rows, routing_map


def grouped(x: Tensor, splits: Tensor, scales: Tensor | None = None, **params: Tensor) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    parts, begin = [], 0
    for group, size in enumerate(splits.tolist()):
        own = slice(begin, begin + size)
        bias = params[f"bias{group}"]
        factor = 1 if scales is None else scales.flatten()[own, None]
        parts.append(rows[own] @ params[f"weight{group}"].T + factor * bias)
        begin += size
    parts.append(rows.new_zeros(rows.shape[0] - begin, parts[0].shape[1]))
    return torch.cat(parts).reshape(*x.shape[:-1], parts[0].shape[1])


def combined(x: Tensor, routing_map: Tensor) -> Tensor:
    of_slots = routing_map[1].flatten().long()
    rows = torch.where(of_slots[:, None] >= 0, x[of_slots.clamp(min=0)], 0.0)
    return rows.reshape(*routing_map.shape[1:], x.shape[1]).sum(-2)


COLLECTIVES = ("AllGather", "AllReduce", "ReduceScatter")

#: By the name of the operation: how to make it, its formula, and how to call the check.
CASES: dict[str, list[tuple[Any, ...]]] = {
    **{name: [activation(name)] for name in ACTIVATIONS},
    "SwiGLU": [activation("SwiGLU"), activation("SwiGLU", glu_interleave_size=2)],
    "ClampedSwiGLU": [
        activation("ClampedSwiGLU"),
        activation("ClampedSwiGLU", limit=0.5, alpha=1.1, glu_linear_offset=0.3),
    ],
    "SiTUGLU": [activation("SiTUGLU"), activation("SiTUGLU", beta1=0.7, beta2=1.5)],
    "ScaledSwiGLU": [activation("ScaledSwiGLU"), activation("ScaledSwiGLU", glu_interleave_size=4)],
    "ScaledSiTUGLU": [activation("ScaledSiTUGLU", beta1=0.7)],
    "ScaledClampedQGeGLU": [activation("ScaledClampedQGeGLU", limit=1.0)],
    "ScaledSReLU": [activation("ScaledSReLU")],
    "LayerNorm": [
        norm(te.ops.LayerNorm, layer_norm, eps=0.1),
        norm(te.ops.LayerNorm, layer_norm, zero_centered_gamma=True),
    ],
    "RMSNorm": [
        norm(te.ops.RMSNorm, rms_norm, eps=0.1),
        norm(te.ops.RMSNorm, rms_norm, zero_centered_gamma=True),
    ],
    "L2Normalization": [(te.ops.L2Normalization, l2_normalization)],
    "BasicLinear": [(lambda dtype: te.ops.BasicLinear(8, 6, dtype=dtype), F.linear)],
    "Bias": [(lambda dtype: te.ops.Bias(8, dtype=dtype), lambda x, bias: x + bias)],
    "ConstantScale": [(lambda: te.ops.ConstantScale(-1.5), lambda x: -1.5 * x)],
    "Dropout": [
        (lambda: te.ops.Dropout(0.5).eval(), lambda x: x),
        # Other dtypes drop other values on a GPU.
        (lambda: te.ops.Dropout(0.5), dropout, {"dtypes": [torch.float64]}),
    ],
    "Identity": [(te.ops.Identity, lambda x: x)],
    # Over a group of one; the tests in distributed/ have several ranks.
    **{name: [(getattr(te.ops, name), lambda x: x)] for name in COLLECTIVES},
    "Quantize": [(te.ops.Quantize, lambda x: x)],
    "Reshape": [(lambda: te.ops.Reshape((-1, 2, 4)), lambda x: x.reshape(-1, 2, 4))],
    "AddExtraInput": [
        (lambda: te.ops.AddExtraInput(), lambda x, extra: x + extra),
        (lambda: te.ops.AddExtraInput(in_place=True), lambda x, extra: x + extra),
    ],
    "MakeExtraOutput": [
        (lambda: te.ops.MakeExtraOutput(), lambda x: (x, x)),
        (
            lambda: te.ops.MakeExtraOutput(in_place=True),
            lambda x: (x, x),
            {"may_change_gradients": True},
        ),
    ],
    "GroupedLinear": [
        (lambda dtype: te.ops.GroupedLinear(3, 8, 6, dtype=dtype), grouped),
        (lambda dtype: te.ops.GroupedLinear(3, 8, 6, dtype=dtype, scale_bias=True), grouped, {}),
    ],
    "Dispatch": [
        (
            lambda: te.ops.Dispatch(3),
            routed,
            {"extra_shapes": [[(n, 2), (n, 2)] for n in (5, 6, 0)]},
        )
    ],
    "Combine": [(lambda: te.ops.Combine(), combined, {"shapes": [(5, 8), (6, 8), (0, 8)]})],
    "TopKRouter": [
        (
            lambda dtype: te.ops.TopKRouter(8, 4, 2, aux_loss_coeff=0.5, dtype=dtype),
            lambda x, weight: (x, *routing.router(x, weight, 2, aux_loss_coeff=0.5)),
            {"shapes": [(5, 8), (2, 3, 8)], "tolerance": 4, "may_change_dtype": True},
        )
    ],
}


@pytest.mark.parametrize("name", _C.operation_names())
def test_every_registered_operation(name: str) -> None:
    assert name in CASES, f"{name} is registered: add its formula here"
    for make, formula, *more in CASES[name]:
        options = {"shapes": SHAPES, **dict(*more)}
        assert check_operation(make, formula, **options).runs > 0
    make, formula, *more = CASES[name][0]
    mixed = [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16), torch.float16]
    if not more:
        check_operation(make, formula, SHAPES, dtypes=mixed, numeric=False, may_change_dtype=True)
        check_operation(
            make, formula, SHAPES, dtypes=[torch.float32], autocast=torch.bfloat16, max_patterns=4
        )


def test_there_are_no_formulas_of_other_operations() -> None:
    assert set(CASES) == set(_C.operation_names())


def test_a_composite() -> None:
    report = check_operation(te.ops.Linear(8, 6), F.linear, SHAPES)
    assert report.runs > 0


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("ForwardLinearBiasActivation", lambda: [te.ops.Linear(8, 16), te.ops.SwiGLU()]),
        ("ForwardLinearBiasAdd", lambda: [te.ops.Linear(8, 16), te.ops.AddExtraInput()]),
        ("BackwardLinearAdd", lambda: [te.ops.MakeExtraOutput(), te.ops.Linear(8, 4)]),
        (
            "DenseMLP",
            lambda: [
                te.ops.RMSNorm(8),
                te.ops.Linear(8, 16),
                te.ops.GELU(),
                te.ops.Linear(16, 8),
            ],
        ),
    ],
)
def test_registered_fusions_by_name(name: str, make: Any) -> None:
    """All of them are proven in C++; here the way through Python's modules is."""
    assert check_fusion(name, make, SHAPES, max_patterns=8).runs > 0
