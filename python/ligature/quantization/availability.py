"""Which formats compute where, and why not."""

from __future__ import annotations

from typing import Literal, overload

import torch

from .. import _C
from .._arguments import default_device

Device = torch.device | str | None
_Answer = bool | tuple[bool, str]


def _answer(why_not: str, return_reason: bool) -> _Answer:
    return (not why_not, why_not) if return_reason else not why_not


def _answer_for(
    what: str, scaling: str, element: str, device: Device, return_reason: bool
) -> _Answer:
    """The CPU computes every format exactly, by a product in bfloat16; so does a GPU without
    products of the format, which is said."""
    place = default_device(device)
    if place.type == "cpu":
        return _answer("", return_reason)
    if place.type != "cuda":
        return _answer(f"{what} on {place.type}: not a device of Ligature's", return_reason)
    cuda = _C.config()["cuda"]
    if not cuda["built"]:
        return _answer(f"{what} on cuda: {cuda['reason']}; the CPU has it", return_reason)
    if not torch.cuda.is_available():
        return _answer(f"{what} on cuda: there is no CUDA device; the CPU has it", return_reason)
    if _C.has_products_of({"scaling": scaling, "element": element}, place):
        return _answer("", return_reason)
    major, minor = torch.cuda.get_device_capability(place)
    note = f"{what} is emulated: a GPU of compute capability {major}.{minor} has no products of it"
    return (True, note) if return_reason else True


@overload
def is_fp8_available(return_reason: Literal[False] = False, device: Device = None) -> bool: ...
@overload
def is_fp8_available(return_reason: Literal[True], device: Device = None) -> tuple[bool, str]: ...
def is_fp8_available(return_reason: bool = False, device: Device = None) -> _Answer:
    """Whether FP8 with one factor per tensor computes on a device, by default the one that
    operations are made on. With ``return_reason`` also why not or, where a GPU has no products of
    the format and they are emulated, that it is so."""
    return _answer_for("FP8", "current", "e4m3", device, return_reason)


@overload
def is_fp8_block_scaling_available(
    return_reason: Literal[False] = False, device: Device = None
) -> bool: ...
@overload
def is_fp8_block_scaling_available(
    return_reason: Literal[True], device: Device = None
) -> tuple[bool, str]: ...
def is_fp8_block_scaling_available(return_reason: bool = False, device: Device = None) -> _Answer:
    """Whether FP8 in blocks of 128 computes on a device; see :func:`is_fp8_available`."""
    return _answer_for("FP8 in blocks", "block", "e4m3", device, return_reason)


@overload
def is_mxfp8_available(return_reason: Literal[False] = False, device: Device = None) -> bool: ...
@overload
def is_mxfp8_available(return_reason: Literal[True], device: Device = None) -> tuple[bool, str]: ...
def is_mxfp8_available(return_reason: bool = False, device: Device = None) -> _Answer:
    """Whether MXFP8 computes on a device; see :func:`is_fp8_available`."""
    return _answer_for("MXFP8", "mx", "e4m3", device, return_reason)


@overload
def is_nvfp4_available(return_reason: Literal[False] = False, device: Device = None) -> bool: ...
@overload
def is_nvfp4_available(return_reason: Literal[True], device: Device = None) -> tuple[bool, str]: ...
def is_nvfp4_available(return_reason: bool = False, device: Device = None) -> _Answer:
    """Whether NVFP4 computes on a device; see :func:`is_fp8_available`."""
    return _answer_for("NVFP4", "nv", "e2m1", device, return_reason)


@overload
def is_bf16_available(return_reason: Literal[False] = False, device: Device = None) -> bool: ...
@overload
def is_bf16_available(return_reason: Literal[True], device: Device = None) -> tuple[bool, str]: ...
def is_bf16_available(return_reason: bool = False, device: Device = None) -> _Answer:
    """Whether bfloat16 computes on a device; see :func:`is_fp8_available`."""
    place = default_device(device)
    if place.type == "cpu":
        return _answer("", return_reason)
    if place.type != "cuda":
        return _answer(f"{place.type} is not a device of Ligature's", return_reason)
    if not torch.cuda.is_available():
        return _answer("there is no CUDA device", return_reason)
    with torch.cuda.device(place):
        good = torch.cuda.is_bf16_supported(including_emulation=False)
    return _answer("" if good else "this GPU has no bfloat16", return_reason)
