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

What is read is checked completely, in C++ where it is the same there, before anything of an
operation is changed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from .. import _C
from .recipe import DelayedScaling
from .recipe_text import delayed_from_description

if TYPE_CHECKING:
    from ..ops.fusible import FusibleOperation
    from ..ops.op import BasicOperation

VERSION = 1
_STATE = "_recipe_state."
_PARTS = tuple(
    f"{side}_{what}" for side in ("rowwise", "columnwise") for what in ("data", "scale", "amax")
)
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
    return lambda key: _tensor(entries, key) if key in entries else None


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


# -- reading


class Entries:
    """What a checkpoint has for one operation, read and checked. Nothing is changed yet."""

    def __init__(self, op: FusibleOperation, entries: Mapping[str, Any], prefix: str) -> None:
        self._op = op
        self.keys: set[str] = set()
        self.parameters: dict[str, torch.Tensor] = {}
        self._state: tuple[DelayedScaling, list[Any], list[Any]] | None = None
        for name, parameter in op._parameters.items():
            if parameter is not None:
                self._read_parameter(entries, prefix, name, parameter)
        part = op._recipe_state_owner()
        if part is not None and any(f"{prefix}{_STATE}{n}" in entries for n in _state_names()):
            self._read_state(part, entries, prefix + _STATE)

    def _read_parameter(
        self, entries: Mapping[str, Any], prefix: str, name: str, parameter: torch.Tensor
    ) -> None:
        key = f"{prefix}{name}"
        present = [part for part in _PARTS if f"{key}.{part}" in entries]
        if not present and f"{key}.format" not in entries:
            return
        handle = _C.read_quantized(_finder(entries), key, list(parameter.shape))
        assert handle is not None
        self.parameters[key] = _C.wrap_quantized(handle)
        self.keys |= {f"{key}.{part}" for part in (*present, "format")}

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
        self.keys |= {prefix + name for name in names}

    def apply_state(self, state_dict: Mapping[str, Any], prefix: str) -> None:
        """Gives the operation the recipe state, before its parameters are written.

        Without one, a factor of delayed scaling is chosen for the weight that comes.
        """
        part = self._op._recipe_state_owner()
        if self._state is None or part is None:
            for name, parameter in self._op._parameters.items():
                value = state_dict.get(f"{prefix}{name}")
                if parameter is None or not isinstance(value, torch.Tensor):
                    continue
                if value.shape == parameter.shape:
                    _C.expect_values(parameter, value)
            return
        recipe, forward, backward = self._state
        part._handle.load_recipe_state(recipe._native, part._quantizer_device(), forward, backward)


def _state_names(*modes: str) -> list[str]:
    names = [] if modes else ["version", "recipe"]
    for mode in modes or _MODES:
        names += [f"{mode}.{what}" for what in ("scale", "amax", "amax_history")]
    return names


def state_keys(prefix: str) -> list[str]:
    """Every key that the recipe state of an operation may have."""
    return [f"{prefix}{_STATE}{name}" for name in _state_names()]


# -- a whole model


def check(model: torch.nn.Module, state_dict: Mapping[str, Any]) -> None:
    """Refuses a checkpoint that some operation of the model cannot take, before any is changed."""
    from ..ops.fusible import FusibleOperation

    if not isinstance(state_dict, Mapping):
        return  # torch says so
    for name, module in model.named_modules():
        if not isinstance(module, FusibleOperation):
            continue
        prefix = f"{name}." if name else ""
        Entries(module, state_dict, prefix)
        for own, parameter in module._parameters.items():
            value = state_dict.get(f"{prefix}{own}")
            if parameter is None or not isinstance(value, torch.Tensor):
                continue
            if value.shape != parameter.shape:
                raise RuntimeError(
                    f"Error(s) in loading state_dict for {type(model).__name__}:\n\tsize mismatch "
                    f"for {prefix}{own}: copying a param with shape {value.shape} from checkpoint, "
                    f"the shape in current model is {parameter.shape}."
                )
