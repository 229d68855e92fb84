"""Where a fuser stands in the autograd graph: what may be asked of it, and how often."""

from __future__ import annotations

import warnings

import pytest
import torch
from reference import (
    Reference,
    assert_close,
    check_against_reference,
    float64_copy,
    make_input,
    make_mlp,
    torch_twin,
)

import ligature.ops as ops

BACKWARD_TWICE = "Trying to backward through the graph a second time"
ONCE = "trying to differentiate twice a function that was marked with @once_differentiable"


@pytest.mark.parametrize("recompute", ["none", "cheap"])
def test_retain_graph_gives_the_same_gradients_again(device, recompute):
    model = make_mlp(recompute=recompute)
    x = make_input(6, 8)
    y = model(x)
    dy = torch.randn_like(y)
    leaves = [x, *model.parameters()]
    first = torch.autograd.grad(y, leaves, dy, retain_graph=True)
    second = torch.autograd.grad(y, leaves, dy, retain_graph=True)
    last = torch.autograd.grad(y, leaves, dy)
    reference = Reference(model)
    x64 = float64_copy(x)
    wanted = torch.autograd.grad(reference(x64), [x64, *reference.parameters.values()], dy.double())
    for a, b, c, want in zip(first, second, last, wanted, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)
        assert_close(a, want, torch.float32)


@pytest.mark.parametrize("recompute", ["none", "cheap"])
def test_second_backward_raises(device, recompute):
    y = make_mlp(recompute=recompute)(make_input(6, 8)).sum()
    y.backward()
    with pytest.raises(RuntimeError, match=BACKWARD_TWICE):
        y.backward()


def test_second_backward_without_saved_tensors_works(device):
    x = make_input(3, 4)
    y = ops.ConstantScale(3.0)(x)
    y.backward(torch.ones_like(y))
    y.backward(torch.ones_like(y))
    assert_close(x.grad, torch.full((3, 4), 6.0), torch.float32)


@pytest.mark.parametrize("recompute", ["none", "cheap"])
def test_double_backward_raises(device, recompute):
    model = make_mlp(recompute=recompute)
    x = make_input(6, 8)
    y = model(x)
    leaves = [x, *model.parameters()]
    grads = torch.autograd.grad(y.square().sum(), leaves, create_graph=True)
    twin = torch_twin(model)
    x2 = x.detach().clone().requires_grad_()
    wanted = torch.autograd.grad(twin(x2).square().sum(), [x2, *twin.parameters()])
    for grad, want in zip(grads, wanted, strict=True):
        assert grad.requires_grad
        assert_close(grad, want, torch.float32, scale=10)
    for grad in grads:
        with pytest.raises(RuntimeError, match=ONCE):
            grad.sum().backward(retain_graph=True)
        with pytest.raises(RuntimeError):
            torch.autograd.grad(grad.sum(), x, retain_graph=True)


@pytest.mark.parametrize("loss", [torch.sum, lambda y: y.square().sum()], ids=["sum", "square"])
@pytest.mark.parametrize("by", ["backward", "grad"])
def test_gradient_penalty_is_not_dropped_silently(device, loss, by):
    model = make_mlp()
    x = make_input(6, 8)
    y = model(x)
    (dx,) = torch.autograd.grad(loss(y), x, create_graph=True)
    total = loss(y) + dx.square().sum()
    with pytest.raises(RuntimeError, match=ONCE):
        total.backward() if by == "backward" else torch.autograd.grad(total, x)


def test_backward_with_create_graph(device):
    model = make_mlp()
    x = make_input(6, 8)
    with warnings.catch_warnings():  # torch warns of the cycle, but only once per process
        warnings.simplefilter("ignore")
        model(x).sum().backward(create_graph=True)
    reference = Reference(model)
    x64 = float64_copy(x)
    reference(x64).sum().backward()
    assert_close(x.grad, x64.grad, torch.float32)
    for name, parameter in model.named_parameters():
        assert_close(parameter.grad, reference.parameters[name].grad, torch.float32, what=name)
        parameter.grad = None
    x.grad = None


def test_gradients_of_a_subset(device):
    model = make_mlp()
    x = make_input(6, 8)
    other = make_input(2)
    y = model(x)
    dy = torch.randn_like(y)
    leaves = [x, *model.parameters()]
    full = torch.autograd.grad(y, leaves, dy, retain_graph=True)
    for chosen in [(0,), (1,), (2,), (3,), (4,), (5,), (6,), (0, 6), (2, 5), (1, 3, 4)]:
        wanted = [leaves[i] for i in chosen]
        got = torch.autograd.grad(y, [*wanted, other], dy, retain_graph=True, allow_unused=True)
        assert got[-1] is None
        for i, grad in zip(chosen, got[:-1], strict=True):
            assert_close(grad, full[i], torch.float32)
    again = torch.autograd.grad(y, leaves, dy)
    assert all(torch.equal(a, b) for a, b in zip(full, again, strict=True))


def test_backward_into_chosen_leaves(device):
    model = make_mlp()
    x = make_input(6, 8)
    y = model(x)
    y.sum().backward(inputs=[model[1].weight])
    reference = Reference(model)
    reference(x.detach().double()).sum().backward()
    for name, parameter in model.named_parameters():
        wanted = reference.parameters[name].grad if name == "1.weight" else None
        assert_close(parameter.grad, wanted, torch.float32, what=name)
    assert x.grad is None


def branching_model() -> ops.Sequential:
    return ops.Sequential(
        ops.Linear(8, 8),
        ops.MakeExtraOutput(),
        ops.SiLU(),
        ops.Linear(8, 8),
        ops.AddExtraInput(),
        ops.RMSNorm(8),
    )


def test_branches_against_reference(device):
    check_against_reference(branching_model(), make_input(5, 8), make_input(5, 8))


@pytest.mark.parametrize("used", ["main", "extra", "both"])
def test_unused_outputs(device, used):
    model = branching_model()
    x, extra = make_input(5, 8), make_input(5, 8)
    weights = {"main": (1.0, 0.0), "extra": (0.0, 2.0), "both": (1.0, 2.0)}[used]

    def loss(y, z):
        total = 0
        if weights[0]:
            total = total + weights[0] * y.square().sum()
        if weights[1]:
            total = total + weights[1] * z.square().sum()
        return total

    loss(*model(x, extra)).backward()
    reference = Reference(model)
    x64, extra64 = float64_copy(x), float64_copy(extra)
    loss(*reference(x64, extra64)).backward()

    def same(actual, wanted, what):
        if wanted is None and actual is not None:
            assert torch.count_nonzero(actual) == 0, what
        else:
            assert_close(actual, wanted, torch.float32, scale=10, what=what)

    same(x.grad, x64.grad, "x")
    same(extra.grad, extra64.grad, "extra")
    for name, parameter in model.named_parameters():
        same(parameter.grad, reference.parameters[name].grad, name)


def test_extra_input_without_gradient(device):
    model = branching_model()
    check_against_reference(model, make_input(5, 8), make_input(5, 8, requires_grad=False))
    check_against_reference(model, make_input(5, 8, requires_grad=False), make_input(5, 8))
    scaled = ops.Sequential(ops.Linear(8, 8), ops.ScaledSwiGLU())
    check_against_reference(scaled, make_input(5, 8), make_input(5, requires_grad=False))
    check_against_reference(scaled, make_input(5, 8), make_input(5))


def test_only_an_extra_input_needs_gradients(device):
    model = branching_model().requires_grad_(False)
    x, extra = make_input(5, 8, requires_grad=False), make_input(5, 8)
    y, z = model(x, extra)
    assert y.requires_grad
    assert not z.requires_grad
    check_against_reference(model, x, extra)


def test_one_tensor_as_input_and_extra_input(device):
    model = ops.Sequential(ops.Linear(8, 8), ops.AddExtraInput())
    x = make_input(5, 8)
    model(x, x).square().sum().backward()
    x64 = float64_copy(x)
    (Reference(model)(x64, x64)).square().sum().backward()
    assert_close(x.grad, x64.grad, torch.float32, scale=10)


def test_non_leaf_and_view_inputs(device):
    model = make_mlp()
    base = make_input(4, 3, 16)
    base64 = float64_copy(base)
    reference = Reference(model)
    for view in (
        lambda t: t.view(24, 8) * 2,
        lambda t: t.reshape(4, 3, 2, 8)[:, 1:, 0],
        lambda t: t[..., :8],
        lambda t: t.transpose(0, 1)[..., ::2],
        lambda t: t.unbind(0)[1].view(6, 8),
    ):
        x, x64 = view(base), view(base64)
        y, y64 = model(x), reference(x64)
        assert_close(y, y64, torch.float32)
        dy = torch.randn_like(y)
        leaves = [base, *model.parameters()]
        got = torch.autograd.grad(y, leaves, dy)
        wanted = torch.autograd.grad(y64, [base64, *reference.parameters.values()], dy.double())
        for a, b in zip(got, wanted, strict=True):
            assert_close(a, b, torch.float32)


def test_one_node_with_a_name(device):
    model = make_mlp()
    x = make_input(6, 8)
    y = model(x)
    assert y.grad_fn.name() == "LigatureFuserBackward"
    leaves = {id(node.variable) for node, _ in y.grad_fn.next_functions if node is not None}
    assert leaves == {id(x), *(id(p) for p in model.parameters())}


def test_tensor_hooks_and_retain_grad(device):
    model = make_mlp()
    x = make_input(6, 8)
    seen = {}
    x.register_hook(lambda g: seen.update(x=g.clone()))
    model[3].bias.register_hook(lambda g: 2 * g)
    model[1].weight.register_post_accumulate_grad_hook(lambda p: seen.update(w=p.grad.clone()))
    y = model(x)
    y.retain_grad()
    y.register_hook(lambda g: 3 * g)
    y.sum().backward()
    reference = Reference(model)
    x64 = float64_copy(x)
    (3 * reference(x64)).sum().backward()
    assert_close(y.grad, torch.full_like(y, 3.0), torch.float32)
    assert_close(seen["x"], x64.grad, torch.float32, scale=10)
    assert_close(seen["w"], reference.parameters["1.weight"].grad, torch.float32, scale=10)
    assert_close(model[3].bias.grad, 2 * reference.parameters["3.bias"].grad, torch.float32)


def test_node_hooks(device):
    model = make_mlp()
    x = make_input(6, 8)
    y = model(x)
    calls = []
    y.grad_fn.register_prehook(lambda grads: calls.append(len(grads)))
    y.grad_fn.register_hook(lambda grad_inputs, grad_outputs: calls.append(len(grad_inputs)))
    y.sum().backward()
    assert calls == [1, 1 + len(list(model.parameters()))]


def test_gradcheck(device):
    model = make_mlp(4, 6, dtype=torch.float64, device=device)
    x = make_input(3, 4, dtype=torch.float64)
    weight = model[1].weight
    assert torch.autograd.gradcheck(lambda a, _: model(a), (x, weight))
    branching = ops.Sequential(
        ops.MakeExtraOutput(),
        ops.RMSNorm(4, dtype=torch.float64, device=device),
        ops.ScaledSwiGLU(),
        ops.AddExtraInput(),
    )
    inputs = (x, make_input(3, dtype=torch.float64), make_input(3, 2, dtype=torch.float64))
    assert torch.autograd.gradcheck(branching, inputs)


def test_anomaly_mode_names_the_node(device):
    model = make_mlp()
    with torch.autograd.set_detect_anomaly(True):
        y = model(make_input(6, 8))
        with (
            pytest.warns(UserWarning, match="Error detected in LigatureFuserBackward"),
            pytest.raises(RuntimeError, match="returned nan values"),
        ):
            y.backward(torch.full_like(y, float("nan")))


def test_torch_func_transforms_are_refused(device):
    model = make_mlp()
    x = make_input(6, 8, requires_grad=False)
    refused = "torch.func"
    with pytest.raises(RuntimeError, match=refused):
        torch.func.grad(lambda a: model(a).sum())(x)
    with pytest.raises(RuntimeError, match=refused):
        torch.func.vmap(model)(x)
    with pytest.raises(RuntimeError, match=r"torch\.func|forward-mode"):
        torch.func.jvp(model, (x,), (x,))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(RuntimeError, match="forward-mode"):
            model(dual)
    check_against_reference(model, make_input(6, 8))
