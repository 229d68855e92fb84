"""Small mixtures of experts of the transformers package, with random weights."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers_support import error, loss_of, make

SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
MIXTURES: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen3Moe": {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24},
    "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "DeepseekV3": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 24,
        "q_lora_rank": None,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 16,
        "head_dim": 8,
    },
}


def make_mixture(kind: str, **options: Any) -> Any:
    """One whose experts transformers computes one after the other."""
    model = make(kind, **{**SMALL, **MIXTURES[kind], **options})
    model.set_experts_implementation("eager")
    return model


def mixture_pair(change: Any, kind: str, **options: Any) -> tuple[Any, Any]:
    """A mixture, and a copy of it that was changed."""
    model = make_mixture(kind, **options)
    changed = copy.deepcopy(model)
    change(changed)
    return model, changed


def experts_of(model: Any) -> list[Any]:
    """The modules of experts."""
    return [module for module in model.modules() if hasattr(module, "is_transposed")]


def original_gradients(model: Any) -> dict[str, torch.Tensor]:
    """Of a replaced model too, by the original's names: a state dict holds them as parameters."""
    wanted = copy.deepcopy(model)
    with torch.no_grad():
        for ours, copied in zip(model.parameters(), wanted.parameters(), strict=True):
            copied.zero_() if ours.grad is None else copied.copy_(ours.grad)
    named = dict(wanted.named_parameters())
    return {name: t for name, t in wanted.state_dict().items() if named or t.is_floating_point()}


def assert_same_step(ours: Any, reference: Any, ids: torch.Tensor, most: float) -> None:
    """Loss, logits and every gradient of one step."""
    for model in (ours, reference):
        model.zero_grad()
    assert error(ours(input_ids=ids).logits, reference(input_ids=ids).logits) < most
    losses = [loss_of(model, ids) for model in (ours, reference)]
    for loss in losses:
        loss.backward()
    assert abs(losses[0].item() - losses[1].item()) < most * abs(losses[1].item())
    found, wanted = original_gradients(ours), original_gradients(reference)
    assert list(found) == list(wanted)
    for name, gradient in found.items():
        assert error(gradient, wanted[name]) < 5 * most, name
