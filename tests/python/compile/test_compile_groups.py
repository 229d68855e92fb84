"""Groups of rows under torch.compile: one compilation for all split sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from quantized_reference import EVERY_RECIPE
from torch._dynamo.testing import CompileCounterWithBackend

import ligature as te

pytestmark = pytest.mark.usefixtures("device", "one_thread")

Tensor = torch.Tensor
SPLITS = ([5, 0, 12], [17, 0, 0], [1, 2, 3], [0, 0, 0])


def experts() -> te.ops.Sequential:
    return te.ops.Sequential(
        te.ops.GroupedLinear(3, 32, 48),
        te.ops.ScaledSwiGLU(),
        te.ops.GroupedLinear(3, 24, 32, scale_bias=True),
    )


def call(run: Any, sizes: list[int], seed: int) -> tuple[Tensor, list[Tensor]]:
    torch.manual_seed(seed)
    x = torch.randn(20, 32, requires_grad=True)
    scales = torch.rand(20, requires_grad=True)
    splits = torch.tensor(sizes)
    y = run(x, splits, scales, splits, scales)
    y.square().sum().backward()
    return y.detach(), [x.grad, scales.grad]


@pytest.mark.parametrize("name", ["none", "mxfp8", "delayed"])
def test_counts_change_without_recompiling(name: str) -> None:
    torch._dynamo.reset()
    recipe = None if name == "none" else EVERY_RECIPE[name]()
    model, twin = experts(), experts()
    twin.load_state_dict(model.state_dict())
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for seed, sizes in enumerate(SPLITS):
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            y, grads = call(compiled, sizes, seed)
            wanted, wanted_grads = call(twin, sizes, seed)
        assert torch.equal(y, wanted)
        for a, b in zip(grads, wanted_grads, strict=True):
            assert torch.equal(a, b)
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
    assert counter.frame_count == 1


def test_bad_counts_are_refused_in_a_compiled_call() -> None:
    torch._dynamo.reset()
    op = te.ops.GroupedLinear(2, 8, 4)
    compiled = torch.compile(op, fullgraph=True, backend="aot_eager")
    compiled(torch.randn(5, 8), torch.tensor([2, 3]))
    with pytest.raises(ValueError, match="at most the input's 5 rows"):
        compiled(torch.randn(5, 8), torch.tensor([3, 3]))
    with pytest.raises(ValueError, match="group 1 must not be negative"):
        compiled(torch.randn(5, 8), torch.tensor([3, -1]))


def test_exported() -> None:
    op = te.ops.GroupedLinear(2, 8, 4)
    x = torch.randn(5, 8)
    program = torch.export.export(op, (x, torch.tensor([2, 3])))
    for sizes in ([2, 3], [5, 0], [1, 1]):
        splits = torch.tensor(sizes)
        assert torch.equal(program.module()(x, splits), op(x, splits))


def test_without_memory() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    op = te.ops.GroupedLinear(2, 8, 4)
    with FakeTensorMode(allow_non_fake_inputs=True):
        y = op(torch.empty(5, 8), torch.tensor([2, 3]))
        assert y.shape == (5, 4)


@pytest.mark.parametrize("accumulate", [False, True])
def test_weight_gradients_that_wait_break_the_graph(accumulate: bool) -> None:
    torch._dynamo.reset()
    op = te.ops.GroupedLinear(
        2, 8, 4, delay_wgrad_compute=True, accumulate_into_main_grad=accumulate
    )
    for weight in (op.weight0, op.weight1):
        weight.main_grad = torch.zeros_like(weight)
    x = torch.randn(5, 8, requires_grad=True)
    splits = torch.tensor([2, 3])
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"main_grad|backward_dw"):
        torch.compile(op, fullgraph=True, backend="aot_eager")(x, splits)
    torch.compile(op, backend="aot_eager")(x, splits).sum().backward()
    op.backward_dw()
    wanted = torch.ones(2, 4).T @ x.detach()[:2]
    found = op.weight0.main_grad if accumulate else op.weight0.grad
    torch.testing.assert_close(found, wanted)


def test_buffers_break_the_graph() -> None:
    torch._dynamo.reset()
    op = te.ops.GroupedLinear(2, 8, 4)
    x, splits, out = torch.randn(5, 8), torch.tensor([2, 3]), torch.empty(5, 4)

    def call(x: Tensor) -> Tensor:
        return op(x, splits, output=out) + 1

    with pytest.raises(torch._dynamo.exc.Unsupported, match="writes into buffers"):
        torch.compile(call, fullgraph=True, backend="aot_eager")(x)
    y = torch.compile(call, backend="aot_eager")(x)
    assert torch.equal(out, op(x, splits))
    assert torch.equal(y, out + 1)
