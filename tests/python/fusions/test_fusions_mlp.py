"""DenseMLP: the joint fusion that recomputes norm and activation in backward."""

from __future__ import annotations

import pytest
import torch
from fusion_support import (
    backward_names,
    check_equal_to_unfused,
    check_indices,
    forward_names,
    freezing_patterns,
    saved_bytes,
)
from reference import (
    ACTIVATIONS,
    FLOAT_DTYPES,
    GLU_ACTIVATIONS,
    assert_close,
    check_against_reference,
    make_input,
)

import ligature as te

pytestmark = pytest.mark.usefixtures("device")

HIDDEN = 24


def mlp_ops(
    norm: str = "LayerNorm",
    activation: str = "SwiGLU",
    bias: tuple[bool, bool] = (True, True),
    residual: str = "none",
    dtype: torch.dtype = torch.float32,
    to_caller: bool = False,
) -> list[te.ops.FusibleOperation]:
    """A block; ``residual``: "none", or the place of the fork, before or after the norm."""
    width = 32 if activation in GLU_ACTIVATIONS else 16
    first = getattr(te.ops, norm)(HIDDEN, dtype=dtype)
    for parameter in first.parameters():
        torch.nn.init.normal_(parameter)
    ops = [
        first,
        te.ops.Linear(HIDDEN, width, bias=bias[0], dtype=dtype),
        getattr(te.ops, activation)(),
        te.ops.Linear(16, HIDDEN, bias=bias[1], dtype=dtype),
    ]
    if residual == "none":
        return ops
    fork, join = te.ops.MakeExtraOutput(), te.ops.AddExtraInput()
    fork.set_extra_output_channel(0, "residual", output_to_caller=to_caller)
    join.set_extra_input_channel(0, "residual")
    ops.insert(0 if residual == "before" else 1, fork)
    return [*ops, join]


def check_mlp(ops: list[te.ops.FusibleOperation], *inputs: torch.Tensor, scale: float = 4) -> None:
    fuser = check_equal_to_unfused(ops, *inputs, recompute="cheap", scale=scale)
    assert forward_names(fuser) == ["DenseMLP"]
    assert backward_names(fuser) == ["DenseMLP"]
    assert fuser._forward_ops[0][1] == list(range(fuser._num_basic_ops))
    check_indices(fuser)


@pytest.mark.parametrize("norm", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation(activation: str, norm: str) -> None:
    check_mlp(mlp_ops(norm, activation), make_input(5, HIDDEN))
    check_mlp(mlp_ops(norm, activation, residual="before"), make_input(2, 3, HIDDEN))


@pytest.mark.parametrize("bias", [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize("residual", ["none", "before", "after"])
@pytest.mark.parametrize("norm", ["LayerNorm", "RMSNorm"])
def test_biases_and_residual(norm: str, residual: str, bias: tuple[bool, bool]) -> None:
    check_mlp(mlp_ops(norm, "GELU", bias, residual), make_input(5, HIDDEN))


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("residual", ["none", "before", "after"])
def test_dtypes(residual: str, dtype: torch.dtype) -> None:
    ops = mlp_ops(residual=residual, dtype=dtype)
    check_mlp(ops, make_input(5, HIDDEN, dtype=dtype))


@pytest.mark.parametrize("residual", ["before", "after"])
def test_residual_that_the_caller_gets_too(residual: str) -> None:
    ops = mlp_ops(residual=residual, to_caller=True)
    check_mlp(ops, make_input(5, HIDDEN))
    fuser = te.ops.OperationFuser(ops, recompute="cheap")
    assert len(fuser(make_input(5, HIDDEN))) == 2


@pytest.mark.parametrize("x_grad", [True, False])
@pytest.mark.parametrize("residual", ["none", "before", "after"])
def test_every_frozen_subset(residual: str, x_grad: bool) -> None:
    ops = mlp_ops("RMSNorm", "SwiGLU", residual=residual)
    parameters = [p for op in ops for p in op.parameters()]
    assert len(parameters) == 5
    x = make_input(3, HIDDEN, requires_grad=x_grad)
    for _ in freezing_patterns(parameters):
        fuser = check_equal_to_unfused(ops, x, recompute="cheap", scale=4)
        assert forward_names(fuser) == ["DenseMLP"]


def test_shapes() -> None:
    ops = mlp_ops()
    for shape in [(HIDDEN,), (2, 3, HIDDEN), (2, 1, 3, HIDDEN), (0, HIDDEN), (2, 0, HIDDEN)]:
        check_mlp(ops, make_input(*shape))
    check_mlp(ops, torch.randn(HIDDEN, 5).t().requires_grad_())


def test_without_gradients() -> None:
    ops = mlp_ops(residual="before")
    fuser = te.ops.OperationFuser(ops, recompute="cheap")
    x = make_input(5, HIDDEN)
    with torch.no_grad():
        got = fuser(x)
        torch.testing.assert_close(got, te.ops.OperationFuser(ops, fuse=False)(x))
    assert not got.requires_grad


@pytest.mark.parametrize("residual", ["none", "before", "after"])
def test_against_float64(residual: str) -> None:
    model = te.ops.Sequential(*mlp_ops(residual=residual), recompute="cheap")
    check_against_reference(model, make_input(5, HIDDEN), scale=3)
    assert forward_names(model._module_groups[0]) == ["DenseMLP"]


@pytest.mark.parametrize("norm", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("activation", ["GELU", "SwiGLU"])
@pytest.mark.parametrize("residual", ["none", "before"])
def test_saves_fewer_bytes(norm: str, activation: str, residual: str) -> None:
    rows = 64
    ops = mlp_ops(norm, activation, residual=residual)
    x = make_input(rows, HIDDEN)
    saved = {
        mode: saved_bytes(te.ops.Sequential(*ops, recompute=mode), x) for mode in ("none", "cheap")
    }
    # What a norm and an activation wrote is no longer there.
    assert saved["none"] - saved["cheap"] >= rows * (HIDDEN + 16) * 4
    width = 32 if activation == "SwiGLU" else 16
    statistics = 2 if norm == "LayerNorm" else 1
    assert saved["cheap"] <= rows * (width + statistics) * 4


def test_the_same_gradients_as_without_recomputing() -> None:
    ops = mlp_ops(residual="before")
    results = []
    for mode in ("none", "cheap"):
        model = te.ops.Sequential(*ops, recompute=mode)
        torch.manual_seed(0)
        x = make_input(5, HIDDEN)
        model.zero_grad()
        model(x).square().sum().backward()
        assert ("DenseMLP" in backward_names(model._module_groups[0])) == (mode == "cheap")
        results.append([x.grad, *(p.grad.clone() for p in model.parameters())])
    for a, b in zip(*results, strict=True):
        assert_close(a, b, torch.float32, scale=10)


def test_needs_permission() -> None:
    fuser = check_equal_to_unfused(mlp_ops(), make_input(5, HIDDEN))
    assert "DenseMLP" not in forward_names(fuser)
    reasons = [row for row in fuser._considered if row[1] == "DenseMLP"]
    assert ("joint forward-backward", "DenseMLP", 0, "recompute is not 'cheap'") in reasons


def test_changing_recompute_changes_the_plan() -> None:
    model = te.ops.Sequential(*mlp_ops())
    x = make_input(5, HIDDEN)
    before = model(x)
    assert "DenseMLP" not in forward_names(model._module_groups[0])
    model.recompute = "cheap"
    assert model._module_groups is None
    torch.testing.assert_close(model(x), before)
    assert forward_names(model._module_groups[0]) == ["DenseMLP"]
    assert model[:].recompute == "cheap"
    assert (model + model).recompute == "cheap"


def test_two_blocks_and_what_is_around_them() -> None:
    ops = [
        te.ops.Linear(HIDDEN, HIDDEN),
        te.ops.GELU(),
        *mlp_ops("RMSNorm"),
        *mlp_ops(residual="before"),
        te.ops.Linear(HIDDEN, 8),
        te.ops.GELU(),
    ]
    fuser = check_equal_to_unfused(ops, make_input(5, HIDDEN), recompute="cheap", scale=10)
    assert forward_names(fuser) == [
        "ForwardLinearBiasActivation",
        "DenseMLP",
        "DenseMLP",
        "ForwardLinearBiasActivation",
    ]
    check_indices(fuser)


def test_one_instance_serves_both_directions() -> None:
    fuser = te.ops.OperationFuser(mlp_ops(), recompute="cheap")
    fuser(make_input(5, HIDDEN))
    assert fuser._forward_ops[0][0] is fuser._backward_ops[0][0]
    assert fuser._forward_ops[0][0] is fuser._forward_ops[0][0]


def test_residual_that_joins_elsewhere_is_not_taken() -> None:
    """Two forks, an addition of another channel, in place: the block alone is taken, or nothing."""
    x = make_input(5, HIDDEN)
    ops = mlp_ops(residual="before")
    other = te.ops.MakeExtraOutput()
    other.set_extra_output_channel(0, "other", output_to_caller=True)
    fuser = check_equal_to_unfused([other, te.ops.SiLU(), *ops], x, recompute="cheap", scale=4)
    assert forward_names(fuser)[-1] == "DenseMLP"

    ops = mlp_ops()
    join = te.ops.AddExtraInput()
    fuser = check_equal_to_unfused(
        [*ops, join], x, make_input(5, HIDDEN), recompute="cheap", scale=4
    )
    assert forward_names(fuser) == ["DenseMLP", "AddExtraInput"]

    fork, late = te.ops.MakeExtraOutput(), te.ops.AddExtraInput()
    fork.set_extra_output_channel(0, "a", output_to_caller=False)
    late.set_extra_input_channel(0, "a")
    ops = [fork, *mlp_ops(), te.ops.SiLU(), late]
    fuser = check_equal_to_unfused(ops, x, recompute="cheap", scale=4)
    assert forward_names(fuser) == ["MakeExtraOutput", "DenseMLP", "SiLU", "AddExtraInput"]


@pytest.mark.parametrize("position", [1, 2, 3])
def test_anything_in_between_keeps_it_apart(position: int) -> None:
    ops = mlp_ops()
    ops.insert(position, te.ops.Identity())
    fuser = check_equal_to_unfused(ops, make_input(5, HIDDEN), recompute="cheap")
    assert "DenseMLP" not in forward_names(fuser)


def test_retained_graph_gives_the_same_gradients_twice() -> None:
    model = te.ops.Sequential(*mlp_ops(residual="after"), recompute="cheap")
    x = make_input(5, HIDDEN)
    y = model(x)
    assert backward_names(model._module_groups[0]) == ["DenseMLP"]
    loss = y.square().sum()
    first = torch.autograd.grad(loss, [x, *model.parameters()], retain_graph=True)
    second = torch.autograd.grad(loss, [x, *model.parameters()])
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)
