"""What stands in a decoder layer in the place of its MLP and of the norm in front of it.

Checkpoints keep the original's names: the two halves of the joined weight and the norm are renamed
on the way out and on the way in.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, cast

import torch

from ... import _C
from ...ops import Linear, RMSNorm, Sequential

HALVES = ("gate_proj", "up_proj")
JOINED = "gate_up_proj"


class GatedMLP(Sequential):
    """A norm (or none), ``gate_up_proj``, a gated activation and ``down_proj`` in one pipeline.

    Where the original has ``gate_proj`` and ``up_proj``, the rows of ``gate_up_proj`` are those of
    ``gate_proj``, then those of ``up_proj``, and checkpoints hold the two. Under those names there
    are views of the rows too.

    Args:
        norm: the norm in front, or None.
        gate_up_proj, activation, down_proj: the operations.
        halves: whether the original has two layers for ``gate_up_proj``.
        recompute: as ``Sequential``'s.
    """

    def __init__(
        self,
        norm: RMSNorm | None,
        gate_up_proj: Linear,
        activation: torch.nn.Module,
        down_proj: Linear,
        *,
        halves: bool,
        recompute: str = "none",
    ) -> None:
        ops: OrderedDict[str, torch.nn.Module] = OrderedDict()
        if norm is not None:
            ops["norm"] = norm
        ops[JOINED] = gate_up_proj
        ops["act"] = activation
        ops["down_proj"] = down_proj
        super().__init__(ops, recompute=recompute)
        self.halves = halves
        self.register_state_dict_post_hook(_split_halves)

    @property
    def gate_proj(self) -> Half:
        """The rows of ``gate_up_proj`` that are gated."""
        return self._half(0)

    @property
    def up_proj(self) -> Half:
        """The other rows of ``gate_up_proj``."""
        return self._half(1)

    def _half(self, place: int) -> Half:
        joined = self._modules.get(JOINED)
        if not self.halves or not isinstance(joined, Linear):
            raise AttributeError(f"{type(self).__name__} has no {HALVES[place]}")
        return Half(joined, place)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        joined = self._modules.get(JOINED)
        if self.halves and joined is not None:
            for name, parameter in joined._parameters.items():
                if parameter is not None:
                    keys = [f"{prefix}{half}.{name}" for half in HALVES]
                    key = f"{prefix}{JOINED}.{name}"
                    _join_halves(state_dict, keys, key, parameter, missing_keys, error_msgs)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )


class Half(torch.nn.Module):
    """One of the linear layers that were joined: its parameters are views of the rows.

    No module of the model, which has the joined one; a fresh object on every look.
    """

    def __init__(self, joined: Linear, place: int) -> None:
        super().__init__()
        self._of = (joined,)  # no submodule of this one
        self.place = place

    @property
    def _joined(self) -> Linear:
        return self._of[0]

    @property
    def weight(self) -> torch.Tensor:
        """Rows of the joined weight."""
        return self._joined.weight.chunk(2)[self.place]

    @property
    def bias(self) -> torch.Tensor | None:
        """A part of the joined bias."""
        bias = self._joined.bias
        return None if bias is None else bias.chunk(2)[self.place]

    @property
    def in_features(self) -> int:
        """Size of the input's last dimension."""
        return self._joined.in_features

    @property
    def out_features(self) -> int:
        """Size of the output's last dimension."""
        return self._joined.out_features // 2

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """What the layer alone computes."""
        return torch.nn.functional.linear(input, self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, a half"


def _part(value: torch.Tensor, place: int) -> torch.Tensor:
    """A half in the same memory. With a storage of its own, since files hold whole storages; a
    parameter itself (``keep_vars``) is a view that gradients flow through."""
    if isinstance(value, torch.nn.Parameter):
        return value.chunk(2)[place]
    rows = value.shape[0] // 2
    return _C.rows_alone(value, place * rows, rows)


def _split_halves(
    module: GatedMLP, state_dict: OrderedDict[str, Any], prefix: str, metadata: Any
) -> None:
    joined = module._modules.get(JOINED)
    if not module.halves or joined is None:
        return
    own = {key: state_dict.pop(key) for key in list(state_dict) if key.startswith(prefix)}
    values = {name: own.pop(f"{prefix}{JOINED}.{name}", None) for name in joined._parameters}
    for place, half in enumerate(HALVES):
        for name, value in values.items():
            if value is not None:
                state_dict[f"{prefix}{half}.{name}"] = _part(value, place)
    state_dict.update(own)


def _join_halves(
    state_dict: dict[str, Any],
    keys: list[str],
    joined: str,
    parameter: torch.nn.Parameter,
    missing_keys: list[str],
    error_msgs: list[str],
) -> None:
    """Puts one entry in the place of two. A half that is missing stays as it is in the model.

    A joined entry that is the model's own parameter says nothing, which is how
    ``torch.distributed.checkpoint`` fills up what it loads."""
    if state_dict.get(joined) is parameter and any(key in state_dict for key in keys):
        del state_dict[joined]
    if joined in state_dict or any(k.startswith(f"{joined}.") for k in state_dict):
        return
    own = parameter.detach().chunk(2)
    given = [state_dict.pop(key, None) for key in keys]
    missing_keys += [key for key, value in zip(keys, given, strict=True) if value is None]
    fits = [_fits(*each, error_msgs) for each in zip(keys, given, own, strict=True)]
    if not all(fits) or all(value is None for value in given):
        state_dict[joined] = parameter
    elif any(value is None for value in given):
        pairs = zip(given, own, strict=True)
        state_dict[joined] = torch.cat([h if v is None else v.to(h) for v, h in pairs])
    else:
        state_dict[joined] = torch.cat([value.detach() for value in given])


def _fits(key: str, value: Any, current: torch.Tensor, error_msgs: list[str]) -> bool:
    if value is None or value.shape == current.shape:
        return True
    error_msgs.append(
        f"size mismatch for {key}: copying a param with shape {value.shape} from checkpoint, "
        f"the shape in current model is {current.shape}."
    )
    return False


class NormInMLP(torch.nn.Module):
    """Gives its input back: the pipeline of the MLP that comes next begins with this norm.

    Args:
        mlp: the name of that MLP in the same layer, whose ``norm`` it stands for.
        module: the MLP.
    """

    def __init__(self, mlp: str, module: GatedMLP) -> None:
        super().__init__()
        self.mlp = mlp
        self._module = (module,)  # no submodule of this one

    @property
    def weight(self) -> torch.Tensor:
        """That of the norm in the MLP."""
        return cast(torch.Tensor, getattr(self._module[0].norm, "weight"))  # noqa: B009

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Its input."""
        return hidden_states

    def extra_repr(self) -> str:
        return f"computed in {self.mlp}"


def keep_norm_names(layer: torch.nn.Module) -> None:
    """Makes a layer's checkpoints hold the norm under its own name instead of the MLP's."""
    layer.register_state_dict_post_hook(_norm_out_of_mlp)
    layer.register_load_state_dict_pre_hook(_norm_into_mlp)


def stand_ins(layer: torch.nn.Module) -> list[tuple[str, str, RMSNorm]]:
    """Name of the norm, name of the MLP, and the norm in it."""
    found = []
    for name, child in layer._modules.items():
        if isinstance(child, NormInMLP):
            mlp = layer._modules.get(child.mlp)
            norm = mlp._modules.get("norm") if isinstance(mlp, GatedMLP) else None
            if isinstance(norm, RMSNorm):
                found.append((name, child.mlp, norm))
    return found


def _norm_out_of_mlp(
    layer: torch.nn.Module, state_dict: OrderedDict[str, Any], prefix: str, metadata: Any
) -> None:
    for name, mlp, norm in stand_ins(layer):
        children = list(layer._modules)
        later = tuple(f"{prefix}{n}." for n in children[children.index(name) + 1 :])
        for own in norm._parameters:
            value = state_dict.pop(f"{prefix}{mlp}.norm.{own}", None)
            if value is not None:
                state_dict[f"{prefix}{name}.{own}"] = value
        for key in [key for key in state_dict if key.startswith(later)] if later else []:
            state_dict.move_to_end(key)


def _norm_into_mlp(
    layer: torch.nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    metadata: Any,
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    for name, mlp, norm in stand_ins(layer):
        for own, parameter in norm._parameters.items():
            key, inner = f"{prefix}{name}.{own}", f"{prefix}{mlp}.norm.{own}"
            if state_dict.get(inner) is parameter and key in state_dict:
                del state_dict[inner]
            if parameter is None or inner in state_dict:
                continue
            value = state_dict.pop(key, None)
            if value is None:
                missing_keys.append(key)
            elif not _fits(key, value, parameter, error_msgs):
                value = None
            state_dict[inner] = parameter if value is None else value
