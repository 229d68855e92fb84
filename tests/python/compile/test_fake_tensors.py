"""FakeTensorMode: shapes, dtypes and devices of a call without memory, forward and backward."""

from __future__ import annotations

import pytest
import torch
from reference import make_input
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import ligature as te
import ligature.ops as ops

#: tools/run_tests.py reads it: torch.compile keeps what it has seen in a process.
IN_ONE_PROCESS = True


def models() -> dict[str, torch.nn.Module]:
    return {
        "LayerNorm": ops.LayerNorm(32),
        "Linear": ops.Linear(32, 64),
        "SwiGLU": ops.SwiGLU(),
        "Dropout": ops.Dropout(0.5),
        "Reshape": ops.Reshape((-1, 16)),
        "Identity": ops.Identity(),
        "mlp": ops.Sequential(
            ops.LayerNorm(32), ops.Linear(32, 64), ops.SwiGLU(), ops.Linear(32, 32)
        ),
        "cheap mlp": ops.Sequential(
            ops.LayerNorm(32),
            ops.Linear(32, 64),
            ops.SwiGLU(),
            ops.Linear(32, 32),
            recompute="cheap",
        ),
        "two groups": ops.Sequential(ops.Linear(32, 32), torch.nn.Tanh(), ops.Linear(32, 8)),
        "fork": ops.Sequential(ops.Linear(32, 32), ops.MakeExtraOutput(), ops.GELU()),
    }


def outputs(result) -> list[torch.Tensor]:
    return list(result) if isinstance(result, tuple) else [result]


def same_shape(fake: torch.Tensor, real: torch.Tensor) -> None:
    assert isinstance(fake, FakeTensor)
    assert fake.shape == real.shape
    assert fake.dtype == real.dtype
    assert fake.device == real.device
    assert fake.stride() == real.stride()


RECIPES = [None, "DelayedScaling", "Float8CurrentScaling", "MXFP8BlockScaling"]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("parameters", ["fake", "real"])
@pytest.mark.parametrize("name", list(models()))
def test_shapes_are_those_of_the_real_call(device, name, parameters, recipe):
    model = models()[name]
    x = make_input(32, 32, dtype=torch.float32)

    def call(x: torch.Tensor) -> list[torch.Tensor]:
        context = te.autocast(
            enabled=recipe is not None, recipe=getattr(te.recipe, recipe or "DelayedScaling")()
        )
        with context:
            return outputs(model(x))

    real = call(x)
    sum(y.sum() for y in real).backward()
    wanted = {n: p.grad for n, p in model.named_parameters()}
    mode = FakeTensorMode()
    fake_x = mode.from_tensor(x.detach()).requires_grad_()
    twins = dict(model.named_parameters())
    if parameters == "fake":
        twins = {n: mode.from_tensor(p.detach()).requires_grad_() for n, p in twins.items()}
    with mode:
        if parameters == "fake":
            with torch.nn.utils.stateless._reparametrize_module(model, twins):
                fakes = call(fake_x)
        else:
            fakes = call(fake_x)
        for fake, y in zip(fakes, real, strict=True):
            same_shape(fake, y)
            assert fake.requires_grad == y.requires_grad
        loss = sum(y.sum() for y in fakes)
        grads = torch.autograd.grad(loss, [fake_x, *twins.values()])
    same_shape(grads[0], x.grad)
    for grad, key in zip(grads[1:], twins, strict=True):
        same_shape(grad, wanted[key])


def test_outside_of_the_mode(device):
    """The input says which mode it belongs to."""
    mode = FakeTensorMode()
    y = ops.Linear(32, 8)(mode.from_tensor(torch.randn(4, 32)))
    assert isinstance(y, FakeTensor)
    assert y.shape == (4, 8)
    assert y.fake_mode is mode


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_dtypes(device, dtype):
    model = ops.Sequential(ops.RMSNorm(32), ops.Linear(32, 8)).to(dtype)
    mode = FakeTensorMode()
    with mode:
        y = model(torch.randn(4, 32, dtype=dtype))
    assert isinstance(y, FakeTensor)
    assert y.dtype == dtype


def test_without_gradients(device):
    model = models()["mlp"]
    with FakeTensorMode(), torch.no_grad():
        y = model(torch.randn(4, 32))
    assert isinstance(y, FakeTensor)
    assert not y.requires_grad


def test_a_model_made_in_the_mode(device):
    with FakeTensorMode():
        model = ops.Sequential(ops.LayerNorm(32), ops.Linear(32, 64), ops.SwiGLU())
        x = torch.randn(4, 32, requires_grad=True)
        y = model(x)
        y.sum().backward()
    assert y.shape == (4, 32)
    assert all(isinstance(p, FakeTensor) for p in model.parameters())
    assert all(isinstance(p.grad, FakeTensor) for p in model.parameters())


def test_extra_inputs_and_autocast(device):
    model = ops.Sequential(ops.Linear(32, 32), ops.AddExtraInput(), ops.ScaledSwiGLU())
    with FakeTensorMode(), torch.autocast(device, dtype=torch.bfloat16):
        y = model(torch.randn(4, 32), torch.randn(4, 32, dtype=torch.bfloat16), torch.randn(4))
    assert y.shape == (4, 16)
    assert y.dtype == torch.bfloat16
    assert y.device.type == device


def test_errors_are_those_of_a_real_call(device):
    with FakeTensorMode(), pytest.raises(ValueError, match=r"\[Linear\] input's last dimension"):
        ops.Linear(32, 8)(torch.randn(4, 31))


def test_a_real_input_in_the_mode_is_refused(device):
    x, model = torch.randn(4, 32), ops.Linear(32, 8)
    with FakeTensorMode(), pytest.raises(Exception, match="FakeTensor"):
        model(x)
    assert type(model(x)) is torch.Tensor  # nothing is left behind
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert isinstance(model(x), FakeTensor)


def test_the_backward_of_a_real_call_in_the_mode_is_refused(device):
    x = make_input(4, 32)
    y = ops.Sequential(ops.LayerNorm(32), ops.SiLU())(x)
    dy = torch.ones_like(y)
    with FakeTensorMode(), pytest.raises(RuntimeError, match="FakeTensorMode"):
        y.backward(dy)
    with pytest.raises((RuntimeError, TypeError), match="FakeTensor"):
        y.backward(FakeTensorMode().from_tensor(dy))


def test_quantizers_in_the_mode(device):
    quantizer = te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, device=device)
    x = torch.randn(32, 32)
    q = quantizer(x)
    with FakeTensorMode():
        for call in (
            lambda: quantizer(x),
            lambda: q.dequantize(),
            lambda: quantizer(torch.ones(4, 4)),
        ):
            with pytest.raises((RuntimeError, TypeError), match="FakeTensor"):
                call()
    assert torch.equal(quantizer(x).dequantize(), q.dequantize())


class Split(ops.BasicOperation):
    """In the split form a compiler, and so this mode, can trace it."""

    def op_forward_compute(self, input_, **unused):
        return input_ * 2, ()

    def op_forward_save_ctx(self, ctx, input_, tensors_to_save, **unused):
        pass

    def op_backward(self, ctx, grad_output):
        return grad_output * 2, ()


class Classic(ops.BasicOperation):
    def op_forward(self, ctx, input_, **unused):
        return input_ * 2

    def op_backward(self, ctx, grad_output):
        return grad_output * 2, ()


def test_operations_in_python(device):
    with FakeTensorMode():
        y = ops.Sequential(ops.Linear(32, 32), Split(), ops.GELU())(torch.randn(4, 32))
        assert isinstance(y, FakeTensor)
        assert y.shape == (4, 32)
        with pytest.raises(NotImplementedError, match=r"Classic.*FakeTensor.*split form"):
            ops.Sequential(ops.Linear(32, 32), Classic())(torch.randn(4, 32))


def test_weights_that_are_kept_quantized(device):
    with te.quantized_model_init(recipe=te.recipe.MXFP8BlockScaling()):
        model = ops.Linear(32, 32)
    with (
        FakeTensorMode(),
        pytest.raises(NotImplementedError, match=r"Linear.*FakeTensor.*low precision"),
    ):
        model(torch.randn(4, 32))


def test_delayed_scaling_notes_nothing(device):
    model = ops.Linear(32, 32)
    recipe = te.recipe.DelayedScaling()
    with te.autocast(recipe=recipe):
        model(torch.randn(32, 32))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    mode = FakeTensorMode()
    with te.autocast(recipe=recipe):
        y = model(mode.from_tensor(torch.randn(32, 32)))
    assert isinstance(y, FakeTensor)
    scales = [model.basic_ops[0].get_quantizer("forward", i).scale for i in range(2)]
    assert not any(isinstance(s, FakeTensor) for s in scales)
    with te.autocast(recipe=recipe):
        model(torch.randn(32, 32))
    assert before.keys() == model.state_dict().keys()


def test_explain_in_the_mode(device):
    model = models()["mlp"]
    with FakeTensorMode():
        assert "LayerNorm" in str(model.explain((4, 32)))


def test_symbolic_sizes(device):
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mode = FakeTensorMode(shape_env=ShapeEnv())
    x = mode.from_tensor(torch.randn(5, 32), static_shapes=False)
    y = models()["mlp"](x)
    assert y.shape[0] == x.shape[0]
    assert y.shape[1] == 32
