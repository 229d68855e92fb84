"""torch.compile with fullgraph=True: every operation and fusion gives what it gives in eager mode,
bit by bit, in one graph that is made once."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compile_support import Pair, mlp
from reference import ACTIVATIONS
from torch._dynamo.testing import CompileCounterWithBackend

import ligature as te

#: tools/run_tests.py reads it: torch.compile keeps what it has seen in a process.
IN_ONE_PROCESS = True

pytestmark = [
    pytest.mark.usefixtures("device", "one_thread"),
    pytest.mark.filterwarnings("error:.*may not alias"),
]

ops = te.ops
Tensor = torch.Tensor
H = 16


def x_of(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape).to(dtype).requires_grad_()


PLAIN: dict[str, Callable[[], torch.nn.Module]] = {
    "Linear": lambda: ops.Linear(H, 12),
    "Linear without bias": lambda: ops.Linear(H, 12, bias=False),
    "BasicLinear": lambda: ops.BasicLinear(H, 12),
    "Bias": lambda: ops.Bias(H),
    "LayerNorm": lambda: ops.LayerNorm(H),
    "LayerNorm zero centered": lambda: ops.LayerNorm(H, zero_centered_gamma=True),
    "RMSNorm": lambda: ops.RMSNorm(H),
    "L2Normalization": lambda: ops.L2Normalization(),
    "ConstantScale": lambda: ops.ConstantScale(0.5),
    "Dropout": lambda: ops.Dropout(0.5),
    "Identity": lambda: ops.Identity(),
    "Reshape": lambda: ops.Reshape((-1, 2, H // 2)),
    "Quantize": lambda: ops.Quantize(),
    **{name: getattr(ops, name) for name in ACTIVATIONS},
}


@pytest.mark.parametrize("name", PLAIN)
def test_an_operation(name: str) -> None:
    """Alone, as a module of its own."""
    pair = Pair(PLAIN[name]())
    for seed in range(2):
        pair.step(x_of(6, H), seed=seed)
    assert pair.graphs == 1


SCALED = ("ScaledSwiGLU", "ScaledSiTUGLU", "ScaledClampedQGeGLU", "ScaledSReLU")


@pytest.mark.parametrize("name", SCALED)
def test_a_scaled_activation(name: str) -> None:
    pair = Pair(ops.Sequential(ops.Linear(H, H), getattr(ops, name)()))
    pair.step(x_of(6, H), x_of(6))
    pair.step(x_of(6, H), torch.rand(6))
    assert pair.graphs == 2  # the scales need no gradient any more


FUSED: dict[str, tuple[Callable[[], list[torch.nn.Module]], int]] = {
    "linear bias activation": (lambda: [ops.Linear(H, H), ops.GELU()], 0),
    "linear bias add": (lambda: [ops.Linear(H, H), ops.AddExtraInput()], 1),
    "linear scale add": (
        lambda: [ops.Linear(H, H, bias=False), ops.ConstantScale(0.5), ops.AddExtraInput()],
        1,
    ),
    "backward activation bias": (lambda: [ops.GELU(), ops.Bias(H), ops.SiLU()], 0),
    "backward linear add": (lambda: [ops.MakeExtraOutput(), ops.Linear(H, H)], 0),
    "backward linear scale": (lambda: [ops.Linear(H, H, bias=False), ops.ConstantScale(2.0)], 0),
    "backward add norm": (lambda: [ops.MakeExtraOutput(), ops.RMSNorm(H)], 0),
    "mlp": (lambda: [ops.LayerNorm(H), ops.Linear(H, 2 * H), ops.SwiGLU(), ops.Linear(H, H)], 0),
}


@pytest.mark.parametrize(
    ("name", "recompute"), [*((name, "none") for name in FUSED), ("mlp", "cheap")]
)
def test_a_fusion(name: str, recompute: str) -> None:
    make, extras = FUSED[name]
    pair = Pair(ops.Sequential(*make(), recompute=recompute))
    for seed in range(2):
        pair.step(x_of(6, H), *(x_of(6, H) for _ in range(extras)), seed=seed)
    assert pair.graphs == 1
    names = [
        [
            [type(op).__name__ for op, _ in steps]
            for steps in (fuser._forward_ops, fuser._backward_ops)
        ]
        for model in (pair.eager, pair.model)
        for fuser in model._module_groups
    ]
    assert names[0] == names[1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes(dtype: torch.dtype) -> None:
    pair = Pair(mlp(dtype=dtype))
    pair.step(x_of(6, H, dtype=dtype))
    assert pair.graphs == 1


def test_torch_autocast(device: str) -> None:
    pair = Pair(mlp())
    pair.step(x_of(6, H))
    for _ in range(2):
        pair.step(x_of(6, H), scope=lambda: torch.autocast(device, torch.bfloat16))
    assert pair.graphs == 2


class Mixed(torch.nn.Module):
    """Operations among modules and functions of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(H, H)
        self.block = mlp()
        self.norm = ops.RMSNorm(H)
        self.last = ops.Sequential(ops.Linear(H, H), torch.nn.Tanh(), ops.GELU(), ops.Bias(H))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.nn.functional.gelu(self.first(x))
        x = x + self.block(x)
        return self.last(self.norm(x) * 2).sum(-1)


def test_a_mixed_model() -> None:
    pair = Pair(Mixed())
    for seed in range(3):
        pair.step(x_of(6, H), seed=seed)
    assert pair.graphs == 1


class Stack(torch.nn.Module):
    """More containers than a compiler makes graphs of one function."""

    def __init__(self) -> None:
        super().__init__()
        layers = [ops.Sequential(ops.Linear(H, H), ops.GELU()) for _ in range(12)]
        self.layers = torch.nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def test_many_layers() -> None:
    pair = Pair(Stack())
    for seed in range(2):
        pair.step(x_of(6, H), seed=seed)
    assert pair.graphs == 1


@pytest.mark.skipif(
    "isolate_recompiles" not in inspect.signature(torch.compile).parameters,
    reason="this torch counts the graphs of all containers together",
)
@pytest.mark.parametrize(
    "make",
    [lambda: ops.Sequential(ops.GELU()), lambda: ops.Bias(H)],
    ids=["container", "operation"],
)
def test_many_compiled_by_themselves(make: Callable[[], torch.nn.Module]) -> None:
    torch._dynamo.reset()
    layers = [make() for _ in range(10)]
    counter = CompileCounterWithBackend("aot_eager")
    compiled = [
        torch.compile(layer, fullgraph=True, backend=counter, isolate_recompiles=True)
        for layer in layers
    ]
    for _ in range(2):
        for layer, call in zip(layers, compiled, strict=True):
            x = torch.randn(6, H)
            assert torch.equal(call(x), layer(x))
    assert counter.frame_count == 10


def test_frozen_parameters_and_inputs() -> None:
    model = mlp()
    for frozen in ((), (0, 1), (2,), (0, 1, 2, 3, 4)):
        for index, p in enumerate(model.parameters()):
            p.requires_grad_(index not in frozen)
        pair = Pair(model)
        pair.step(x_of(6, H))
        pair.step(x_of(6, H).detach())
        assert pair.graphs == 2


def test_modes() -> None:
    model = ops.Sequential(ops.Linear(H, H), ops.Dropout(0.5), ops.GELU())
    pair = Pair(model)
    pair.step(x_of(6, H))
    pair.step(x_of(6, H), scope=torch.no_grad)
    pair.step(x_of(6, H), scope=torch.inference_mode)
    for m in (pair.eager, pair.model):
        m.eval()
    pair.step(x_of(6, H))
    assert pair.graphs == 4


def test_channels() -> None:
    fork, join = ops.MakeExtraOutput(), ops.AddExtraInput()
    fork.set_extra_output_channel(0, "residual", output_to_caller=False)
    join.set_extra_input_channel(0, "residual")
    pair = Pair(ops.Sequential(fork, ops.LayerNorm(H), ops.Linear(H, H), join))
    pair.step(x_of(6, H))
    assert pair.graphs == 1


@pytest.mark.parametrize("used", [None, [0], [1]])
def test_extra_outputs(used: Any) -> None:
    pair = Pair(
        ops.Sequential(ops.Linear(H, H), ops.MakeExtraOutput(), ops.GELU(), ops.Linear(H, H))
    )
    pair.step(x_of(6, H), used=used)
    assert pair.graphs == 1


@pytest.mark.parametrize("in_place", [False, True])
def test_an_extra_output_that_is_the_input(in_place: bool) -> None:
    pair = Pair(ops.Sequential(ops.MakeExtraOutput(in_place=in_place), ops.Linear(H, H)))
    for used in (None, [0], [1]):
        pair.step(x_of(6, H), used=used)
    assert pair.graphs == 1


class Overwrites(torch.nn.Module):
    def __init__(self, *after: torch.nn.Module) -> None:
        super().__init__()
        self.ops = ops.Sequential(ops.Linear(H, H), ops.AddExtraInput(in_place=True), *after)

    def forward(self, x: Tensor, extra: Tensor) -> tuple[Tensor, Tensor]:
        extra = extra * 1
        y = self.ops(x, extra)
        return y, extra.detach() + 0


def test_an_extra_input_in_place() -> None:
    for after in ([], [ops.GELU()]):
        pair = Pair(Overwrites(*after))
        pair.step(x_of(6, H), x_of(6, H), used=[0])
        assert pair.graphs == 1


def test_a_leaf_in_place_is_refused() -> None:
    model = ops.Sequential(ops.Linear(H, H), ops.AddExtraInput(in_place=True))
    compiled = torch.compile(lambda x, extra: model(x, extra), backend="aot_eager")
    leaf = x_of(6, H)
    before = leaf.detach().clone()
    with pytest.raises(RuntimeError, match="a compiled graph cannot do that"):
        compiled(x_of(6, H), leaf)
    assert torch.equal(leaf.detach(), before)


def test_op_kwargs() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ops = mlp()

        def forward(self, x: Tensor) -> Any:
            return self.ops(x, op_kwargs={1: {"is_first_microbatch": True}})

    pair = Pair(Model())
    pair.step(x_of(6, H))
    assert pair.graphs == 1


def test_layouts() -> None:
    pair = Pair(ops.Sequential(ops.Identity(), ops.LayerNorm(H), ops.Linear(H, H)))
    pair.step(torch.randn(H, 6).t().requires_grad_())
    pair.step(torch.randn(2, H, 3).transpose(1, 2).requires_grad_())
    pair.step(torch.randn(1, H).expand(6, H).requires_grad_())


def test_the_same_tensor_twice() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ops = ops.Sequential(ops.Linear(H, H), ops.AddExtraInput())
            self.tied = ops.Sequential(ops.Linear(H, H), ops.GELU(), ops.Linear(H, H))
            self.tied[2].weight = self.tied[0].weight

        def forward(self, x: Tensor) -> Tensor:
            return self.tied(self.ops(x, x))

    pair = Pair(Model())
    pair.step(x_of(6, H))
    assert pair.graphs == 1


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_dynamic_batch(backend: str) -> None:
    pair = Pair(Mixed(), backend)
    for n in (6, 9, 5, 32):
        pair.step(x_of(n, H), seed=n, dynamic=True)
    assert pair.graphs == 1


def test_dynamic_shapes_without_a_mark() -> None:
    pair = Pair(ops.Sequential(ops.Reshape((-1, 2, H)), mlp(), ops.Reshape((-1, 4, H))))
    for shape in ((4, H), (8, H), (12, H), (20, H)):
        pair.step(x_of(*shape))
    assert pair.graphs == 2
    pair = Pair(mlp(), dynamic=True)
    for shape in ((2, 3, H), (4, 5, H), (7, 2, H)):
        pair.step(x_of(*shape))
    assert pair.graphs == 1


def test_microbatches() -> None:
    """Several forwards before their backwards, gradients that add up."""
    pair = Pair(mlp())
    batches = [torch.randn(6, H) for _ in range(3)]
    for call, model in ((pair.eager, pair.eager), (pair.compiled, pair.model)):
        outputs = [call(x) for x in batches]
        for y in outputs:
            y.square().sum().backward()
        model.result = [p.grad.clone() for p in model.parameters()]
    for wanted, got in zip(pair.eager.result, pair.model.result, strict=True):
        assert torch.equal(got, wanted)
    assert pair.graphs == 1


def test_training() -> None:
    """20 steps with AdamW: the losses of eager mode."""
    pair = Pair(Mixed())
    losses: list[list[float]] = []
    for call, model in ((pair.eager, pair.eager), (pair.compiled, pair.model)):
        torch.manual_seed(7)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses.append([])
        for _ in range(20):
            x = torch.randn(8, H)
            loss = (call(x) - x.sum(-1)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    assert pair.graphs == 1
    assert losses[0] == losses[1]
    assert losses[0][-1] < losses[0][0]


def test_changes_are_seen() -> None:
    model = mlp()
    pair = Pair(model)
    pair.step(x_of(6, H))
    for m in (pair.eager, pair.model):
        m.append(ops.GELU())
    pair.step(x_of(6, H))
    for m in (pair.eager, pair.model):
        m.recompute = "cheap"
    pair.step(x_of(6, H))
    assert pair.graphs == 3


def test_bad_input_is_refused() -> None:
    model = torch.compile(mlp(), fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=r"must be normalized_shape|last dimension"):
        model(torch.randn(6, H + 1))


def test_a_width_is_no_symbol() -> None:
    """The compiler takes a size that was another in an earlier call for a symbol."""
    model = mlp()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="normalized_shape"):
        compiled(torch.randn(6, H + 1))
    for n in (6, 8):
        x = torch.randn(n, H)
        assert torch.equal(compiled(x), model(x))


def test_the_first_call_may_be_eager() -> None:
    model = mlp()
    x = torch.randn(6, H)
    wanted = model(x)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), wanted)
    assert torch.equal(model(x), wanted)
