"""A compiled model beside the same model in eager mode: results, gradients, state."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._dynamo.testing import CompileCounterWithBackend

import ligature as te

Tensor = torch.Tensor


def as_tuple(y: Any) -> tuple[Tensor, ...]:
    return y if isinstance(y, tuple) else (y,)


def assert_same(got: Any, wanted: Any, what: str, exact: bool = True) -> None:
    if wanted is None or got is None:
        assert got is wanted, f"{what}: {got} instead of {wanted}"
        return
    assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape), what
    if exact:
        torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True, msg=what)
    else:
        torch.testing.assert_close(got, wanted)


def state_of(model: torch.nn.Module) -> dict[str, Tensor]:
    return {k: v for k, v in model.state_dict().items() if isinstance(v, Tensor)}


class Pair:
    """A model, compiled, and its twin."""

    def __init__(
        self, model: torch.nn.Module, backend: str = "aot_eager", dynamic: bool | None = None
    ) -> None:
        torch._dynamo.reset()
        self.eager = copy.deepcopy(model)
        self.model = model
        self.counter = CompileCounterWithBackend(backend)
        self.compiled = torch.compile(model, fullgraph=True, backend=self.counter, dynamic=dynamic)
        self.exact = backend != "inductor"

    @property
    def graphs(self) -> int:
        return self.counter.frame_count

    def step(
        self,
        *inputs: Tensor,
        scope: Callable[[], Any] = contextlib.nullcontext,
        seed: int = 0,
        used: Sequence[int] | None = None,
        dynamic: bool = False,
    ) -> None:
        """One forward and backward of both. `used`: outputs with a gradient; by default all."""
        given = [[t.detach().clone().requires_grad_(t.requires_grad) for t in inputs]]
        given.append([t.detach().clone().requires_grad_(t.requires_grad) for t in inputs])
        if dynamic:
            for t in given[1]:
                torch._dynamo.mark_dynamic(t, 0)
        results = []
        for call, tensors in zip((self.eager, self.compiled), given, strict=True):
            torch.manual_seed(seed)
            with scope():
                results.append(as_tuple(call(*tensors)))
        assert len(results[0]) == len(results[1])
        for k, (wanted, got) in enumerate(zip(*results, strict=True)):
            assert_same(got, wanted, f"output {k}", self.exact)
            assert got.requires_grad == wanted.requires_grad, f"output {k}"
        if not any(y.requires_grad for y in results[0]):
            return
        for model, outputs in zip((self.eager, self.model), results, strict=True):
            model.zero_grad()
            chosen = [outputs[k] for k in (used or range(len(outputs)))]
            chosen = [y for y in chosen if y.requires_grad]
            torch.manual_seed(100 + seed)
            grads = [torch.randn(y.shape, dtype=y.dtype, device=y.device) for y in chosen]
            torch.manual_seed(200 + seed)
            torch.autograd.backward(chosen, grads)
        for k, (wanted, got) in enumerate(zip(*given, strict=True)):
            assert_same(got.grad, wanted.grad, f"gradient of input {k}", self.exact)
        for (name, wanted), got in zip(
            self.eager.named_parameters(), self.model.parameters(), strict=True
        ):
            assert_same(got.grad, wanted.grad, f"gradient of {name}", self.exact)
        states = state_of(self.eager), state_of(self.model)
        assert states[0].keys() == states[1].keys()
        for name, wanted in states[0].items():
            assert_same(states[1][name], wanted, name, self.exact)


def mlp(h: int = 16, f: int = 32, **kwargs: Any) -> te.ops.Sequential:
    ops = te.ops
    return ops.Sequential(
        ops.LayerNorm(h, **kwargs),
        ops.Linear(h, 2 * f, **kwargs),
        ops.SwiGLU(),
        ops.Linear(f, h, **kwargs),
    )
