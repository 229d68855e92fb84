"""Module hooks on operations inside a Sequential."""

from __future__ import annotations

import pytest
import torch
from reference import Reference, assert_close, float64_copy, make_input, make_mlp
from torch.nn.modules import module as torch_module

import ligature.ops as ops


def is_one_fuser(model: ops.Sequential) -> bool:
    groups = model._module_groups
    return groups is not None and len(groups) == 1 and isinstance(groups[0], ops.OperationFuser)


def check_plain(model, x):
    """After hooks are gone: one fuser again, and right."""
    y = model(x)
    assert is_one_fuser(model)
    assert_close(y, Reference(model)(x.double()), torch.float32)


def intermediate(model, x64, index):
    """Float64 values before and after ``model[index]``, as leaves of their own graph."""
    reference = Reference(model)
    before = reference._run(model[:index], x64, [], [], {}) if index else x64
    return before, reference._run(model[index : index + 1], before, [], [], {})


@pytest.mark.parametrize("index", [0, 1, 2, 3])
def test_forward_hook_sees_the_values(device, index):
    model = make_mlp()
    x = make_input(6, 8)
    check_plain(model, x)
    seen = []
    handle = model[index].register_forward_hook(lambda m, args, out: seen.append((m, args, out)))
    y = model(x)
    assert not is_one_fuser(model)
    ((module, args, out),) = seen
    before, after = intermediate(model, x.detach().double(), index)
    assert module is model[index]
    assert len(args) == 1
    assert_close(args[0], before, torch.float32)
    assert_close(out, after, torch.float32)
    assert_close(y, Reference(model)(x.double()), torch.float32)
    y.sum().backward()
    reference = Reference(model)
    x64 = float64_copy(x)
    reference(x64).sum().backward()
    assert_close(x.grad, x64.grad, torch.float32)
    for name, parameter in model.named_parameters():
        assert_close(parameter.grad, reference.parameters[name].grad, torch.float32)
    handle.remove()
    check_plain(model, x)
    assert len(seen) == 1


def test_forward_hook_changes_the_output(device):
    model = make_mlp()
    x = make_input(6, 8)
    model(x)
    handle = model[1].register_forward_hook(lambda m, args, out: 2 * out)
    y = model(x)
    reference = Reference(model)
    x64 = float64_copy(x)
    _, hidden = intermediate(model, x64, 1)
    wanted = reference._run(model[2:], 2 * hidden, [], [], {})
    assert_close(y, wanted, torch.float32)
    dy = torch.randn_like(y)
    (dx,) = torch.autograd.grad(y, x, dy)
    assert_close(dx, torch.autograd.grad(wanted, x64, dy.double())[0], torch.float32)
    handle.remove()
    check_plain(model, x)


def test_forward_pre_hook_changes_the_input(device):
    model = make_mlp()
    x = make_input(6, 8)
    model(x)
    handle = model[1].register_forward_pre_hook(lambda m, args: (args[0] + 1,))
    y = model(x)
    x64 = float64_copy(x)
    reference = Reference(model)
    before, _ = intermediate(model, x64, 1)
    wanted = reference._run(model[1:], before + 1, [], [], {})
    assert_close(y, wanted, torch.float32)
    dy = torch.randn_like(y)
    (dx,) = torch.autograd.grad(y, x, dy)
    assert_close(dx, torch.autograd.grad(wanted, x64, dy.double())[0], torch.float32)
    handle.remove()
    check_plain(model, x)


def test_hooks_with_keywords(device):
    model = make_mlp()
    x = make_input(6, 8)
    seen = []
    model[2].register_forward_pre_hook(
        lambda m, args, kwargs: seen.append(len(args)), with_kwargs=True
    )
    model[2].register_forward_hook(
        lambda m, args, kwargs, out: seen.append(out.shape), with_kwargs=True, always_call=True
    )
    model(x)
    assert seen == [1, (6, 16)]


@pytest.mark.parametrize("index", [0, 1, 2, 3])
@pytest.mark.parametrize("x_grad", [False, True])
def test_full_backward_hooks_see_the_gradients(device, index, x_grad):
    model = make_mlp()
    x = make_input(6, 8, requires_grad=x_grad)
    model(x)
    seen = {}

    def backward_hook(module, grad_input, grad_output):
        seen["grads"] = (grad_input, grad_output)

    def backward_pre_hook(module, grad_output):
        seen["pre"] = grad_output

    handles = [
        model[index].register_full_backward_hook(backward_hook),
        model[index].register_full_backward_pre_hook(backward_pre_hook),
    ]
    y = model(x)
    dy = torch.randn_like(y)
    y.backward(dy)
    before, after = intermediate(model, float64_copy(x), index)
    rest = Reference(model)._run(model[index + 1 :], after, [], [], {})
    targets = [after, *([before] if before.requires_grad else [])]
    d_after, *d_before = torch.autograd.grad(rest, targets, dy.double())
    grad_input, grad_output = seen["grads"]
    assert_close(grad_output[0], d_after, torch.float32)
    assert_close(seen["pre"][0], d_after, torch.float32)
    assert_close(grad_input[0], d_before[0] if d_before else None, torch.float32)
    for handle in handles:
        handle.remove()
    check_plain(model, x)


def test_full_backward_hooks_change_the_gradients(device):
    model = make_mlp()
    x = make_input(6, 8)
    pre = model[3].register_full_backward_pre_hook(lambda m, grads: (2 * grads[0],))
    post = model[1].register_full_backward_hook(lambda m, gi, go: (3 * gi[0],))
    model(x).sum().backward()
    reference = Reference(model)
    x64 = float64_copy(x)
    reference(x64).sum().backward()
    wanted = reference.parameters
    assert_close(x.grad, 6 * x64.grad, torch.float32)
    assert_close(model[3].weight.grad, 2 * wanted["3.weight"].grad, torch.float32, scale=4)
    assert_close(model[1].weight.grad, 2 * wanted["1.weight"].grad, torch.float32, scale=4)
    assert_close(model[0].bias.grad, 6 * wanted["0.bias"].grad, torch.float32, scale=4)
    pre.remove()
    post.remove()
    check_plain(model, x)


def test_hooks_on_the_container_and_on_inner_containers(device):
    inner = ops.Sequential(ops.Linear(8, 8), ops.ReLU())
    model = ops.Sequential(ops.Linear(8, 8), inner, ops.Linear(8, 8))
    seen = []
    model.register_forward_hook(lambda m, args, out: seen.append("model"))
    inner.register_forward_hook(lambda m, args, out: seen.append("inner"))
    x = make_input(6, 8)
    y = model(x)
    assert seen == ["inner", "model"]
    assert_close(y, Reference(model)(x.double()), torch.float32)


def test_a_hook_on_an_operation_called_alone(device):
    linear = ops.Linear(8, 4)
    seen = []
    linear.register_forward_hook(lambda m, args, out: seen.append(out))
    x = make_input(6, 8)
    y = linear(x)
    assert len(seen) == 1
    assert seen[0] is y


@pytest.mark.parametrize("alone", [False, True])
def test_a_hook_on_a_part_of_a_linear_runs_or_is_refused(device, alone):
    linear = ops.Linear(8, 8)
    model = linear if alone else ops.Sequential(linear, ops.GELU())
    x = make_input(6, 8)
    model(x)
    seen = []
    try:
        linear.basic_ops[0].register_forward_hook(lambda m, args, out: seen.append(out))
    except RuntimeError:
        return
    model(x)
    assert len(seen) == 1
    assert_close(seen[0], x.detach().double() @ linear.weight.double().t(), torch.float32)


# -- with extra tensors


def residual_model(to_caller: bool) -> ops.Sequential:
    model = ops.Sequential(
        ops.MakeExtraOutput(),
        ops.RMSNorm(8),
        ops.Linear(8, 8),
        ops.AddExtraInput(),
        ops.MakeExtraOutput(),
        ops.Linear(8, 8),
        ops.AddExtraInput(),
    )
    model[0].set_extra_output_channel(0, "first", output_to_caller=to_caller)
    model[3].set_extra_input_channel(0, "first")
    return model


@pytest.mark.parametrize("index", range(7))
@pytest.mark.parametrize("to_caller", [False, True])
def test_hooks_and_channels(device, index, to_caller):
    model = residual_model(to_caller)
    x, extra = make_input(6, 8), make_input(6, 8)
    plain = model(x, extra)
    assert is_one_fuser(model)
    assert len(plain) == (3 if to_caller else 2)
    leaves = [x, extra, *model.parameters()]
    grads = [torch.randn_like(y) for y in plain]
    wanted = torch.autograd.grad(plain, leaves, grads)
    calls = []
    handles = [
        model[index].register_forward_hook(lambda m, args, out: calls.append("forward")),
        model[index].register_full_backward_hook(lambda m, gi, go: calls.append("backward")),
    ]
    hooked = model(x, extra)
    got = torch.autograd.grad(hooked, leaves, grads)
    assert calls == ["forward", "backward"]
    for a, b in zip([*hooked, *got], [*plain, *wanted], strict=True):
        assert_close(a, b, torch.float32, scale=4)
    for handle in handles:
        handle.remove()
    model(x, extra)
    assert is_one_fuser(model)


def test_hooks_on_both_ends_of_a_channel(device):
    model = residual_model(False)
    x, extra = make_input(6, 8), make_input(6, 8)
    plain = model(x, extra)
    outputs = []
    for index in (0, 3):
        model[index].register_forward_hook(lambda m, args, out: outputs.append((args, out)))
    hooked = model(x, extra)
    for a, b in zip(hooked, plain, strict=True):
        assert_close(a, b, torch.float32)
    (_, (_, made)), ((_, taken), _) = outputs
    assert_close(made, x, torch.float32)
    assert_close(taken, x, torch.float32)


def test_hook_on_a_scaled_activation(device):
    model = ops.Sequential(ops.Linear(8, 8), ops.ScaledSwiGLU(), ops.Linear(4, 8))
    x, scales = make_input(6, 8), make_input(6)
    plain = model(x, scales)
    handle = model[1].register_forward_pre_hook(lambda m, args: (args[0], 2 * args[1]))
    hooked = model(x, scales)
    reference = Reference(model)
    wanted = reference(x.double(), 2 * scales.double())
    assert_close(hooked, wanted, torch.float32)
    handle.remove()
    assert_close(model(x, scales), plain, torch.float32)


def test_op_kwargs_reach_a_hooked_operation(device):
    class AddNumber(ops.BasicOperation):
        def op_forward(self, ctx, input_, *, number=0.0, **unused):
            return input_ + number

        def op_backward(self, ctx, grad_output):
            return grad_output, ()

    model = ops.Sequential(ops.Identity(), AddNumber(), ops.Identity())
    x = make_input(6, 8)
    kwargs = {model[1]: {"number": 5.0}}
    plain = model(x, op_kwargs=kwargs)
    model[1].register_forward_hook(lambda m, args, out: None)
    assert_close(plain, x + 5, torch.float32)
    assert_close(model(x, op_kwargs=kwargs), x + 5, torch.float32)


# -- global hooks


def test_global_forward_hooks(device):
    model = make_mlp()
    x = make_input(6, 8)
    check_plain(model, x)
    names = []
    handles = [
        torch_module.register_module_forward_hook(
            lambda m, args, out: names.append(type(m).__name__)
        ),
        torch_module.register_module_forward_pre_hook(lambda m, args: None),
    ]
    try:
        y = model(x)
    finally:
        for handle in handles:
            handle.remove()
    assert names == ["LayerNorm", "Linear", "GELU", "Linear", "Sequential"]
    assert_close(y, Reference(model)(x.double()), torch.float32)
    check_plain(model, x)
    assert len(names) == 5


def test_global_backward_hooks(device):
    model = make_mlp()
    x = make_input(6, 8)
    check_plain(model, x)
    names = []
    handle = torch_module.register_module_full_backward_hook(
        lambda m, gi, go: names.append(type(m).__name__)
    )
    try:
        model(x).sum().backward()
    finally:
        handle.remove()
    assert names == ["Linear", "GELU", "Linear", "LayerNorm", "Sequential"]
    reference = Reference(model)
    x64 = float64_copy(x)
    reference(x64).sum().backward()
    assert_close(x.grad, x64.grad, torch.float32)
    check_plain(model, x)


def test_a_hook_replaced_by_another_is_seen(device):
    model = make_mlp()
    x = make_input(6, 8)
    seen = []
    first = model[1].register_forward_hook(lambda m, args, out: seen.append(1))
    model(x)
    first.remove()
    model[2].register_forward_hook(lambda m, args, out: seen.append(2))
    model(x)
    assert seen == [1, 2]


def test_a_hook_that_raises_leaves_the_model_usable(device):
    model = make_mlp()
    x = make_input(6, 8)

    def refuse(module, args, out):
        raise KeyError("refused")

    handle = model[2].register_forward_hook(refuse)
    with pytest.raises(KeyError, match="refused"):
        model(x)
    handle.remove()
    check_plain(model, x)
