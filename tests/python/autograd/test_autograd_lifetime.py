"""Models come and go: nothing leaks, and a graph outlives the model that made it."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref

import pytest
import torch
from reference import Reference, assert_close, float64_copy, make_input, make_mlp

import ligature.ops as ops


class Scale(ops.BasicOperation):
    """A user's operation with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = torch.nn.Parameter(torch.tensor(3.0))

    def op_forward(self, ctx, input_, **unused):
        ctx.save_for_backward(input_, self.factor)
        return input_ * self.factor

    def op_backward(self, ctx, grad_output):
        x, factor = ctx.saved_tensors
        return grad_output * factor, ((grad_output * x).sum(),)


class Pair(ops.FusedOperation):
    """A user's fusion of two operations."""

    def __init__(self, first, second) -> None:
        super().__init__([first, second])

    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        a, b = (op.factor for op in self.basic_ops)
        basic_op_ctxs[0].save_for_backward(input_, a)
        basic_op_ctxs[1].save_for_backward(input_ * a, b)
        return input_ * a * b, [(), ()]


@pytest.fixture(autouse=True, scope="module")
def _only_new_objects():
    """Lets the collector look at what these tests make only, which is fast."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def collected(reference) -> bool:
    gc.collect()
    return reference() is None


CASES = {
    "linear": lambda: ops.Linear(8, 8),
    "norm": lambda: ops.LayerNorm(8),
    "python op": Scale,
    "mlp": make_mlp,
    "recomputing mlp": lambda: make_mlp(recompute="cheap"),
    "with python op": lambda: ops.Sequential(ops.Linear(8, 8), Scale(), ops.GELU()),
    "nested": lambda: ops.Sequential(make_mlp(), torch.nn.ReLU(), ops.Sequential(Scale())),
    "channels": lambda: with_channels(),
}


def with_channels():
    model = ops.Sequential(
        ops.MakeExtraOutput(), ops.Linear(8, 8), ops.AddExtraInput(), ops.RMSNorm(8)
    )
    model[0].set_extra_output_channel(0, "residual", output_to_caller=False)
    model[2].set_extra_input_channel(0, "residual")
    return model


@pytest.fixture(params=CASES, ids=lambda name: name.replace(" ", "-"))
def make(request):
    return CASES[request.param]


@pytest.mark.parametrize("how", ["never called", "forward", "backward", "no_grad"])
def test_models_do_not_leak(device, make, how):
    model = make()
    parts = [weakref.ref(m) for m in model.modules()]
    parts += [weakref.ref(p) for p in model.parameters()]
    if how == "no_grad":
        with torch.no_grad():
            model(make_input(4, 8))
    elif how != "never called":
        y = model(make_input(4, 8))
        if how == "backward":
            y.sum().backward()
        del y
    del model
    gc.collect()
    assert [ref() for ref in parts if ref() is not None] == []


def test_operations_called_alone_and_in_a_model_do_not_leak(device):
    linear, norm = ops.Linear(8, 8), ops.RMSNorm(8)
    model = ops.Sequential(linear, norm)
    for module in (linear, norm, model):
        module(make_input(4, 8)).sum().backward()
    refs = [weakref.ref(m) for m in (linear, norm, model)]
    del linear, norm, model, module
    assert all(collected(ref) for ref in refs)


def test_a_deleted_module_is_try_release(device):
    model = make_mlp()
    model(make_input(4, 8)).sum().backward()
    gone = weakref.ref(model[3])
    del model[3]
    model(make_input(4, 8))
    assert collected(gone)


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward"])
def test_a_hook_that_knows_the_model_does_not_leak(device, kind):
    def make_hooked():
        model = make_mlp()
        hook = lambda *args: model.training and None  # noqa: E731
        getattr(model[1], f"register_{kind}_hook")(hook)
        model(make_input(4, 8)).sum().backward()
        return weakref.ref(model)

    assert collected(make_hooked())


def test_an_operation_that_knows_the_model_does_not_leak(device):
    op = Scale()
    model = ops.Sequential(ops.Linear(8, 8), op)
    op.__dict__["model"] = model
    model(make_input(4, 8)).sum().backward()
    op(make_input(4, 8))
    refs = [weakref.ref(model), weakref.ref(op)]
    del model, op
    assert all(collected(ref) for ref in refs)


def test_fusions_do_not_keep_models(device):
    fusion = ops.Fusion([Scale, Scale], Pair)
    with ops.register_forward_fusion(fusion):
        model = ops.Sequential(Scale(), Scale())
        model(make_input(4, 8)).sum().backward()
        assert isinstance(model._module_groups[0]._forward_ops[0][0], Pair)
        refs = [weakref.ref(model), weakref.ref(model[0])]
        del model
        assert all(collected(ref) for ref in refs)


def test_outputs_are_try_release(device):
    model = make_mlp()
    x = make_input(4, 8) * 1
    y = model(x)
    refs = [weakref.ref(x), weakref.ref(y)]
    del x, y
    assert [ref() for ref in refs] == [None, None]


def test_extra_outputs_that_are_saved_do_not_keep_the_graph(device):
    model = ops.Sequential(ops.Linear(8, 8), ops.MakeExtraOutput(), ops.Linear(8, 8))
    y, z = model(make_input(4, 8))
    refs = [weakref.ref(y), weakref.ref(z)]
    del y, z
    assert [ref() for ref in refs] == [None, None]


def test_no_memory_grows_over_steps(device):
    model = make_mlp()
    x = make_input(4, 8)

    def tensors():
        gc.collect()
        return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())

    counts = []
    for _ in range(3):
        for _ in range(5):
            model(x).sum().backward()
        counts.append(tensors())
    assert counts[0] == counts[1] == counts[2]


def test_backward_after_the_model_is_gone(device, make):
    model = make()
    reference = Reference(model) if "Scale" not in str(model) else None
    x = make_input(4, 8)
    y = model(x)
    dy = torch.randn_like(y)
    if reference is None:
        (wanted,) = torch.autograd.grad(y, x, dy, retain_graph=True)
    else:
        x64 = float64_copy(x)
        (wanted,) = torch.autograd.grad(reference(x64), x64, dy.double())
    parameters = list(model.parameters())
    gone = weakref.ref(model)
    del model, reference
    gc.collect()
    if isinstance(gone(), ops.Sequential):
        pytest.fail("the container is kept by the graph")
    y.backward(dy)
    assert_close(x.grad, wanted, torch.float32)
    assert all(p.grad is not None for p in parameters)
    del y
    assert collected(gone)


def test_backward_after_the_fused_model_and_its_fusion_are_gone(device):
    handle = ops.register_forward_fusion(ops.Fusion([Scale, Scale], Pair))
    model = ops.Sequential(Scale(), Scale())
    x = make_input(4, 8)
    y = model(x)
    del model
    handle.unregister()
    gc.collect()
    y.sum().backward()
    assert_close(x.grad, torch.full((4, 8), 9.0), torch.float32)


@pytest.mark.parametrize("called", [False, True])
def test_parts_of_a_linear_that_is_gone(called):
    """They may work or refuse; they must not touch freed memory."""
    program = f"""
import gc, torch, ligature.ops as ops
x = torch.ones(4, 8)
linear = ops.Linear(8, 8, device="cpu")
wanted = linear(x).detach()
model = ops.Sequential(*linear.basic_ops)
if {called}:
    model(x)
del linear
gc.collect()
noise = [torch.nn.Linear(8, 8) for _ in range(100)]
try:
    y = model(x)
except RuntimeError as error:
    assert "Linear" in str(error)
else:
    assert torch.equal(y, wanted)
print("done")
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "done\n"
