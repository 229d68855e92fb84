"""te.pytorch's functions around experts, against loops in float64."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from reference import FLOAT_DTYPES, assert_close, float64_copy, make_input

import ligature as te

pytestmark = pytest.mark.usefixtures("device")

Tensor = torch.Tensor

#: tokens, experts, share of the mask that is set
MASKS = [(9, 5, 0.4), (9, 5, 1.0), (6, 4, 0.0), (1, 1, 1.0), (0, 3, 0.5), (40, 16, 0.1)]


def mask_of(tokens: int, experts: int, share: float) -> Tensor:
    return torch.rand(tokens, experts) < share


def slots_of_mask(mask: Tensor) -> list[tuple[int, int]]:
    return [(t, e) for e in range(mask.shape[1]) for t in range(mask.shape[0]) if mask[t, e]]


def slots_of_index(index: Tensor) -> list[tuple[int, int]]:
    slots = [(t, k) for t in range(index.shape[0]) for k in range(index.shape[1])]
    chosen = [slot for slot in slots if index[slot] >= 0]
    return sorted(chosen, key=lambda slot: int(index[slot]))


def stack(rows: list[Tensor], like: Tensor, count: int) -> Tensor:
    """`count` rows, zeros at the end, in the graph of `like`."""
    zero = 0 * like.sum() + torch.zeros_like(like[:0].sum(0))
    rows = [*rows[:count], *[zero] * (count - len(rows))]
    return torch.stack(rows) if rows else like[:0] + zero


def sums(rows: Tensor, slots: list[tuple[int, int]], tokens: int, weights: Tensor | None) -> Tensor:
    zero = 0 * rows.sum() + torch.zeros_like(rows[:0].sum(0))
    if weights is not None:
        zero = zero + 0 * weights.sum()
    out = [zero] * tokens
    for row, (t, s) in enumerate(slots[: rows.shape[0]]):
        out[t] = out[t] + (rows[row] if weights is None else weights[t, s] * rows[row])
    return torch.stack(out) if out else rows[:0] + zero


def check(outputs: list[Tensor], wanted: list[Tensor], leaves: list[tuple[Tensor, Tensor]]) -> None:
    """Outputs and gradients; the second of a pair of leaves is in float64."""
    for y, w in zip(outputs, wanted, strict=True):
        assert_close(y, w, scale=2)
    grads = [torch.randn_like(y) for y in outputs]
    torch.autograd.backward(outputs, grads)
    torch.autograd.backward(wanted, [g.double() for g in grads])
    for leaf, leaf64 in leaves:
        assert_close(leaf.grad, leaf64.grad, scale=8)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("given", MASKS)
@pytest.mark.parametrize("extra", [None, 0, 5, -2])
def test_permute_by_mask(
    given: tuple[int, int, float], extra: int | None, dtype: torch.dtype
) -> None:
    """`extra`: how many rows more than there are; None: the function counts them."""
    mask = mask_of(*given)
    slots = slots_of_mask(mask)
    count = max(len(slots) + (extra or 0), 0)
    x, probs = make_input(given[0], 8, dtype=dtype), make_input(*mask.shape)
    x2, probs2 = float64_copy(x), float64_copy(probs)
    rows, row_probs, row_map = te.moe_permute_with_probs(
        x, probs, mask.int(), -1 if extra is None else count
    )
    wanted = stack([x2[t] for t, _ in slots], x2, count)
    wanted_probs = stack([probs2[slot].view(1) for slot in slots], probs2.view(-1, 1), count)
    assert torch.equal(rows.double(), wanted)
    check([rows, row_probs], [wanted, wanted_probs.view(-1)], [(x, x2), (probs, probs2)])
    plain, plain_map = te.moe_permute(x.detach(), mask, rows.shape[0])
    assert torch.equal(plain, rows)
    assert torch.equal(plain_map, row_map)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("given", MASKS)
@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize("extra", [0, 5, -2])
def test_unpermute_by_mask(
    given: tuple[int, int, float], extra: int, merge: bool, dtype: torch.dtype
) -> None:
    mask = mask_of(*given)
    slots = slots_of_mask(mask)
    count = max(len(slots) + extra, 0)
    _, row_map = te.moe_permute(torch.zeros(given[0], 8), mask, count)
    rows = make_input(count, 8, dtype=dtype)
    probs = make_input(*mask.shape) if merge else None
    rows2 = float64_copy(rows)
    probs2 = None if probs is None else float64_copy(probs)
    y = te.moe_unpermute(rows, row_map, probs, torch.Size((given[0], 8)))
    wanted = sums(rows2, slots[:count], given[0], probs2)
    leaves = [(rows, rows2), *([] if probs is None else [(probs, probs2)])]
    check([y], [wanted], leaves)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("size", [(7, 3, 4), (5, 1, 3), (0, 2, 3), (3, 2, 50)])
@pytest.mark.parametrize("dropped", [0, 4])
def test_by_index(size: tuple[int, int, int], dropped: int, dtype: torch.dtype) -> None:
    tokens, top_k, experts = size
    index = torch.randint(-1, experts, (tokens, top_k), dtype=torch.int32)
    slots = slots_of_index(index)
    count = max(tokens * top_k - dropped, 0)
    slots = slots[:count]
    x, weights = make_input(tokens, 8, dtype=dtype), make_input(tokens, top_k)
    x2, weights2 = float64_copy(x), float64_copy(weights)
    rows, row_map = te.moe_permute(x, index, count if dropped else -1, 512, "index")
    assert torch.equal(rows.double(), stack([x2[t] for t, _ in slots], x2, count))
    y = te.moe_unpermute(2 * rows, row_map, weights, map_type="index")
    wanted = sums(stack([2 * x2[t] for t, _ in slots], x2, count), slots, tokens, weights2)
    check([y], [wanted], [(x, x2), (weights, weights2)])


@pytest.mark.parametrize("align", [1, 4, 16])
@pytest.mark.parametrize("given", MASKS)
def test_permute_and_pad(given: tuple[int, int, float], align: int) -> None:
    mask = mask_of(*given)
    counts = mask.sum(0)
    x, probs = make_input(given[0], 8), make_input(*mask.shape)
    x2, probs2 = float64_copy(x), float64_copy(probs)
    rows, row_probs, row_map, offsets, padded = te.moe_permute_and_pad_with_probs(
        x, probs, mask, counts, align
    )
    assert padded.tolist() == [-(-n // align) * align for n in counts.tolist()]
    wanted, wanted_probs = [], []
    for e, size in enumerate(padded.tolist()):
        tokens = [t for t in range(given[0]) if mask[t, e]]
        wanted += [x2[t] for t in tokens] + [0 * x2.sum(0)] * (size - len(tokens))
        wanted_probs += [probs2[t, e] for t in tokens] + [0 * probs2.sum()] * (size - len(tokens))
    assert rows.shape[0] == len(wanted)
    if wanted:
        y = te.moe_unpermute(rows, row_map, probs.detach(), pad_offsets=offsets)
        assert_close(y, x2 * (probs2 * mask).sum(1, keepdim=True), torch.float32, scale=4)
        check(
            [rows, row_probs],
            [torch.stack(wanted), torch.stack(wanted_probs)],
            [(x, x2), (probs, probs2)],
        )


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("sizes", [[3, 0, 4, 1], [5], [0, 0, 2], [0], [2, 2, 2, 2, 2, 2]])
@pytest.mark.parametrize("beyond", [0, 3])
def test_sort_chunks(sizes: list[int], beyond: int, dtype: torch.dtype) -> None:
    rows = sum(sizes) + beyond
    order = torch.randperm(len(sizes))
    x, probs = make_input(rows, 8, dtype=dtype), make_input(rows)
    x2, probs2 = float64_copy(x), float64_copy(probs)
    for integer in (torch.int64, torch.int32):
        given = torch.tensor(sizes, dtype=integer), order.to(integer)
        y, y_probs = te.moe_sort_chunks_by_index_with_probs(x, probs, *given)
        assert torch.equal(y, te.moe_sort_chunks_by_index(x, *given))
    chunks = [*x2.split([*sizes, beyond])]
    probs_chunks = [*probs2.split([*sizes, beyond])]
    wanted = torch.cat([*(chunks[i] for i in order), 0 * chunks[-1]])
    wanted_probs = torch.cat([*(probs_chunks[i] for i in order), 0 * probs_chunks[-1]])
    check([y, y_probs], [wanted, wanted_probs], [(x, x2), (probs, probs2)])


def test_rows_of_nobody_stay_out() -> None:
    mask = torch.tensor([[True, False], [False, False], [True, True]])
    _, row_map = te.moe_permute(torch.zeros(3, 4), mask, 5)
    rows = torch.ones(5, 4)
    rows[3:] = torch.nan
    rows.requires_grad_()
    probs = torch.where(mask, 1.0, torch.nan).requires_grad_()
    for merging in (None, probs):
        y = te.moe_unpermute(rows, row_map, merging)
        assert y.tolist() == [[1.0] * 4, [0.0] * 4, [2.0] * 4]
        y.sum().backward()
        assert rows.grad.tolist() == [[1.0] * 4] * 3 + [[0.0] * 4] * 2
        rows.grad = None
    assert probs.grad.tolist() == [[4.0, 0.0], [0.0, 0.0], [4.0, 4.0]]


def test_only_what_is_needed_is_saved() -> None:
    mask = mask_of(9, 5, 0.4)
    rows, row_map = te.moe_permute(make_input(9, 8), mask)
    dtypes: list[torch.dtype] = []

    def pack(t: Tensor) -> Tensor:
        dtypes.append(t.dtype)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        te.moe_permute(make_input(9, 8), mask)
        te.moe_unpermute(rows, row_map)
    assert not any(d.is_floating_point for d in dtypes)


def test_a_second_derivative_is_refused() -> None:
    mask = mask_of(9, 5, 0.5)
    x, probs = make_input(9, 8), make_input(9, 5)
    rows, row_map = te.moe_permute(x, mask)
    y = te.moe_unpermute(rows.square(), row_map, probs)
    (grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        grad.sum().backward()


def test_same_bits_again() -> None:
    mask = mask_of(200, 16, 0.3)
    results = []
    for _ in range(3):
        torch.manual_seed(0)
        x, probs = make_input(200, 8), make_input(200, 16)
        rows, row_probs, row_map = te.moe_permute_with_probs(x, probs, mask, 1000)
        y = te.moe_unpermute(rows * row_probs.unsqueeze(1), row_map, probs)
        y.square().sum().backward()
        results.append((y, x.grad, probs.grad))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_quantized_rows() -> None:
    quantizer = te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, torch.device("cpu"))
    x = quantizer(torch.randn(16, 16))
    mask = torch.ones(16, 2, dtype=torch.bool)
    assert torch.equal(te.moe_permute(x, mask)[0], x.dequantize().repeat(2, 1))


# -- padding


@pytest.mark.parametrize("splits", [[3, 0, 17, 16], [16, 32, 0, 48], [0, 0, 0, 0]])
def test_padding(splits: list[int]) -> None:
    padding, unpadding = te.Fp8Padding(4), te.Fp8Unpadding(4)
    x = make_input(sum(splits), 8)
    padded, sizes = padding(x, splits)
    assert sizes == [-(-m // 16) * 16 for m in splits]
    wanted = [
        torch.nn.functional.pad(part, (0, 0, 0, size - part.shape[0]))
        for part, size in zip(x.split(splits), sizes, strict=True)
    ]
    assert torch.equal(padded, torch.cat(wanted))
    y = unpadding(padded, splits)
    assert torch.equal(y, x)
    grad = torch.randn_like(y)
    y.backward(grad)
    assert torch.equal(x.grad, grad)


def test_alignment_follows_the_recipe() -> None:
    x = torch.randn(5, 8)
    padding = te.Fp8Padding(1)
    assert padding(x, [5])[1] == [16]
    for recipe, size in (
        (te.recipe.MXFP8BlockScaling(), 32),
        (te.recipe.NVFP4BlockScaling(), 128),
        (te.recipe.DelayedScaling(), 16),
    ):
        with te.autocast(recipe=recipe):
            assert padding(x, [5])[1] == [size]
            assert te.Fp8Padding(1, 8)(x, [5])[1] == [8]
            assert torch.equal(te.Fp8Unpadding(1)(padding(x, [5])[0], [5]), x)
    with te.autocast(enabled=False, recipe=te.recipe.MXFP8BlockScaling()):
        assert padding(x, [5])[1] == [16]


# -- what scripts rely on

SIGNATURES: dict[str, list[tuple[str, Any]]] = {
    "moe_permute": [
        *((n, inspect.Parameter.empty) for n in ("inp", "routing_map")),
        ("num_out_tokens", -1),
        ("max_token_num", -1),
        ("map_type", "mask"),
    ],
    "moe_permute_with_probs": [
        *((n, inspect.Parameter.empty) for n in ("inp", "probs", "routing_map")),
        ("num_out_tokens", -1),
    ],
    "moe_permute_and_pad_with_probs": [
        (n, inspect.Parameter.empty)
        for n in ("inp", "probs", "routing_map", "tokens_per_expert", "align_size")
    ],
    "moe_unpermute": [
        *((n, inspect.Parameter.empty) for n in ("inp", "row_id_map")),
        *((n, None) for n in ("merging_probs", "restore_shape")),
        ("map_type", "mask"),
        *((n, None) for n in ("probs", "pad_offsets")),
    ],
    "moe_sort_chunks_by_index": [
        (n, inspect.Parameter.empty) for n in ("inp", "split_sizes", "sorted_index")
    ],
    "moe_sort_chunks_by_index_with_probs": [
        (n, inspect.Parameter.empty) for n in ("inp", "probs", "split_sizes", "sorted_index")
    ],
    "Fp8Padding": [("num_gemms", inspect.Parameter.empty), ("align_size", None)],
    "Fp8Unpadding": [("num_gemms", inspect.Parameter.empty), ("align_size", None)],
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_moe_signature(name: str) -> None:
    parameters = inspect.signature(getattr(te, name)).parameters.values()
    assert [(p.name, p.default) for p in parameters] == SIGNATURES[name]
    assert name in te.__all__


def test_moe_errors() -> None:
    x, mask, probs = torch.randn(4, 8), mask_of(4, 3, 0.5), torch.rand(4, 3)
    _, row_map = te.moe_permute(x, mask)
    values: dict[str, Any] = {
        "map_type must be 'mask' or 'index', got 'other'": lambda: te.moe_permute(
            x, mask, map_type="other"
        ),
        r"inp must be \[rows, columns\], got \[8\]": lambda: te.moe_permute(x[0], mask),
        r"routing_map must be \[tokens=4, experts or top_k\], got \[3, 3\]": lambda: te.moe_permute(
            x, mask[:3]
        ),
        r"probs must be \[4, 3\], got \[3, 4\]": lambda: te.moe_permute_with_probs(
            x, probs.t(), mask
        ),
        r"row_id_map must be moe_permute's, got \[12\]": lambda: te.moe_unpermute(
            x, row_map.view(-1)
        ),
        r"merging_probs must be \[4, 3\], got \[4, 2\]": lambda: te.moe_unpermute(
            x, row_map, probs[:, :2]
        ),
        r"restore_shape must be \[4, 8\], got \[5, 8\]": lambda: te.moe_unpermute(
            x, row_map, restore_shape=torch.Size((5, 8))
        ),
        "merging_probs or, for the same, probs, not both": lambda: te.moe_unpermute(
            x, row_map, probs, probs=probs
        ),
        "align_size must be positive, got 0": lambda: te.moe_permute_and_pad_with_probs(
            x, probs, mask, mask.sum(0), 0
        ),
        r"tokens_per_expert must be \[experts=3\]": lambda: te.moe_permute_and_pad_with_probs(
            x, probs, mask, mask.sum(1), 4
        ),
        r"sorted_index must be \[2\], got \[1\]": lambda: te.moe_sort_chunks_by_index(
            x, torch.tensor([1, 3]), torch.tensor([0])
        ),
        r"m_splits must be num_gemms=2 numbers, got 1": lambda: te.Fp8Padding(2)(x, [4]),
        r"\[Fp8Unpadding\] align_size must be positive": lambda: te.Fp8Unpadding(2, 0),
        r"must have the 5 rows of its groups": lambda: te.Fp8Padding(1)(x, [5]),
    }
    for match, call in values.items():
        with pytest.raises(ValueError, match=match):
            call()
    types: dict[str, Any] = {
        "inp must have a floating dtype": lambda: te.moe_permute(mask, mask),
        "routing_map must be integers or bool": lambda: te.moe_permute(x, probs),
        "routing_map of indices must be integers, got Bool": lambda: te.moe_permute(
            x, mask, map_type="index"
        ),
        "row_id_map must be integers": lambda: te.moe_unpermute(x, probs),
        "split_sizes must be integers": lambda: te.moe_sort_chunks_by_index(
            x, probs[0], torch.tensor([0, 1, 2])
        ),
    }
    for match, call in types.items():
        with pytest.raises(TypeError, match=match):
            call()


def test_the_older_name_of_weights() -> None:
    x, mask, probs = torch.randn(4, 8), mask_of(4, 3, 0.5), torch.rand(4, 3)
    rows, row_map = te.moe_permute(x, mask)
    with pytest.warns(DeprecationWarning, match="use merging_probs"):
        y = te.moe_unpermute(rows, row_map, probs=probs)
    assert torch.equal(y, te.moe_unpermute(rows, row_map, probs))
