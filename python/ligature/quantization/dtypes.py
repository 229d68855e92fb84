"""Names of the number formats, as Transformer Engine has them."""

from __future__ import annotations

import enum

import torch


class DType(enum.IntEnum):
    """A number format, also those that torch has no dtype for."""

    # ruff: noqa: N815
    kByte = 0
    kInt16 = 1
    kInt32 = 2
    kInt64 = 3
    kFloat32 = 4
    kFloat16 = 5
    kBFloat16 = 6
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8
    kFloat8E8M0 = 9
    kFloat4E2M1 = 10

    @classmethod
    def of_element(cls, name: str) -> DType:
        """Of an element type by the core's name: ``"e4m3"``."""
        return _OF_ELEMENT[name]


_OF_ELEMENT = {
    "e4m3": DType.kFloat8E4M3,
    "e5m2": DType.kFloat8E5M2,
    "e2m1": DType.kFloat4E2M1,
}
_ELEMENTS = {value: name for name, value in _OF_ELEMENT.items()}
_OF_TORCH = {
    torch.float8_e4m3fn: DType.kFloat8E4M3,
    torch.float8_e5m2: DType.kFloat8E5M2,
    torch.float4_e2m1fn_x2: DType.kFloat4E2M1,
}


def element_of(value: object, wanted: tuple[str, ...], op: str, argument: str) -> str:
    """The core's name of an element type, one of ``wanted``, given as a DType or a torch dtype."""
    found = _OF_TORCH.get(value) if isinstance(value, torch.dtype) else value
    name = _ELEMENTS.get(found) if isinstance(found, DType) else None
    if name is None or name not in wanted:
        names = " or ".join(f"DType.{_OF_ELEMENT[w].name}" for w in wanted)
        got = f"DType.{value.name}" if isinstance(value, DType) else repr(value)
        raise (ValueError if isinstance(value, DType | torch.dtype) else TypeError)(
            f"[{op}] {argument} must be {names}, got {got}"
        )
    return name
