"""The state of an optimizer over a model before it was replaced, for one after it, and back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from .modules import HALVES, JOINED, GatedMLP, stand_ins

__all__ = ["convert_optimizer_state"]

#: What torch's optimizers keep in the shape of the parameter.
_OF_THE_SHAPE = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "sum")


def convert_optimizer_state(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    state_dict: dict[str, Any],
    *,
    to: str = "replaced",
) -> dict[str, Any]:
    """The ``state_dict`` of an optimizer, for the other form of the model.

    ``replace`` joins ``gate_proj`` and ``up_proj`` and moves norms, so an optimizer of the original
    has other parameters in another order. What it kept of two halves is joined, exactly; what
    cannot be joined (the factors of Adafactor) is refused. ::

        replace(model)
        optimizer = torch.optim.AdamW(model.parameters())
        saved = torch.load("optimizer.pt")  # of the original
        optimizer.load_state_dict(convert_optimizer_state(model, optimizer, saved))

    Args:
        model: the replaced model.
        optimizer: over the replaced model. Its groups are those of the original's, made by the same
            rule: each has the same parameters, in the order of ``named_parameters``.
        state_dict: of the original's optimizer; with ``to="original"``, of ``optimizer``. Its
            entries may be numbered, as torch's are, or named, as those of
            ``torch.distributed.checkpoint``.
        to: ``"replaced"`` or ``"original"``.
    """
    if to not in ("replaced", "original"):
        raise ValueError(
            f"[convert_optimizer_state] to must be 'replaced' or 'original', got {to!r}"
        )
    for name in ("state", "param_groups"):
        if not isinstance(state_dict, dict) or name not in state_dict:
            raise TypeError(
                "[convert_optimizer_state] state_dict must be that of an optimizer, with 'state' "
                f"and 'param_groups', got {type(state_dict).__name__}"
            )
    groups = _groups(model, optimizer)
    given = state_dict["param_groups"]
    if len(given) != len(groups):
        raise ValueError(
            f"[convert_optimizer_state] state_dict must have {len(groups)} param_groups, as the "
            f"optimizer has, got {len(given)}"
        )
    out: dict[str, Any] = {k: v for k, v in state_dict.items() if k != "state"}
    out["state"], out["param_groups"] = {}, []
    number = 0
    for index, (group, saved) in enumerate(zip(groups, given, strict=True)):
        known = _keys(group, saved, index, to)
        names: list[str] = []
        keys: list[Any] = []
        for target, sources in _targets(group, to):
            state = _state(target, sources, known, state_dict["state"])
            named = bool(saved["params"]) and isinstance(saved["params"][0], str)
            key = target.name if named else number
            number += 1
            if state is not None:
                out["state"][key] = state
            keys.append(key)
            names.append(target.name)
        made = {**saved, "params": keys}
        if "param_names" in saved:
            made["param_names"] = names
        out["param_groups"].append(made)
    return out


@dataclass(frozen=True)
class _Entry:
    """A parameter of one of the two models."""

    name: str
    shape: tuple[int, ...]
    place: int | None = None  #: of the original: which half of the parameter it became


@dataclass(frozen=True)
class _Pair:
    """A parameter of the replaced model, and what of the original it is."""

    replaced: _Entry
    original: tuple[_Entry, ...]


@dataclass(frozen=True)
class _Group:
    """In the order of each model's ``named_parameters``."""

    replaced: list[_Pair]
    original: list[tuple[_Entry, _Pair]]


def _origins(model: torch.nn.Module) -> dict[str, tuple[str, int | None]]:
    """By each parameter's name in the original: its name here, and which half of it."""
    joined: dict[str, str] = {}
    moved: dict[str, str] = {}
    for prefix, module in model.named_modules():
        start = f"{prefix}." if prefix else ""
        for name, mlp, norm in stand_ins(module):
            for own in norm._parameters:
                moved[f"{start}{mlp}.norm.{own}"] = f"{start}{name}.{own}"
        if isinstance(module, GatedMLP) and module.halves:
            joined[f"{start}{JOINED}"] = start
    here: dict[str, tuple[str, int | None]] = {}
    for whole, _ in model.named_parameters(remove_duplicate=False):
        linear, _, own = whole.rpartition(".")
        if linear in joined:
            for place, half in enumerate(HALVES):
                here[f"{joined[linear]}{half}.{own}"] = (whole, place)
        else:
            here[moved.get(whole, whole)] = (whole, None)
    # state_dict has the original's order.
    return {name: here[name] for name in [*model.state_dict(), *here] if name in here}


def _groups(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[_Group]:
    parameters = dict(model.named_parameters(remove_duplicate=False))
    names = {id(p): n for n, p in reversed(list(model.named_parameters()))}
    group_of = {id(p): i for i, g in enumerate(optimizer.param_groups) for p in g["params"]}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise ValueError(
                    "[convert_optimizer_state] optimizer must be over the replaced model, got one "
                    f"with a parameter of shape {tuple(parameter.shape)} that is not in it"
                )
    parts: dict[int, list[_Entry]] = {}
    order: list[tuple[int, _Entry]] = []
    for name, (here, place) in _origins(model).items():
        parameter = parameters[here]
        if id(parameter) not in group_of:
            continue
        known = parts.setdefault(id(parameter), [])
        if any(entry.place == place for entry in known):
            continue  # one that is tied
        shape = tuple(parameter.shape)
        if place is not None:
            shape = (shape[0] // 2, *shape[1:])
        entry = _Entry(name, shape, place)
        known.append(entry)
        order.append((id(parameter), entry))
    pairs = {
        key: _Pair(_Entry(names[key], tuple(parameters[names[key]].shape)), tuple(entries))
        for key, entries in parts.items()
    }
    out = []
    for index, group in enumerate(optimizer.param_groups):
        original = [(e, pairs[key]) for key, e in order if group_of[key] == index]
        out.append(_Group([pairs[id(p)] for p in group["params"]], original))
    return out


def _keys(group: _Group, saved: dict[str, Any], index: int, to: str) -> dict[str, Any]:
    """Under which key the given state dict has each parameter of the model that it is of."""
    entries = (
        [entry for entry, _ in group.original]
        if to == "replaced"
        else [pair.replaced for pair in group.replaced]
    )
    keys = saved["params"]
    names = saved.get("param_names") or [key for key in keys if isinstance(key, str)]
    if names:
        found = dict(zip(names, keys, strict=True))
        missing = [entry.name for entry in entries if entry.name not in found]
        if missing:
            raise ValueError(
                f"[convert_optimizer_state] group {index} of state_dict must have {missing[0]}, "
                f"as the optimizer's has, got {', '.join(names[:3])}, ..."
            )
        return found
    if len(keys) != len(entries):
        raise ValueError(
            f"[convert_optimizer_state] group {index} of state_dict must have {len(entries)} "
            f"parameters ({entries[0].name if entries else 'none'}, ...), as the optimizer's "
            f"group stands for, got {len(keys)}"
        )
    return {entry.name: key for entry, key in zip(entries, keys, strict=True)}


def _targets(group: _Group, to: str) -> Iterator[tuple[_Entry, tuple[_Entry, ...]]]:
    """What is made, in order, and of what."""
    if to == "replaced":
        for pair in group.replaced:
            yield pair.replaced, pair.original
    else:
        for entry, pair in group.original:
            yield entry, (pair.replaced,)


def _state(
    target: _Entry, sources: tuple[_Entry, ...], keys: dict[str, Any], states: dict[Any, Any]
) -> dict[str, Any] | None:
    given = [states.get(keys[source.name]) for source in sources]
    if all(state is None for state in given):
        return None
    present = [state for state in given if state is not None]
    if len(present) != len(given) or any(set(s) != set(present[0]) for s in present):
        raise ValueError(
            "[convert_optimizer_state] state_dict must have the same of "
            f"{' and '.join(source.name for source in sources)}, got different entries"
        )
    return {
        name: _value(name, target, sources, [state[name] for state in present])
        for name in present[0]
    }


def _value(name: str, target: _Entry, sources: tuple[_Entry, ...], values: list[Any]) -> Any:
    first = values[0]
    tensors = all(isinstance(value, torch.Tensor) for value in values)
    whole = tensors and all(tuple(v.shape) == s.shape for v, s in zip(values, sources, strict=True))
    if tensors and name in _OF_THE_SHAPE and not whole:
        raise ValueError(
            f"[convert_optimizer_state] {name} of {sources[0].name} must be "
            f"{list(sources[0].shape)} like the parameter, got {list(first.shape)}"
        )
    if whole and len(sources) == 2:
        return torch.cat(values)
    if whole and target.place is not None:
        return first.chunk(2)[target.place].clone()
    same = len(sources) == 1 and target.place is None
    if same or _are_equal(values):
        return first.clone() if isinstance(first, torch.Tensor) else first
    raise ValueError(
        f"[convert_optimizer_state] '{name}' of {' and '.join(s.name for s in sources)} must be of "
        f"the parameter's shape, or one number that both share, to become that of {target.name}"
    )


def _are_equal(values: list[Any]) -> bool:
    first, *rest = values
    if isinstance(first, torch.Tensor):
        if first.numel() != 1:
            return False
        return all(isinstance(v, torch.Tensor) and torch.equal(v, first) for v in rest)
    return all(bool(value == first) for value in rest)
