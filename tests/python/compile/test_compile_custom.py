"""Operations written in Python in compiled graphs, what breaks a graph or is refused,
torch.export, and torch's own checks of the functions that graphs call."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from compile_support import Pair, mlp
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

import ligature as te
from ligature.common.recipe import DelayedScaling, Float8CurrentScaling
from ligature.ops._traced.group import CALLS

#: tools/run_tests.py reads it: torch.compile keeps what it has seen in a process.
IN_ONE_PROCESS = True

pytestmark = [
    pytest.mark.usefixtures("device", "one_thread"),
    pytest.mark.filterwarnings("error:.*may not alias"),
]

ops = te.ops
Tensor = torch.Tensor
H = 16


class Gain(ops.BasicOperation):
    """y = x * w, in the split form."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(0.5, 1.5, size))

    def op_forward_compute(self, input_: Tensor, *, requires_grad: bool, **unused: Any) -> Any:
        return input_ * self.weight, (), {"rank": input_.dim()}

    def op_forward_save_ctx(
        self, ctx: Any, input_: Tensor, tensors_to_save: Any, *, requires_grad: bool, **unused: Any
    ) -> None:
        ctx.save_for_backward(input_)

    def op_backward(self, ctx: Any, grad_output: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        assert ctx.rank == x.dim()
        dw = (grad_output * x).sum(tuple(range(x.dim() - 1)))
        return grad_output * self.weight, (dw,)


class Classic(ops.BasicOperation):
    def op_forward(self, ctx: Any, input_: Tensor, **unused: Any) -> Tensor:
        ctx.save_for_backward(input_)
        return input_.square()

    def op_backward(self, ctx: Any, grad_output: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return 2 * x * grad_output, ()


def test_the_split_form() -> None:
    pair = Pair(ops.Sequential(ops.LayerNorm(H), Gain(H), ops.Linear(H, H), Gain(H)))
    for n in (6, 9, 12):
        pair.step(torch.randn(n, H).requires_grad_(), dynamic=True)
    assert pair.graphs == 1
    pair = Pair(Gain(H))
    pair.step(torch.randn(2, 3, H).requires_grad_())
    assert pair.graphs == 1


def test_the_classic_form_breaks_the_graph_once() -> None:
    model = ops.Sequential(ops.Linear(H, H), Classic(), ops.Linear(H, H))

    def function(x: Tensor) -> Tensor:
        return model(x * 2) + 1

    x = torch.randn(6, H)
    why = torch._dynamo.explain(function)(x)
    assert why.graph_break_count == 1
    assert "split form" in str(why.break_reasons[0].reason)
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="aot_eager")
    assert torch.equal(compiled(x), function(x))
    torch._dynamo.reset()
    strict = torch.compile(function, backend="aot_eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="Classic defines op_forward"):
        strict(x)


def low_precision_weight() -> torch.nn.Module:
    with te.quantized_model_init(recipe=Float8CurrentScaling()):
        return ops.Sequential(ops.Linear(32, 32), ops.GELU())


def main_grad() -> torch.nn.Module:
    model = ops.Sequential(ops.Linear(32, 32, accumulate_into_main_grad=True), ops.GELU())
    model[0].weight.main_grad = torch.zeros(32, 32)
    return model


@pytest.mark.parametrize(
    ("make", "reason"),
    [(low_precision_weight, "kept in low precision"), (main_grad, "adds into main_grad")],
)
def test_parameters_that_break_the_graph(make: Any, reason: str) -> None:
    """They are computed in eager mode, between two graphs."""
    results: list[list[Tensor]] = []
    for compiled in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = make()

        def function(x: Tensor, model: torch.nn.Module = model) -> Tensor:
            return model(x * 2) + 1

        call = torch.compile(function, backend="aot_eager") if compiled else function
        x = torch.randn(8, 32, requires_grad=True)
        y = call(x)
        y.square().sum().backward()
        weight = model[0].weight
        results.append([y, x.grad, getattr(weight, "main_grad", weight.grad), model[0].bias.grad])
    for wanted, got in zip(*results, strict=True):
        assert wanted.abs().sum() > 0
        assert torch.equal(got, wanted)
    torch._dynamo.reset()
    strict = torch.compile(function, backend="aot_eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=reason):
        strict(x)


def test_strict() -> None:
    model = ops.Sequential(ops.Linear(H, H), ops.GELU(), strict=["ForwardLinearBiasActivation"])
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = torch.randn(6, H)
    assert torch.equal(compiled(x), model(x))
    with te.strict("ForwardLinearBiasActivation"):
        compiled(x)
    with (
        te.strict("ForwardLinearBiasAdd"),
        pytest.raises(RuntimeError, match="ForwardLinearBiasAdd"),
    ):
        compiled(x)
    model.append(torch.nn.Tanh())
    with pytest.raises(Exception, match="strict cannot be checked in a compiled graph"):
        compiled(x)


def test_export() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Linear(H, H)
            self.block = mlp()

        def forward(self, x: Tensor) -> Tensor:
            return self.block(torch.relu(self.first(x)))

    model = Model().eval()
    x = torch.randn(6, H)
    batch = torch.export.Dim("batch", min=2, max=512)
    for strict in (False, True):
        with torch.no_grad():
            program = torch.export.export(model, (x,), dynamic_shapes=({0: batch},), strict=strict)
        targets = [str(n.target) for n in program.graph.nodes if n.op == "call_function"]
        assert targets.count("ligature.pipeline_forward.default") == 1
        for n in (6, 11):
            x = torch.randn(n, H)
            with torch.no_grad():
                assert torch.equal(program.module()(x), model(x))


def test_a_graph_outlives_its_model() -> None:
    model, x = mlp(), torch.randn(6, H)
    gone = weakref.ref(model)
    before = set(CALLS)
    with torch.no_grad():
        wanted = model(x)
        program = torch.export.export(model, (x,))
    graph = program.module()
    assert set(CALLS) > before
    del model
    gc.collect()
    assert gone() is None
    assert torch.equal(graph(x), wanted)


class Recorder(torch.fx.Interpreter):
    """Runs a graph and keeps what it gives to our functions."""

    seen: ClassVar[dict[str, tuple[Any, ...]]] = {}

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if getattr(target, "namespace", "") == "ligature":
            self.seen[target._opname] = args
        return super().call_function(target, args, kwargs)


def recording(gm: torch.fx.GraphModule, inputs: Any) -> Any:
    return make_boxed_func(lambda *args: Recorder(gm).run(*args))


def recorded(function: Callable[[Tensor], Tensor], x: Tensor) -> dict[str, tuple[Any, ...]]:
    """What the graphs of a function give to ours, forward and backward."""
    torch._dynamo.reset()
    Recorder.seen.clear()
    y = torch.compile(function, fullgraph=True, backend=aot_autograd(fw_compiler=recording))(x)
    if y.requires_grad:
        y.sum().backward()
    return dict(Recorder.seen)


def opcheck(name: str, args: tuple[Any, ...]) -> None:
    args = torch.utils._pytree.tree_map_only(Tensor, lambda t: t.detach().clone(), args)
    torch.library.opcheck(getattr(torch.ops.ligature, name), args)


@pytest.mark.parametrize("recipe", [None, Float8CurrentScaling(), DelayedScaling()], ids=str)
def test_opcheck(recipe: Any) -> None:
    """Every function that graphs call, with the arguments that a graph gives it."""
    model = mlp(32, 64)

    def function(x: Tensor) -> Tensor:
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            return model(x)

    seen = recorded(function, torch.randn(8, 32, requires_grad=True))
    suffix = ""
    if isinstance(recipe, DelayedScaling):
        suffix = "_no_cudagraph"
        number = int(model._groups[0].traced.number)
        scales, amaxes, histories = model._groups[0].traced.delayed[recipe._key]
        opcheck("record_amax", (amaxes, torch.rand(len(amaxes))))
        noted = [torch.tensor([1.0] * (len(amaxes) - 1) + [-1.0])]
        opcheck("update_delayed", (scales, amaxes, histories, noted, number, recipe._key))
    for name in ("pipeline_forward", "pipeline_backward"):
        opcheck(name + suffix, seen[name + suffix])


def test_what_cuda_graphs_of_a_compiler_may_hold() -> None:
    """Calls without a state of their own; the others are functions that such graphs leave out."""
    model, x = mlp(32, 64), torch.randn(8, 32, requires_grad=True)
    own = te.ops.Sequential(Gain(32), *mlp(32, 64))
    current = Float8CurrentScaling()

    def names(run: Callable[[Tensor], Tensor], recipe: Any = None) -> set[str]:
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            return {name for name in recorded(run, x) if name.startswith("pipeline")}

    free = {"pipeline_forward", "pipeline_backward"}
    apart = {name + "_no_cudagraph" for name in free}
    assert names(model) == free
    assert names(model, current) == free
    assert names(model, DelayedScaling()) == apart
    assert names(own) == apart
    with torch.no_grad():
        assert names(model) == {"pipeline_forward"}
        assert names(model, current) == {"pipeline_forward_no_cudagraph"}
    tags = torch.Tag.cudagraph_unsafe
    for name in free:
        assert tags not in getattr(torch.ops.ligature, name).default.tags
        assert tags in getattr(torch.ops.ligature, name + "_no_cudagraph").default.tags


@pytest.mark.parametrize("recipe", [Float8CurrentScaling(), DelayedScaling()], ids=str)
def test_a_training_graph_copies_no_weights(recipe: Any) -> None:
    """Its backward takes over what forward quantized. Delayed scaling keeps that for itself."""
    model, x = mlp(32, 64), torch.randn(8, 32, requires_grad=True)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for _ in range(3):
        with te.autocast(recipe=recipe), torch.profiler.profile() as profiler:
            y = compiled(x)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1.5)
    called = {event.key for event in profiler.key_averages()}
    assert torch.isfinite(y).all()
    assert ("aten::clone" in called) == isinstance(recipe, DelayedScaling)
