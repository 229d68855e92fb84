"""Checkpoints of models that have operations anywhere in them, by torch's own functions.

Torch loads module after module, and ``torch.distributed.checkpoint`` fills what a fresh model has.
Neither has a place to say: this operation cannot take what comes, or, that one will remember more
than it does now. So their functions ask here first; for models without operations nothing changes.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import torch
import torch.distributed as dist

from .checkpointing import PARTS, Entries

_INNER = {"DistributedDataParallel": "module", "OptimizedModule": "_orig_mod"}
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


def _own_keys(state_dict: Mapping[str, Any]) -> list[str]:
    """Those that only operations know: recipe state, and the parts of quantized parameters."""

    def is_part(key: str) -> bool:
        parameter, _, last = key.rpartition(".")
        return last in PARTS and f"{parameter}.format" in state_dict

    return [key for key in state_dict if _STATE in key or is_part(key)]


def _full_name(model: torch.nn.Module, key: str) -> str:
    """With the names of wrappers: torch's tools strip and add them where they know parameters."""
    names: list[str] = []
    module: Any = model
    for name in key.split("."):
        while (inner := _INNER.get(type(module).__name__)) is not None and name != inner:
            names.append(inner)
            module = module._modules.get(inner)
        names.append(name)
        module = module._modules.get(name) if isinstance(module, torch.nn.Module) else None
    return ".".join(names)


def _with_full_names(model: torch.nn.Module, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
    names = {key: _full_name(model, key) for key in _own_keys(state_dict)}
    names = {key: full for key, full in names.items() if full != key}
    if not names:
        return state_dict
    renamed = type(state_dict)(state_dict)  # type: ignore[call-arg]
    for key, full in names.items():
        renamed[full] = renamed.pop(key)  # type: ignore[index, attr-defined]
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
            state_dict = _with_full_names(self, _handed_back(self, state_dict))
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
        planner = kwargs.get("planner")  # one of a user's need not be derived from torch's
        if planner is not None:
            set_up = _offering(type(planner).set_up_planner)
            planner.set_up_planner = functools.partial(set_up, planner)
        try:
            result = load(state_dict, *args, **kwargs)
            state_dict.update(_offered.entries)  # it works on a dict of its own
            return result
        finally:
            _offered.entries = before
            if planner is not None:
                del planner.set_up_planner

    return load_all


# -- torch.distributed.checkpoint.state_dict

_HELD = "<held back>"  # where torch looks for a parameter that is there in parts


class _Held(threading.local):
    model: torch.nn.Module | None = None
    entries: dict[str, Any] = {}  # noqa: RUF012


_held = _Held()


def _from_rank_0(entries: Mapping[str, Any]) -> dict[str, Any]:
    names = [list(entries)]
    dist.broadcast_object_list(names, src=0)
    out = {}
    for name in names[0]:
        value = entries.get(name)
        one = [value.cpu() if isinstance(value, torch.Tensor) else value]
        dist.broadcast_object_list(one, src=0)
        out[name] = one[0]
    return out


def _holding_back(load: Any) -> Any:
    """What only operations know goes past a function that deals in parameters."""

    @functools.wraps(load)
    def load_model_state(model: torch.nn.Module, state_dict: Any, info: Any) -> Any:
        from ..ops.fusible import FusibleOperation

        keys = _own_keys(state_dict)
        broadcast = info.broadcast_from_rank0 and any(
            isinstance(module, FusibleOperation) for module in model.modules()
        )
        if not keys and not broadcast:
            return load(model, state_dict, info)
        entries = {key: state_dict[key] for key in keys}
        rest = {key: value for key, value in state_dict.items() if key not in entries}
        rest |= {key[: -len(".format")]: _HELD for key in keys if key.endswith(".format")}
        before = _held.model, _held.entries
        _held.model, _held.entries = model, _from_rank_0(entries) if broadcast else entries
        try:
            return load(model, rest or {_HELD: _HELD}, info)  # nothing at all would not be loaded
        finally:
            _held.model, _held.entries = before

    return load_model_state


def _handed_back(model: torch.nn.Module, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
    if _held.model is not model:
        return state_dict
    rest = {k: v for k, v in state_dict.items() if not (isinstance(v, str) and v == _HELD)}
    return rest | _held.entries


# -- telling torch


def install() -> None:
    """Makes torch's functions ask here."""
    module = torch.nn.Module
    module.load_state_dict = _asking_operations(module.load_state_dict)  # type: ignore[method-assign]
    if not dist.is_available():
        return
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint import default_planner, state_dict, state_dict_loader

    planner = default_planner.DefaultLoadPlanner
    planner.set_up_planner = _offering(planner.set_up_planner)  # type: ignore[method-assign]
    load = _giving_back(state_dict_loader.load)
    state_dict_loader.load = checkpoint.load = load  # type: ignore[attr-defined]
    state_dict._load_model_state_dict = _holding_back(state_dict._load_model_state_dict)
