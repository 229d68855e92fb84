"""Tokens to the rows of their experts and back, under the names that Transformer Engine gives them.

They run on any device, always with the same bits, and are differentiable once. The same as
operations of a pipeline: :class:`ligature.ops.Dispatch`, :class:`ligature.ops.Combine`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from . import _C
from .quantization.autocast import get_autocast_recipe, is_autocast_enabled
from .quantization.tensor import QuantizedTensor

__all__ = [
    "Fp8Padding",
    "Fp8Unpadding",
    "moe_permute",
    "moe_permute_and_pad_with_probs",
    "moe_permute_with_probs",
    "moe_sort_chunks_by_index",
    "moe_sort_chunks_by_index_with_probs",
    "moe_unpermute",
]

Tensor = torch.Tensor
F = TypeVar("F", bound=Callable[..., Any])


def _eager(function: F) -> F:
    """Compiled graphs stop at it."""
    eager: F = torch.compiler.disable(function)
    return eager


def _plain(t: Tensor) -> Tensor:
    return t.dequantize() if isinstance(t, QuantizedTensor) else t


def _is_mask(op: str, map_type: str) -> bool:
    if map_type not in ("mask", "index"):
        raise ValueError(f"[{op}] map_type must be 'mask' or 'index', got {map_type!r}")
    return map_type == "mask"


@_eager
def moe_permute(
    inp: Tensor,
    routing_map: Tensor,
    num_out_tokens: int = -1,
    max_token_num: int = -1,
    map_type: str = "mask",
) -> tuple[Tensor, Tensor]:
    """The rows of ``inp`` by expert, those of one expert in the order of tokens.

    Args:
        inp: ``[tokens, hidden]``.
        routing_map: with ``"mask"`` ``[tokens, experts]``, bool or integers, not zero where a token
            is sent to an expert; with ``"index"`` ``[tokens, top_k]``, the experts of each token.
            An index below 0 is none.
        num_out_tokens: how many rows the output has; those that find no place are dropped, and rows
            that are not needed are zeros. -1: as many as there are, ``tokens * top_k`` with
            ``"index"``; a mask has to be counted, for which the host waits for the device.
        max_token_num: accepted for compatibility, no effect: there is no workspace.
        map_type: ``"mask"`` or ``"index"``.

    Returns:
        The rows, and a row map for :func:`moe_unpermute`: int32, of ``routing_map``'s shape.
    """
    mask = _is_mask("moe_permute", map_type)
    rows, _, row_id_map = _C.moe_permute(_plain(inp), None, routing_map, num_out_tokens, mask)
    return rows, row_id_map


@_eager
def moe_permute_with_probs(
    inp: Tensor, probs: Tensor, routing_map: Tensor, num_out_tokens: int = -1
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`moe_permute` with a mask, and the probability of each row.

    ``probs``: ``[tokens, experts]``. Returns the rows, their probabilities, and the row map.
    """
    rows, row_probs, row_id_map = _C.moe_permute(
        _plain(inp), probs, routing_map, num_out_tokens, True
    )
    assert row_probs is not None
    return rows, row_probs, row_id_map


@_eager
def moe_permute_and_pad_with_probs(
    inp: Tensor,
    probs: Tensor,
    routing_map: Tensor,
    tokens_per_expert: Tensor,
    align_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """:func:`moe_permute_with_probs`, each expert's rows filled up to a multiple of ``align_size``.

    What is filled in is zeros. How many rows there are is read from ``tokens_per_expert``
    ``[experts]``; where it is on a device, the host waits for it. Returns the rows, their
    probabilities, the row map, the offsets for :func:`moe_unpermute`, and the aligned
    ``tokens_per_expert``. :class:`ligature.ops.GroupedLinear` needs no such rows.
    """
    return _C.moe_permute_and_pad(_plain(inp), probs, routing_map, tokens_per_expert, align_size)


@_eager
def moe_unpermute(
    inp: Tensor,
    row_id_map: Tensor,
    merging_probs: Tensor | None = None,
    restore_shape: torch.Size | None = None,
    map_type: str = "mask",
    probs: Tensor | None = None,
    pad_offsets: Tensor | None = None,
) -> Tensor:
    """The sum of each token's rows, in float32 (float64 for float64) and rounded once.

    Args:
        inp: ``[rows, hidden]``.
        row_id_map: what the permutation returned.
        merging_probs: weights of the rows, of ``row_id_map``'s shape.
        restore_shape: the output's shape, if it is to be checked: ``[tokens, hidden]`` follows from
            ``row_id_map`` and ``inp``.
        map_type: accepted for compatibility, no effect: ``row_id_map`` says it.
        probs: ``merging_probs`` under its older name.
        pad_offsets: those of :func:`moe_permute_and_pad_with_probs`.
    """
    _is_mask("moe_unpermute", map_type)
    if probs is not None:
        if merging_probs is not None:
            raise ValueError(
                "[moe_unpermute] takes merging_probs or, for the same, probs, not both"
            )
        warnings.warn(
            "[moe_unpermute] the argument 'probs' is deprecated, use merging_probs",
            DeprecationWarning,
            stacklevel=2,
        )
        merging_probs = probs
    shape = torch.Size((row_id_map.shape[0], inp.shape[-1]))
    if restore_shape is not None and torch.Size(restore_shape) != shape:
        raise ValueError(
            f"[moe_unpermute] restore_shape must be {list(shape)}, got {list(restore_shape)}"
        )
    return _C.moe_unpermute(_plain(inp), row_id_map, merging_probs, pad_offsets)


@_eager
def moe_sort_chunks_by_index(inp: Tensor, split_sizes: Tensor, sorted_index: Tensor) -> Tensor:
    """Chunks of rows in another order.

    Args:
        inp: ``[rows, hidden]``, in consecutive chunks. Rows past the last chunk become zeros at the
            end.
        split_sizes: ``[chunks]`` integers: how many rows each has.
        sorted_index: ``[chunks]`` integers: which comes first, second, ...; each once.
    """
    return _C.moe_sort_chunks_by_index(_plain(inp), None, split_sizes, sorted_index)[0]


@_eager
def moe_sort_chunks_by_index_with_probs(
    inp: Tensor, probs: Tensor, split_sizes: Tensor, sorted_index: Tensor
) -> tuple[Tensor, Tensor]:
    """:func:`moe_sort_chunks_by_index`, and with each row its probability: ``probs`` ``[rows]``."""
    rows, row_probs = _C.moe_sort_chunks_by_index(_plain(inp), probs, split_sizes, sorted_index)
    assert row_probs is not None
    return rows, row_probs


class _Padding(torch.nn.Module):
    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        super().__init__()
        if align_size is not None and align_size < 1:
            raise ValueError(
                f"[{type(self).__name__}] align_size must be positive, got {align_size}"
            )
        self.num_gemms = num_gemms
        self.align_size = align_size

    def _aligned(self, m_splits: Sequence[int]) -> list[int]:
        if len(m_splits) != self.num_gemms:
            raise ValueError(
                f"[{type(self).__name__}] m_splits must be num_gemms={self.num_gemms} numbers, "
                f"got {len(m_splits)}"
            )
        size = self.align_size
        if size is None:
            recipe = get_autocast_recipe() if is_autocast_enabled() else None
            size = 16 if recipe is None else 32 if recipe.mxfp8() else 128 if recipe.nvfp4() else 16
        return [(m + size - 1) // size * size for m in m_splits]

    def extra_repr(self) -> str:
        return f"num_gemms={self.num_gemms}, align_size={self.align_size}"


class Fp8Padding(_Padding):
    """Fills each group of rows up with zeros to a multiple of ``align_size``.

    Accepted because scripts for Transformer Engine call it: :class:`ligature.ops.GroupedLinear`
    takes groups of any size in every recipe, faster without such rows.

    Args:
        num_gemms: number of groups.
        align_size: by default 32 under an ``autocast`` with an MXFP8 recipe, 128 with NVFP4, else
            16.

    ``padding(inp, m_splits)``, with a list of the groups' sizes, returns the rows and the new
    sizes.
    """

    @_eager
    def forward(self, inp: Tensor, m_splits: Sequence[int]) -> tuple[Tensor, list[int]]:
        """The rows with those that fill up, and the sizes of the groups."""
        aligned = self._aligned(m_splits)
        if aligned == list(m_splits):
            return inp, aligned
        return _C.resize_groups(_plain(inp), list(m_splits), aligned), aligned


class Fp8Unpadding(_Padding):
    """Takes away what :class:`Fp8Padding` filled in; ``m_splits`` are the sizes without it."""

    @_eager
    def forward(self, inp: Tensor, m_splits: Sequence[int]) -> Tensor:
        """The rows without those that filled up."""
        aligned = self._aligned(m_splits)
        if aligned == list(m_splits):
            return inp
        return _C.resize_groups(_plain(inp), aligned, list(m_splits))
