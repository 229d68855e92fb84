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

What is read is checked completely before anything of an operation is changed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from .. import _C
from .recipe import DelayedScaling
from .recipe_text import delayed_from_description, description_of

if TYPE_CHECKING:
    from ..ops.op import BasicOperation, FusibleOperation

VERSION = 1
_STATE = "_recipe_state."
_PARTS = tuple(
    f"{side}_{what}" for side in ("rowwise", "columnwise") for what in ("data", "scale", "amax")
)
_MODES = ("forward", "backward")
_MOST_BYTES = 1 << 16
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def _error(key: str, wanted: str, got: Any) -> RuntimeError:
    return RuntimeError(f"checkpoint entry '{key}' must be {wanted}, got {got}")


def _shape(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _to_bytes(value: Any) -> torch.Tensor:
    text = json.dumps(value, sort_keys=True).encode()
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).clone()


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


def _check_floats(key: str, tensor: torch.Tensor, shape: list[int], *, zero: bool) -> None:
    """Non-negative and no NaN; without ``zero`` also positive and finite."""
    if tensor.dtype != torch.float32 or list(tensor.shape) != shape:
        raise _error(key, f"float32{shape}", _shape(tensor))
    if tensor.isnan().any():
        raise _error(key, "numbers", "NaN among them")
    if zero and (tensor < 0).any():
        raise _error(key, "zero or more", tensor.min().item())
    if not zero and not ((tensor > 0) & tensor.isfinite()).all():
        raise _error(key, "positive and finite", tensor.min().item())


# -- saving


def save(op: FusibleOperation, destination: dict[str, Any], prefix: str) -> None:
    """Adds the recipe state, and puts the parts of quantized parameters in their place."""
    for name, parameter in op._parameters.items():
        quantized = None if parameter is None else _C.quantized_of(parameter)
        if quantized is None or f"{prefix}{name}" not in destination:
            continue
        del destination[f"{prefix}{name}"]
        dtype = str(quantized.dtype).removeprefix("torch.")
        destination[f"{prefix}{name}.format"] = _to_bytes(
            {
                "version": VERSION,
                "format": quantized.fields,
                "shape": list(quantized.sizes),
                "dtype": dtype,
            }
        )
        seen: set[int] = set()
        for part, tensor in zip(_PARTS, quantized.parts, strict=True):
            if tensor is None:
                continue
            memory = tensor.data_ptr()  # both orientations may have one amax; files want two
            destination[f"{prefix}{name}.{part}"] = (
                tensor.detach().clone() if memory in seen else tensor.detach()
            )
            seen.add(memory)
    owner = op._recipe_state_owner()
    if owner is not None:
        _save_state(owner, destination, prefix + _STATE)


def _save_state(op: BasicOperation, destination: dict[str, Any], prefix: str) -> None:
    for recipe, *states in reversed(op._handle.recipe_states()):
        description = description_of(recipe)
        if description is None:
            continue
        tensors: dict[str, torch.Tensor] = {}
        for mode, state in zip(_MODES, states, strict=True):
            if not state or any(item is None for item in state):
                continue
            scales, amaxes, histories = zip(*state, strict=True)
            tensors[f"{mode}.scale"] = torch.cat(scales)
            tensors[f"{mode}.amax"] = torch.cat(amaxes)
            tensors[f"{mode}.amax_history"] = torch.stack(histories, 1)
        if not any(
            bool((tensor != (1 if name.endswith(".scale") else 0)).any())
            for name, tensor in tensors.items()
        ):
            return  # as it begins
        destination[f"{prefix}version"] = torch.tensor(VERSION)
        destination[f"{prefix}recipe"] = _to_bytes(description)
        for name, tensor in tensors.items():
            destination[prefix + name] = tensor
        return


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
        if key in entries:
            raise RuntimeError(
                f"checkpoint entry '{key}' is there twice: plain, and quantized as '{key}.format'"
            )
        about = _from_bytes(entries, f"{key}.format")
        _check_version(f"{key}.format", about.get("version"))
        shape, dtype = about.get("shape"), _DTYPES.get(str(about.get("dtype")))
        if dtype is None:
            raise _error(f"{key}.format", f"of dtype {', '.join(_DTYPES)}", about.get("dtype"))
        if shape != list(parameter.shape):
            raise RuntimeError(
                f"size mismatch for {key}: checkpoint entry '{key}.format' says shape {shape}, the "
                f"shape in current model is {list(parameter.shape)}"
            )
        fields: Any = about.get("format")
        tensors = _read_parts(entries, key, fields, shape, present)
        try:
            handle = _C.make_quantized(fields, shape, dtype, [tensors.get(part) for part in _PARTS])
        except (TypeError, ValueError, RuntimeError) as error:
            reason = str(error).splitlines()[0]
            raise RuntimeError(f"checkpoint entry '{key}.format': {reason}") from None
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
            states.append(_read_mode(entries, prefix, mode, count, length) if count else [])
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


def _read_mode(
    entries: Mapping[str, Any], prefix: str, mode: str, count: int, length: Any
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    if not isinstance(length, int) or isinstance(length, bool) or length < 1:
        raise _error(f"{prefix}recipe", "with a positive amax_history_len", length)
    read = {}
    for what, shape in (("scale", [count]), ("amax", [count]), ("amax_history", [length, count])):
        key = f"{prefix}{mode}.{what}"
        read[what] = _tensor(entries, key).detach().cpu()
        _check_floats(key, read[what], shape, zero=what != "scale")
    return [
        (read["scale"][i : i + 1], read["amax"][i : i + 1], read["amax_history"][:, i])
        for i in range(count)
    ]


def _blocks(count: int, size: int) -> int:
    return -(-count // size)


def _read_parts(
    entries: Mapping[str, Any], key: str, fields: Any, shape: list[int], present: list[str]
) -> dict[str, torch.Tensor]:
    """The parts of a quantized parameter, each as its format wants it."""
    scaling = fields.get("scaling") if isinstance(fields, dict) else None
    if scaling not in ("delayed", "current", "block", "mx", "nv"):
        raise _error(f"{key}.format", "of a known scaling", scaling)
    sides = [s for s in ("rowwise", "columnwise") if any(p.startswith(s) for p in present)]
    if not sides:
        raise RuntimeError(f"checkpoint entry '{key}.rowwise_data' is missing")
    rows, columns = math.prod(shape[:-1]), shape[-1]
    tensors: dict[str, torch.Tensor] = {}
    for side in sides:
        m, n = rows, columns
        if side == "columnwise":
            m, n = columns, _blocks(rows, 16) * 16 if fields.get("hadamard") else rows
        data = [m, _blocks(n, 2)] if scaling == "nv" else [m, n]
        size = {"block": 128, "mx": 32, "nv": 16}.get(scaling)
        scale = [1]
        if size is not None:
            scale = [_blocks(m, size) if fields.get("block_2d") else m, _blocks(n, size)]
        for what in ("data", "scale", "amax"):
            name = f"{key}.{side}_{what}"
            if what == "amax" and scaling != "nv":
                if name in entries:
                    raise RuntimeError(
                        f"checkpoint entry '{name}' is there, but its format has none"
                    )
                continue
            tensor = tensors[f"{side}_{what}"] = _tensor(entries, name).detach()
            if what == "amax":
                _check_floats(name, tensor, [m if fields.get("row_scaled") else 1], zero=True)
                if tensor.isinf().any():
                    raise _error(name, "finite", "infinity")
            elif what == "scale" and scaling in ("delayed", "current", "block"):
                _check_floats(name, tensor, scale, zero=False)
            else:
                wanted = data if what == "data" else scale
                if tensor.dtype != torch.uint8 or list(tensor.shape) != wanted:
                    raise _error(name, f"uint8{wanted}", _shape(tensor))
                if what == "scale":
                    _check_codes(name, tensor, scaling)
    return tensors


def _check_codes(key: str, codes: torch.Tensor, scaling: str) -> None:
    if scaling == "mx" and (codes == 255).any():
        raise _error(key, "numbers", "NaN among them (code 255)")
    if scaling == "nv" and ((codes & 0x7F) == 0x7F).any():
        raise _error(key, "numbers", "NaN among them (code 127)")
    if scaling == "nv" and (codes >= 0x80).any():
        raise _error(key, "zero or more", "a negative number (code 128 or more)")


# -- a whole model


def check(model: torch.nn.Module, state_dict: Mapping[str, Any]) -> None:
    """Refuses a checkpoint that some operation of the model cannot take, before any is changed."""
    from ..ops.op import FusibleOperation

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
