"""Tools of torch that look at what runs: the profiler, FlopCounterMode, selective checkpoints and
modes of a user's."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compile_support import assert_same, mlp, state_of
from quantized_reference import RECIPES
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import FlopCounterMode

import ligature as te
from ligature.common import recipe as recipes

#: tools/run_tests.py reads it: torch.compile keeps what it has seen in a process.
IN_ONE_PROCESS = True

ops = te.ops
Tensor = torch.Tensor
pytestmark = pytest.mark.usefixtures("device")
EVERY: dict[str, Any] = {"high": lambda: None, **RECIPES}
every_recipe = pytest.mark.parametrize("name", EVERY)
H = 32
#: Two linear layers of the MLP, for 32 rows: the products of forward, twice as many of backward.
FORWARD = 2 * 32 * H * 128 + 2 * 32 * 64 * H
STEP = 3 * FORWARD


def low(recipe: Any) -> Any:
    return te.autocast(enabled=recipe is not None, recipe=recipe)


class Python(ops.BasicOperation):
    """A linear layer in Python, in the classic form."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(H, H))

    def op_forward(self, ctx: Any, input_: Tensor, **unused: Any) -> Tensor:
        ctx.save_for_backward(input_)
        return input_ @ self.weight.T

    def op_backward(self, ctx: Any, grad_output: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return grad_output @ self.weight, (grad_output.T @ x,)


class Split(Python):
    def op_forward_compute(self, input_: Tensor, **unused: Any) -> Any:
        return input_ @ self.weight.T, ()

    def op_forward_save_ctx(self, ctx: Any, input_: Tensor, *args: Any, **unused: Any) -> None:
        ctx.save_for_backward(input_)


PYTHON = 3 * 2 * 32 * H * H


# -- the profiler


def ranges(run: Callable[[], Any]) -> list[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        run()
    return [event.name for event in profiler.events()]


def test_a_range_per_step() -> None:
    model, x = mlp(H, 64), torch.randn(32, H, requires_grad=True)
    y = model(x)
    fuser = model._module_groups[0]
    names = {
        "forward": [op._op.name for op, _ in fuser._forward_ops],
        "backward": [op._op.name for op, _ in fuser._backward_ops],
    }
    assert any(name.startswith("Forward") for name in names["forward"])
    assert any(name.startswith("Backward") for name in names["backward"])
    known = {*names["forward"], *names["backward"]}
    assert [n for n in ranges(lambda: model(x)) if n in known] == names["forward"]
    backward = ranges(lambda: y.sum().backward())
    assert [n for n in backward if n in known] == names["backward"][::-1]


def test_ranges_enclose_what_a_step_does() -> None:
    model, x = ops.Sequential(ops.Linear(H, H), Python()), torch.randn(32, H)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        model(x)
    (own,) = [event for event in profiler.events() if event.name == "Python"]
    assert "aten::matmul" in {child.name for child in own.cpu_children}


def test_ranges_in_a_compiled_graph() -> None:
    model, x = mlp(H, 64), torch.randn(32, H, requires_grad=True)
    model(x)
    fuser = model._module_groups[0]
    names = [op._op.name for op, _ in (*fuser._forward_ops, *fuser._backward_ops[::-1])]
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    compiled(x).sum().backward()
    seen = ranges(lambda: compiled(x).sum().backward())
    assert [name for name in seen if name in names] == names


# -- FlopCounterMode


def flops(run: Callable[[], Any]) -> int:
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


@every_recipe
def test_flops(name: str) -> None:
    """As many as torch counts for the same layers, and the same results as without a counter."""
    model, recipe = mlp(H, 64), EVERY[name]()
    twin = copy.deepcopy(model)
    for seed in range(2):
        x = torch.randn(32, H, requires_grad=True)
        z = x.detach().clone().requires_grad_()
        results = []

        def run(
            model: Any = model, x: Tensor = x, seed: int = seed, results: Any = results
        ) -> None:
            torch.manual_seed(seed)
            with low(recipe):
                y = model(x)
            y.sum().backward()
            results.append(y)

        assert flops(run) == STEP
        run(twin, z)
        assert_same(results[0], results[1], "output")
        assert_same(x.grad, z.grad, "gradient of the input")
        for a, b in zip(model.parameters(), twin.parameters(), strict=True):
            assert_same(a.grad, b.grad, "gradient of a parameter")
        for key, value in state_of(twin).items():
            assert_same(state_of(model)[key], value, key)


def test_flops_are_those_of_torch() -> None:
    model = torch.nn.Sequential(
        torch.nn.LayerNorm(H), torch.nn.Linear(H, 128), torch.nn.GLU(), torch.nn.Linear(64, H)
    )
    x = torch.randn(32, H, requires_grad=True)
    assert flops(lambda: model(x)) == FORWARD
    assert flops(lambda: model(x).sum().backward()) == STEP
    with torch.no_grad():
        assert flops(lambda: mlp(H, 64)(x)) == FORWARD


def test_flops_by_module() -> None:
    model, x = mlp(H, 64), torch.randn(32, H, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        model(x).sum().backward()
    counts = counter.get_flop_counts()
    assert sum(counts["Sequential.1"].values()) == 3 * 2 * 32 * H * 128
    assert sum(counts["Sequential.3"].values()) == 3 * 2 * 32 * 64 * H


def test_flops_of_gradients_that_are_not_needed() -> None:
    model, x = mlp(H, 64), torch.randn(32, H)
    model[1].weight.requires_grad_(False)
    wanted = FORWARD + 2 * 32 * 64 * H * 2 + 2 * 32 * H * 128
    assert flops(lambda: model(x).sum().backward()) == wanted


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", ["high", "current", "delayed"])
def test_flops_of_a_compiled_model(backend: str, name: str) -> None:
    """While a mode is active torch runs a compiled function as it is, or refuses fullgraph=True."""
    model, recipe = mlp(H, 64), EVERY[name]()
    x = torch.randn(32, H, requires_grad=True)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend)

    def run() -> None:
        with low(recipe):
            y = compiled(x)
        y.sum().backward()

    run()
    assert flops(run) == STEP


def test_flops_of_a_graph_that_runs_below_the_counter() -> None:
    """The functions themselves, without a model to be called."""
    from functorch.compile import aot_function

    model = mlp(H, 64)
    graphs: list[Any] = []

    def keep(graph: Any, args: Any) -> Any:
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(
        model, backend=lambda graph, args: aot_function(graph, keep, keep), fullgraph=True
    )
    x = torch.randn(32, H, requires_grad=True)
    y = compiled(x)
    assert flops(lambda: y.sum().backward()) == 2 * FORWARD
    assert graphs


@pytest.mark.parametrize("make", [Python, Split])
def test_flops_of_operations_in_python(make: Any) -> None:
    model, x = ops.Sequential(*mlp(H, 64), make()), torch.randn(32, H, requires_grad=True)
    assert flops(lambda: model(x).sum().backward()) == STEP + PYTHON
    fuser = ops.OperationFuser([*mlp(H, 64), make()])
    assert flops(lambda: fuser(x).sum().backward()) == STEP + PYTHON


def test_flops_of_compiled_operations_in_python() -> None:
    model, x = ops.Sequential(*mlp(H, 64), Split()), torch.randn(32, H, requires_grad=True)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    y = compiled(x)
    assert flops(lambda: y.sum().backward()) == (STEP + PYTHON) // 3 * 2


def test_flops_of_weights_in_low_precision() -> None:
    with te.quantized_model_init(recipe=recipes.Float8CurrentScaling()):
        model = mlp(H, 64)
    x = torch.randn(32, H, requires_grad=True)
    assert flops(lambda: model(x).sum().backward()) == STEP


def test_flops_with_a_main_grad() -> None:
    model = ops.Sequential(ops.Linear(H, H, accumulate_into_main_grad=True), ops.GELU())
    model[0].weight.main_grad = torch.zeros(H, H)
    x = torch.randn(32, H, requires_grad=True)
    assert flops(lambda: model(x).sum().backward()) == 3 * 2 * 32 * H * H
    assert model[0].weight.main_grad.abs().sum() > 0


def test_flops_of_a_quantized_output() -> None:
    model, x = ops.Sequential(ops.Linear(H, H), ops.Quantize()), torch.randn(32, H)

    def run() -> Tensor:
        with te.autocast(recipe=recipes.Float8CurrentScaling()):
            return model(x)

    assert flops(run) == 2 * 32 * H * H
    with FlopCounterMode(display=False):
        assert isinstance(run(), te.QuantizedTensor)


def test_flops_of_recomputation() -> None:
    model = mlp(H, 64)
    x = torch.randn(32, H, requires_grad=True)
    assert flops(lambda: checkpoint(model, x, use_reentrant=False).sum().backward()) == (
        STEP + FORWARD
    )


def test_only_where_faster_holds_under_a_counter() -> None:
    model, x = mlp(H, 64), torch.randn(32, H)
    wanted = model(x)
    with (
        te.autocast(recipe=recipes.MXFP8BlockScaling(), only_where_faster=True),
        FlopCounterMode(display=False) as counter,
    ):
        got = model(x)
    if x.device.type == "cpu":
        assert_same(got, wanted, "output")
    assert counter.get_total_flops() == FORWARD


def test_errors_are_those_of_an_eager_call() -> None:
    model = mlp(H, 64)
    messages = []
    for run in (lambda: model(torch.randn(4, 7)), lambda: flops(lambda: model(torch.randn(4, 7)))):
        with pytest.raises(ValueError, match="LayerNorm") as error:
            run()
        messages.append(str(error.value))
    assert messages[0] == messages[1]


# -- selective checkpoints


def saves(names: set[str], calls: list[str]) -> Callable[[], Any]:
    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name = op._opname
        calls.append(("again " if ctx.is_recompute else "") + name)
        keep = name in names
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return lambda: create_selective_checkpoint_contexts(policy)


@pytest.mark.parametrize("keep", [True, False])
@every_recipe
def test_selective_checkpoint(keep: bool, name: str) -> None:
    recipe = EVERY[name]()
    apart = name.startswith("delayed")
    model = torch.nn.Sequential(torch.nn.Linear(H, H), mlp(H, 64), torch.nn.Tanh())
    twin = copy.deepcopy(model)
    kept = {"pipeline_forward" + ("_no_cudagraph" if apart else "")} if keep else set()
    for seed in range(2):
        x = torch.randn(32, H, requires_grad=True)
        z = x.detach().clone().requires_grad_()
        calls: list[str] = []
        model.zero_grad()
        twin.zero_grad()
        torch.manual_seed(seed)
        # The counter is around both: it looks at modules with calls that a checkpoint sees.
        with FlopCounterMode(display=False) as counter:
            with low(recipe):
                y = te.checkpoint(model, x, use_reentrant=False, context_fn=saves(kept, calls))
            y.sum().backward()
        count = counter.get_total_flops()
        torch.manual_seed(seed)
        with low(recipe):
            wanted = twin(z)
        wanted.sum().backward()
        assert any(call.startswith("pipeline_forward") for call in calls)
        plain = 2 * 32 * H * H
        assert count == STEP + 4 * plain + (0 if keep else FORWARD)
        assert_same(y, wanted, "output")
        assert_same(x.grad, z.grad, "gradient of the input")
        for a, b in zip(model.parameters(), twin.parameters(), strict=True):
            assert_same(a.grad, b.grad, "gradient of a parameter")
        for key, value in state_of(twin).items():
            assert_same(state_of(model)[key], value, key)


def test_selective_checkpoint_of_operations_in_python() -> None:
    """They are kept by what they call; the others run again."""
    model, x = ops.Sequential(*mlp(H, 64), Python()), torch.randn(32, H, requires_grad=True)
    calls: list[str] = []
    y = checkpoint(model, x, use_reentrant=False, context_fn=saves({"mm"}, calls))
    y.sum().backward()
    grad, x.grad = x.grad, None
    model(x).sum().backward()
    assert_same(x.grad, grad, "gradient of the input")
    assert "mm" in calls


# -- modes of a user's


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._opname)
        return func(*args, **(kwargs or {}))


def test_a_mode_sees_one_call_per_direction() -> None:
    model, x = mlp(H, 64), torch.randn(32, H, requires_grad=True)
    wanted = model(x)
    with Seen() as seen:
        y = model(x)
    assert_same(y, wanted, "output")
    assert seen.names.count("pipeline_forward") == 1
    assert not {"mm", "addmm", "empty"} & set(seen.names)
    with Seen() as seen:
        y.sum().backward()
    assert seen.names.count("pipeline_backward") == 1


def test_a_mode_sees_what_python_calls() -> None:
    model, x = ops.Sequential(ops.Linear(H, H), Python()), torch.randn(32, H, requires_grad=True)
    with Seen() as seen:
        model(x).sum().backward()
    assert seen.names.count("mm") == 3
    assert seen.names.count("gemms") == 2
    assert "pipeline_forward" not in seen.names


def test_a_mode_that_changes_results() -> None:
    class Twice(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            out = func(*args, **(kwargs or {}))
            return [t * 2 for t in out] if func._opname == "pipeline_forward" else out

    model, x = mlp(H, 64), torch.randn(32, H)
    with torch.no_grad():
        wanted = model(x) * 2
        with Twice():
            assert_same(model(x), wanted, "output")


def test_explain_after_a_watched_call() -> None:
    model = mlp(H, 64)
    with Seen():
        model(torch.randn(32, H, requires_grad=True))
    assert "LayerNorm" in str(model.explain())


def test_a_watched_call_keeps_what_its_backward_needs() -> None:
    model, x = mlp(H, 64), torch.randn(32, H, requires_grad=True)
    wanted = torch.autograd.grad(model(x).sum(), x)[0]
    with Seen():
        y = model(x)
    gone = weakref.ref(model)
    del model
    assert gone() is None
    mlp(H, 64)(x)
    y.sum().backward()
    assert_same(x.grad, wanted, "gradient")


def test_in_place_edits_are_noticed() -> None:
    model = mlp(H, 64)
    x = torch.randn(32, H, requires_grad=True) * 1
    with Seen():
        y = model(x)
        x.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_fake_tensor_mode() -> None:
    """Shapes and dtypes of a step, without values; the model is real or fake itself."""
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    model = mlp(H, 64)
    for name in ("high", "current", "delayed"):
        with FakeTensorMode() as mode, low(EVERY[name]()):
            x = mode.from_tensor(torch.empty(32, H)).requires_grad_()
            y = model(x)
            y.sum().backward()
        assert isinstance(y, FakeTensor)
        assert y.shape == (32, H)
        assert isinstance(x.grad, FakeTensor)
        assert x.grad.shape == (32, H)
        model.zero_grad()
        assert not mode.allow_non_fake_inputs
    with FakeTensorMode():
        made = mlp(H, 64)
        y = made(torch.randn(32, H))
        y.sum().backward()
        assert isinstance(made[1].weight.grad, FakeTensor)
