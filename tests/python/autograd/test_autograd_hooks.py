"""What saved-tensor hooks give back is what they were given, or it is refused."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from reference import assert_close, check_against_reference, make_input, make_mlp
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

import ligature as te
import ligature.ops as ops

RECIPES: dict[str, Any] = {
    "none": None,
    "delayed": te.recipe.DelayedScaling,
    "current": te.recipe.Float8CurrentScaling,
    "block": te.recipe.Float8BlockScaling,
    "mxfp8": te.recipe.MXFP8BlockScaling,
    "nvfp4": lambda: te.recipe.NVFP4BlockScaling(
        disable_rht=True, disable_stochastic_rounding=True
    ),
}


class ScaleInPython(ops.BasicOperation):
    """An operation in Python that saves its input."""

    def op_forward(self, ctx, input_, **unused):
        ctx.save_for_backward(input_)
        return input_ * 2

    def op_backward(self, ctx, grad_output):
        (x,) = ctx.saved_tensors
        return grad_output * 2 + 0 * x, ()


def every_kind() -> dict[str, torch.nn.Module]:
    return {
        "Linear": ops.Linear(32, 32),
        "LayerNorm": ops.LayerNorm(32),
        "RMSNorm": ops.RMSNorm(32),
        "L2Normalization": ops.L2Normalization(),
        "GELU": ops.GELU(),
        "SwiGLU": ops.SwiGLU(),
        "ScaledSwiGLU": ops.ScaledSwiGLU(),
        "Dropout": ops.Dropout(0.5),
        "cached": ops.SwiGLU(cache_quantized_input=True),
        "ScaleInPython": ScaleInPython(),
        "mlp": make_mlp(features=32),
        "cheap mlp": make_mlp(features=32, recompute="cheap"),
    }


def call(model: torch.nn.Module, unpack: Callable[[torch.Tensor], Any]) -> torch.Tensor:
    x = make_input(32, 32)
    extra = [make_input(32)] if isinstance(model, ops.ScaledSwiGLU) else []
    with saved_tensors_hooks(lambda t: t.detach().clone(), unpack):
        return model(x, *extra)


def larger(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.new_ones([*tensor.shape[:-1], tensor.shape[-1] + 1])


OTHERS: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "dtype": (lambda t: t.to(torch.float16), "Half"),
    "larger": (larger, "got"),
    "smaller": (lambda t: t.reshape(-1)[:1], "got"),
    "shape": (lambda t: t.reshape(1, *t.shape), "got"),
    "meta": (lambda t: t.to("meta"), "meta"),
    "sparse": (lambda t: t.to_sparse(), "parse"),
}


@pytest.mark.parametrize("how", OTHERS)
@pytest.mark.parametrize("kind", list(every_kind()))
def test_another_tensor_is_refused(device, kind, how):
    change, word = OTHERS[how]
    y = call(every_kind()[kind], change)
    with pytest.raises(
        (RuntimeError, TypeError), match=r"\[\w+\] saved tensor \d.*hooks.*(layout|" + word + ")"
    ):
        y.sum().backward()


def test_the_message_names_operation_and_both_tensors(device):
    y = call(ops.Dropout(0.5), lambda t: t.to(torch.bfloat16))
    with pytest.raises(
        RuntimeError,
        match=rf"\[Dropout\] saved tensor 0.*Bool\[32, 32\] on {device}.*BFloat16\[32, 32\]",
    ):
        y.sum().backward()


def test_a_graph_that_was_refused_works_with_other_hooks(device):
    right = [False]
    x = make_input(32, 32)
    dropout = ops.Dropout(0.5)
    change = lambda t: t if right[0] else t.float()  # noqa: E731
    with saved_tensors_hooks(lambda t: t, change):
        y = dropout(x)
    with pytest.raises(RuntimeError, match="Dropout"):
        y.sum().backward(retain_graph=True)
    right[0] = True
    y.sum().backward()
    assert_close(x.grad, (y != 0) * 2.0, torch.float32)


@pytest.mark.parametrize("recipe", [r for r in RECIPES if r != "none"])
def test_parts_of_quantized_tensors_are_looked_at(device, recipe):
    model = ops.Linear(32, 32)
    for change in (lambda t: t[:1], lambda t: t.to(torch.float16)):
        with te.autocast(recipe=RECIPES[recipe]()):
            y = call(model, change)
        with pytest.raises(RuntimeError, match=r"\[Linear\] saved tensor \d, part \d"):
            y.sum().backward()


# -- what stays allowed


def transposed(tensor: torch.Tensor) -> torch.Tensor:
    """The same values with other strides."""
    if tensor.dim() < 2:
        return torch.stack([tensor, tensor], -1)[..., 0]
    return tensor.transpose(0, -1).contiguous().transpose(0, -1)


def restored(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_floating_point():
        return tensor
    return tensor.to(torch.float64).to(tensor.dtype)


class Subclass(torch.Tensor):
    """A subclass with memory."""


FINE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "same": lambda t: t,
    "copy": lambda t: t.clone(),
    "cpu and back": lambda t: t.cpu().clone().to(t.device),
    "dtype and back": restored,
    "strides": transposed,
    "negative bit": lambda t: torch._neg_view(-t) if t.is_floating_point() else t,
    "subclass": lambda t: t.as_subclass(Subclass),
    "in a larger storage": lambda t: torch.cat([t.reshape(-1), t.reshape(-1)])[: t.numel()].view(
        t.shape
    ),
}


def check_same(kind: str, how: str, recipe: str) -> None:
    def gradients(unpack: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor | None]:
        torch.manual_seed(3)
        model = every_kind()[kind]
        x = make_input(32, 32)
        extra = [make_input(32)] if kind == "ScaledSwiGLU" else []
        with contextlib.ExitStack() as stack:
            if recipe != "none":
                stack.enter_context(te.autocast(recipe=RECIPES[recipe]()))
            stack.enter_context(saved_tensors_hooks(lambda t: t.detach().clone(), unpack))
            y = model(x, *extra)
        y.backward(torch.cos(y.detach()))
        return [x.grad, *(e.grad for e in extra), *(p.grad for p in model.parameters())]

    for got, wanted in zip(gradients(FINE[how]), gradients(lambda t: t), strict=True):
        assert got is not None
        assert wanted is not None
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("how", FINE)
@pytest.mark.parametrize("kind", list(every_kind()))
def test_the_same_values_are_fine(device, kind, how):
    check_same(kind, how, "none")


@pytest.mark.parametrize("recipe", [r for r in RECIPES if r != "none"])
@pytest.mark.parametrize("how", FINE)
@pytest.mark.parametrize("kind", ["Linear", "mlp", "cheap mlp"])
def test_the_same_values_are_fine_in_low_precision(device, kind, how, recipe):
    check_same(kind, how, recipe)


@pytest.mark.parametrize("recompute", ["none", "cheap"])
def test_save_on_cpu_still_works(device, recompute):
    model = make_mlp(recompute=recompute)
    x = make_input(6, 8)
    with save_on_cpu():
        check_against_reference(model, x.t().contiguous().t().detach().requires_grad_())


@pytest.mark.parametrize("change", [lambda t: t.to(torch.float16), lambda t: t.reshape(-1)[:3]])
def test_compiled_graphs_look_at_them_too(device, change):
    model = ops.Sequential(ops.LayerNorm(32), ops.Dropout(0.5))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = make_input(32, 32)
    with saved_tensors_hooks(lambda t: t.detach().clone(), change):
        y = compiled(x)
    with pytest.raises(Exception, match=r"saved|gave back|size|dtype"):
        y.sum().backward()
