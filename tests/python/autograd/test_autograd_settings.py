"""autocast, main_grad, activation checkpointing and threads."""

from __future__ import annotations

import threading

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
from torch.utils.checkpoint import checkpoint

import ligature.ops as ops

# -- autocast


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("recompute", ["none", "cheap"])
def test_autocast_as_torch(device, dtype, recompute):
    model = make_mlp(32, 64, recompute=recompute)
    twin = torch_twin(model)
    x = make_input(16, 32)
    x2 = x.detach().clone().requires_grad_()
    with torch.autocast(device, dtype=dtype):
        y, y2 = model(x), twin(x2)
    assert y.dtype == y2.dtype == dtype
    assert_close(y, y2, dtype)
    dy = torch.randn_like(y)
    y.backward(dy)
    y2.backward(dy)
    assert_close(x.grad, x2.grad, torch.float32, scale=1e4 if dtype == torch.bfloat16 else 1e3)
    for (name, a), b in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert a.grad.dtype == torch.float32
        error = (a.grad - b.grad).norm() / b.grad.norm()
        assert error < (0.02 if dtype == torch.bfloat16 else 0.003), name


def test_autocast_really_computes_in_its_dtype(device):
    linear = ops.Linear(2, 1, bias=False)
    with torch.no_grad():
        linear.weight.copy_(torch.tensor([[1.0, -1.0]]))
    x = torch.tensor([[1 + 2**-10, 1.0]])
    assert linear(x).item() == 2**-10
    with torch.autocast(device, dtype=torch.bfloat16):
        assert linear(x).item() == 0


def test_autocast_can_be_disabled_inside(device):
    model = make_mlp()
    x = make_input(6, 8)
    with torch.autocast(device, dtype=torch.bfloat16):
        assert model(x).dtype == torch.bfloat16
        with torch.autocast(device, enabled=False):
            check_against_reference(model, x)
    check_against_reference(model, x)


def test_autocast_of_a_half_precision_input(device):
    model = make_mlp()
    x = make_input(6, 8, dtype=torch.bfloat16)
    with torch.autocast(device, dtype=torch.bfloat16):
        y = model(x)
    y.sum().backward()
    assert y.dtype == x.grad.dtype == torch.bfloat16
    assert model[1].weight.grad.dtype == torch.float32


@pytest.mark.parametrize("recompute", ["none", "cheap"])
def test_autocast_leaves_float64_alone(device, recompute):
    model = make_mlp(dtype=torch.float64, recompute=recompute)
    linear = torch.nn.Linear(8, 8, dtype=torch.float64)
    x = make_input(6, 8, dtype=torch.float64)
    with torch.autocast(device, dtype=torch.bfloat16):
        assert linear(x).dtype == torch.float64
        check_against_reference(model, x)
        check_against_reference(ops.Sequential(ops.Linear(8, 8, dtype=torch.float64)), x)
        check_against_reference(ops.ScaledSwiGLU(), x, make_input(6, dtype=torch.float64))


def test_autocast_around_backward_changes_nothing(device):
    model = make_mlp()
    x = make_input(6, 8)
    y = model(x)
    dy = torch.randn_like(y)
    leaves = [x, *model.parameters()]
    outside = torch.autograd.grad(y, leaves, dy, retain_graph=True)
    with torch.autocast(device, dtype=torch.bfloat16):
        inside = torch.autograd.grad(y, leaves, dy)
    for a, b in zip(outside, inside, strict=True):
        assert torch.equal(a, b)


class Square(ops.BasicOperation):
    """A user's operation, by matrix product, so that autocast applies to it."""

    def op_forward(self, ctx, input_, **unused):
        ctx.save_for_backward(input_)
        self.seen = torch.mm(input_, torch.eye(input_.shape[1])).dtype
        return input_.square()

    def op_backward(self, ctx, grad_output):
        (x,) = ctx.saved_tensors
        return 2 * x * grad_output, ()


def test_a_python_operation_runs_under_the_callers_autocast(device):
    op = Square()
    with torch.autocast(device, dtype=torch.bfloat16):
        ops.Sequential(op)(make_input(4, 4))
    assert op.seen == torch.bfloat16
    ops.Sequential(op)(make_input(4, 4))
    assert op.seen == torch.float32


# -- main_grad


def main_grad_mlp(dtype=torch.float32):
    model = ops.Sequential(
        ops.Linear(8, 16, accumulate_into_main_grad=True, dtype=dtype),
        ops.GELU(),
        ops.Linear(16, 8, accumulate_into_main_grad=True, dtype=dtype),
    )
    for index in (0, 2):
        weight = model[index].weight
        weight.main_grad = torch.zeros(weight.shape, dtype=torch.float32)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_main_grad_accumulates_microbatches(device, dtype):
    model = main_grad_mlp(dtype)
    x = make_input(8, 8, dtype=dtype)
    for part in x.split(4):
        model(part).sum().backward()
    reference = Reference(model)
    x64 = float64_copy(x)
    reference(x64).sum().backward()
    for index in (0, 2):
        weight = model[index].weight
        assert weight.grad is None
        assert weight.main_grad.dtype == torch.float32
        error = weight.main_grad.double() - reference.parameters[f"{index}.weight"].grad
        assert error.abs().max() < (1e-5 if dtype == torch.float32 else 0.1)
        bias_grad = reference.parameters[f"{index}.bias"].grad
        assert_close(model[index].bias.grad, bias_grad, dtype, scale=4)
    assert_close(x.grad, x64.grad, dtype)


def test_main_grad_is_overwritten_on_request(device):
    model = main_grad_mlp()
    x = make_input(4, 8)
    model(x).sum().backward()
    wanted = model[0].weight.main_grad.clone()
    model[0].weight.overwrite_main_grad = True
    model[0].weight.main_grad.fill_(float("nan"))
    model[2].weight.overwrite_main_grad = False
    once = model[2].weight.main_grad.clone()
    model(x).sum().backward()
    assert_close(model[0].weight.main_grad, wanted, torch.float32)
    assert_close(model[2].weight.main_grad, 2 * once, torch.float32)


def test_main_grad_marks_the_weight(device):
    model = main_grad_mlp()
    weight = model[0].weight
    weight.grad_added_to_main_grad = False
    model(make_input(4, 8)).sum().backward()
    assert weight.grad_added_to_main_grad is True
    assert weight.grad is not None
    assert weight.grad.shape == weight.shape
    assert torch.count_nonzero(weight.grad) == 0
    assert not hasattr(model[2].weight, "grad_added_to_main_grad")
    assert model[2].weight.grad is None


def test_main_grad_of_a_frozen_weight_stays(device):
    model = main_grad_mlp()
    model[0].weight.requires_grad_(False)
    model(make_input(4, 8)).sum().backward()
    assert torch.count_nonzero(model[0].weight.main_grad) == 0
    assert torch.count_nonzero(model[2].weight.main_grad) > 0


def test_main_grad_that_is_missing_or_wrong(device):
    model = ops.Linear(8, 4, accumulate_into_main_grad=True)
    x = make_input(4, 8)
    with pytest.raises(RuntimeError, match=r"\[Linear\].*main_grad"):
        model(x).sum().backward()
    model.weight.main_grad = torch.zeros(8, 4)
    with pytest.raises(ValueError, match=r"main_grad must be \[4, 8\]"):
        model(x).sum().backward()
    model.weight.main_grad = torch.zeros(4, 8)
    model(x).sum().backward()
    assert torch.count_nonzero(model.weight.main_grad) > 0


def test_main_grad_of_a_weight_replaced_after_forward(device):
    model = ops.Linear(8, 4, accumulate_into_main_grad=True, bias=False)
    first = model.weight
    first.main_grad = torch.zeros(4, 8)
    y = model(make_input(4, 8))
    model.weight = torch.nn.Parameter(torch.zeros(4, 8))
    model.weight.main_grad = torch.zeros(4, 8)
    y.sum().backward()
    assert torch.count_nonzero(first.main_grad) > 0
    assert torch.count_nonzero(model.weight.main_grad) == 0


# -- checkpointing


class Checkpointed(torch.nn.Module):
    def __init__(self, inner: torch.nn.Module, use_reentrant: bool) -> None:
        super().__init__()
        self.inner = inner
        self.use_reentrant = use_reentrant
        self.calls = 0

    def forward(self, x):
        def run(a):
            self.calls += 1
            return self.inner(a)

        return checkpoint(run, x, use_reentrant=self.use_reentrant)


def compare_with(model, plain, x):
    torch.manual_seed(3)
    y = model(x)
    torch.manual_seed(3)
    x2 = x.detach().clone().requires_grad_()
    y2 = plain(x2)
    assert torch.equal(y, y2)
    dy = torch.randn_like(y)
    got = torch.autograd.grad(y, [x, *plain.parameters()], dy)
    wanted = torch.autograd.grad(y2, [x2, *plain.parameters()], dy)
    for a, b in zip(got, wanted, strict=True):
        assert torch.equal(a, b)


def test_checkpoint_around_a_model(device):
    inner = ops.Sequential(*make_mlp(), ops.Dropout(0.5), ops.Linear(8, 8))
    model = Checkpointed(inner, use_reentrant=False)
    compare_with(model, inner, make_input(6, 8))
    assert model.calls == 2


def test_reentrant_checkpoint_around_a_model(device):
    inner = ops.Sequential(*make_mlp(), ops.Dropout(0.5), ops.Linear(8, 8))
    model = Checkpointed(inner, use_reentrant=True)
    x = make_input(6, 8)
    torch.manual_seed(3)
    y = model(x)
    dy = torch.randn_like(y)
    y.backward(dy)
    assert model.calls == 2
    torch.manual_seed(3)
    x2 = x.detach().clone().requires_grad_()
    wanted = torch.autograd.grad(inner(x2), [x2, *inner.parameters()], dy)
    for a, b in zip([x, *inner.parameters()], wanted, strict=True):
        assert_close(a.grad, b, torch.float32)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint_inside_a_model(device, use_reentrant):
    inner = make_mlp()
    model = ops.Sequential(
        ops.Linear(8, 8), Checkpointed(inner, use_reentrant), ops.SiLU(), ops.Linear(8, 4)
    )
    plain = ops.Sequential(model[0], inner, model[2], model[3])
    x = make_input(6, 8)
    model(x).square().sum().backward()
    got = [x.grad, *(p.grad for p in model.parameters())]
    x2 = x.detach().clone().requires_grad_()
    wanted = torch.autograd.grad(plain(x2).square().sum(), [x2, *plain.parameters()])
    assert model[1].calls == 2
    for a, b in zip(got, wanted, strict=True):
        assert_close(a, b, torch.float32)


def test_checkpoint_saves_only_its_input(device):
    inner = make_mlp()
    shapes = []
    x = make_input(6, 8)

    def pack(tensor):
        shapes.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = Checkpointed(inner, use_reentrant=False)(x)
    assert [shape for shape in shapes if shape != (0,)] == [(6, 8)]  # torch 2.11 adds a dummy
    y.sum().backward()
    assert x.grad is not None


# -- threads


class SlowPython(ops.BasicOperation):
    def op_forward(self, ctx, input_, **unused):
        ctx.save_for_backward(input_)
        return input_.sin()

    def op_backward(self, ctx, grad_output):
        (x,) = ctx.saved_tensors
        return x.cos() * grad_output, ()


@pytest.mark.parametrize("with_python_op", [False, True])
def test_threads_share_a_model(device, with_python_op):
    model = make_mlp(32, 64)
    if with_python_op:
        model.append(SlowPython())
    inputs = [make_input(16, 32) for _ in range(4)]
    parameters = list(model.parameters())

    def step(x):
        y = model(x)
        return [y, *torch.autograd.grad(y, [x, *parameters], torch.ones_like(y))]

    wanted = [step(x) for x in inputs]
    results: list[list] = [[] for _ in inputs]
    start = threading.Barrier(len(inputs))

    def work(index):
        start.wait()
        for _ in range(10):
            results[index].append(step(inputs[index]))

    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive(), "deadlock"
    for got, want in zip(results, wanted, strict=True):
        assert len(got) == 10
        for run in got:
            for a, b in zip(run, want, strict=True):
                assert_close(a, b, torch.float32)


def test_threads_start_on_a_fresh_model_and_share_a_graph(device):
    model = make_mlp(32, 64)
    model.append(SlowPython())
    x = make_input(16, 32)
    outputs, gradients = [], []
    start = threading.Barrier(4)

    def forward():
        start.wait()
        outputs.append(model(x))

    def backward(y):
        start.wait()
        gradients.append(torch.autograd.grad(y, x, torch.ones_like(y), retain_graph=True)[0])

    for target, args in ((forward, ()), (backward, None)):
        args = (outputs[0],) if args is None else args
        threads = [threading.Thread(target=target, args=args, daemon=True) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
            assert not thread.is_alive(), "deadlock"
    assert len(outputs) == len(gradients) == 4
    assert all(torch.equal(y, outputs[0]) for y in outputs)
    assert all(torch.equal(g, gradients[0]) for g in gradients)
