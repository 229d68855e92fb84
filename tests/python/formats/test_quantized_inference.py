"""Quantized tensors and inference mode: what shares memory counts versions as plain tensors do."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from quantized_support import CLASSES, QUANTIZERS

import ligature as te
from ligature.common import recipe as recipes

FUNCTIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "detach": lambda w: w.detach(),
    "alias": lambda w: torch.ops.aten.alias(w),
    "data": lambda w: w.data,
    "view": lambda w: w.view(4, 8, 64),
    "flat view": lambda w: w.view(-1),
    "reshape": lambda w: w.reshape(4, 8, 64),
    "view_as": lambda w: w.view_as(w),
    "unsqueeze": lambda w: w.unsqueeze(0),
    "squeeze": lambda w: w.squeeze(),
    "flatten": lambda w: w.flatten(0, 1),
    "t": lambda w: w.t(),
    "slice": lambda w: w[2:4],
    "row": lambda w: w[3],
    "chunk": lambda w: w.chunk(2)[1],
    "unbind": lambda w: w.unbind()[0],
    "split": lambda w: w.split(8)[2],
    "narrow": lambda w: w.narrow(0, 1, 4),
    "expand": lambda w: w.expand(2, 32, 64),
    "clone": lambda w: w.clone(),
    "to": lambda w: w.to(torch.bfloat16),
    "cpu": lambda w: w.cpu(),
    "contiguous": lambda w: w.contiguous(),
    "copy": copy.copy,
    "deepcopy": lambda w: copy.deepcopy(w),
    "pickle": lambda w: pickle.loads(pickle.dumps(w)),
    "Parameter": lambda w: torch.nn.Parameter(w),
    "add": lambda w: w + 1,
}


def plain() -> torch.Tensor:
    return torch.nn.Parameter(torch.randn(32, 64))


def quantized(kind: str) -> torch.Tensor:
    return torch.nn.Parameter(QUANTIZERS[kind]()(torch.randn(32, 64)))


def values(t: torch.Tensor) -> torch.Tensor:
    t = t.detach()
    return t.dequantize() if isinstance(t, te.QuantizedTensor) else t + 0


@CLASSES
@pytest.mark.parametrize("name", FUNCTIONS)
def test_made_outside_used_inside(kind: str, name: str) -> None:
    w, like = quantized(kind), plain()
    f = FUNCTIONS[name]
    wanted = f(w)
    with torch.inference_mode():
        got, expected = f(w), f(like)
        assert got.is_inference() == expected.is_inference()
        assert type(got) is type(wanted)
        torch.testing.assert_close(values(got), values(wanted))
    # It can be used in training then, unless it has memory of its own.
    if not expected.is_inference() and got.is_floating_point():
        assert got._version == w._version


@CLASSES
@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name != "copy"])
def test_made_inside_used_outside(kind: str, name: str) -> None:
    f = FUNCTIONS[name]
    with torch.inference_mode():
        w, like = quantized(kind), plain()
        wanted = f(w)
    try:
        expected = f(like)
    except RuntimeError as error:
        with pytest.raises(RuntimeError, match=str(error)):
            f(w)
        return
    got = f(w)
    assert got.is_inference() == expected.is_inference()
    assert type(got) is type(wanted)
    torch.testing.assert_close(values(got), values(wanted))


@CLASSES
def test_writes_inside_are_seen_outside(kind: str) -> None:
    w = quantized(kind)
    saved = (w * torch.randn(32, 64, requires_grad=True)).sum()
    with torch.inference_mode():
        w.detach().fill_(2.0)
        w[3].fill_(1.0)
    assert torch.equal(w[3].detach(), torch.ones(64))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.backward()


@pytest.mark.parametrize("inside", [True, False])
def test_models(inside: bool) -> None:
    """state_dict, copies and conversions of a model in inference mode, and of one made there."""
    recipe = recipes.DelayedScaling(amax_history_len=4)

    def build() -> te.ops.Sequential:
        with te.quantized_model_init(recipe=recipe):
            return te.ops.Sequential(te.ops.Linear(32, 64), te.ops.GELU(), te.ops.Linear(64, 32))

    x = torch.randn(4, 32)
    if inside:
        model = build()
        with torch.inference_mode():
            state = model.state_dict()
            twin = copy.deepcopy(model)
            same = twin(x)
            other = build()
            other.load_state_dict(state)
            assert torch.equal(other(x), model(x))
            assert twin.half().float()[0].weight.is_inference()
    else:
        with torch.inference_mode():
            model = build()
        state = model.state_dict()
        twin = copy.deepcopy(model)
        with torch.inference_mode():
            same = twin(x)
        other = build()
        other.load_state_dict(state)
    with torch.no_grad():
        torch.testing.assert_close(same, model(x))
        torch.testing.assert_close(other(x), model(x))
