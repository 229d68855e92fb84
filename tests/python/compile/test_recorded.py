"""Tools that record calls, to make them again with other values: torch.jit.trace, make_fx,
torch.export, torch.onnx and torch.fx. A recorded call computes with the values it is given, as the
model itself does, or recording is refused with a reason."""

from __future__ import annotations

import copy
import gc
import sys
import warnings
from typing import Any

import pytest
import torch
from compile_support import assert_same, mlp
from torch.fx.experimental.proxy_tensor import make_fx

import ligature as te
from ligature.common import recipe as recipes

#: tools/run_tests.py reads it: torch.compile keeps what it has seen in a process.
IN_ONE_PROCESS = True

ops = te.ops
Tensor = torch.Tensor
pytestmark = pytest.mark.usefixtures("device")
LOW = {
    "high": None,
    "current": recipes.Float8CurrentScaling(),
    "mxfp8": recipes.MXFP8BlockScaling(),
}
EVERY = pytest.mark.parametrize("name", LOW)


def low(name: str) -> Any:
    return te.autocast(enabled=LOW[name] is not None, recipe=LOW[name])


def trace(model: Any, *example: Any, **kwargs: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.trace(model, example, **kwargs)


class Double(ops.BasicOperation):
    """Written in Python."""

    def op_forward(self, ctx: Any, input_: Tensor, **unused: Any) -> Tensor:
        return input_ * 2

    def op_backward(self, ctx: Any, grad_output: Tensor) -> Any:
        return grad_output * 2, ()


class Shift(ops.BasicOperation):
    """Written in Python, in the split form."""

    def op_forward_compute(self, input_: Tensor, **unused: Any) -> Any:
        return input_ + 1, ()

    def op_forward_save_ctx(self, ctx: Any, *args: Any, **unused: Any) -> None: ...

    def op_backward(self, ctx: Any, grad_output: Tensor) -> Any:
        return grad_output, ()


class Around(torch.nn.Module):
    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.before = torch.nn.Linear(32, 32)
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(torch.tanh(self.before(x))) + x


def assert_trains_alike(recorded: Any, model: torch.nn.Module, name: str = "high") -> None:
    """Values and gradients, for sizes and values other than those of the example."""
    for rows in (32, 64):
        x = torch.randn(rows, 32)
        got, wanted = x.clone().requires_grad_(), x.clone().requires_grad_()
        model.zero_grad()
        with low(name):
            y = recorded(got)
        dy = torch.randn(rows, 32)
        y.backward(dy)
        grads = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        with low(name):
            z = model(wanted)
        z.backward(dy)
        assert_same(y, z, "output")
        assert_same(got.grad, wanted.grad, "gradient of the input")
        for grad, parameter in zip(grads, model.parameters(), strict=True):
            assert_same(grad, parameter.grad, "gradient of a parameter")


# -- torch.jit.trace


@EVERY
def test_jit_trace(name: str) -> None:
    model = Around(mlp(32, 64))
    with low(name):
        traced = trace(model, torch.randn(32, 32, requires_grad=True))
    assert str(traced.inlined_graph).count("ligature::pipeline_forward") == 1
    assert_trains_alike(traced, model, name)


def test_jit_trace_of_extra_inputs_and_outputs() -> None:
    """Outputs in the memory of an input among them."""
    model = ops.Sequential(
        ops.MakeExtraOutput(), ops.Linear(32, 32), ops.AddExtraInput(), ops.MakeExtraOutput()
    )
    traced = trace(model, torch.randn(4, 32, requires_grad=True), torch.randn(4, 32))
    x, extra = torch.randn(4, 32, requires_grad=True), torch.randn(4, 32)
    got, wanted = traced(x, extra), model(x, extra)
    assert len(got) == len(wanted) == 3
    dys = [torch.randn(4, 32) for _ in wanted]
    leaves = [x, *model.parameters()]
    for a, b in zip(got, wanted, strict=True):
        assert_same(a, b, "output")
    for a, b in zip(
        torch.autograd.grad(got, leaves, dys),
        torch.autograd.grad(wanted, leaves, dys),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


def test_jit_trace_of_single_operations() -> None:
    linear, x = ops.Linear(32, 8), torch.randn(4, 32)
    assert_same(trace(linear, torch.randn(4, 32))(x), linear(x), "Linear")
    assert_same(trace(ops.GELU(), torch.randn(4, 32))(x), ops.GELU()(x), "GELU")
    fuser = ops.OperationFuser([linear, ops.ReLU()])  # no module: torch has no name for its weights
    with pytest.raises(RuntimeError, match="Consider making it a parameter"):
        trace(fuser, torch.randn(4, 32))
    linear.requires_grad_(False)
    assert_same(trace(fuser, torch.randn(4, 32))(x), fuser(x), "fuser")


def test_a_traced_model_outlives_the_model() -> None:
    model, x = mlp(32, 64), torch.randn(8, 32, requires_grad=True)
    wanted = model(x)
    grad = torch.autograd.grad(wanted.sum(), x)[0]
    model = trace(model, torch.randn(8, 32, requires_grad=True))
    gc.collect()
    mlp(32, 64)(x)  # another one, under a number of its own
    got = model(x)
    assert_same(got, wanted, "output")
    assert_same(torch.autograd.grad(got.sum(), x)[0], grad, "gradient")


def test_a_trace_in_another_precision_than_its_caller() -> None:
    model, x = mlp(32, 64), torch.randn(32, 32)
    traced = trace(model, x)
    with low("current"), pytest.raises(RuntimeError, match="compiled for high precision"):
        traced(x)


def test_a_trace_without_gradients() -> None:
    """Gradients are enabled, or not, where the graph runs."""
    model, x = mlp(32, 64), torch.randn(8, 32)
    with torch.no_grad():
        traced = trace(model, torch.randn(8, 32))
        assert_same(traced(x), model(x), "output")
        assert not traced(x).requires_grad
    parameters = list(model.parameters())
    got = torch.autograd.grad(traced(x).sum(), parameters)
    for a, b in zip(got, torch.autograd.grad(model(x).sum(), parameters), strict=True):
        assert torch.equal(a, b)


def test_a_trace_whose_example_needed_no_gradient() -> None:
    model, x = mlp(32, 64).requires_grad_(False), torch.randn(8, 32, requires_grad=True)
    traced = trace(model, torch.randn(8, 32))
    for _ in range(2):
        leaves = [x, *(p for p in model.parameters() if p.requires_grad)]
        got = torch.autograd.grad(traced(x).sum(), leaves)
        for a, b in zip(got, torch.autograd.grad(model(x).sum(), leaves), strict=True):
            assert torch.equal(a, b)
        model.requires_grad_(True)


def test_a_trace_does_not_differentiate_twice() -> None:
    model, x = mlp(32, 64), torch.randn(8, 32, requires_grad=True)
    traced = trace(model, torch.randn(8, 32, requires_grad=True))
    (grad,) = torch.autograd.grad(traced(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        grad.sum().backward()


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: ops.Sequential(ops.Linear(32, 32), Double()), r"Double\] is written in Python"),
        (
            lambda: ops.Sequential(ops.Linear(32, 32), ops.AddExtraInput(in_place=True)),
            r"AddExtraInput\] overwrites its extra input 0",
        ),
        (lambda: te.quantized_model_init(recipe=recipes.MXFP8BlockScaling())(mlp)(32, 64), "low"),
    ],
)
def test_what_a_trace_cannot_hold(make: Any, why: str) -> None:
    model = make()
    examples = [torch.randn(32, 32) for _ in range(1 + model.num_extra_inputs)]
    with pytest.raises(RuntimeError, match=f"torch.jit.trace cannot record .*{why}.*torch.compile"):
        trace(model, *examples)


def test_a_trace_cannot_hold_delayed_scaling() -> None:
    with (
        te.autocast(recipe=recipes.DelayedScaling()),
        pytest.raises(RuntimeError, match=r"cannot record .*delayed scaling changes with every"),
    ):
        trace(mlp(32, 64), torch.randn(32, 32))


# -- make_fx


def pipelines(graph: torch.fx.GraphModule) -> list[str]:
    targets = [str(n.target) for n in graph.graph.nodes if n.op == "call_function"]
    return [t.split(".")[1] for t in targets if t.startswith("ligature.pipeline")]


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
@EVERY
def test_make_fx(mode: str, name: str) -> None:
    model = Around(mlp(32, 64))
    with low(name):
        graph = make_fx(model, tracing_mode=mode, _allow_non_fake_inputs=True)(
            torch.randn(32, 32, requires_grad=True)
        )
    assert pipelines(graph) == ["pipeline_forward"]
    rows = (32, 64) if mode == "symbolic" else (32,)
    for n in rows:
        x = torch.randn(n, 32)
        with low(name):
            assert_same(graph(x), model(x), "output")


def test_make_fx_of_a_step() -> None:
    """Forward and backward in one graph, with the parameters as arguments."""
    model = mlp(32, 64)

    def step(params: dict[str, Tensor], x: Tensor) -> Any:
        y = torch.func.functional_call(model, params, (x,))
        return torch.autograd.grad((y * y).sum(), [x, *params.values()])

    def arguments() -> Any:
        params = {n: torch.randn_like(p).requires_grad_() for n, p in model.named_parameters()}
        return params, torch.randn(8, 32, requires_grad=True)

    graph = make_fx(step)(*arguments())
    assert pipelines(graph) == ["pipeline_forward", "pipeline_backward"]
    given = arguments()
    for got, wanted in zip(graph(*given), step(*given), strict=True):
        assert_same(got, wanted, "gradient")


def test_make_fx_before_dispatch() -> None:
    model, x = mlp(32, 64), torch.randn(8, 32)
    graph = make_fx(model, pre_dispatch=True)(torch.randn(8, 32))
    assert pipelines(graph) == ["pipeline_forward"]
    assert_same(graph(x), model(x), "output")


def test_make_fx_in_delayed_scaling() -> None:
    """The graph goes on with the state of the model."""
    model, recipe = mlp(32, 64), recipes.DelayedScaling(amax_history_len=4)
    twin = copy.deepcopy(model)
    with te.autocast(recipe=recipe):
        graph = make_fx(model)(torch.zeros(32, 32))
    with te.autocast(recipe=recipe):
        twin(torch.zeros(32, 32))
    for _ in range(3):
        x = torch.randn(32, 32)
        with te.autocast(recipe=recipe):
            got = graph(x)
        with te.autocast(recipe=recipe):
            wanted = twin(x)
        assert_same(got, wanted, "output")


def test_make_fx_of_operations_in_python() -> None:
    model, x = ops.Sequential(ops.Linear(32, 32), Shift()), torch.randn(4, 32)
    graph = make_fx(model)(torch.randn(4, 32))
    assert_same(graph(x), model(x), "output")
    with pytest.raises(RuntimeError, match=r"ProxyTorchDispatchMode cannot hold .*op_forward"):
        make_fx(ops.Sequential(ops.Linear(32, 32), Double()))(torch.randn(4, 32))


# -- torch.export


@pytest.mark.parametrize("strict", [True, False])
def test_a_call_after_export(strict: bool) -> None:
    model, x = Around(mlp(32, 64)), torch.randn(8, 32)
    wanted = model(x)
    for _ in range(3):
        program = torch.export.export(model, (torch.randn(8, 32),), strict=strict)
        gc.collect()
        assert_same(model(x), wanted, "the model")
        assert_same(program.module()(x), wanted, "the program")
    model.model.append(ops.ReLU())
    assert_same(model(x), torch.relu(wanted - x) + x, "after an edit", exact=False)


@pytest.mark.parametrize("strict", [True, False])
def test_an_exported_program_trains(strict: bool) -> None:
    model = Around(mlp(32, 64))
    rows = torch.export.Dim("rows", min=2, max=256)
    example = (torch.randn(8, 32, requires_grad=True),)
    program = torch.export.export(model, example, strict=strict, dynamic_shapes=({0: rows},))
    assert_trains_alike(program.module(), model)


@pytest.mark.parametrize("strict", [True, False])
def test_an_exported_program_outlives_the_model(strict: bool) -> None:
    model, x = mlp(32, 64), torch.randn(8, 32)
    wanted = model(x)
    program = torch.export.export(model, (torch.randn(8, 32),), strict=strict)
    del model
    gc.collect()
    mlp(32, 64)(x)
    assert_same(program.module()(x), wanted, "output")


# -- refusals


def export_to_onnx(model: torch.nn.Module) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(model, (torch.randn(8, 32),), "unused.onnx", dynamo=False)


@pytest.mark.parametrize(
    "make",
    [
        lambda: mlp(32, 64),
        lambda: ops.Sequential(ops.Linear(32, 32), torch.nn.ReLU(), ops.GELU()),
        lambda: ops.Linear(32, 32),
        lambda: Around(mlp(32, 64)),
    ],
)
def test_onnx(make: Any) -> None:
    with pytest.raises(RuntimeError, match=r"torch.onnx cannot export operations of Ligature"):
        export_to_onnx(make())


@pytest.mark.parametrize("make", [lambda: mlp(32, 64), lambda: Around(ops.Linear(32, 32))])
def test_script(make: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        with pytest.raises(
            RuntimeError, match=r"torch.jit.script cannot compile it.*torch.jit.trace"
        ):
            torch.jit.script(make())


@pytest.mark.parametrize(
    "make", [lambda: mlp(32, 64), lambda: ops.GELU(), lambda: Around(mlp(32, 64))]
)
def test_symbolic_trace(make: Any) -> None:
    with pytest.raises(TypeError, match=r"symbolic_trace cannot look into.*is_leaf_module"):
        torch.fx.symbolic_trace(make())


def test_symbolic_trace_of_leaves() -> None:
    class Tracer(torch.fx.Tracer):
        def is_leaf_module(self, module: torch.nn.Module, name: str) -> bool:
            return isinstance(module, ops.Sequential) or super().is_leaf_module(module, name)

    model, x = Around(mlp(32, 64)), torch.randn(8, 32)
    graph = torch.fx.GraphModule(model, Tracer().trace(model))
    assert_same(graph(x), model(x), "output")


@pytest.mark.parametrize(
    "transform",
    [
        lambda model, x: torch.vmap(model)(x),
        lambda model, x: torch.func.grad(lambda x: model(x).sum())(x),
        lambda model, x: torch.func.jvp(model, (x,), (x,)),
    ],
)
def test_transforms(transform: Any) -> None:
    with pytest.raises(RuntimeError, match=r"transforms of torch.func .* cannot look into a fuser"):
        transform(mlp(32, 64), torch.randn(8, 32))


def test_recording_leaves_nothing_behind() -> None:
    """After all that, an eager call is one again."""
    model, x = mlp(32, 64), torch.randn(8, 32)
    wanted = model(x)
    trace(model, x)
    make_fx(model)(x)
    assert_same(model(x), wanted, "output")
    assert model(x).grad_fn.name() == "LigatureFuserBackward"
    gc.collect()
    before = sys.getrefcount(model)
    make_fx(model)(x)
    gc.collect()
    assert sys.getrefcount(model) == before
