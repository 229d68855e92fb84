"""How long a collective and GEMMs take side by side, from what each takes alone.

The pieces of a transfer follow each other on the link: the i-th has arrived at (i + 1) / pieces of
its time. Nothing here is fitted to the times that overlap.py puts beside it.
"""

from __future__ import annotations

from collections.abc import Callable

PIECES = (1, 2, 4, 8)
LEAST_ROWS = 64


def gather_gemm(
    transfer: float, gemm: float, ranks: int, pieces: int = 1, cost: float = 0.0
) -> float:
    """A GEMM whose operand is gathered: the rank's own part first, then each piece as it arrives.

    ``cost``: what each further piece adds.
    """
    after_last = gemm * (ranks - 1) / (ranks * pieces)
    return max(gemm, transfer + after_last) + (pieces - 1) * cost


def gemm_scatter(transfer: float, gemm: float, pieces: int = 1, cost: float = 0.0) -> float:
    """A GEMM whose result is reduced and scattered: each piece leaves when it is computed.

    A piece has rows of every rank, its own too: Gloo's reduce-scatter is an all-reduce.
    """
    return max(gemm + transfer / pieces, gemm / pieces + transfer) + (pieces - 1) * cost


def backward(dgrad: float, wgrads: float, scatter: float) -> float:
    """The input's gradient is reduced and scattered while weights' gradients are computed."""
    return dgrad + max(wgrads, scatter)


def best_pieces(predict: Callable[[int], float], rows: int) -> int:
    """Of 1, 2, 4 and 8 the fastest; ``rows`` of one rank, of which a piece has at least 64."""
    return min((p for p in PIECES if p == 1 or rows // p >= LEAST_ROWS), key=predict)


def mlp_step(
    gather: float,
    scatter: float,
    computation: float,
    ranks: int,
    rows: int,
    cost: float = 0.0,
    cut: bool = True,
    gather_in_pieces: float | None = None,
) -> float:
    """Forward and backward of norm, column linear, activation, row linear; sequence-parallel.

    ``computation`` is taken as six GEMMs of one size. ``cut``: GEMMs are cut into pieces, and both
    weight gradients are computed while dx is scattered. Otherwise only what needs neither: the
    gather of x beside the first linear's dgrad, the scatter of dx beside its wgrad.
    ``gather_in_pieces``: how long a gather takes that is cut, where that differs.
    """
    gemm = computation / 6
    beside_dgrad = max(gemm, gather)
    if not cut:
        forward = gather + gemm + gemm + scatter
        second = gather + gemm + gemm
        return forward + second + backward(beside_dgrad, gemm, scatter)

    def gathered(pieces: int) -> float:
        transfer = gather if pieces == 1 else gather_in_pieces or gather
        return gather_gemm(transfer, gemm, ranks, pieces, cost)

    def scattered(pieces: int) -> float:
        return gemm_scatter(scatter, gemm, pieces, cost)

    each_gather = gathered(best_pieces(gathered, rows))
    forward = each_gather + scattered(best_pieces(scattered, rows))
    return forward + each_gather + backward(beside_dgrad, 2 * gemm, scatter)
