"""Registration of fusions, and when plans are made, kept and made anew."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fusion_support import REGISTER, Pair, backward_names, check_indices, forward_names
from reference import make_input

import ligature as te
from ligature import _C


class Other(Pair):
    pass


def fuse_pairs(cls: type, first: type, second: type) -> Callable[..., list]:
    """A fusion function as users write them: a scan over the list."""

    def fuse(ops: list, recipe: Any = None) -> list:
        out: list = []
        while ops:
            if len(ops) > 1 and isinstance(ops[0], first) and isinstance(ops[1], second):
                out.append(cls(ops[0], ops[1]))
                ops = ops[2:]
            else:
                out.append(ops[0])
                ops = ops[1:]
        return out

    return fuse


SCALE_SILU = (te.ops.ConstantScale, te.ops.SiLU)


def scale_silu() -> list[te.ops.FusibleOperation]:
    return [te.ops.ConstantScale(2.0), te.ops.SiLU()]


def plan_names(fuser: te.ops.OperationFuser) -> tuple[list[str], list[str]]:
    return forward_names(fuser), backward_names(fuser)


# -- registration


@pytest.mark.parametrize("kind", REGISTER)
@pytest.mark.parametrize("declarative", [True, False])
def test_registered_fusions_fire(kind: str, declarative: bool, registered) -> None:
    fusion = te.ops.Fusion(SCALE_SILU, Pair) if declarative else fuse_pairs(Pair, *SCALE_SILU)
    handle = registered(kind, fusion)
    assert handle.registered
    fuser = te.ops.OperationFuser([te.ops.Identity(), *scale_silu()])
    x = make_input(3, 8)
    y = fuser(x)
    y.sum().backward()
    fused, plain = ["Identity", "Pair"], ["Identity", "ConstantScale", "SiLU"]
    assert forward_names(fuser) == (plain if kind == "backward" else fused)
    assert backward_names(fuser) == (plain if kind == "forward" else fused)
    check_indices(fuser)
    wanted = torch.nn.functional.silu(2 * x.detach().requires_grad_())
    torch.testing.assert_close(y, wanted)

    handle.unregister()
    assert not handle.registered
    fuser(x)
    assert plan_names(fuser) == (plain, plain)
    handle.unregister()


#: The built-in fusions that te.ops has too; all others come after those that users register.
IN_TE_OPS = {
    "joint": [],
    "forward": [
        "OverlapForwardLinear",
        "OverlapForwardLinear by rows",
        "ForwardLinearScaleAdd",
        "ForwardLinearBiasAdd",
    ],
    "backward": [
        "OverlapBackwardLinear",
        "BackwardLinearAdd",
        "BackwardLinearScale",
        "BackwardActivationBias",
        "BackwardAddRMSNorm",
    ],
}


@pytest.mark.parametrize("kind", REGISTER)
def test_handle_as_a_context_manager(kind: str) -> None:
    before = _C.registered_fusions(kind)
    first = IN_TE_OPS[kind]
    last = [name for name in before if name not in first]
    assert before == [*first, *last]
    fusion = te.ops.Fusion(SCALE_SILU, Pair, name="mine")
    with REGISTER[kind](fusion) as handle:
        assert isinstance(handle, te.ops.FusionHandle)
        assert _C.registered_fusions(kind) == [*first, "mine", *last]
        with REGISTER[kind](fusion, prepend=True):
            assert _C.registered_fusions(kind) == ["mine", *first, "mine", *last]
        assert _C.registered_fusions(kind) == [*first, "mine", *last]
    assert _C.registered_fusions(kind) == before
    with pytest.raises(KeyError), REGISTER[kind](fusion):
        raise KeyError
    assert _C.registered_fusions(kind) == before


def test_unregistering_one_of_two_equal_registrations(registered) -> None:
    fusion = te.ops.Fusion(SCALE_SILU, Pair)
    first, second = registered("forward", fusion), registered("forward", fusion)
    first.unregister()
    first.unregister()
    assert second.registered
    fuser = te.ops.OperationFuser(scale_silu())
    fuser(make_input(3, 8))
    assert forward_names(fuser) == ["Pair"]


@pytest.mark.parametrize("prepend", [False, True])
def test_order(prepend: bool, registered) -> None:
    registered("forward", te.ops.Fusion(SCALE_SILU, Pair))
    registered("forward", te.ops.Fusion(SCALE_SILU, Other), prepend=prepend)
    fuser = te.ops.OperationFuser(scale_silu())
    fuser(make_input(3, 8))
    assert forward_names(fuser) == ["Other" if prepend else "Pair"]


def test_prepended_before_the_built_in_fusions(registered) -> None:
    """Also before those that te.ops has: a linear and an addition in place."""
    pattern = [te.ops.BasicLinear, te.ops.optional(te.ops.Bias), te.ops.AddExtraInput]
    make = lambda *ops: Pair(*[op for op in ops if op is not None])  # noqa: E731
    later = registered("forward", te.ops.Fusion(pattern, make))
    ops = [te.ops.Linear(8, 8), te.ops.AddExtraInput(in_place=True)]
    fuser = te.ops.OperationFuser(ops)
    x, extra = make_input(3, 8), torch.randn(3, 8)
    wanted = fuser(x, extra.clone())
    assert forward_names(fuser) == ["ForwardLinearBiasAdd"]
    later.unregister()
    registered("forward", te.ops.Fusion(pattern, make), prepend=True)
    torch.testing.assert_close(fuser(x, extra.clone()), wanted)
    assert forward_names(fuser) == ["Pair"]


def test_joint_fusions_come_first(registered) -> None:
    for kind in ("forward", "backward"):
        registered(kind, te.ops.Fusion(SCALE_SILU, Other), prepend=True)
    handle = registered("joint", te.ops.Fusion(SCALE_SILU, Pair))
    fuser = te.ops.OperationFuser(scale_silu())
    fuser(make_input(3, 8)).sum().backward()
    assert plan_names(fuser) == (["Pair"], ["Pair"])
    assert fuser._forward_ops[0][0] is fuser._backward_ops[0][0]
    handle.unregister()
    fuser(make_input(3, 8)).sum().backward()
    assert plan_names(fuser) == (["Other"], ["Other"])
    assert fuser._forward_ops[0][0] is not fuser._backward_ops[0][0]


def test_functions_are_given_the_list_of_operations_and_the_recipe(registered) -> None:
    calls = []

    def look(ops, **kwargs):
        calls.append((list(ops), kwargs))
        ops.clear()  # the list is theirs
        return calls[-1][0]

    registered("forward", look)
    ops = [te.ops.Linear(8, 8), te.ops.Dropout(0.5), te.ops.SiLU()]
    fuser = te.ops.OperationFuser(ops)
    fuser(make_input(3, 8))
    (given, kwargs), *others = calls
    assert not others
    assert kwargs == {"recipe": None}
    assert given == [*ops[0].basic_ops, ops[1], ops[2]]


# -- when plans are made


@pytest.fixture
def counted(registered) -> dict[str, int]:
    """How often a function registered for each pass was called."""
    counts = dict.fromkeys(REGISTER, 0)
    for kind in REGISTER:

        def count(ops, kind=kind, **unused):
            counts[kind] += 1
            return ops

        registered(kind, count)
    return counts


def made(counted: dict[str, int]) -> int:
    """How many plans were made: each asks each function once."""
    numbers = set(counted.values())
    assert len(numbers) == 1, counted
    return numbers.pop()


def test_one_plan_for_many_calls(counted) -> None:
    fuser = te.ops.OperationFuser([te.ops.Linear(8, 8), te.ops.SiLU()])
    for rows in (3, 3, 5, 0):
        fuser(make_input(rows, 8)).sum().backward()
    fuser(make_input(2, 3, 8))
    assert made(counted) == 1
    steps = fuser._forward_ops
    assert steps[0][1] == [0, 1, 2]


def test_new_plan_when_the_registry_changes(counted) -> None:
    fuser = te.ops.OperationFuser([te.ops.Linear(8, 8), te.ops.SiLU()])
    x = make_input(3, 8)
    fuser(x)
    handle = te.ops.register_backward_fusion(lambda ops, **unused: ops)
    fuser(x)
    fuser(x)
    assert made(counted) == 2
    handle.unregister()
    fuser(x)
    assert made(counted) == 3
    handle.unregister()  # changes nothing, so nothing is planned
    fuser(x)
    assert made(counted) == 3


def test_new_plan_for_another_dtype(counted) -> None:
    fuser = te.ops.OperationFuser([te.ops.SiLU()])
    for _ in range(2):
        fuser(make_input(3, 8))
        fuser(make_input(3, 8, dtype=torch.bfloat16))
    assert made(counted) == 2


def test_new_plan_when_backward_begins_elsewhere(counted) -> None:
    linear = te.ops.Linear(8, 8)
    fuser = te.ops.OperationFuser([te.ops.SiLU(), linear, te.ops.GELU()])
    x, frozen = make_input(3, 8), make_input(3, 8, requires_grad=False)
    fuser(x)
    assert backward_names(fuser) == ["SiLU", "BasicLinear", "BackwardActivationBias"]
    fuser(frozen)
    assert made(counted) == 2
    linear.weight.requires_grad_(False)
    fuser(frozen)
    assert made(counted) == 3
    linear.weight.requires_grad_(True)
    fuser(x)
    fuser(frozen)
    assert made(counted) == 3


def test_training_and_no_grad_alternate_without_planning(counted) -> None:
    fuser = te.ops.OperationFuser([te.ops.Linear(8, 8), te.ops.SiLU()])
    x = make_input(3, 8)
    for _ in range(3):
        fuser(x).sum().backward()
        with torch.no_grad():
            fuser(x)
    # Without backward there is nothing to ask the functions of that pass.
    assert counted == {"joint": 2, "forward": 2, "backward": 1}


def test_planning_again_gives_the_same_plan(registered) -> None:
    registered("joint", fuse_pairs(Pair, *SCALE_SILU))
    ops = [te.ops.Linear(8, 8), te.ops.GELU(), *scale_silu(), te.ops.Linear(8, 8)]
    fuser = te.ops.OperationFuser(ops)
    x = make_input(3, 8)
    plans = []
    for _ in range(3):
        wanted = fuser(x)
        plans.append(plan_names(fuser))
        with te.ops.register_forward_fusion(lambda ops, **unused: ops):
            torch.testing.assert_close(fuser(x), wanted)
            plans.append(plan_names(fuser))
    assert plans[0][0] == ["ForwardLinearBiasActivation", "Pair", "ForwardLinearBiasActivation"]
    assert all(plan == plans[0] for plan in plans)


def test_plan_of_the_last_call_is_shown() -> None:
    fuser = te.ops.OperationFuser([te.ops.Linear(8, 8), te.ops.SiLU()])
    assert fuser._forward_ops is None
    assert fuser._backward_ops is None
    assert fuser._considered == []
    fuser(make_input(3, 8))
    assert plan_names(fuser) == (
        ["ForwardLinearBiasActivation"],
        ["BasicLinear", "BackwardActivationBias"],
    )
    with torch.no_grad():
        fuser(make_input(3, 8))
    assert backward_names(fuser) == ["BasicLinear", "Bias", "SiLU"]


def test_a_graph_keeps_the_plan_it_was_made_with(registered) -> None:
    fuser = te.ops.OperationFuser(scale_silu())
    x = make_input(3, 8)
    wanted = torch.autograd.grad(fuser(x).sum(), x)[0]
    handle = registered("joint", te.ops.Fusion(SCALE_SILU, Pair))
    y = fuser(x)
    handle.unregister()
    fuser(x)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], wanted)


# -- wrong results


@pytest.mark.parametrize("kind", REGISTER)
@pytest.mark.parametrize(
    ("func", "returned"),
    [
        (lambda ops, **unused: ops[:-1], "[ConstantScale]"),
        (lambda ops, **unused: ops[::-1], "[SiLU, ConstantScale]"),
        (lambda ops, **unused: [], "[]"),
        (lambda ops, **unused: [*ops, te.ops.GELU()], "[ConstantScale, SiLU, GELU]"),
        (lambda ops, **unused: [te.ops.ConstantScale(2.0), ops[1]], "[ConstantScale, SiLU]"),
        (lambda ops, **unused: [Pair(ops[1], ops[0])], "[SiLU, ConstantScale]"),
        (lambda ops, **unused: [Pair(*ops), ops[1]], "[ConstantScale, SiLU, SiLU]"),
    ],
)
def test_a_result_with_other_operations(kind: str, func: Any, returned: str, registered) -> None:
    fuser = te.ops.OperationFuser(scale_silu())
    x = make_input(3, 8)
    wanted = fuser(x)
    handle = registered(kind, func)
    with pytest.raises(RuntimeError) as error:
        fuser(x)
    text = str(error.value)
    assert "must return the same basic operations in order" in text
    assert f"given [ConstantScale, SiLU], returned {returned}" in text
    assert "<lambda>" in text
    handle.unregister()
    torch.testing.assert_close(fuser(x), wanted)


@pytest.mark.parametrize("result", [None, 3, te.ops.GELU(), "ops"])
def test_a_result_that_is_no_list(result: Any, registered) -> None:
    registered("forward", lambda ops, **unused: result)
    with pytest.raises(TypeError, match="fusion '<lambda>' must return a list of operations, got"):
        te.ops.OperationFuser(scale_silu())(make_input(3, 8))


@pytest.mark.parametrize("item", [None, 3, torch.nn.GELU()])
def test_a_result_with_something_else(item: Any, registered) -> None:
    registered("forward", lambda ops, **unused: [ops[0], item])
    with pytest.raises(TypeError, match="must be fusible operations, got"):
        te.ops.OperationFuser(scale_silu())(make_input(3, 8))


def test_an_exception_in_a_function_is_passed_on(registered) -> None:
    def fail(ops, **unused):
        raise KeyError("the reason")

    handle = registered("backward", fail)
    fuser = te.ops.OperationFuser(scale_silu())
    with pytest.raises(KeyError, match="the reason"):
        fuser(make_input(3, 8))
    handle.unregister()
    fuser(make_input(3, 8)).sum().backward()
