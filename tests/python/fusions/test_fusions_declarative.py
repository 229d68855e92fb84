"""Fusions as data: patterns, predicates, optional places, and patterns that name Linear."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from fusion_support import Pair, check_indices, forward_names
from reference import make_input

import ligature as te


def pair_of(*ops: te.ops.FusibleOperation | None) -> Pair:
    return Pair(*[op for op in ops if op is not None])


def run(ops: list[te.ops.FusibleOperation], *extra: torch.Tensor) -> te.ops.OperationFuser:
    """Checks against the unfused operations, with gradients."""
    fuser, plain = te.ops.OperationFuser(ops), te.ops.OperationFuser(ops, fuse=False)
    x = make_input(3, 8)
    parameters = [p for op in ops for p in op.parameters()]
    results = []
    for run in (fuser, plain):
        y = run(x, *extra)
        results.append((y, *torch.autograd.grad(y.square().sum(), [x, *parameters])))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)
    check_indices(fuser)
    return fuser


def reasons(fuser: te.ops.OperationFuser, name: str) -> list[tuple[int, str]]:
    return [(position, why) for _, fusion, position, why in fuser._considered if fusion == name]


@pytest.mark.parametrize("bias", [True, False])
def test_pattern_that_names_linear(bias: bool, registered) -> None:
    matched = []

    def make(linear, dropout):
        matched.append((linear, dropout))
        return Pair(linear, dropout)

    registered("forward", te.ops.Fusion([te.ops.Linear, te.ops.Dropout], make))
    ops = [te.ops.SiLU(), te.ops.Linear(8, 8, bias=bias), te.ops.Dropout(0.0), te.ops.SiLU()]
    fuser = run(ops)
    assert forward_names(fuser) == ["SiLU", "Pair", "SiLU"]
    assert matched[0] == (ops[1], ops[2])
    assert fuser._forward_ops[1][1] == ([1, 2, 3] if bias else [1, 2])


@pytest.mark.parametrize("bias", [True, False])
def test_pattern_of_two_linears(bias: bool, registered) -> None:
    registered("forward", te.ops.Fusion([te.ops.Linear, te.ops.Linear], Pair))
    ops = [te.ops.Linear(8, 8, bias=bias) for _ in range(5)]
    fuser = run(ops)
    assert forward_names(fuser)[:2] == ["Pair", "Pair"]
    left = "ForwardLinearBiasActivation" if bias else "BasicLinear"
    assert forward_names(fuser)[2:] == [left]


def test_pattern_that_names_linear_wants_a_whole_one(registered) -> None:
    registered("forward", te.ops.Fusion([te.ops.Linear, te.ops.Dropout], Pair, name="mine"))
    ops = [te.ops.BasicLinear(8, 8), te.ops.Bias(8), te.ops.Dropout(0.0)]
    assert forward_names(run(ops)) == ["ForwardLinearBiasActivation", "Dropout"]
    linear = te.ops.Linear(8, 8)
    ops = [linear.basic_ops[0], te.ops.Dropout(0.0), linear.basic_ops[1]]
    fuser = te.ops.OperationFuser(ops)
    fuser(make_input(3, 8))
    assert forward_names(fuser) == ["BasicLinear", "Dropout", "Bias"]


def test_pattern_that_names_basic_linear_matches_the_part(registered) -> None:
    registered("forward", te.ops.Fusion([te.ops.BasicLinear, te.ops.Bias], Pair), prepend=True)
    assert forward_names(run([te.ops.Linear(8, 8), te.ops.Dropout(0.0)])) == ["Pair", "Dropout"]


def test_places(registered) -> None:
    """A class, several classes, a function, a base class."""

    def doubles(op: te.ops.FusibleOperation) -> bool:
        return isinstance(op, te.ops.ConstantScale) and op.scale == 2.0

    registered("forward", te.ops.Fusion([doubles, (te.ops.SiLU, te.ops.ReLU)], Pair))
    scale = te.ops.ConstantScale
    ops = [scale(2.0), te.ops.SiLU(), scale(3.0), te.ops.SiLU(), scale(2.0), te.ops.ReLU()]
    ops += [scale(2.0), te.ops.GELU()]
    names = ["Pair", "ConstantScale", "SiLU", "Pair", "ConstantScale", "GELU"]
    assert forward_names(run(ops)) == names

    registered("forward", te.ops.Fusion([te.ops.BasicOperation] * 2, Pair))
    assert forward_names(run([te.ops.GELU(), te.ops.GELU(), te.ops.GELU()])) == ["Pair", "GELU"]


@pytest.mark.parametrize("where", ["first", "middle", "last"])
@pytest.mark.parametrize("present", [True, False])
def test_optional_place(where: str, present: bool, registered) -> None:
    maybe = te.ops.optional(te.ops.Dropout)
    pattern: list[Any] = [te.ops.ConstantScale, te.ops.SiLU]
    at = {"first": 0, "middle": 1, "last": 2}[where]
    pattern.insert(at, maybe)
    given = []

    def make(*ops):
        given.append(ops)
        return pair_of(*ops)

    registered("forward", te.ops.Fusion(pattern, make))
    ops = [te.ops.ConstantScale(2.0), te.ops.SiLU()]
    if present:
        ops.insert(at, te.ops.Dropout(0.0))
    fuser = run([te.ops.GELU(), *ops, te.ops.GELU()])
    assert forward_names(fuser) == ["GELU", "Pair", "GELU"]
    wanted = list(ops)
    if not present:
        wanted.insert(at, None)
    assert given[0] == tuple(wanted)


def test_optional_place_gives_way(registered) -> None:
    """An optional place takes an operation only if the rest still matches."""
    pattern = [te.ops.optional(te.ops.SiLU), te.ops.SiLU]
    registered("forward", te.ops.Fusion(pattern, pair_of))
    assert forward_names(run([te.ops.SiLU()])) == ["Pair"]
    fuser = run([te.ops.SiLU() for _ in range(3)])
    assert [indices for _, indices in fuser._forward_ops] == [[0, 1], [2]]


def test_optional_composite(registered) -> None:
    pattern = [te.ops.SiLU, te.ops.optional(te.ops.Linear), te.ops.Dropout]
    registered("forward", te.ops.Fusion(pattern, pair_of))
    for middle in ([], [te.ops.Linear(8, 8)], [te.ops.Linear(8, 8, bias=False)]):
        assert forward_names(run([te.ops.SiLU(), *middle, te.ops.Dropout(0.0)])) == ["Pair"]


@pytest.mark.parametrize(
    ("answer", "fires", "reason"),
    [
        (True, True, ""),
        ("", True, ""),
        (1, True, ""),
        (False, False, "its predicate refused"),
        (None, False, "its predicate refused"),
        ("the scale is too large", False, "the scale is too large"),
    ],
)
def test_predicate(answer: Any, fires: bool, reason: str, registered) -> None:
    seen = []

    def predicate(scale, silu):
        seen.append((scale, silu))
        return answer

    pattern = [te.ops.ConstantScale, te.ops.SiLU]
    registered("forward", te.ops.Fusion(pattern, Pair, predicate, name="mine"))
    ops = [te.ops.GELU(), te.ops.ConstantScale(2.0), te.ops.SiLU()]
    fuser = run(ops)
    assert ("Pair" in forward_names(fuser)) == fires
    assert seen[0] == (ops[1], ops[2])
    assert (1, reason) in reasons(fuser, "mine")
    assert all(row[0] == "forward" for row in fuser._considered if row[1] == "mine")


def test_predicate_is_given_none_for_a_missing_place(registered) -> None:
    pattern = [te.ops.Linear, te.ops.optional(te.ops.Dropout), te.ops.L2Normalization]
    refuse = lambda linear, dropout, l2: "no dropout" if dropout is None else ""  # noqa: E731
    registered("forward", te.ops.Fusion(pattern, pair_of, refuse, "mine"))
    fuser = run([te.ops.Linear(8, 8), te.ops.L2Normalization()])
    assert reasons(fuser, "mine") == [(0, "no dropout")]
    fuser = run([te.ops.Linear(8, 8), te.ops.Dropout(0.0), te.ops.L2Normalization()])
    assert forward_names(fuser) == ["Pair"]


def test_near_misses_are_told(registered) -> None:
    pattern = [te.ops.Linear, te.ops.optional(te.ops.Dropout), te.ops.L2Normalization]
    registered("forward", te.ops.Fusion(pattern, pair_of, name="mine"))
    fuser = run([te.ops.Linear(8, 8), te.ops.Identity()])
    assert reasons(fuser, "mine") == [(0, "wanted L2Normalization, found Identity")]
    fuser = run([te.ops.Linear(8, 8)])
    assert reasons(fuser, "mine") == [(0, "wanted L2Normalization, found the end")]
    fuser = run([te.ops.Linear(8, 8), te.ops.Dropout(0.0), te.ops.Identity()])
    assert reasons(fuser, "mine") == [(0, "wanted L2Normalization, found Identity")]
    fuser = run([te.ops.Identity()])
    assert reasons(fuser, "mine") == []


def test_name() -> None:
    pattern = [te.ops.SiLU]
    assert te.ops.Fusion(pattern, Pair).name == "Pair"
    assert te.ops.Fusion(pattern, pair_of).name == "pair_of"
    assert te.ops.Fusion(pattern, pair_of, name="mine").name == "mine"


def test_applied_by_hand() -> None:
    fusion = te.ops.Fusion([te.ops.ConstantScale, te.ops.SiLU], Pair)
    ops = [te.ops.GELU(), te.ops.ConstantScale(2.0), te.ops.SiLU()]
    first, pair = fusion(ops, recipe=None)
    assert first is ops[0]
    assert type(pair) is Pair
    assert list(pair.basic_ops) == ops[1:]
    assert fusion(ops[:1]) == ops[:1]


def test_factory_that_makes_something_else(registered) -> None:
    pattern = [te.ops.ConstantScale, te.ops.SiLU]
    ops = [te.ops.ConstantScale(2.0), te.ops.SiLU()]
    handle = registered("forward", te.ops.Fusion(pattern, lambda scale, silu: None, name="mine"))
    with pytest.raises(TypeError, match="fusion 'mine'"):
        te.ops.OperationFuser(ops)(make_input(3, 8))
    handle.unregister()
    handle = registered("forward", te.ops.Fusion(pattern, lambda scale, silu: silu, name="mine"))
    with pytest.raises(RuntimeError, match=r"given \[ConstantScale, SiLU\], returned \[SiLU\]"):
        te.ops.OperationFuser(ops)(make_input(3, 8))
    handle.unregister()

    def fail(scale, silu):
        raise ZeroDivisionError("in the factory")

    registered("forward", te.ops.Fusion(pattern, fail))
    with pytest.raises(ZeroDivisionError, match="in the factory"):
        te.ops.OperationFuser(ops)(make_input(3, 8))


@pytest.mark.parametrize("handles", [False, True])
def test_channel_inside_a_match(handles: bool, registered) -> None:
    """A fused operation takes both ends of a channel only if it says that it runs it."""

    class ForkJoin(te.ops.FusedOperation):
        handles_internal_channels = handles

        def __init__(self, *ops: te.ops.FusibleOperation) -> None:
            super().__init__(ops)

        def fuser_forward(self, basic_op_ctxs, input_, **unused):
            return 2 * input_, [(input_,), ()]

        def fuser_backward(self, basic_op_ctxs, grad_output, **unused):
            return 2 * grad_output, [(), ()], [(), ()]

    fork, join = te.ops.MakeExtraOutput(), te.ops.AddExtraInput()
    fork.set_extra_output_channel(0, "r", output_to_caller=False)
    join.set_extra_input_channel(0, "r")
    pattern = [te.ops.MakeExtraOutput, te.ops.AddExtraInput]
    handle = registered("joint", te.ops.Fusion(pattern, ForkJoin, name="mine"))
    fuser = run([te.ops.SiLU(), fork, join])
    plain = ["SiLU", "MakeExtraOutput", "AddExtraInput"]
    assert forward_names(fuser) == (["SiLU", "ForkJoin"] if handles else plain)
    wanted = "" if handles else "it does not run a channel inside itself"
    assert reasons(fuser, "mine") == [(1, wanted)]

    handle.unregister()
    registered("joint", lambda ops, **unused: [ops[0], ForkJoin(ops[1], ops[2])])
    if handles:
        assert forward_names(run([te.ops.SiLU(), fork, join])) == ["SiLU", "ForkJoin"]
    else:
        with pytest.raises(RuntimeError, match="covers both ends of a channel"):
            run([te.ops.SiLU(), fork, join])


def linear_then_dropout(ops, **unused):
    """A function written against Linear."""
    out, i = [], 0
    while i < len(ops):
        if isinstance(ops[i], te.ops.Linear) and isinstance(ops[i + 1], te.ops.Dropout):
            out.append(Pair(ops[i], ops[i + 1]))
            i += 2
        else:
            out.append(ops[i])
            i += 1
    return out


def test_function_that_asks_for_linear_is_given_its_only_part(registered) -> None:
    registered("forward", linear_then_dropout)
    linear = te.ops.Linear(8, 8, bias=False)
    assert forward_names(run([linear, te.ops.Dropout(0.0)])) == ["Pair"]
    assert not isinstance(linear.basic_ops[0], te.ops.Linear)


def test_function_that_asks_for_linear_is_told_of_its_parts(registered) -> None:
    registered("forward", linear_then_dropout)
    with pytest.warns(UserWarning, match="'linear_then_dropout' looks for Linear, but"):
        fuser = run([te.ops.Linear(8, 8), te.ops.Dropout(0.0)])
    assert forward_names(fuser) == ["ForwardLinearBiasActivation", "Dropout"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run([te.ops.BasicLinear(8, 8), te.ops.Dropout(0.0)])
