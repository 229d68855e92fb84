"""Where torch keeps the hooks of a module."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.modules import module as torch_module

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
GLOBAL_HOOKS: list[dict[Any, Any]] = [getattr(torch_module, f"_global{name}") for name in _HOOKS]


#: What a container looks at when it groups operations, and cannot see replaced.
REPLACEABLE = frozenset({"forward", *_HOOKS})
#: Grows with each replacement: containers watch its length, as they do those of dicts of hooks.
REPLACED: dict[int, None] = {}


def replaced() -> None:
    """An operation has another ``forward`` than before, or another dict of hooks."""
    REPLACED[len(REPLACED)] = None


def hook_dicts(module: torch.nn.Module) -> list[dict[Any, Any]]:
    """The dicts in which a module keeps its hooks."""
    return [getattr(module, name) for name in _HOOKS]


def has_hooks(module: torch.nn.Module) -> bool:
    """Whether the module has hooks of its own."""
    return any(map(len, hook_dicts(module)))
