"""Recipe state and quantized weights in a ``state_dict``: plain tensors, versioned, no pickle.

Below an operation's prefix there are, where there is something to keep:

``_recipe_state.version``            int64, 1
``_recipe_state.recipe``             the fields of the ``DelayedScaling``, as JSON in uint8
``_recipe_state.forward.scale``      float32 [n], one per quantizer; likewise ``backward``
``_recipe_state.forward.amax``       float32 [n], since the last update
``_recipe_state.forward.amax_history``  float32 [amax_history_len, n], newest first

and for a quantized parameter ``weight`` instead of ``weight`` itself:

``weight.format``                    version, format, shape and dtype, as JSON in uint8
``weight.rowwise_data``, ``..._scale``, ``..._amax`` and the same with ``columnwise``

What is read is checked completely, in C++ where it is the same there, before anything of a model is
changed.
"""

from __future__ import annotations

import json
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from .. import _C
from .dispatch import DTYPES
from .recipe import DelayedScaling
from .recipe_text import delayed_from_description

if TYPE_CHECKING:
    from ..ops.fusible import FusibleOperation
    from ..ops.op import BasicOperation

VERSION = 1
_STATE = "_recipe_state."
_SIDES = [
    f"{side}_{what}" for side in ("rowwise", "columnwise") for what in ("data", "scale", "amax")
]
PARTS = (*_SIDES, "format")
_MODES = ("forward", "backward")
_MOST_BYTES = 1 << 16


def _error(key: str, wanted: str, got: Any) -> RuntimeError:
    return RuntimeError(f"checkpoint entry '{key}' must be {wanted}, got {got}")


def _shape(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _tensor(entries: Mapping[str, Any], key: str) -> torch.Tensor:
    value = entries.get(key)
    if value is None:
        raise RuntimeError(f"checkpoint entry '{key}' is missing, though others like it are there")
    if not isinstance(value, torch.Tensor):
        raise _error(key, "a tensor", type(value).__name__)
    _C.check_readable(value, key)
    return value


def _from_bytes(entries: Mapping[str, Any], key: str) -> dict[str, Any]:
    tensor = _tensor(entries, key)
    if tensor.dtype != torch.uint8 or tensor.dim() != 1 or tensor.numel() > _MOST_BYTES:
        raise _error(key, f"uint8[n] with n up to {_MOST_BYTES}", _shape(tensor))
    try:
        value = json.loads(bytes(tensor.cpu().tolist()).decode())
    except (UnicodeDecodeError, ValueError, RecursionError):
        raise _error(key, "JSON in UTF-8", "something else") from None
    if not isinstance(value, dict):
        raise _error(key, "an object in JSON", type(value).__name__)
    return value


def _check_version(key: str, version: Any) -> None:
    if version != VERSION:
        raise _error(key, f"of version {VERSION}, which this version of Ligature reads", version)


def _finder(entries: Mapping[str, Any]) -> Callable[[str], torch.Tensor | None]:
    def find(key: str) -> torch.Tensor | None:
        value = entries.get(key)
        if value is not None and not isinstance(value, torch.Tensor):
            raise _error(key, "a tensor", type(value).__name__)
        return value

    return find


# -- saving


def save(op: FusibleOperation, destination: dict[str, Any], prefix: str) -> None:
    """Adds the recipe state, and puts the parts of quantized parameters in their place."""
    for name, parameter in op._parameters.items():
        quantized = None if parameter is None else _C.quantized_of(parameter)
        if quantized is None or f"{prefix}{name}" not in destination:
            continue
        del destination[f"{prefix}{name}"]
        for part, tensor in _C.quantized_entries(quantized):
            destination[f"{prefix}{name}.{part}"] = tensor
    owner = op._recipe_state_owner()
    if owner is not None:
        for name, tensor in owner._handle.recipe_state_entries():
            destination[prefix + name] = tensor


def named_state(op: FusibleOperation) -> SimpleNamespace:
    """The recipe state as attributes: torch's tools look up names of a state dict that way."""
    found = SimpleNamespace()
    owner = op._recipe_state_owner()
    for name, tensor in [] if owner is None else owner._handle.recipe_state_entries():
        *path, last = name.removeprefix(_STATE).split(".")
        place = found
        for part in path:
            place = place.__dict__.setdefault(part, SimpleNamespace())
        setattr(place, last, tensor)
    return found


# -- reading


class Entries:
    """What a checkpoint has for one operation, read and checked. Nothing is changed yet."""

    def __init__(self, op: FusibleOperation, entries: Mapping[str, Any], prefix: str) -> None:
        self._op = op
        self._keys: set[str] = set()
        self._renamed: dict[str, str] = {}
        self._parameters: dict[str, torch.Tensor] = {}
        self._other_layouts: dict[str, tuple[list[torch.Tensor], bool]] = {}
        self._state: tuple[DelayedScaling, list[Any], list[Any]] | None = None
        for other, own in op._other_names().items():
            if f"{prefix}{other}" in entries and f"{prefix}{own}" not in entries:
                self._renamed[f"{prefix}{other}"] = f"{prefix}{own}"
        if self._renamed:
            named = {own: entries[key] for key, own in self._renamed.items()}
            entries = ChainMap(named, entries)  # type: ignore[arg-type]
        self._entries = entries
        for name, parameter in op._parameters.items():
            if parameter is not None:
                self._read_parameter(entries, prefix, name, parameter)
        part = op._recipe_state_owner()
        if part is not None and any(f"{prefix}{_STATE}{n}" in entries for n in _state_names()):
            self._read_state(part, entries, prefix + _STATE)
        for name in op._other_extra_states():  # of te.ops, for an operation without a recipe
            value = entries.get(f"{prefix}{name}")
            if isinstance(value, torch.Tensor) and value.numel() == 0:
                self._keys.add(f"{prefix}{name}")

    def _read_parameter(
        self, entries: Mapping[str, Any], prefix: str, name: str, parameter: torch.Tensor
    ) -> None:
        key = f"{prefix}{name}"
        present = [part for part in PARTS if f"{key}.{part}" in entries]
        if not present:
            if key not in entries and (owner := self._op._recipe_state_owner()) is self._op:
                self._read_other_layout(owner, entries, prefix, name, parameter)
            return
        for other, own in self._renamed.items():
            if own == key:
                raise RuntimeError(
                    f"checkpoint entry '{other}' is there twice: plain, and quantized as "
                    f"'{key}.{present[-1]}'"
                )
        handle = _C.read_quantized(_finder(entries), key, list(parameter.shape))
        assert handle is not None
        self._parameters[key] = _C.wrap_quantized(handle)
        self._keys |= {f"{key}.{part}" for part in present}

    def _read_other_layout(
        self,
        op: BasicOperation,
        entries: Mapping[str, Any],
        prefix: str,
        name: str,
        parameter: torch.Tensor,
    ) -> None:
        shape = list(parameter.shape)
        found = op._handle.read_other_layout(_finder(entries), prefix, name, shape)
        if found is not None:
            parts, stacked, keys = found
            self._other_layouts[f"{prefix}{name}"] = parts, stacked
            self._keys.update(keys)

    def _read_state(self, op: BasicOperation, entries: Mapping[str, Any], prefix: str) -> None:
        version = _tensor(entries, f"{prefix}version")
        if version.dtype != torch.int64 or version.numel() != 1:
            raise _error(f"{prefix}version", "int64[]", _shape(version))
        _check_version(f"{prefix}version", int(version))
        about = _from_bytes(entries, f"{prefix}recipe")
        length = about.get("amax_history_len")
        states: list[list[Any]] = []
        names = ["version", "recipe"]
        for mode in _MODES:
            count = op.num_quantizers(mode)
            present = [n for n in _state_names(mode) if prefix + n in entries]
            if count == 0 and present:
                raise RuntimeError(
                    f"checkpoint entry '{prefix}{present[0]}' is for {mode}, where "
                    f"{type(op).__name__} has no quantizers"
                )
            read = _C.read_delayed(_finder(entries), prefix, mode, count, length) if count else []
            states.append(read)
            names += present
        try:
            recipe = delayed_from_description(about)
        except (TypeError, ValueError, KeyError) as error:
            reason = str(error).splitlines()[0]
            raise RuntimeError(f"checkpoint entry '{prefix}recipe': {reason}") from None
        self._state = (recipe, *states)  # type: ignore[assignment]
        self._keys |= {prefix + name for name in names}

    def into(self, state_dict: dict[str, Any]) -> None:
        """Leaves in ``state_dict`` what torch knows how to load."""
        for other, own in self._renamed.items():
            state_dict[own] = state_dict.pop(other)
        for key in self._keys:
            state_dict.pop(key, None)
        state_dict.update(self._parameters)
        for key, (parts, stacked) in self._other_layouts.items():
            state_dict[key] = torch.stack(parts) if stacked else parts[0]

    def apply_state(self) -> None:
        """Gives the operation the recipe state, before its parameters are written."""
        part = self._op._recipe_state_owner()
        if self._state is not None and part is not None:
            recipe, *states = self._state
            device = part._quantizer_device()
            part._handle.load_recipe_state(recipe._native, device, states[0], states[1])

    def check_plain(self, model: torch.nn.Module, prefix: str, assign: bool) -> None:
        """Refuses entries for plain parameters that cannot be loaded."""
        for name, parameter in self._op._parameters.items():
            key = f"{prefix}{name}"
            value = self._entries.get(key)
            if parameter is None or value is None or torch.nn.parameter.is_lazy(parameter):
                continue
            if not isinstance(value, torch.Tensor):
                raise _error(key, "a tensor", type(value).__name__)
            if value.shape != parameter.shape:
                raise RuntimeError(
                    f"Error(s) in loading state_dict for {type(model).__name__}:\n\tsize mismatch "
                    f"for {key}: copying a param with shape {value.shape} from checkpoint, the "
                    f"shape in current model is {parameter.shape}."
                )
            if value.layout != torch.strided:
                raise _error(key, "dense", f"a tensor of layout {value.layout}")
            if value.is_meta and not parameter.is_meta and not assign:
                raise _error(key, "a tensor with memory", "one on the meta device")


def _plain_values(
    op: FusibleOperation, state_dict: Mapping[str, Any], prefix: str
) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor, str]]:
    for name, parameter in op._parameters.items():
        value = state_dict.get(f"{prefix}{name}")
        if parameter is not None and isinstance(value, torch.Tensor):
            yield parameter, value, f"{prefix}{name}"


def quantize_assigned(op: FusibleOperation, state_dict: dict[str, Any], prefix: str) -> None:
    """What is to be assigned to a quantized parameter, in its format."""
    for parameter, value, key in _plain_values(op, state_dict, prefix):
        quantized = _C.quantized_of(parameter)
        if quantized is None or _C.quantized_of(value) is not None or value.is_meta:
            continue
        if value.shape == parameter.shape and value.dtype in DTYPES:
            part = op._recipe_state_owner()
            if part is not None:
                part._handle.place_recipe_state(value.device)
            made = _C.with_values(quantized.with_dtype(value.dtype), value.detach())
            state_dict[key] = _C.wrap_quantized(made)


def _state_names(*modes: str) -> list[str]:
    names = [] if modes else ["version", "recipe"]
    for mode in modes or _MODES:
        names += [f"{mode}.{what}" for what in ("scale", "amax", "amax_history")]
    return names


def state_keys(prefix: str) -> list[str]:
    """Every key that the recipe state of an operation may have."""
    return [f"{prefix}{_STATE}{name}" for name in _state_names()]
