"""Sequential as a container, and how it groups operations with other modules."""

from __future__ import annotations

import copy
import gc
import weakref
from collections import OrderedDict
from collections.abc import Callable

import pytest
import torch
from fusion_support import forward_names
from reference import check_against_reference, make_input

import ligature as te

Linear, GELU, Sequential = te.ops.Linear, te.ops.GELU, te.ops.Sequential


@pytest.fixture
def modules() -> list[torch.nn.Module]:
    return [te.ops.LayerNorm(8), Linear(8, 8), GELU(), torch.nn.Linear(8, 8), te.ops.ReLU()]


def check(model: Sequential, wanted: list[torch.nn.Module]) -> None:
    """The container holds these modules and computes with them, now."""
    assert len(model) == len(wanted)
    assert all(a is b for a, b in zip(model, wanted, strict=True))
    assert all(model[i] is m for i, m in enumerate(wanted))
    assert all(model[i - len(wanted)] is m for i, m in enumerate(wanted))
    assert list(model.children()) == list(dict.fromkeys(wanted))
    x = torch.randn(3, 8)
    y = x
    for module in wanted:
        y = module(y)
    torch.testing.assert_close(model(x), y)


# -- container


def test_made_of_modules(modules: list[torch.nn.Module]) -> None:
    check(Sequential(*modules), modules)
    assert list(Sequential(*modules)._modules) == ["0", "1", "2", "3", "4"]


@pytest.mark.parametrize("kind", [OrderedDict, dict])
def test_made_of_a_dict(kind: type, modules: list[torch.nn.Module]) -> None:
    named = kind((f"layer_{i}", m) for i, m in enumerate(modules))
    model = Sequential(named)
    check(model, modules)
    assert model.layer_3 is modules[3]
    assert [name for name, _ in model.named_children()] == list(named)
    assert "layer_1.weight" in model.state_dict()
    model.append(GELU())
    assert list(model._modules)[-1] == "0"


def test_empty() -> None:
    model = Sequential()
    x = torch.randn(3, 8)
    assert len(model) == 0
    assert list(model) == []
    assert model(x) is x
    model.append(GELU())
    check(model, [model[0]])


def test_index_out_of_range(modules: list[torch.nn.Module]) -> None:
    model = Sequential(*modules)
    for index in (5, -6):
        with pytest.raises(IndexError):
            model[index]
        with pytest.raises(IndexError):
            model[index] = GELU()
        with pytest.raises(IndexError):
            del model[index]
    check(model, modules)


@pytest.mark.parametrize(
    "where", [slice(1, 3), slice(None), slice(-2, None), slice(None, None, 2), slice(3, 1)]
)
def test_slice(where: slice, modules: list[torch.nn.Module]) -> None:
    model = Sequential(*modules)
    part = model[where]
    assert type(part) is Sequential
    check(part, modules[where])
    part.append(GELU())
    check(model, modules)


@pytest.mark.parametrize("index", [0, 2, -1, -5])
def test_set(index: int, modules: list[torch.nn.Module]) -> None:
    model = Sequential(*modules)
    model(torch.randn(3, 8))
    model[index] = modules[index] = te.ops.SiLU()
    assert model._module_groups is None
    check(model, modules)


@pytest.mark.parametrize("where", [0, 2, -1, slice(1, 3), slice(None), slice(None, None, 2)])
def test_delete(where: int | slice, modules: list[torch.nn.Module]) -> None:
    model = Sequential(*modules)
    model(torch.randn(3, 8))
    del model[where]
    del modules[where]
    assert model._module_groups is None
    check(model, modules)
    model.append(GELU())
    check(model, [*modules, model[-1]])


@pytest.mark.parametrize("where", [0, 2, -1, 3])
def test_pop(where: int, modules: list[torch.nn.Module]) -> None:
    model = Sequential(*modules)
    model(torch.randn(3, 8))
    assert model.pop(where) is modules.pop(where)
    assert model._module_groups is None
    check(model, modules)


def test_pop_the_last_and_a_slice(modules: list[torch.nn.Module]) -> None:
    model = Sequential(*modules)
    assert model.pop() is modules.pop()
    popped = model.pop(slice(0, 2))
    check(popped, modules[:2])
    check(model, modules[2:])


@pytest.mark.parametrize("where", [0, 1, 4, 5, -1, -5])
def test_insert(where: int, modules: list[torch.nn.Module]) -> None:
    model = Sequential(*modules)
    model(torch.randn(3, 8))
    op = te.ops.SiLU()
    assert model.insert(where, op) is model
    modules.insert(where, op)
    assert model._module_groups is None
    check(model, modules)


def test_insert_nowhere(modules: list[torch.nn.Module]) -> None:
    model = Sequential(*modules)
    with pytest.raises(IndexError):
        model.insert(-6, GELU())
    check(model, modules)


def test_append_and_extend(modules: list[torch.nn.Module]) -> None:
    model = Sequential()
    for module in modules[:2]:
        model(torch.randn(3, 8))
        assert model.append(module) is model
        assert model._module_groups is None
    check(model, modules[:2])
    assert model.extend(iter(modules[2:])) is model
    assert model._module_groups is None
    check(model, modules)
    model.extend(model)
    check(model, modules * 2)


def test_addition(modules: list[torch.nn.Module]) -> None:
    first, second = Sequential(*modules[:2]), Sequential(*modules[2:])
    both = first + second
    assert type(both) is Sequential
    check(both, modules)
    check(first, modules[:2])
    check(first + modules[2:], modules)
    same = first
    first += second
    assert same is first
    check(first, modules)
    check(second, modules[2:])


def test_only_modules_may_enter() -> None:
    model = Sequential(GELU())
    for bad in (3, "x", torch.nn.functional.gelu):
        for enter in (
            lambda bad=bad: model.append(bad),
            lambda bad=bad: model.insert(0, bad),
            lambda bad=bad: model.__setitem__(0, bad),
            lambda bad=bad: model.extend([bad]),
        ):
            with pytest.raises(TypeError):
                enter()
    check(model, [model[0]])


def test_the_same_module_twice() -> None:
    linear, gelu = Linear(8, 8), GELU()
    model = Sequential(linear, gelu, linear, gelu)
    check(model, [linear, gelu, linear, gelu])
    assert len(list(model.parameters())) == 2
    check_against_reference(model, make_input(3, 8))


def test_repr(modules: list[torch.nn.Module]) -> None:
    lines = repr(Sequential(*modules)).splitlines()
    assert lines[0] == "Sequential("
    assert lines[2] == "  (1): Linear(in_features=8, out_features=8, bias=True)"
    assert len(lines) == 2 + len(modules)
    named = repr(Sequential(OrderedDict(first=Linear(4, 2, bias=False))))
    assert "(first): Linear(in_features=4, out_features=2, bias=False)" in named


def test_is_a_module(modules: list[torch.nn.Module]) -> None:
    model = Sequential(*modules)
    torch_model = torch.nn.Sequential(
        torch.nn.LayerNorm(8), torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 8)
    )
    assert list(model.state_dict()) == list(torch_model.state_dict())
    model.load_state_dict(torch_model.state_dict())
    x = torch.randn(3, 8)
    torch.testing.assert_close(model[:4](x), torch_model(x), rtol=1e-3, atol=1e-3)
    assert not model.eval()[2].training
    assert model.double()(x.double()).dtype is torch.float64
    clone = copy.deepcopy(model)
    torch.nn.init.zeros_(clone[1].weight)
    assert model[1].weight.any()
    check(model.float(), modules)


# -- groups


def test_groups(modules: list[torch.nn.Module]) -> None:
    model = Sequential(*modules)
    assert model._module_groups is None
    model(torch.randn(3, 8))
    first, plain, last = model._module_groups
    assert type(first) is te.ops.OperationFuser
    assert plain is modules[3]
    assert type(last) is te.ops.OperationFuser
    assert forward_names(first) == ["LayerNorm", "ForwardLinearBiasActivation"]
    assert forward_names(last) == ["ReLU"]
    groups = model._module_groups
    model(torch.randn(3, 8))
    assert model._module_groups is groups


def test_direct_edits_are_noticed(modules: list[torch.nn.Module]) -> None:
    model = Sequential(*modules)
    x = torch.randn(3, 8)
    model(x)
    model._modules["2"] = modules[2] = te.ops.SiLU()
    check(model, modules)
    del model._modules["4"]
    check(model, modules[:4])
    model._modules["new"] = te.ops.SiLU()
    check(model, [*modules[:4], model._modules["new"]])
    setattr(model, "0", te.ops.RMSNorm(8))
    modules[0] = getattr(model, "0")
    check(model, [*modules[:4], model._modules["new"]])


def test_with_torch_modules() -> None:
    model = Sequential(
        Linear(8, 16), torch.nn.Dropout(0.0), te.ops.SwiGLU(), torch.nn.Linear(8, 4), GELU()
    )
    x = make_input(3, 8)
    y = model(x)
    y.sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    assert [type(g).__name__ for g in model._module_groups] == [
        "OperationFuser",
        "Dropout",
        "OperationFuser",
        "Linear",
        "OperationFuser",
    ]


def test_inside_torch_sequential() -> None:
    inner = Sequential(Linear(8, 8), GELU())
    model = torch.nn.Sequential(inner, torch.nn.Linear(8, 2))
    x = make_input(3, 8)
    torch.testing.assert_close(model(x), model[1](inner(x)))


def test_nested_with_extra_inputs_and_outputs() -> None:
    inner = Sequential(te.ops.AddExtraInput(), te.ops.MakeExtraOutput(), Linear(8, 8))
    model = Sequential(
        te.ops.MakeExtraOutput(),
        te.ops.AddExtraInput(),
        inner,
        torch.nn.Linear(8, 8),
        te.ops.MakeExtraOutput(),
        te.ops.AddExtraInput(),
    )
    inputs = [make_input(3, 8) for _ in range(4)]
    x, a, b, c = inputs
    y, first, second, third = model(*inputs)
    assert torch.equal(first, x)
    assert torch.equal(second, x + a + b)
    torch.testing.assert_close(third, model[3](inner[2](x + a + b)))
    torch.testing.assert_close(y, third + c)
    assert (inner.num_extra_inputs, model.num_extra_inputs) == (1, 3)
    check_against_reference(model, *inputs)
    with pytest.raises(ValueError, match=r"\[Sequential\] takes 3 extra inputs, got 2"):
        model(x, a, b)


def test_nested_sequential_that_changes() -> None:
    inner = Sequential(te.ops.AddExtraInput())
    model = Sequential(GELU(), inner)
    x = torch.randn(3, 8)
    model(x, x)
    inner.append(te.ops.AddExtraInput())
    torch.testing.assert_close(model(x, x, x), GELU()(x) + 2 * x)
    inner[0] = GELU()
    torch.testing.assert_close(model(x, x), GELU()(GELU()(x)) + x)
    del inner[1]
    torch.testing.assert_close(model(x), GELU()(GELU()(x)))


def test_one_plan_per_situation_in_deep_copies() -> None:
    model = Sequential(Linear(8, 8), GELU())
    x = make_input(3, 8)
    wanted = model(x)
    clone = copy.deepcopy(model)
    assert clone._module_groups is None
    torch.testing.assert_close(clone(x), wanted)
    clone(x).sum().backward()
    assert model[0].weight.grad is None
    assert clone[0].weight.grad is not None


# -- the short way of a call: everything is one run of operations


def test_edits_between_calls_are_noticed() -> None:
    x = make_input(4, 8)
    model = te.ops.Sequential(te.ops.ReLU())
    assert torch.equal(model(x), torch.relu(x))
    model._modules["0"] = te.ops.SiLU()  # behind the container's back
    torch.testing.assert_close(model(x), torch.nn.functional.silu(x))
    model[0] = te.ops.ReLU()
    assert torch.equal(model(x), torch.relu(x))
    seen = []
    handle = model[0].register_forward_hook(lambda *_: seen.append(True))
    model(x)
    assert seen == [True]
    handle.remove()
    assert torch.equal(model(x), torch.relu(x))
    assert seen == [True]
    del model[0]
    assert model(x) is x


def test_wrong_arguments_of_a_call() -> None:
    x = make_input(4, 8)
    for model in (te.ops.Sequential(te.ops.ReLU()), te.ops.ReLU()):
        for _ in range(2):  # the first call makes the groups
            with pytest.raises(TypeError, match=r"\[ReLU\] input must be a tensor, got .*int"):
                model(3)
            with pytest.raises(ValueError, match="take 0 extra inputs, got 1"):
                model(x, x)
            assert torch.equal(model(x), torch.relu(x))
    join = te.ops.Sequential(te.ops.AddExtraInput())
    assert torch.equal(join(x, x), 2 * x)
    with pytest.raises(TypeError, match="an extra input"):
        join(x, 3)


@pytest.mark.parametrize(
    "make", [lambda: te.ops.LayerNorm(8), lambda: te.ops.Sequential(te.ops.Linear(8, 8))]
)
def test_what_was_called_is_collected(make: Callable[[], torch.nn.Module]) -> None:
    model = make()
    model(make_input(4, 8)).sum().backward()
    gone = weakref.ref(next(model.parameters()))
    del model
    gc.collect()
    assert gone() is None


def test_a_graph_outlives_its_model() -> None:
    x = make_input(4, 8)
    model = te.ops.Sequential(te.ops.Linear(8, 8), te.ops.GELU())
    wanted = torch.autograd.grad(model(x).sum(), x)[0]
    y = model(x).sum()
    del model
    gc.collect()
    assert torch.equal(torch.autograd.grad(y, x)[0], wanted)


def test_times() -> None:
    linear = te.ops.Linear(8, 8)
    block = te.ops.Sequential(linear, te.ops.GELU(), recompute="cheap")
    plain = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(approximate="tanh"))
    plain[0].load_state_dict(dict(linear.named_parameters()))
    given = torch.randn(4, 8, requires_grad=True)
    for times in (1, 3):
        for made in (block * times, times * block):
            assert isinstance(made, te.ops.Sequential)
            assert made is not block
            assert list(made._modules) == list((plain * times)._modules)
            assert [id(m) for m in made] == [id(m) for m in block] * times
            assert made.recompute == "cheap"
            got = torch.autograd.grad(made(given).sum(), [given, linear.weight, linear.bias])
            wanted = torch.autograd.grad(
                (plain * times)(given).sum(), [given, plain[0].weight, plain[0].bias]
            )
            for g, w in zip(got, wanted, strict=True):
                torch.testing.assert_close(g, w)
    same = block
    block *= 2
    assert block is same
    assert len(block) == 4
    for wrong, error in ((2.0, TypeError), ("2", TypeError), (0, ValueError), (-1, ValueError)):
        with pytest.raises(error, match=r"\[Sequential\] it can be multiplied by"):
            block * wrong
        with pytest.raises(error, match=r"\[Sequential\] it can be multiplied by"):
            block *= wrong
    assert len(block) == 4
