"""Dispatch, Combine and TopKRouter against float64, one token after the other."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import routing_reference as reference
import torch
from compile_support import Pair
from reference import FLOAT_DTYPES, assert_close, float64_copy, make_input
from routing_reference import Choices

import ligature as te
from ligature.testing import check_operation

pytestmark = pytest.mark.usefixtures("device")

Tensor = torch.Tensor

#: tokens, top_k, experts
SIZES = [(7, 3, 5), (1, 1, 1), (6, 1, 4), (0, 2, 3), (4, 2, 20), (9, 4, 2)]
INTEGERS = [torch.int64, torch.int32, torch.int16, torch.uint8]


def choices(tokens: int, top_k: int, experts: int, dtype: torch.dtype = torch.int64) -> Tensor:
    lowest = 0 if dtype == torch.uint8 else -1
    return torch.randint(lowest, experts + 2, (tokens, top_k)).to(dtype)


# -- Dispatch and Combine


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_dispatch(size: tuple[int, int, int], dtype: torch.dtype) -> None:
    tokens, top_k, num_experts = size
    x = make_input(tokens, 8, dtype=dtype)
    probs = make_input(tokens, top_k)
    experts = choices(*size)
    rows, splits, row_probs, routing_map = te.ops.Dispatch(num_experts)(x, experts, probs)
    assert splits.dtype == torch.int64
    assert torch.equal(splits, reference.splits_of(experts, num_experts))
    assert torch.equal(routing_map, reference.routing_map_of(experts, num_experts))
    assert not splits.requires_grad
    assert not routing_map.requires_grad

    x2, probs2 = float64_copy(x), float64_copy(probs)
    wanted = reference.dispatch(x2, experts, probs2, num_experts)
    assert torch.equal(rows.double(), wanted[0])
    assert torch.equal(row_probs.double(), wanted[1])
    grads = [torch.randn_like(rows), torch.randn_like(row_probs)]
    torch.autograd.backward([rows, row_probs], grads)
    torch.autograd.backward(wanted, [grad.double() for grad in grads])
    assert_close(x.grad, x2.grad, dtype)
    assert_close(probs.grad, probs2.grad, torch.float32)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_combine(size: tuple[int, int, int], weighted: bool, dtype: torch.dtype) -> None:
    tokens, top_k, num_experts = size
    experts = choices(*size)
    rows = make_input(tokens * top_k, 8, dtype=dtype)
    weights = [make_input(tokens, top_k)] if weighted else []
    routing_map = reference.routing_map_of(experts, num_experts)
    y = te.ops.Combine(weighted=weighted)(rows, routing_map, *weights)

    rows2, weights2 = float64_copy(rows), [float64_copy(w) for w in weights]
    wanted = reference.combine(rows2, experts, num_experts, *(weights2 or [None]))
    assert_close(y, wanted, dtype, scale=2)
    grad = torch.randn_like(y)
    y.backward(grad)
    wanted.backward(grad.double())
    assert_close(rows.grad, rows2.grad, dtype)
    for w, w2 in zip(weights, weights2, strict=True):
        assert_close(w.grad, w2.grad, torch.float32, scale=10)


def test_combine_rounds_once() -> None:
    """In bfloat16 one after the other, 256 + 1 + 1 would stay 256."""
    rows = torch.tensor([[256.0], [1.0], [1.0]], dtype=torch.bfloat16)
    routing_map = reference.routing_map_of(torch.zeros(1, 3, dtype=torch.int64), 1)
    assert te.ops.Combine()(rows, routing_map).item() == 258


@pytest.mark.parametrize("integer", INTEGERS)
def test_indices_of_any_integer_dtype(integer: torch.dtype) -> None:
    experts = choices(9, 3, 5, integer)
    _, splits, _, routing_map = te.ops.Dispatch(5)(torch.randn(9, 4), experts, torch.rand(9, 3))
    assert torch.equal(splits, reference.splits_of(experts, 5))
    assert torch.equal(routing_map, reference.routing_map_of(experts, 5))


def test_what_is_sent_nowhere_stays_out() -> None:
    """Not even what is not a number comes through: neither a token nor a row or weight."""
    experts = torch.tensor([[0, -1], [7, -3], [1, 0]])
    x = torch.randn(3, 4)
    x[1] = torch.nan
    rows, splits, _, routing_map = te.ops.Dispatch(2)(x, experts, torch.rand(3, 2))
    assert splits.tolist() == [2, 1]
    assert torch.equal(rows[3:], torch.zeros(3, 4))
    rows = rows.clone()
    rows[3:] = torch.nan
    weights = torch.tensor([[1.0, torch.nan], [torch.inf, torch.nan], [1.0, 1.0]])
    rows.requires_grad_()
    weights.requires_grad_()
    for op, extra in ((te.ops.Combine(), []), (te.ops.Combine(weighted=True), [weights])):
        y = op(rows, routing_map, *extra)
        assert torch.equal(y[1], torch.zeros(4))
        torch.testing.assert_close(y[2], 2 * x[2])
        y.sum().backward()
        assert torch.equal(rows.grad[3:], torch.zeros(3, 4))
        rows.grad = None
    assert torch.equal(weights.grad[experts.lt(0) | experts.ge(2)], torch.zeros(3))


def test_the_tokens_dimensions_come_back() -> None:
    x = torch.randn(2, 3, 4)
    experts = choices(6, 2, 3).clamp(0, 2)
    rows, _, _, routing_map = te.ops.Dispatch(3)(x, experts, torch.rand(6, 2))
    assert rows.shape == (12, 4)
    assert routing_map.shape == (2, 2, 3, 2)
    torch.testing.assert_close(te.ops.Combine()(rows, routing_map), 2 * x)
    weights = torch.rand(6, 2)
    y = te.ops.Combine(weighted=True)(rows, routing_map, weights)
    torch.testing.assert_close(y, x * weights.sum(-1).view(2, 3, 1))


def routed_pair(dtype: torch.dtype, device: Any, *, weighted: bool) -> list[Any]:
    """From tokens to rows and back, with indices that a channel brings."""
    source, dispatch = Choices(4, 3), te.ops.Dispatch(4)
    combine = te.ops.Combine(weighted=weighted)
    dispatch.set_extra_input_channel(0, "experts")
    dispatch.set_extra_output_channel(2, "map")
    combine.set_extra_input_channel(0, "map")
    return [source, dispatch, te.ops.ConstantScale(0.5), combine]


@pytest.mark.parametrize("weighted", [False, True])
def test_checked(weighted: bool, device: str) -> None:
    def formula(x: Tensor, probs: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        tokens = x.numel() // x.shape[-1]
        experts = Choices(4, 3).indices(tokens, x.device)
        rows, row_probs = reference.dispatch(x, experts, probs, 4)
        y = reference.combine(0.5 * rows, experts, 4, *(weights or [None]))
        routing_map = reference.routing_map_of(experts, 4).view(2, *x.shape[:-1], 3)
        splits = reference.splits_of(experts, 4)
        return y.view(x.shape), splits, row_probs, routing_map

    check_operation(
        lambda dtype, device: routed_pair(dtype, device, weighted=weighted),
        formula,
        [(6, 8), (2, 4, 3)],
        extra_shapes=[[(6, 3)] * (1 + weighted), [(8, 3)] * (1 + weighted)],
        device=device,
        tolerance=2,
    )


def test_only_what_is_needed_is_computed_and_saved() -> None:
    experts = choices(5, 2, 3)
    saved: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        saved.append(t)
        return t

    rows, probs = make_input(10, 4), make_input(5, 2)
    routing_map = reference.routing_map_of(experts, 3)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        te.ops.Combine()(rows, routing_map)
        assert [t.dtype for t in saved] == [torch.int32]
        saved.clear()
        te.ops.Combine(weighted=True)(rows, routing_map, probs.detach())
        assert sorted(t.numel() for t in saved) == [10, 20]
        saved.clear()
        te.ops.Dispatch(3)(make_input(5, 4), experts, probs)
        assert [t.dtype for t in saved] == [torch.int32]


def test_dispatch_errors() -> None:
    x, experts, probs = torch.randn(4, 8), choices(4, 2, 3), torch.rand(4, 2)
    op = te.ops.Dispatch(3)
    with pytest.raises(ValueError, match=r"\[Dispatch\] num_experts must be positive, got 0"):
        te.ops.Dispatch(0)
    with pytest.raises(TypeError, match="expert indices must be integers"):
        op(x, probs, probs)
    with pytest.raises(TypeError, match="probabilities must have a floating dtype"):
        op(x, experts, experts)
    with pytest.raises(ValueError, match=r"expert indices must be \[tokens=4, top_k\], got \[3, 2"):
        op(x, experts[:3], probs)
    with pytest.raises(ValueError, match=r"shape \[4, 2\], got \[4, 1\]"):
        op(x, experts, probs[:, :1])
    with pytest.raises(ValueError, match=r"input must be \[tokens, columns\], got \[8\]"):
        op(x[0], experts, probs)
    with pytest.raises(TypeError, match="input's dtype must be"):
        op(x.long(), experts, probs)


def test_combine_errors() -> None:
    rows, routing_map = torch.randn(6, 8), reference.routing_map_of(choices(3, 2, 4), 4)
    op, weighted = te.ops.Combine(), te.ops.Combine(weighted=True)
    with pytest.raises(TypeError, match="routing map must be Dispatch's, of int32"):
        op(rows, routing_map.long())
    with pytest.raises(ValueError, match=r"routing map must be \[2, tokens, top_k\]"):
        op(rows, routing_map[0])
    with pytest.raises(ValueError, match=r"a row per slot of the routing map, 6, got \[5, 8\]"):
        op(rows[:5], routing_map)
    with pytest.raises(ValueError, match=r"input must be \[rows, columns\]"):
        op(rows[None], routing_map)
    with pytest.raises(ValueError, match=r"weights must be \[tokens, top_k\] = \[3, 2\]"):
        weighted(rows, routing_map, torch.rand(2, 3))
    with pytest.raises(TypeError, match="weights must have a floating dtype"):
        weighted(rows, routing_map, torch.ones(3, 2, dtype=torch.int64))


# -- TopKRouter

ROUTERS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "softmax, one": {"top_k": 1},
    "pre": {"use_pre_softmax": True},
    "pre, normalized": {"use_pre_softmax": True, "normalize": True, "aux_loss_coeff": 0.5},
    "scaled": {"scaling_factor": 2.5, "z_loss_coeff": 0.3},
    "losses": {"aux_loss_coeff": 0.7, "z_loss_coeff": 0.1},
    "sigmoid": {"score_function": "sigmoid", "aux_loss_coeff": 0.5},
    "sigmoid, one": {"score_function": "sigmoid", "top_k": 1, "scaling_factor": 1.5},
    "sigmoid, not normalized": {"score_function": "sigmoid", "normalize": False},
    "groups": {"num_groups": 4, "group_topk": 2},
    "pre, groups": {"use_pre_softmax": True, "num_groups": 2, "group_topk": 1},
    "bias": {"expert_bias": True, "aux_loss_coeff": 0.5},
    "deepseek": {
        "score_function": "sigmoid",
        "num_groups": 4,
        "group_topk": 2,
        "expert_bias": True,
        "scaling_factor": 2.5,
        "aux_loss_coeff": 0.5,
        "z_loss_coeff": 0.1,
    },
}


@pytest.mark.parametrize("name", ROUTERS)
def test_router(name: str, device: str) -> None:
    options = {"top_k": 3, **ROUTERS[name]}

    def make(dtype: torch.dtype, device: Any) -> te.ops.TopKRouter:
        return te.ops.TopKRouter(6, 8, **options, dtype=dtype, device=device)

    def formula(x: Tensor, weight: Tensor, expert_bias: Tensor | None = None) -> Any:
        results = reference.router(x, weight, **{**options, "expert_bias": expert_bias})
        return x, *results

    check_operation(
        make,
        formula,
        [(5, 6), (2, 4, 6), (1, 6)],
        device=device,
        tolerance=4,
        may_change_dtype=True,
    )


def test_router_without_tokens() -> None:
    router = te.ops.TopKRouter(6, 8, 3, aux_loss_coeff=0.5, z_loss_coeff=0.5)
    y, experts, probs, loss, counts = router(torch.randn(2, 0, 6))
    assert y.shape == (2, 0, 6)
    assert experts.shape == probs.shape == (0, 3)
    assert loss.item() == 0
    assert counts.tolist() == [0] * 8
    (probs.sum() + loss).backward()
    assert torch.equal(router.weight.grad, torch.zeros(8, 6))


def test_among_equals_the_lowest_index() -> None:
    router = te.ops.TopKRouter(4, 40, 3)
    torch.nn.init.zeros_(router.weight)
    assert (router(torch.randn(50, 4))[1] == torch.arange(3)).all()
    router = te.ops.TopKRouter(4, 40, 3, num_groups=10, group_topk=2)
    torch.nn.init.zeros_(router.weight)
    assert (router(torch.randn(50, 4))[1] == torch.arange(3)).all()


def test_a_bias_moves_tokens_but_not_weights() -> None:
    router = te.ops.TopKRouter(4, 6, 2, score_function="sigmoid", expert_bias=True)
    x = torch.randn(30, 4)
    _, before, probs, _, _ = router(x)
    assert router.expert_bias.dtype == torch.float32
    assert not router.expert_bias.requires_grad
    assert "expert_bias" in router.state_dict()
    with torch.no_grad():
        router.expert_bias[3] = 10.0
    _, after, moved, _, counts = router(x)
    assert (after[:, 0] == 3).all()
    assert counts[3] == 30
    stayed = (before[:, :1] == 3).squeeze(1) & (before[:, 1] == after[:, 1])
    assert stayed.any()
    torch.testing.assert_close(moved[stayed], probs[stayed])
    router.requires_grad_(True)
    router(x)[2].square().sum().backward()
    assert torch.equal(router.expert_bias.grad, torch.zeros(6))
    assert router.weight.grad.any()


def test_balanced_experts_cost_the_coefficient() -> None:
    router = te.ops.TopKRouter(4, 4, 1, aux_loss_coeff=0.25, dtype=torch.float64)
    with torch.no_grad():
        router.weight.copy_(torch.eye(4))
    x = torch.eye(4, dtype=torch.float64).repeat(3, 1)
    torch.testing.assert_close(router(x)[3].item(), 0.25)


def test_router_computes_in_float32() -> None:
    router = te.ops.TopKRouter(64, 8, 2, dtype=torch.bfloat16, expert_bias=True)
    x = make_input(5, 64, dtype=torch.bfloat16)
    for enabled in (False, True):
        with torch.autocast(x.device.type, torch.bfloat16, enabled=enabled):
            y, _, probs, loss, _ = router(x)
        assert y.dtype == torch.bfloat16
        assert probs.dtype == loss.dtype == torch.float32
        logits = x.detach().float() @ router.weight.detach().float().t()
        torch.testing.assert_close(probs, logits.topk(2).values.softmax(-1))
    assert y.data_ptr() == x.data_ptr()


def test_router_errors() -> None:
    router = te.ops.TopKRouter
    cases = {
        "hidden_size must be positive, got 0": lambda: router(0, 4, 2),
        "top_k must be at most num_experts=4, got 5": lambda: router(8, 4, 5),
        "num_groups and group_topk must be given together": lambda: router(8, 4, 2, num_groups=2),
        "num_experts must be a multiple of num_groups=3": lambda: router(
            8, 4, 2, num_groups=3, group_topk=1
        ),
        "group_topk must be at most num_groups=2": lambda: router(
            8, 4, 2, num_groups=2, group_topk=3
        ),
        "top_k must be at most the 2 experts of group_topk=1": lambda: router(
            8, 4, 3, num_groups=2, group_topk=1
        ),
        "must be 'softmax' or 'sigmoid', got 'relu'": lambda: router(
            8, 4, 2, score_function="relu"
        ),
        r"last dimension must be hidden_size=8, got \[3, 7\]": lambda: router(8, 4, 2)(
            torch.randn(3, 7)
        ),
    }
    for match, call in cases.items():
        with pytest.raises(ValueError, match=match):
            call()


# -- a whole block


def mixture(**more: Any) -> te.ops.Sequential:
    return te.ops.mixture_of_experts(8, 6, 5, 2, aux_loss_coeff=0.1, **more)


def block_reference(block: te.ops.Sequential, x: Tensor) -> tuple[Tensor, Tensor]:
    """Every expert sees every token; only the chosen count."""
    router, _, first, _, second, _ = block
    params = {name: float64_copy(p) for name, p in block.named_parameters()}
    block._reference_parameters = params
    flat = x.reshape(-1, x.shape[-1])
    experts, probs, loss, _ = reference.router(
        flat, params["0.weight"], router.top_k, aux_loss_coeff=router.aux_loss_coeff
    )
    y = torch.zeros_like(flat)
    for e in range(first.num_groups):
        z = flat @ params[f"2.weight{e}"].t()
        if first.has_bias:
            z = z + params[f"2.bias{e}"]
        a, b = z.chunk(2, -1)
        out = torch.nn.functional.silu(a) * b @ params[f"4.weight{e}"].t()
        if second.has_bias:
            out = out + params[f"4.bias{e}"]
        y = y + out * (probs * (experts == e)).sum(-1, keepdim=True)
    return y.view(x.shape), loss


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(9, 8), (3, 4, 8)])
def test_block(shape: tuple[int, ...], bias: bool) -> None:
    block = mixture(bias=bias)
    x = make_input(*shape)
    y, loss = block(x)
    x2 = float64_copy(x)
    wanted, wanted_loss = block_reference(block, x2)
    assert_close(y, wanted, torch.float32)
    assert_close(loss, wanted_loss, torch.float32)
    grad = torch.randn_like(y)
    torch.autograd.backward([y, loss], [grad, torch.ones_like(loss)])
    torch.autograd.backward([wanted, wanted_loss], [grad.double(), torch.ones_like(wanted_loss)])
    assert_close(x.grad, x2.grad, torch.float32, scale=3)
    for name, parameter in block.named_parameters():
        assert_close(parameter.grad, block._reference_parameters[name].grad, scale=3, what=name)


def test_block_between_a_branch_and_its_join() -> None:
    fork, join = te.ops.MakeExtraOutput(), te.ops.AddExtraInput()
    fork.set_extra_output_channel(0, "skip", output_to_caller=False)
    join.set_extra_input_channel(0, "skip")
    block = te.ops.mixture_of_experts(8, 6, 5, 2)
    layer = te.ops.Sequential(fork, te.ops.RMSNorm(8), *block, join)
    x = make_input(3, 4, 8)
    y = layer(x)
    torch.testing.assert_close(y, x + block(layer[1](x)))
    y.sum().backward()
    assert x.grad is not None


def test_same_bits_again() -> None:
    block, x = mixture(), make_input(64, 8)
    results = []
    for _ in range(3):
        block.zero_grad()
        x.grad = None
        y, loss = block(x)
        (y.square().sum() + loss).backward()
        results.append([y, x.grad, *(p.grad for p in block.parameters())])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.usefixtures("one_thread")
def test_compiled_with_changing_counts() -> None:
    block = mixture()
    pair = Pair(block)
    for seed in range(3):
        torch.manual_seed(seed)
        pair.step(make_input(12, 8))
    assert pair.graphs == 1


def test_saved_tensors_are_seen_once() -> None:
    block, x = mixture(), make_input(12, 8)
    packed: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        packed.append(t)
        return t.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y, loss = block(x)
    (y.sum() + loss).backward()
    parameters = {p.data_ptr() for p in block.parameters()}
    seen = [t.data_ptr() for t in packed if t.data_ptr() not in parameters]
    assert len(seen) == len(set(seen))


def test_copies_and_checkpoints() -> None:
    block, x = mixture(expert_bias=True), torch.randn(6, 8)
    with torch.no_grad():
        block[0].expert_bias.copy_(torch.randn(5))
    twin = copy.deepcopy(block)
    other = mixture(expert_bias=True)
    other.load_state_dict(block.state_dict())
    for made in (twin, other):
        assert torch.equal(made(x)[0], block(x)[0])
    assert not twin[0].expert_bias.requires_grad


def test_mixture_errors() -> None:
    with pytest.raises(TypeError, match="activation must be an operation"):
        te.ops.mixture_of_experts(8, 6, 5, 2, activation="swiglu")
