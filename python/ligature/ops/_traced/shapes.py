"""Shapes of a traced call's results where sizes are symbols.

The core knows shapes for numbers. With a symbolic size it is asked for several numbers, and the
answers are matched with the few forms that sizes take here: a constant, a multiple of a size or of
a product of sizes, blocks of rows. What matches none of them is an error, never a guess.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import torch

Sizes = tuple[int, ...]
#: Sizes and dtype of each result for inputs of these sizes; an error where they do not fit.
Asked = Callable[[Sizes], Sequence[tuple[Sequence[int], torch.dtype]]]

_BLOCKS = (16, 32, 64, 128)


def is_symbolic(size: Any) -> bool:
    return not isinstance(size, int)


def hint(size: Any) -> int:
    """A number that a size stands for while a graph is traced."""
    if isinstance(size, int):
        return size
    from torch.fx.experimental import symbolic_shapes as torchs

    # The second is torch 2.11's.
    name = "optimization_hint" if hasattr(torchs, "optimization_hint") else "size_hint"
    return int(getattr(torchs, name)(size, fallback=32))


def _symbols(sizes: Sequence[Any]) -> list[Any]:
    found: dict[str, Any] = {}
    for size in sizes:
        if is_symbolic(size):
            found.update({str(symbol): symbol for symbol in size.node.expr.free_symbols})
    return [found[name] for name in sorted(found)]


def _at(sizes: Sequence[Any], values: dict[Any, int]) -> Sizes:
    return tuple(
        int(size.node.expr.xreplace(values)) if is_symbolic(size) else size for size in sizes
    )


def _samples(sizes: Sequence[Any]) -> dict[Any, list[Sizes]]:
    """For each symbol the sizes at other values of it; for None, at other values of all."""
    start: dict[Any, int] = {}
    for symbol in _symbols(sizes):
        alone = [s for s in sizes if is_symbolic(s) and s.node.expr == symbol]
        start[symbol] = hint(alone[0]) if alone else 8
    out: dict[Any, list[Sizes]] = {}
    for symbol, h in start.items():
        values = (2 * h, 3 * h, h + 1, 5 * h + 3, h + 128, 17 * h)
        out[symbol] = [_at(sizes, {**start, symbol: value}) for value in values]
    out[None] = [
        _at(sizes, {s: (2 + (j + k) % 5) * v for j, (s, v) in enumerate(start.items())})
        for k in range(len(start))
    ]
    return out


def _product(sizes: Sequence[Any]) -> Any:
    out: Any = 1
    for size in sizes:
        out = out * size
    return out


class _Bases:
    """What sizes of results are made of: each symbolic size, the rows, and all elements."""

    def __init__(self, inputs: Sequence[Sequence[Any]]) -> None:
        self._ranges: list[tuple[int, int, int]] = []  # which sizes of which input are multiplied
        for i, sizes in enumerate(inputs):
            for d, size in enumerate(sizes):
                if is_symbolic(size):
                    self._ranges.append((i, d, d + 1))
        for i, sizes in enumerate(inputs):
            for stop in range(2, len(sizes) + 1):
                if any(map(is_symbolic, sizes[:stop])):
                    self._ranges.append((i, 0, stop))

    def of(self, inputs: Sequence[Sequence[Any]]) -> list[Any]:
        return [_product(inputs[i][start:stop]) for i, start, stop in self._ranges]


def _match(values: Sequence[int], bases: list[list[int]], symbolic: list[Any]) -> Any:
    """The size that has these values; None where no form does."""
    if len(set(values)) == 1:
        return values[0]
    for k, base in enumerate(symbolic):
        numbers = [row[k] for row in bases]
        if all(numbers):
            ratio = Fraction(values[0], numbers[0])
            if all(Fraction(v, n) == ratio for v, n in zip(values, numbers, strict=True)):
                scaled = base * ratio.numerator
                return scaled if ratio.denominator == 1 else scaled // ratio.denominator
    for k, base in enumerate(symbolic):
        for block in _BLOCKS:
            counts = [-(-row[k] // block) for row in bases]
            if all(counts) and values[0] % counts[0] == 0:
                times = values[0] // counts[0]
                if all(v == c * times for v, c in zip(values, counts, strict=True)):
                    return (base + (block - 1)) // block * times
    return None


def result_shapes(
    inputs: Sequence[Sequence[Any]], asked: Asked, what: str
) -> list[tuple[tuple[Any, ...], torch.dtype]]:
    """Sizes and dtype of each result for inputs of these sizes, some of them symbolic."""
    flat = [size for sizes in inputs for size in sizes]
    hints = tuple(map(hint, flat))
    first = asked(hints)
    if not any(map(is_symbolic, flat)):
        return [(tuple(sizes), dtype) for sizes, dtype in first]
    answers = [(hints, first)]
    for symbol, samples in _samples(flat).items():
        count = len(answers)
        for sample in samples:
            try:
                answer = asked(sample)
            except (ValueError, RuntimeError):
                continue  # not a size that it takes
            if [(len(s), d) for s, d in answer] == [(len(s), d) for s, d in first]:
                answers.append((sample, answer))
        if symbol is not None and len(answers) == count:
            # It takes this one value only: a number from here on, which the compiler guards.
            fixed = [
                [
                    int(s) if is_symbolic(s) and symbol in s.node.expr.free_symbols else s
                    for s in sizes
                ]
                for sizes in inputs
            ]
            return result_shapes(fixed, asked, what)
    bounds = [len(sizes) for sizes in inputs]

    def split(values: Sequence[Any]) -> list[Sequence[Any]]:
        out, start = [], 0
        for length in bounds:
            out.append(values[start : start + length])
            start += length
        return out

    bases = _Bases(inputs)
    numbers = [bases.of(split(sample)) for sample, _ in answers]
    symbolic = bases.of(inputs)
    out = []
    for k, (sizes, dtype) in enumerate(first):
        shape = []
        for d in range(len(sizes)):
            values = [answer[k][0][d] for _, answer in answers]
            size = _match(values, numbers, symbolic) if len(values) > 2 else None
            if size is None:
                raise RuntimeError(
                    f"{what}: size {d} of result {k} is no simple function of the input's "
                    f"symbolic sizes: {list(inputs)} gives {values}; compile with dynamic=False, "
                    "or mark the dimension static"
                )
            shape.append(size)
        out.append((tuple(shape), dtype))
    return out
