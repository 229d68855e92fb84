"""Modules of experts in every layout that transformers knows, alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers_support import error

import ligature as te
import ligature.integrations.transformers  # which tells transformers of the implementation
from ligature.integrations.transformers.gates import read_gate

use_experts_implementation = pytest.importorskip(
    "transformers.integrations.moe"
).use_experts_implementation
TOGETHER = ("Dispatch", "GroupedLinear", "ScaledSwiGLU", "GroupedLinear", "Combine")


class Config:
    _experts_implementation = "eager"
    hidden, inner, experts = 12, 10, 5

    def __init__(self, act: Any = None) -> None:
        self.act = act or nn.SiLU()


class _Experts(nn.Module):
    """What transformers' modules have in common; their own forward computes the reference."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.num_experts = config.experts
        self.act_fn = config.act
        self.post_expert_norm = nn.LayerNorm(config.hidden)
        traits = self.traits
        rows = config.inner * (2 if traits.get("has_gate", True) else 1)
        first = "gate_up_proj" if traits.get("has_gate", True) else "up_proj"
        for name, sizes in (
            (first, (rows, config.hidden)),
            ("down_proj", (config.hidden, config.inner)),
        ):
            shape = sizes[::-1] if traits.get("is_transposed") else sizes
            setattr(self, name, nn.Parameter(0.3 * torch.randn(config.experts, *shape)))
            if traits.get("has_bias"):
                bias = nn.Parameter(0.3 * torch.randn(config.experts, sizes[0]))
                setattr(self, f"{name}_bias", bias)

    def forward(self, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        first = "gate_up_proj" if self.has_gate else "up_proj"
        for t, k in torch.cartesian_prod(*map(torch.arange, index.shape)).tolist():
            e = int(index[t, k])
            if not 0 <= e < self.num_experts:
                continue
            y = x[t]
            for name in (first, "down_proj"):
                w = getattr(self, name)[e]
                y = y @ (w if self.is_transposed else w.T)
                y = y + getattr(self, f"{name}_bias")[e] if self.has_bias else y
                if name == first:
                    y = self._apply_gate(y) if self.has_gate else self.act_fn(y)
            y = self.post_expert_norm(y) if self.has_post_expert_norm else y
            out = out.index_add(0, torch.tensor([t]), (y * weights[t, k])[None])
        return out


def experts_class(**traits: bool) -> Any:
    made = type("SomeExperts", (_Experts,), {"traits": traits})
    return use_experts_implementation(**traits)(made)


class Squared(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.relu(x).square()


PARTS = ("Dispatch", "GroupedLinear", "SomeExperts._apply_gate", "GroupedLinear", "Combine")
LAYOUTS = [
    ({}, nn.SiLU(), TOGETHER),
    ({"is_transposed": True}, nn.SiLU(), TOGETHER),
    ({"has_bias": True}, nn.SiLU(), TOGETHER),
    ({"has_gate": False}, Squared(), (*TOGETHER[:2], "ScaledSReLU", *TOGETHER[3:])),
    ({"has_gate": False, "has_bias": True}, nn.SiLU(), (*TOGETHER[:2], "SiLU", *TOGETHER[3:])),
    (
        {"has_bias": True},
        nn.GELU(approximate="tanh"),
        (*TOGETHER[:2], "GEGLU", *TOGETHER[3:]),
    ),
    ({"has_bias": True, "is_transposed": True}, nn.Tanh(), PARTS),
    ({"has_gate": False}, nn.Tanh(), (*PARTS[:2], "SomeExperts.act_fn", *PARTS[3:])),
    (
        {"has_post_expert_norm": True},
        nn.SiLU(),
        (*TOGETHER[:2], "SwiGLU", "GroupedLinear", "post_expert_norm", "Combine"),
    ),
    ({"has_post_expert_norm": True}, nn.Tanh(), (*PARTS[:4], "post_expert_norm", "Combine")),
]


@pytest.mark.parametrize(
    ("traits", "act", "operations"),
    LAYOUTS,
    ids=[" ".join([*traits, type(act).__name__]) for traits, act, _ in LAYOUTS],
)
def test_every_layout(traits: dict[str, bool], act: nn.Module, operations: Any) -> None:
    config = Config(act)
    module = experts_class(**traits)(config).to(torch.get_default_device())
    reference = copy.deepcopy(module).double()
    x = torch.randn(7, Config.hidden, requires_grad=True)
    weights = torch.rand(7, 3, requires_grad=True)
    # Some are sent to experts that are not here; nobody is sent to expert 1.
    index = torch.tensor(
        [[0, 2, 3], [4, 3, 5], [5, 6, 7], [2, 0, 4], [9, 0, 2], [3, 4, 0], [0, 2, 9]]
    )
    wide = [t.detach().double().requires_grad_() for t in (x, weights)]
    wanted = reference(wide[0], index, wide[1])
    config._experts_implementation = "ligature"
    y = module(x, index, weights)
    assert module._ligature.operations == operations
    dy = torch.randn_like(y)
    y.backward(dy)
    wanted.backward(dy.double())
    assert error(y, wanted) < 1e-6
    for ours, theirs in zip((x, weights), wide, strict=True):
        assert error(ours.grad, theirs.grad) < 1e-6
    for (name, ours), theirs in zip(module.named_parameters(), reference.parameters(), strict=True):
        if theirs.grad is not None:
            assert error(ours.grad, theirs.grad) < 2e-6, name
    assert not module.down_proj.grad[1].any()


def test_compiled_before_the_first_call() -> None:
    config = Config()
    module = experts_class()(config).to(torch.get_default_device())
    inputs = torch.randn(4, Config.hidden), torch.randint(5, (4, 2)), torch.rand(4, 2)
    wanted = module(*inputs)
    config._experts_implementation = "ligature"
    torch._dynamo.reset()
    compiled = torch.compile(module, backend="eager")
    for _ in range(2):
        torch.testing.assert_close(compiled(*inputs), wanted)


def test_no_tokens() -> None:
    config = Config()
    module = experts_class()(config).to(torch.get_default_device())
    config._experts_implementation = "ligature"
    x = torch.randn(0, Config.hidden, requires_grad=True)
    y = module(x, torch.empty(0, 2, dtype=torch.int64), torch.empty(0, 2))
    assert y.shape == x.shape
    y.sum().backward()
    assert not module.gate_up_proj.grad.any()


@pytest.mark.parametrize(
    ("gate", "wanted"),
    [
        (
            lambda a, b: (
                a.clamp(max=7) * torch.sigmoid(1.702 * a.clamp(max=7)) * (b.clamp(-7, 7) + 1)
            ),
            7,
        ),
        (lambda a, b: nn.functional.silu(a.clamp(max=2.5)) * b.clamp(-2.5, 2.5), 2.5),
        (lambda a, b: nn.functional.silu(a).clamp(max=2) * b.clamp(-2, 2), None),
        (lambda a, b: nn.functional.silu(a) * (b + 1), None),
        (lambda a, b: a * b, None),
        (lambda a, b: a + b, None),
    ],
)
@pytest.mark.parametrize("interleaved", [False, True])
def test_a_gate_is_read(gate: Any, wanted: float | None, interleaved: bool) -> None:
    def apply(self: Any, z: torch.Tensor) -> torch.Tensor:
        return gate(z[..., ::2], z[..., 1::2]) if interleaved else gate(*z.chunk(2, -1))

    made = experts_class(is_concatenated=not interleaved)
    made._apply_gate = apply
    found = read_gate(made(Config()))
    if wanted is None:
        assert found.kind is None
        assert "no operation computes the same" in found.note
        return
    op = found.make(True)
    assert type(op) is te.ops.ScaledClampedQGeGLU
    assert (op.limit, op.glu_interleave_size) == (wanted, 1 if interleaved else None)
    z = 5 * torch.randn(4, 20)
    ours = op(z, torch.ones(4))
    torch.testing.assert_close(ours, apply(None, z), rtol=1e-5, atol=1e-5)


def test_a_shallow_copy_with_other_parameters() -> None:
    config = Config()
    config._experts_implementation = "ligature"
    module = experts_class()(config).to(torch.get_default_device())
    inputs = torch.randn(4, Config.hidden), torch.randint(5, (4, 2)), torch.rand(4, 2)
    y = module(*inputs)
    other = copy.copy(module)
    other._parameters = {
        name: nn.Parameter(2 * p.detach()) for name, p in module._parameters.items()
    }
    config._experts_implementation = "eager"
    wanted = other(*inputs)
    config._experts_implementation = "ligature"
    torch.testing.assert_close(other(*inputs), wanted)
    torch.testing.assert_close(module(*inputs), y, rtol=0, atol=0)
