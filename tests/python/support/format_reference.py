"""The bits of the low-precision formats, by plain torch arithmetic and Python integers.

An independent statement of docs/low_precision.md: float8 casts are torch's own, FP4 and E8M0 come
from tables and from integers, and nothing of Ligature is used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

FLT_MAX = torch.finfo(torch.float32).max
FLT_MIN = torch.finfo(torch.float32).tiny
FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0, "e2m1": 6.0}
FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], device="cpu")
SIGNS = [1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1]
BLOCK = {"block": 128, "mx": 32, "nv": 16}


@dataclass
class Matrix:
    """One orientation: what a kernel gives, and the values again in float32."""

    data: torch.Tensor
    scale: torch.Tensor
    amax: torch.Tensor | None
    values: torch.Tensor


def encode_fp8(v: torch.Tensor, element: str) -> torch.Tensor:
    largest = LARGEST[element]
    code = v.clamp(-largest, largest).to(FP8[element]).view(torch.uint8)
    nan = 0x7F + 0x80 * torch.signbit(v).to(torch.uint8)
    return torch.where(v.isnan(), nan, code)


def decode_fp8(code: torch.Tensor, element: str) -> torch.Tensor:
    return code.view(FP8[element]).float()


def encode_fp4(v: torch.Tensor) -> torch.Tensor:
    """The nearest of the eight, of two equally near the one with an even code."""
    code = torch.zeros(v.shape, dtype=torch.uint8)
    for i in range(7):
        middle = (FP4[i] + FP4[i + 1]) / 2
        above = v.abs() >= middle if i % 2 else v.abs() > middle
        code += above.to(torch.uint8)
    return code + 8 * torch.signbit(v).to(torch.uint8)


def decode_fp4(code: torch.Tensor) -> torch.Tensor:
    return torch.where(code >= 8, -FP4[(code & 7).long()], FP4[(code & 7).long()])


def magnitude(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x.isnan(), 0.0, x.abs())


def ceil_div(n: int, size: int) -> int:
    return -(-n // size)


def per_block(x: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """[blocks down, blocks across, rows, columns], filled up with zeros."""
    down, across = ceil_div(x.shape[0], rows), ceil_div(x.shape[1], columns)
    full = torch.zeros(down * rows, across * columns)
    full[: x.shape[0], : x.shape[1]] = x
    return full.view(down, rows, across, columns).transpose(1, 2)


def spread(scale: torch.Tensor, rows: int, columns: int, shape: torch.Size) -> torch.Tensor:
    """A value per block as one per element."""
    full = scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    return full[: shape[0], : shape[1]]


def factor(amax: torch.Tensor, largest: float, epsilon: float, power_of_2: bool) -> torch.Tensor:
    amax = amax.clamp(min=epsilon)
    s = torch.tensor(largest) / amax
    s = torch.where(s.isinf(), FLT_MAX, s)
    if power_of_2:
        s = (s.view(torch.int32) & 0x7F800000).view(torch.float32)
    return torch.where((amax == 0) | amax.isinf(), 1.0, s)


def power_of_2(exponent: torch.Tensor) -> torch.Tensor:
    """2 ** exponent for -127 to 127, made of bits."""
    normal = (exponent + 127).int() << 23
    return torch.where(exponent < -126, 1 << 22, normal).int().view(torch.float32)


def e8m0(q: torch.Tensor) -> torch.Tensor:
    """The exponent of q rounded up, as a code: exact powers of two keep theirs."""
    codes = []
    for bits in q.flatten().view(torch.int32).tolist():
        exponent, mantissa = bits >> 23, bits & 0x7FFFFF
        if exponent == 255:
            code = 254
        elif exponent == 0:
            code = 0 if mantissa <= 1 << 22 else 1
        else:
            code = exponent + (mantissa != 0)
        codes.append(min(code, 254))
    return torch.tensor(codes, dtype=torch.uint8).view(q.shape)


def philox(counter: int, stream: int, seed: int) -> list[int]:
    """Philox4x32-10 with counter {low, high, stream, 0} and key {low, high}."""
    mask = 0xFFFFFFFF
    c = [counter & mask, counter >> 32, stream, 0]
    k = [seed & mask, seed >> 32]
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(p1 >> 32) ^ c[1] ^ k[0], p1 & mask, (p0 >> 32) ^ c[3] ^ k[1], p0 & mask]
        k = [(k[0] + 0x9E3779B9) & mask, (k[1] + 0xBB67AE85) & mask]
    return c


def uniform(shape: torch.Size, stream: int, seed: int) -> torch.Tensor:
    n = shape.numel()
    words = [w for i in range(ceil_div(n, 4)) for w in philox(i, stream, seed)]
    return torch.tensor([(w >> 8) * 2.0**-24 for w in words[:n]]).view(shape)


def encode_fp4_stochastic(v: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    a = v.abs().clamp(max=6.0)
    low = (torch.bucketize(a, FP4, right=True) - 1).clamp(max=6)
    share = (a - FP4[low]) / (FP4[low + 1] - FP4[low])
    return (low + (u < share)).to(torch.uint8) + 8 * torch.signbit(v).to(torch.uint8)


def hadamard_matrix() -> torch.Tensor:
    h = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(4):
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)], 0)
    return torch.tensor(SIGNS, dtype=torch.float64)[:, None] * h / 4


def transformed(x: torch.Tensor) -> torch.Tensor:
    """Groups of 16 along rows times the matrix; exact for the values that tests use."""
    groups = per_block(x, 1, 16).flatten(2).double()
    return (groups @ hadamard_matrix()).float().view(x.shape[0], -1)


def tree_sum(e: torch.Tensor) -> torch.Tensor:
    for half in (8, 4, 2, 1):
        e = e[..., :half] + e[..., half : 2 * half]
    return e[..., 0]


def nv_candidate(
    x: torch.Tensor, f: dict[str, Any], upper: torch.Tensor, divisor: float, u: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, block scales and values when the largest of a block becomes ``divisor``."""
    height = 16 if f["block_2d"] else 1
    blocks = per_block(x, height, 16)
    amax = magnitude(blocks).amax((2, 3))
    per_row = upper.numel() > 1
    scale = encode_fp8((amax / divisor) / (upper[:, None] if per_row else upper), "e4m3")
    scale = torch.where(blocks.isnan().any(3).any(2), 0x7F, scale).to(torch.uint8)
    each = spread(decode_fp8(scale, "e4m3"), height, 16, x.shape)
    above = upper[:, None] if per_row else upper
    product = each * above
    inverse = torch.where(product == 0, 0.0, (1.0 / product).clamp(max=FLT_MAX))
    v = x * inverse
    code = encode_fp4(v) if u is None else encode_fp4_stochastic(v, u)
    code = torch.where(each.isnan(), 0, code).to(torch.uint8)
    return code, scale, (decode_fp4(code) * each) * above


def quantize_nv(x: torch.Tensor, f: dict[str, Any], stream: int, seed: int) -> Matrix:
    if f["hadamard"] and stream == 1:
        x = transformed(x)
    amax = magnitude(x)
    amax = amax.amax(1) if f["row_scaled"] else amax.amax().view(1)
    amax = amax.clamp(max=FLT_MAX)
    four_over_six = f["four_over_six"] != "none"
    to_256 = four_over_six and not f.get("scales_to_448", False)
    upper = (amax / torch.tensor(1536.0 if to_256 else 2688.0)).clamp(min=FLT_MIN)
    u = uniform(x.shape, stream, seed) if f["stochastic_rounding"] else None
    code, scale, values = nv_candidate(x, f, upper, 6.0, u)
    if four_over_six:
        height = 16 if f["block_2d"] else 1
        other = nv_candidate(x, f, upper, 4.0, u)
        errors = []
        for candidate in (values, other[2]):
            e = (x - candidate).abs()
            e = e * e if f["four_over_six"] == "mean_square" else e
            rows = tree_sum(per_block(e, height, 16))
            total = rows[..., 0]
            for i in range(1, rows.shape[-1]):
                total = total + rows[..., i]
            errors.append(total)
        better = errors[1] < errors[0]
        each = spread(better, height, 16, x.shape)
        code = torch.where(each, other[0], code)
        scale = torch.where(better, other[1], scale)
        values = torch.where(each, other[2], values)
    wide = torch.zeros(x.shape[0], ceil_div(x.shape[1], 2) * 2, dtype=torch.uint8)
    wide[:, : x.shape[1]] = code
    return Matrix(wide[:, ::2] | wide[:, 1::2] << 4, scale, amax, values)


def quantize_matrix(
    x: torch.Tensor, f: dict[str, Any], stream: int = 0, scale: float = 1.0, seed: int = 0
) -> Matrix:
    """One orientation of a float32 matrix in the format with the fields ``f``."""
    element, scaling = f["element"], f["scaling"]
    if scaling == "nv":
        return quantize_nv(x, f, stream, seed)
    largest = LARGEST[element]
    if scaling in ("delayed", "current"):
        s = torch.tensor([scale])
        if scaling == "current":
            amax = magnitude(x).amax().view(1)
            s = factor(amax, largest, f["amax_epsilon"], f["power_of_2_scales"])
        data = encode_fp8(x * s, element)
        return Matrix(data, 1.0 / s, None, decode_fp8(data, element) * (1.0 / s))
    size = BLOCK[scaling]
    height = size if f["block_2d"] else 1
    amax = magnitude(per_block(x, height, size)).amax((2, 3))
    if scaling == "block":
        s = factor(amax, largest, f["amax_epsilon"], f["power_of_2_scales"])
        stored, back = 1.0 / s, 1.0 / s
    else:
        stored = e8m0(amax / torch.tensor(largest))
        s, back = power_of_2(127 - stored.int()), power_of_2(stored.int() - 127)
    data = encode_fp8(x * spread(s, height, size, x.shape), element)
    values = decode_fp8(data, element) * spread(back, height, size, x.shape)
    return Matrix(data, stored, None, values)


def quantize(
    x: torch.Tensor, f: dict[str, Any], scale: float = 1.0, seed: int = 0
) -> tuple[Matrix, Matrix]:
    """Row-wise and column-wise."""
    x = x.detach().cpu()
    # torch's conversion from float16 may lose the sign of a NaN.
    sign = torch.where(torch.signbit(x), -1.0, 1.0)
    matrix = torch.where(x.isnan(), torch.copysign(x.float(), sign), x.float())
    matrix = matrix.reshape(-1, x.shape[-1])
    with torch.device("cpu"):
        return (
            quantize_matrix(matrix, f, 0, scale, seed),
            quantize_matrix(matrix.t().contiguous(), f, 1, scale, seed),
        )
