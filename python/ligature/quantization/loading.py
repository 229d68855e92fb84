"""Checkpoints of models that have operations anywhere in them, by torch's own functions.

Torch loads module after module, and ``torch.distributed.checkpoint`` fills what a fresh model has.
Neither has a place to say: this operation cannot take what comes, or, that one will remember more
than it does now. So their functions ask here first; for models without operations nothing changes.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import torch

from .checkpointing import Entries

_WRAPPER = "_checkpoint_wrapped_module."  # of activation checkpoints; entries are named without it
_STATE = "_recipe_state."


# -- torch.nn.Module.load_state_dict


def check(model: torch.nn.Module, state_dict: Mapping[str, Any], assign: bool) -> None:
    """Refuses a checkpoint that some operation of the model cannot take, before any is changed."""
    from ..ops.fusible import FusibleOperation

    rewritten: list[
        str
    ] = []  # below these prefixes a module changes entries before they are loaded
    for name, module in model.named_modules(remove_duplicate=False):
        prefix = f"{name}." if name else ""
        is_op = isinstance(module, FusibleOperation)
        as_torch = type(module)._load_from_state_dict is torch.nn.Module._load_from_state_dict
        if module._load_state_dict_pre_hooks or not (is_op or as_torch):
            rewritten.append(prefix)
        if not is_op:
            continue
        read = Entries(module, state_dict, prefix.replace(_WRAPPER, ""))
        if not any(prefix.startswith(place) for place in rewritten):
            read.check_plain(model, prefix, assign)


def _with_prefix(model: torch.nn.Module, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
    """Recipe state under the names of a wrapper: those who strip and add them know parameters."""
    inner = type(model).__name__
    name = {"DistributedDataParallel": "module", "OptimizedModule": "_orig_mod"}.get(inner)
    if name is None:
        return state_dict
    bare = [k for k in state_dict if _STATE in k and not k.startswith(f"{name}.")]
    if not bare:
        return state_dict
    renamed = type(state_dict)(state_dict)  # type: ignore[call-arg]
    for key in bare:
        renamed[f"{name}.{key}"] = renamed.pop(key)  # type: ignore[index, attr-defined]
    return renamed


def _asking_operations(load: Any) -> Any:
    @functools.wraps(load)
    def load_state_dict(
        self: torch.nn.Module,
        state_dict: Mapping[str, Any],
        strict: bool = True,
        assign: bool = False,
    ) -> Any:
        if isinstance(state_dict, Mapping):
            state_dict = _with_prefix(self, state_dict)
            check(self, state_dict, assign)
        return load(self, state_dict, strict, assign)

    return load_state_dict


# -- torch.distributed.checkpoint.load


class _Offered(threading.local):
    entries: dict[str, Any] | None = None  # those of the outermost state dict, while one is loaded


_offered = _Offered()


def _levels(
    state_dict: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[Mapping[str, Any], str]]:
    yield state_dict, prefix
    for key, value in state_dict.items():
        if isinstance(value, Mapping):
            yield from _levels(value, f"{prefix}{key}.")


def _belongs(key: str, entries: Mapping[str, Any], has_parameters: bool) -> bool:
    """Whether these are the entries of a model with the operation whose recipe state this is."""
    op = key[: key.index(_STATE)]
    if (op and not op.endswith(".")) or isinstance(entries.get(op.split(".")[0]), Mapping):
        return False
    around = op[:-1].rpartition(".")[0]
    sought = op if has_parameters else f"{around}." if around else ""
    return any(k.startswith(sought) for k, v in entries.items() if isinstance(v, torch.Tensor))


def _offer_recipe_state(state_dict: Mapping[str, Any], metadata: Any) -> None:
    """Adds the entries of recipe state that a checkpoint has and a fresh model does not yet."""
    stored = getattr(metadata, "state_dict_metadata", {})
    names = [name for name in stored if _STATE in name and hasattr(stored[name], "size")]
    for entries, prefix in list(_levels(state_dict)) if names else []:
        for name in names:
            key = name.removeprefix(prefix)
            op = name[: name.index(_STATE)]
            has_parameters = any(k.startswith(op) and _STATE not in k for k in stored)
            if not name.startswith(prefix) or key in entries:
                continue
            if not _belongs(key, entries, has_parameters):
                continue
            about = stored[name]
            assert isinstance(entries, MutableMapping)
            entries[key] = torch.empty(about.size, dtype=about.properties.dtype, device="cpu")
            if entries is state_dict and _offered.entries is not None:
                _offered.entries[key] = entries[key]


def _offering(set_up: Any) -> Any:
    @functools.wraps(set_up)
    def set_up_planner(
        self: Any, state_dict: Any, metadata: Any = None, is_coordinator: bool = False
    ) -> Any:
        _offer_recipe_state(state_dict, metadata)
        return set_up(self, state_dict, metadata, is_coordinator)

    return set_up_planner


def _giving_back(load: Any) -> Any:
    @functools.wraps(load)
    def load_all(state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        before, _offered.entries = _offered.entries, {}
        try:
            result = load(state_dict, *args, **kwargs)
            state_dict.update(_offered.entries)  # it works on a dict of its own
            return result
        finally:
            _offered.entries = before

    return load_all


# -- telling torch


def meet_distributed_checkpoints() -> None:
    """Makes ``torch.distributed.checkpoint`` ask here, once it is imported."""
    planner = sys.modules.get("torch.distributed.checkpoint.default_planner")
    package = sys.modules.get("torch.distributed.checkpoint")
    if not hasattr(planner, "DefaultLoadPlanner") or not hasattr(package, "load"):
        return
    assert planner is not None
    assert package is not None
    cls = planner.DefaultLoadPlanner
    if getattr(cls, "_offers_recipe_state", False):
        return
    cls._offers_recipe_state = True
    cls.set_up_planner = _offering(cls.set_up_planner)
    loader = sys.modules["torch.distributed.checkpoint.state_dict_loader"]
    loader.load = package.load = _giving_back(package.load)  # type: ignore[attr-defined]


def install() -> None:
    """Makes torch's functions ask here."""
    load = _asking_operations(torch.nn.Module.load_state_dict)
    torch.nn.Module.load_state_dict = load  # type: ignore[method-assign]
    meet_distributed_checkpoints()
