"""Which formats compute where, and why not."""

from __future__ import annotations

from typing import Literal, overload

import torch

Device = torch.device | str | None
_Answer = bool | tuple[bool, str]


def _answer(why_not: str, return_reason: bool) -> _Answer:
    return (not why_not, why_not) if return_reason else not why_not


def _place(device: Device) -> torch.device:
    from ..ops.builtin import default_device

    return default_device(device)


def _why_no_low_precision(what: str, device: Device) -> str:
    """Empty on the CPU, where every format is computed exactly, by a product in bfloat16."""
    place = _place(device)
    if place.type == "cpu":
        return ""
    return f"{what} on {place.type} is not in this version; the CPU has it"


@overload
def is_fp8_available(return_reason: Literal[False] = False, device: Device = None) -> bool: ...
@overload
def is_fp8_available(return_reason: Literal[True], device: Device = None) -> tuple[bool, str]: ...
def is_fp8_available(return_reason: bool = False, device: Device = None) -> _Answer:
    """Whether FP8 with one factor per tensor computes on a device, by default the one that
    operations are made on. With ``return_reason`` also why not."""
    return _answer(_why_no_low_precision("FP8", device), return_reason)


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
    return _answer(_why_no_low_precision("FP8 in blocks", device), return_reason)


@overload
def is_mxfp8_available(return_reason: Literal[False] = False, device: Device = None) -> bool: ...
@overload
def is_mxfp8_available(return_reason: Literal[True], device: Device = None) -> tuple[bool, str]: ...
def is_mxfp8_available(return_reason: bool = False, device: Device = None) -> _Answer:
    """Whether MXFP8 computes on a device; see :func:`is_fp8_available`."""
    return _answer(_why_no_low_precision("MXFP8", device), return_reason)


@overload
def is_nvfp4_available(return_reason: Literal[False] = False, device: Device = None) -> bool: ...
@overload
def is_nvfp4_available(return_reason: Literal[True], device: Device = None) -> tuple[bool, str]: ...
def is_nvfp4_available(return_reason: bool = False, device: Device = None) -> _Answer:
    """Whether NVFP4 computes on a device; see :func:`is_fp8_available`."""
    return _answer(_why_no_low_precision("NVFP4", device), return_reason)


@overload
def is_bf16_available(return_reason: Literal[False] = False, device: Device = None) -> bool: ...
@overload
def is_bf16_available(return_reason: Literal[True], device: Device = None) -> tuple[bool, str]: ...
def is_bf16_available(return_reason: bool = False, device: Device = None) -> _Answer:
    """Whether bfloat16 computes on a device; see :func:`is_fp8_available`."""
    place = _place(device)
    if place.type == "cpu":
        return _answer("", return_reason)
    if place.type != "cuda":
        return _answer(f"{place.type} is not a device of Ligature's", return_reason)
    if not torch.cuda.is_available():
        return _answer("there is no CUDA device", return_reason)
    with torch.cuda.device(place):
        good = torch.cuda.is_bf16_supported(including_emulation=False)
    return _answer("" if good else "this GPU has no bfloat16", return_reason)
