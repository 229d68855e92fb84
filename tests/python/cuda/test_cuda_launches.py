"""Small pipelines launch their kernels together: nobody can tell, but for the time."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

import ligature as te
from ligature import _C, ops

RECIPES: dict[str, Callable[[], te.recipe.Recipe] | None] = {
    "none": None,
    "delayed": lambda: te.recipe.DelayedScaling(amax_history_len=4),
    "current": te.recipe.Float8CurrentScaling,
    "block": te.recipe.Float8BlockScaling,
    "mxfp8": te.recipe.MXFP8BlockScaling,
    "nvfp4": te.recipe.NVFP4BlockScaling,
}
EVERY_RECIPE = pytest.mark.parametrize("recipe", RECIPES)
H = 256


@pytest.fixture(autouse=True)
def _held(_cuda_backend: None) -> Iterator[None]:
    te.set_launch_graphs(True)
    yield
    te.set_launch_graphs(True)


def make(*more: torch.nn.Module, recompute: str = "none") -> ops.Sequential:
    torch.manual_seed(5)
    return ops.Sequential(
        ops.LayerNorm(H, dtype=torch.bfloat16),
        ops.Linear(H, 2 * H, dtype=torch.bfloat16),
        *more,
        ops.SwiGLU(),
        ops.Linear(H, H, bias=False, dtype=torch.bfloat16),
        recompute=recompute,
    )


def context(recipe: te.recipe.Recipe | None) -> contextlib.AbstractContextManager[object]:
    return contextlib.nullcontext() if recipe is None else te.autocast(recipe=recipe)


def train(
    model: ops.Sequential, steps: int, recipe: te.recipe.Recipe | None = None
) -> list[torch.Tensor]:
    """Everything that a step gives, with new data and changed weights in each."""
    torch.manual_seed(11)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    seen = []
    for _ in range(steps):
        x = torch.randn(128, H, dtype=torch.bfloat16, requires_grad=True)
        with context(recipe):
            y = model(x)
        y.backward(torch.cos(y.detach()))
        seen += [t.detach().cpu() for t in (y, x.grad, *(p.grad for p in model.parameters()))]
        optimizer.step()
        optimizer.zero_grad()
        del x, y  # their memory serves the next step
    return [*seen, *(p.detach().cpu() for p in model.parameters())]


def assert_same(got: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    for i, (a, b) in enumerate(zip(got, wanted, strict=True)):
        assert torch.equal(a, b), i


@EVERY_RECIPE
@pytest.mark.parametrize("recompute", ["none", "cheap"])
def test_the_same_bits(recipe: str, recompute: str) -> None:
    made = RECIPES[recipe]
    before = _C.launch_counts()
    got = train(make(recompute=recompute), 12, made() if made else None)
    after = _C.launch_counts()
    assert after["single"] > before["single"]
    if recipe != "nvfp4":  # each step rounds with other random numbers: no launch repeats
        assert after["replayed"] > before["replayed"]
    te.set_launch_graphs(False)
    wanted = train(make(recompute=recompute), 12, made() if made else None)
    assert _C.launch_counts() == after
    assert_same(got, wanted)


def test_most_steps_are_replayed() -> None:
    model = make()
    x = torch.randn(128, H, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(128, H, dtype=torch.bfloat16)

    def step() -> None:
        x.grad = None
        for p in model.parameters():
            p.grad = None
        model(x).backward(dy)

    for _ in range(12):
        step()
    before = _C.launch_counts()
    for _ in range(20):
        step()
    after = _C.launch_counts()
    assert after["replayed"] - before["replayed"] == 40
    assert after["single"] == before["single"]


class Doubled(ops.BasicOperation):
    """Computes with kernels that know nothing of what is held."""

    def op_forward(self, ctx, input_, **unused):
        return input_ * 2

    def op_backward(self, ctx, grad_output):
        return grad_output * 2, ()


def test_an_operation_in_python_sees_results() -> None:
    got = train(make(Doubled()), 8)
    te.set_launch_graphs(False)
    assert_same(got, train(make(Doubled()), 8))


def test_hooks_of_saved_tensors_see_results() -> None:
    model = make()
    x = torch.randn(64, H, dtype=torch.bfloat16, requires_grad=True)

    def run() -> tuple[list[torch.Tensor], torch.Tensor]:
        packed: list[torch.Tensor] = []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            packed.append(tensor.clone())
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            y = model(x)
        (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
        return packed, dx

    runs = [run() for _ in range(6)]
    te.set_launch_graphs(False)
    packed, dx = run()
    for other, other_dx in runs:
        assert_same(other, packed)
        assert torch.equal(other_dx, dx)


def test_streams() -> None:
    model, x = make(), torch.randn(64, H, dtype=torch.bfloat16)
    wanted = model(x).detach()
    stream = torch.cuda.Stream()
    for _ in range(6):
        assert torch.equal(model(x), wanted)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            late = torch.zeros_like(x)
            torch.cuda._sleep(1_000_000)
            late.copy_(x)
            y = model(late)
        stream.synchronize()
        assert torch.equal(y, wanted)


def test_threads() -> None:
    inputs = [torch.randn(64, H, dtype=torch.bfloat16) for _ in range(4)]
    model = make()
    wanted = [model(x).detach() for x in inputs]
    wrong: list[int] = []

    def run(i: int) -> None:
        for _ in range(40):
            if not torch.equal(model(inputs[i]), wanted[i]):
                wrong.append(i)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_inside_a_graph_of_the_users() -> None:
    model, x = make(), torch.randn(64, H, dtype=torch.bfloat16)
    with torch.no_grad():
        for _ in range(5):
            model(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = model(x)
        x.normal_()
        graph.replay()
        assert torch.equal(y, model(x))


def test_memory_that_went_back_to_the_driver() -> None:
    model, x = make(), torch.randn(64, H, dtype=torch.bfloat16)
    wanted = model(x).detach().clone()
    for _ in range(6):
        for _ in range(4):
            assert torch.equal(model(x), wanted)
        torch.cuda.empty_cache()


def test_no_step_waits() -> None:
    model = make()
    x = torch.randn(64, H, dtype=torch.bfloat16, requires_grad=True)
    model(x).sum().backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(6):
            model(x).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_it_is_told() -> None:
    assert te.show_config("dict")["cuda"]["launch_graphs"] is True
    te.set_launch_graphs(False)
    assert te.show_config("dict")["cuda"]["launch_graphs"] is False


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_another_device_than_the_current_one() -> None:
    model, x = make(), torch.randn(64, H, dtype=torch.bfloat16)
    wanted = model(x).detach()
    model, x = model.to("cuda:1"), x.to("cuda:1")
    for _ in range(6):
        assert torch.equal(model(x).to("cuda:0"), wanted)
