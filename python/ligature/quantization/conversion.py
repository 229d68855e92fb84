"""Conversions of modules with quantized parameters: ``to``, ``half``, ``double``, ``to_empty``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .. import _C
from .dispatch import DTYPES, wrap


def _in_format(handle: _C.QuantizedTensor, values: torch.Tensor) -> _C.QuantizedTensor:
    """``values`` as the quantized tensor has its own: in its format, on their device and dtype."""
    like = handle.with_dtype(values.dtype)
    if handle.device.type == "meta" or values.is_meta:  # there are no values
        parts = [torch.zeros_like(part, device=values.device) for part in handle.tensors]
        return like.with_tensors(parts)
    if values.device == handle.device and torch.equal(handle.dequantize(values.dtype), values):
        return like
    # A conversion is no step: delayed scaling does not learn from it.
    own = handle.quantizer
    return _C.with_values(like.with_quantizer(own.copy(deep=True)), values).with_quantizer(own)


def _converted(fn: Callable[[torch.Tensor], Any], tensor: torch.Tensor) -> Any:
    handle = _C.quantized_of(tensor)
    with torch.no_grad():
        made = fn(tensor)
        if handle is None or not isinstance(made, torch.Tensor) or made is tensor:
            return made
        if _C.quantized_of(made) is not None or made.shape != tensor.shape:
            return made
        return wrap(_in_format(handle, made)) if made.dtype in DTYPES else made


def empty_like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """One without values on that device; a quantized one in the same format."""
    made: torch.Tensor = _converted(lambda t: torch.empty_like(t, device=device), tensor)
    return made


@contextmanager
def of_quantized(module: torch.nn.Module, fn: Callable[[torch.Tensor], Any]) -> Iterator[None]:
    """Converts the quantized parameters of a module; inside, its other ones are.

    A parameter stays quantized where low precision can stand for the new dtype, and otherwise
    becomes a plain one. It stays the object that it is where torch lets it.
    """
    parameters = module._parameters
    before = dict(parameters)
    new: dict[str, Any] = {}
    for name, parameter in before.items():
        if parameter is not None and _C.quantized_of(parameter) is not None:
            grad = None if parameter.grad is None else _converted(fn, parameter.grad)
            new[name] = _converted(fn, parameter), grad
    if not new:
        yield
        return
    for name in new:
        del parameters[name]
    try:
        yield
    except BaseException:
        new.clear()
        raise
    finally:
        others = dict(parameters)
        parameters.clear()
        parameters.update({name: others.get(name, old) for name, old in before.items()})
        for name, (made, grad) in new.items():
            parameters[name] = _set(before[name], made, grad)


def _set(parameter: Any, made: Any, grad: Any) -> torch.nn.Parameter:
    if made is parameter:
        return parameter
    had_grad = parameter.grad is not None
    needs_graph = had_grad and parameter.grad.requires_grad
    quantized = _C.quantized_of(made) is not None
    if quantized and torch._has_compatible_shallow_copy_type(parameter, made):
        parameter.data = made
    else:
        parameter = torch.nn.Parameter(made, requires_grad=parameter.requires_grad)
    if had_grad:
        parameter.grad = grad.requires_grad_(needs_graph)
    return parameter
