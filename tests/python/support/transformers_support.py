"""Small decoders of the transformers package, and a model's gradients in the original's names."""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
pytest.importorskip("transformers", reason="the integration needs transformers")

import transformers

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def make(kind: str = "Llama", **options: Any) -> Any:
    """A small model with random weights, of norms too."""
    config = getattr(transformers, f"{kind}Config")(**{**SMALL, **options})
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def pair(replace: Any, kind: str = "Llama", **options: Any) -> tuple[Any, Any]:
    """A model, and a copy of it that went through ``replace``."""
    model = make(kind, **options)
    changed = copy.deepcopy(model)
    replace(changed)
    return model, changed


def tokens(rows: int = 2, length: int = 12) -> torch.Tensor:
    return torch.randint(3, SMALL["vocab_size"], (rows, length))


def loss_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
    return loss


def gradients(model: Any, norm: str = "post_attention_layernorm") -> dict[str, torch.Tensor]:
    """By the names that the original has; the gradients of joined weights are cut in halves."""
    halves = type(model).__name__ != "Phi3ForCausalLM"  # which has them joined by itself
    found: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        if halves and "mlp.gate_up_proj." in name:
            size = len(parameter) // 2
            for half, grad in (("gate", parameter.grad[:size]), ("up", parameter.grad[size:])):
                found[name.replace("gate_up_proj", f"{half}_proj")] = grad
        else:
            found[name.replace("mlp.norm.", f"{norm}.")] = parameter.grad
    return found


def backward(model: Any, ids: torch.Tensor, norm: str = "post_attention_layernorm") -> Any:
    """The loss and the gradients of one step, which are taken away from the model."""
    loss = loss_of(model, ids)
    loss.backward()
    found = gradients(model, norm)
    model.zero_grad()
    return loss.detach(), found


def error(value: torch.Tensor, reference: torch.Tensor) -> float:
    """How far it is away, relative to the size of the reference."""
    reference = reference.double()
    return float((value.double() - reference).norm() / reference.norm().clamp_min(1e-12))
