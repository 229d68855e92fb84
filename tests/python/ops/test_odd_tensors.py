"""Tensors without memory of their own: an error that says which, never the end of the process."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed
from reference import make_input
from torch._subclasses.fake_tensor import FakeTensorMode

import ligature as te
import ligature.ops as ops


def dtensor(*shape: int) -> torch.Tensor:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    device = torch.get_default_device().type
    return distribute_tensor(torch.randn(*shape), init_device_mesh(device, (1,)), [Replicate()])


def two_tensor(*shape: int) -> torch.Tensor:
    from torch.testing._internal.two_tensor import TwoTensor

    return TwoTensor(torch.randn(*shape), torch.randn(*shape))


def freed(*shape: int) -> torch.Tensor:
    tensor = torch.randn(*shape)
    tensor.untyped_storage().resize_(0)
    return tensor


def shrunk(*shape: int) -> torch.Tensor:
    tensor = torch.randn(*shape)
    tensor.untyped_storage().resize_(4)
    return tensor


def masked(*shape: int) -> torch.Tensor:
    return torch.masked.masked_tensor(torch.randn(*shape), torch.ones(*shape, dtype=torch.bool))


def nested(layout: torch.layout) -> Callable[..., torch.Tensor]:
    return lambda *shape: torch.nested.nested_tensor(
        [torch.randn(*shape), torch.randn(*shape)], layout=layout
    )


#: How each is made, its name in messages, and the way out.
ODD: dict[str, tuple[Callable[..., torch.Tensor], str, str]] = {
    "DTensor": (dtensor, "DTensor", r"to_local\(\)"),
    "MaskedTensor": (masked, "MaskedTensor", r"get_data\(\)"),
    "TwoTensor": (two_tensor, "TwoTensor", "a, b"),
    "freed": (freed, "freed", "fill it again"),
    "shrunk": (shrunk, "smaller", "fill it again"),
    "sparse": (lambda *s: torch.randn(*s).to_sparse(), "Sparse", r"to_dense\(\)"),
    "nested": (nested(torch.strided), "nested", "to_padded_tensor"),
    "jagged": (nested(torch.jagged), "nested", "to_padded_tensor"),
    "functional": (
        lambda *s: torch._to_functional_tensor(torch.randn(*s)),
        "functional",
        "outside",
    ),
}
if torch.backends.mkldnn.is_available():
    ODD["mkldnn"] = (lambda *s: torch.randn(*s).cpu().to_mkldnn(), "Mkldnn", r"to_dense\(\)")
#: A FakeTensor as an input has a meaning: test_fake_tensors.py.
NOT_INPUTS = dict(ODD)
NOT_INPUTS["FakeTensor"] = (
    lambda *s: FakeTensorMode().from_tensor(torch.randn(*s)),
    "FakeTensor",
    "FakeTensorMode",
)


@pytest.fixture(autouse=True)
def _one_process(device: str, tmp_path) -> Iterator[None]:
    """A group of one process, for DTensors."""
    torch.distributed.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        store=torch.distributed.HashStore(),
        rank=0,
        world_size=1,
    )
    yield
    torch.distributed.destroy_process_group()


def refused(name: str, argument: str) -> pytest.RaisesExc:
    _, kind, way = NOT_INPUTS[name]
    return pytest.raises((TypeError, RuntimeError), match=rf"{argument} must .*{kind}.*{way}")


def skip_cpu_only(name: str, device: str) -> None:
    if name == "mkldnn" and device != "cpu":
        pytest.skip("MKL-DNN's tensors are the CPU's")


@pytest.mark.parametrize("name", ODD)
def test_as_an_input(device, name):
    skip_cpu_only(name, device)
    for model in (
        ops.LayerNorm(8),
        ops.Sequential(ops.LayerNorm(8), ops.Linear(8, 16), ops.SwiGLU()),
        ops.Sequential(ops.LayerNorm(8), ops.Linear(8, 16), ops.SwiGLU(), recompute="cheap"),
    ):
        with refused(name, r"\[LayerNorm\] input"):
            model(ODD[name][0](4, 8))
    with te.autocast(recipe=te.recipe.Float8CurrentScaling()), refused(name, r"\[Linear\] input"):
        ops.Linear(8, 8)(ODD[name][0](4, 8))


@pytest.mark.parametrize("name", NOT_INPUTS)
def test_as_an_extra_input(device, name):
    skip_cpu_only(name, device)
    for model in (
        ops.AddExtraInput(),
        ops.AddExtraInput(in_place=True),
        ops.Sequential(ops.Linear(8, 8), ops.AddExtraInput()),
        ops.Sequential(ops.Linear(8, 8), ops.AddExtraInput(in_place=True)),
    ):
        with refused(name, r"\[AddExtraInput\] extra input 0"):
            model(torch.randn(4, 8), NOT_INPUTS[name][0](4, 8))
    with refused(name, r"\[ScaledSwiGLU\] extra input 0"):
        ops.ScaledSwiGLU()(torch.randn(4, 8), NOT_INPUTS[name][0](4))


@pytest.mark.parametrize("name", NOT_INPUTS)
def test_as_a_parameter(device, name):
    skip_cpu_only(name, device)
    x = torch.randn(4, 8)
    for model, key, shape in [
        (ops.LayerNorm(8), "weight", (8,)),
        (ops.RMSNorm(8), "weight", (8,)),
        (ops.Bias(8), "bias", (8,)),
        (ops.Linear(8, 4), "weight", (4, 8)),
        (ops.Linear(8, 4), "bias", (4,)),
    ]:
        model._parameters[key] = NOT_INPUTS[name][0](*shape)
        for run in (model, ops.Sequential(model, ops.GELU())):
            with refused(name, rf"\[\w+\] {key}"):
                run(x)


@pytest.mark.parametrize("name", NOT_INPUTS)
def test_as_a_gradient(device, name):
    skip_cpu_only(name, device)
    y = ops.Sequential(ops.LayerNorm(8), ops.GELU())(make_input(4, 8))
    with pytest.raises((TypeError, RuntimeError)):  # torch refuses some of them itself
        y.backward(NOT_INPUTS[name][0](4, 8))
    y, extra = ops.Sequential(ops.MakeExtraOutput(), ops.Linear(8, 8))(make_input(4, 8))
    with pytest.raises((TypeError, RuntimeError)):
        torch.autograd.backward([y, extra], [torch.ones_like(y), NOT_INPUTS[name][0](4, 8)])


@pytest.mark.parametrize("name", ["DTensor", "TwoTensor", "MaskedTensor", "freed"])
def test_the_message_for_a_gradient(device, name):
    y = ops.Sequential(ops.LayerNorm(8), ops.GELU())(make_input(4, 8))
    with refused(name, r"\[GELU\] the gradient of its output"):
        y.backward(ODD[name][0](4, 8))


@pytest.mark.parametrize("name", NOT_INPUTS)
def test_as_a_main_grad(device, name):
    skip_cpu_only(name, device)
    linear = ops.Linear(8, 4, bias=False, accumulate_into_main_grad=True)
    linear.weight.main_grad = NOT_INPUTS[name][0](4, 8)
    y = linear(make_input(4, 8))
    with pytest.raises((TypeError, RuntimeError), match=r"\[Linear\] main_grad must"):
        y.sum().backward()


@pytest.mark.parametrize("name", NOT_INPUTS)
def test_as_a_saved_tensor(device, name):
    skip_cpu_only(name, device)
    for model in (ops.SiLU(), ops.Dropout(0.5), ops.LayerNorm(8)):
        odd = NOT_INPUTS[name][0](4, 8)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t, odd=odd: odd):
            y = model(make_input(4, 8))
        with pytest.raises((TypeError, RuntimeError), match=rf"\[{type(model).__name__}\] saved"):
            y.sum().backward()


@pytest.mark.parametrize("name", NOT_INPUTS)
def test_for_a_quantizer(device, name):
    skip_cpu_only(name, device)
    e4m3 = te.DType.kFloat8E4M3
    for quantizer in (
        te.Float8CurrentScalingQuantizer(e4m3, device=device),
        te.MXFP8Quantizer(e4m3),
        te.Float8Quantizer(torch.ones(1), torch.zeros(1), e4m3),
    ):
        with pytest.raises((TypeError, RuntimeError)):
            quantizer(NOT_INPUTS[name][0](32, 32))
        good = quantizer(torch.randn(32, 32))
        with pytest.raises((TypeError, RuntimeError, ValueError)):
            good.quantize_(NOT_INPUTS[name][0](32, 32))
    if name == "shrunk":
        return
    with pytest.raises((TypeError, RuntimeError, ValueError)):
        te.Float8Quantizer(NOT_INPUTS[name][0](1), torch.zeros(1), e4m3)(torch.randn(32, 32))


def test_parts_of_a_quantized_tensor_that_were_freed(device):
    quantizer = te.MXFP8Quantizer(te.DType.kFloat8E4M3)
    q = quantizer(torch.randn(32, 32))
    q.rowwise_data.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="freed"):
        q.dequantize()
    for model in (ops.LayerNorm(32), ops.Linear(32, 32), ops.SiLU()):
        with pytest.raises(RuntimeError, match=rf"\[{type(model).__name__}\] input.*freed"):
            model(q)
    linear = ops.Linear(32, 32, bias=False)
    linear._parameters["weight"] = q
    with pytest.raises(RuntimeError, match=r"\[Linear\] weight.*freed"):
        linear(torch.randn(32, 32))


def test_nothing_changes_when_one_is_refused(device):
    model = ops.Sequential(ops.LayerNorm(32), ops.Linear(32, 32))
    x = make_input(32, 32)
    with te.autocast(recipe=te.recipe.DelayedScaling()):
        model(x)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(RuntimeError, match="freed"), te.autocast(recipe=te.recipe.DelayedScaling()):
        model(freed(32, 32))
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(v, after[k]) for k, v in before.items())


# -- what has values after all


def test_zeros_without_memory(device):
    zeros, plain = torch._efficientzerotensor((4, 8), device=device), torch.zeros(4, 8)
    x = make_input(4, 8)
    model = ops.Sequential(ops.LayerNorm(8), ops.Linear(8, 8), ops.AddExtraInput())
    assert torch.equal(model(zeros, x), model(plain, x))
    assert torch.equal(model(x, zeros), model(x, plain))
    (grad,) = torch.autograd.grad(model(x, plain), x, zeros)
    assert torch.equal(grad, plain)
    weights = torch._efficientzerotensor((8,), device=device)
    norm = ops.LayerNorm(8)
    assert torch.equal(torch.func.functional_call(norm, {"weight": weights}, x), plain)
    with pytest.raises((TypeError, RuntimeError), match=r"\[AddExtraInput\] extra input 0"):
        ops.AddExtraInput(in_place=True)(x.detach(), zeros)


@pytest.mark.parametrize("recipe", [None, "MXFP8BlockScaling", "Float8CurrentScaling"])
def test_quantized_parameters_of_norms_and_biases(device, recipe):
    """Operations that compute with plain values are given them."""
    quantizer = te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, device=device)
    for make, keys in [
        (lambda: ops.LayerNorm(32), ["weight", "bias"]),
        (lambda: ops.RMSNorm(32), ["weight"]),
        (lambda: ops.Bias(32), ["bias"]),
        (lambda: ops.Sequential(ops.LayerNorm(32), ops.Linear(32, 32), ops.GELU()), ["0.weight"]),
        (
            lambda: ops.Sequential(
                ops.LayerNorm(32),
                ops.Linear(32, 32),
                ops.GELU(),
                ops.Linear(32, 32),
                recompute="cheap",
            ),
            ["0.weight", "0.bias", "1.bias", "3.bias"],
        ),
        (lambda: ops.Linear(32, 32), ["bias"]),
    ]:
        model = make()
        quantized = {k: quantizer(torch.randn(32)).requires_grad_() for k in keys}
        plain = {k: v.dequantize().detach().requires_grad_() for k, v in quantized.items()}
        results = []
        for given in (quantized, plain):
            torch.manual_seed(1)
            x = make_input(32, 32)
            with te.autocast(
                enabled=recipe is not None, recipe=recipe and getattr(te.recipe, recipe)()
            ):
                y = torch.func.functional_call(model, given, x)
            grads = torch.autograd.grad(y, [x, *given.values()], torch.cos(y.detach()))
            results.append([y.detach(), *grads])
        for a, b in zip(*results, strict=True):
            assert torch.equal(a, b)


def test_quantized_extra_inputs(device):
    quantizer = te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, device=device)
    x, q = torch.randn(32, 32), quantizer(torch.randn(32, 32))
    for model in (ops.AddExtraInput(), ops.Sequential(ops.Linear(32, 32), ops.AddExtraInput())):
        assert torch.equal(model(x, q), model(x, q.dequantize()))
    in_place = ops.Sequential(ops.Linear(32, 32), ops.AddExtraInput(in_place=True))
    with torch.no_grad():
        wanted = quantizer(in_place(x, q.dequantize()))
        in_place(x, q)
    assert torch.equal(q.dequantize(), wanted.dequantize())
    scales = quantizer(torch.randn(32))
    assert torch.equal(ops.ScaledSwiGLU()(x, scales), ops.ScaledSwiGLU()(x, scales.dequantize()))


class LoggingTensor(torch.Tensor):
    """Has memory, and sees every function."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, tensor):
        return torch.Tensor._make_subclass(cls, tensor)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        plain = torch.utils._pytree.tree_map_only(cls, lambda t: t.as_subclass(torch.Tensor), args)
        with torch._C._DisableTorchDispatch():
            return func(*plain, **(kwargs or {}))


def test_a_subclass_with_memory_is_computed_with(device):
    x = torch.randn(4, 8)
    model = ops.Sequential(ops.LayerNorm(8), ops.Linear(8, 16), ops.SwiGLU())
    assert torch.equal(model(LoggingTensor(x)), model(x))


def test_tensors_without_elements_need_no_memory(device):
    model = ops.Sequential(ops.LayerNorm(8), ops.Linear(8, 16), ops.SwiGLU(), ops.Linear(8, 8))
    x = make_input(0, 8)
    y = model(x)
    assert y.shape == (0, 8)
    y.sum().backward()
    assert x.grad.shape == (0, 8)
    sliced = torch.randn(4, 8)[4:]
    assert model(sliced).shape == (0, 8)


# -- operations in Python


class GivesOdd(ops.BasicOperation):
    """Returns a tensor without memory, in forward or in backward."""

    def __init__(self, make, forward: bool) -> None:
        super().__init__()
        self.make = make
        self.in_forward = forward

    def op_forward(self, ctx, input_, **unused):
        return self.make(*input_.shape) if self.in_forward else input_.clone()

    def op_backward(self, ctx, grad_output):
        with torch.device(grad_output.device):  # the default of the caller's thread alone
            return self.make(*grad_output.shape), ()


@pytest.mark.parametrize("name", ["DTensor", "TwoTensor", "FakeTensor", "freed", "sparse"])
def test_what_an_operation_in_python_returns(device, name):
    make = NOT_INPUTS[name][0]
    model = ops.Sequential(GivesOdd(make, True), ops.LayerNorm(8))
    with refused(name, r"\[LayerNorm\] input"):
        model(torch.randn(4, 8))
    model = ops.Sequential(ops.LayerNorm(8), GivesOdd(make, False))
    y = model(make_input(4, 8))
    with refused(name, r"\[LayerNorm\] the gradient of its output"):
        y.sum().backward()


def test_operations_in_python_may_take_what_they_like(device):
    class Local(ops.BasicOperation):
        def op_forward(self, ctx, input_, **unused):
            return input_.to_local() * 2

        def op_backward(self, ctx, grad_output):
            return grad_output * 2, ()

    x = dtensor(4, 8)
    model = ops.Sequential(Local(), ops.LayerNorm(8))
    assert torch.equal(model(x), model[1](x.to_local() * 2))


def test_the_pieces_of_operations_refuse_them_too(device):
    class Covering(ops.FusedOperation):
        """Runs the halves of what it covers on something else."""

        def fuser_forward(self, basic_op_ctxs, input_, *, basic_op_extra_inputs, **unused):
            return self.basic_ops[0].fuser_forward(
                basic_op_ctxs, freed(4, 8), basic_op_extra_inputs=basic_op_extra_inputs
            )

    fusion = ops.Fusion([ops.LayerNorm], lambda norm: Covering([norm]), name="Covering")
    with ops.register_forward_fusion(fusion, prepend=True):
        model = ops.Sequential(ops.LayerNorm(8), ops.GELU())
        with pytest.raises(RuntimeError, match=r"\[LayerNorm\] input.*freed"):
            model(torch.randn(4, 8))
    norm = ops.LayerNorm(8)
    with pytest.raises(RuntimeError, match=r"\[LayerNorm\] input.*freed"):
        norm.op_forward_compute(freed(4, 8), requires_grad=False)


def test_explain_needs_no_memory(device):
    model = ops.Sequential(ops.LayerNorm(8), ops.Linear(8, 8))
    assert "LayerNorm" in str(model.explain(torch.empty(4, 8, device="meta")))
