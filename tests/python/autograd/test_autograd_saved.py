"""What is kept for backward, for how long, and what is computed there."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from reference import Reference, assert_close, check_against_reference, make_input, make_mlp
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

import ligature.ops as ops


class Packed:
    """What a pack hook gives autograd to keep: weak references tell when it was let go."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class Recorder:
    """Saved-tensor hooks that note every tensor, and how often it is packed and unpacked."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []
        self.bytes = 0
        self.unpacked = 0
        self.alive: list[weakref.ref[Packed]] = []

    def pack(self, tensor: torch.Tensor) -> Packed:
        self.shapes.append(tuple(tensor.shape))
        self.bytes += tensor.nbytes
        packed = Packed(tensor)
        self.alive.append(weakref.ref(packed))
        return packed

    def unpack(self, packed: Packed) -> torch.Tensor:
        self.unpacked += 1
        return packed.tensor

    def hooks(self) -> saved_tensors_hooks:
        return saved_tensors_hooks(self.pack, self.unpack)

    @property
    def num_alive(self) -> int:
        return sum(ref() is not None for ref in self.alive)


class Probe(ops.BasicOperation):
    """An identity that looks around in backward."""

    def __init__(self, look) -> None:
        super().__init__()
        self.look = look

    def op_forward(self, ctx, input_, **unused):
        return input_.clone()

    def op_backward(self, ctx, grad_output):
        self.look()
        return grad_output.clone(), ()


def saved_shapes(model, *inputs) -> list[tuple[int, ...]]:
    recorder = Recorder()
    with recorder.hooks():
        model(*inputs)
    return sorted(recorder.shapes)


def counted_dtype(device: str) -> torch.dtype:
    """One whose products are ATen's, which can be counted."""
    return torch.float64 if device == "cuda" else torch.float32


def flops_of_backward(y: torch.Tensor, inputs=None) -> int:
    with FlopCounterMode(display=False) as counter:
        y.backward(torch.ones_like(y), inputs=inputs)
    return counter.get_total_flops()


# -- lifetime


@pytest.mark.parametrize("recompute", ["none", "cheap"])
def test_saved_tensors_are_freed_after_backward(device, recompute):
    model = make_mlp(recompute=recompute)
    recorder = Recorder()
    with recorder.hooks():
        y = model(make_input(6, 8))
    assert recorder.num_alive == len(recorder.shapes) > 0
    torch.autograd.backward(y, torch.ones_like(y), retain_graph=True)
    assert recorder.num_alive == len(recorder.shapes)
    y.backward(torch.ones_like(y))
    assert recorder.num_alive == 0


def test_saved_tensors_are_freed_without_backward(device):
    recorder = Recorder()
    with recorder.hooks():
        y = make_mlp()(make_input(6, 8))
    assert recorder.num_alive > 0
    del y
    assert recorder.num_alive == 0


def test_saved_input_is_freed_after_backward(device):
    x = make_input(6, 8) * 1
    kept = weakref.ref(x)
    y = make_mlp()(x)
    del x
    gc.collect()
    assert kept() is not None
    y.sum().backward()
    gc.collect()
    assert kept() is None


def test_saved_tensors_are_freed_step_by_step(device):
    counts = []
    recorder = Recorder()
    look = lambda: counts.append(recorder.num_alive)  # noqa: E731
    model = ops.Sequential(
        Probe(look),
        ops.Linear(8, 8),
        ops.GELU(),
        Probe(look),
        ops.Linear(8, 8),
        Probe(look),
        ops.RMSNorm(8),
        Probe(look),
    )
    with recorder.hooks():
        y = model(make_input(6, 8))
    total = len(recorder.shapes)
    y.sum().backward(retain_graph=True)
    assert counts == [total] * 4
    counts.clear()
    y.sum().backward()
    # norm: input, rstd, weight; linear: input, weight; GELU: input; linear: input, weight
    assert total == 8
    assert counts == [8, 5, 3, 0]


def test_weights_are_not_copied_or_kept_alive_by_backward(device):
    model = make_mlp()
    weight = weakref.ref(model[1].weight)
    y = model(make_input(6, 8))
    y.sum().backward()
    del model
    gc.collect()
    assert weight() is not None  # the node leads to it
    del y
    gc.collect()
    assert weight() is None


# -- saved-tensor hooks


@pytest.mark.parametrize("recompute", ["none", "cheap"])
def test_hooks_run_once_for_each_tensor(device, recompute):
    model = make_mlp(recompute=recompute)
    recorder = Recorder()
    x = make_input(6, 8)
    with recorder.hooks():
        y = model(x)
    assert recorder.unpacked == 0
    y.backward(torch.ones_like(y), retain_graph=True)
    assert recorder.unpacked == len(recorder.shapes)
    y.backward(torch.ones_like(y))
    assert recorder.unpacked == 2 * len(recorder.shapes)


def test_a_tensor_that_two_operations_save_is_packed_once(device):
    model = ops.Sequential(ops.Linear(8, 8, bias=False), ops.ReLU(), ops.Linear(8, 8, bias=False))
    model[2].weight = model[0].weight
    recorder = Recorder()
    with recorder.hooks():
        y = model(make_input(6, 8))
    # input, weight, input of ReLU, input of the second
    assert sorted(recorder.shapes) == [(6, 8), (6, 8), (6, 8), (8, 8)]
    y.sum().backward()
    assert recorder.unpacked == 4


@pytest.mark.parametrize("recompute", ["none", "cheap"])
def test_gradients_with_packing_hooks(device, recompute):
    model = make_mlp(recompute=recompute)
    x = make_input(6, 8)

    def pack(tensor):
        return tensor.detach().cpu().numpy().copy(), tensor.device

    def unpack(packed):
        return torch.from_numpy(packed[0]).to(packed[1])

    with saved_tensors_hooks(pack, unpack):
        check_against_reference(model, x)
    with save_on_cpu():
        check_against_reference(model, x)
    branching = ops.Sequential(
        ops.Linear(8, 8), ops.MakeExtraOutput(), ops.Linear(8, 8), ops.AddExtraInput(), ops.SiLU()
    )
    with saved_tensors_hooks(pack, unpack):
        check_against_reference(branching, x, make_input(6, 8))


def test_an_error_in_a_hook_is_passed_on(device):
    model = make_mlp()
    x = make_input(6, 8)

    class RefusedError(Exception):
        pass

    def refuse(_):
        raise RefusedError

    with saved_tensors_hooks(refuse, lambda t: t), pytest.raises(RefusedError):
        model(x)
    with saved_tensors_hooks(lambda t: t, refuse):
        y = model(x)
    with pytest.raises(RefusedError):
        y.sum().backward()
    check_against_reference(model, x)


# -- nothing is kept or computed for what is frozen


def test_linear_saves_what_its_gradients_need(device):
    x, frozen_x = make_input(6, 8), make_input(6, 8, requires_grad=False)
    linear = ops.Linear(8, 4)
    assert saved_shapes(linear, x) == [(4, 8), (6, 8)]
    assert saved_shapes(linear, frozen_x) == [(6, 8)]
    linear.weight.requires_grad_(False)
    assert saved_shapes(linear, x) == [(4, 8)]
    assert saved_shapes(linear, frozen_x) == []
    linear.bias.requires_grad_(False)
    assert saved_shapes(linear, x) == [(4, 8)]
    check_against_reference(linear, x)


def test_frozen_prefix_saves_nothing(device):
    model = ops.Sequential(
        ops.LayerNorm(8), ops.Linear(8, 16), ops.GELU(), ops.Linear(16, 16), ops.Linear(16, 4)
    )
    x = make_input(6, 8, requires_grad=False)
    whole = saved_shapes(model, x)
    model[:4].requires_grad_(False)
    assert saved_shapes(model, x) == [(6, 16)]
    assert len(whole) > 6
    check_against_reference(model, x)
    assert all(p.grad is None for p in model.parameters())


def test_frozen_suffix_saves_no_inputs_of_its_linears(device):
    model = ops.Sequential(ops.Linear(8, 8), ops.Linear(8, 16), ops.Linear(16, 4))
    model[1:].requires_grad_(False)
    x = make_input(6, 8, requires_grad=False)
    assert saved_shapes(model, x) == [(4, 16), (6, 8), (16, 8)]
    check_against_reference(model, x)


@pytest.mark.parametrize("recompute", ["none", "cheap"])
def test_frozen_mlp_saves_less_and_gives_no_gradients(device, recompute):
    model = make_mlp(recompute=recompute)
    x = make_input(6, 8)
    recorder, frozen_recorder = Recorder(), Recorder()
    with recorder.hooks():
        model(x)
    model.requires_grad_(False)
    with frozen_recorder.hooks():
        y = model(x)
    # The inputs of both linears are not needed, the rest is.
    assert frozen_recorder.bytes < recorder.bytes
    y.sum().backward()
    assert all(p.grad is None for p in model.parameters())
    x.grad = None
    check_against_reference(model, x)


def test_recompute_saves_less(device):
    recorders = Recorder(), Recorder()
    for recompute, recorder in zip(("none", "cheap"), recorders, strict=True):
        model = make_mlp(64, 256, recompute=recompute)
        with recorder.hooks():
            model(make_input(32, 64))
    # The normalized input and the activation are recomputed, for which the norm's bias is needed.
    assert recorders[1].bytes == recorders[0].bytes - 4 * 32 * (64 + 256) + 4 * 64


def gemm(m: int, n: int, k: int) -> int:
    return 2 * m * n * k


def test_nothing_is_computed_for_frozen_tensors(device):
    dtype = counted_dtype(device)
    x = make_input(6, 8, dtype=dtype, requires_grad=False)
    model = ops.Sequential(
        ops.Linear(8, 16, dtype=dtype), ops.GELU(), ops.Linear(16, 4, dtype=dtype)
    )
    first, second = gemm(6, 16, 8), gemm(6, 4, 16)
    assert flops_of_backward(model(x)) == first + 2 * second
    model[0].weight.requires_grad_(False)
    assert flops_of_backward(model(x)) == second + second
    model[0].bias.requires_grad_(False)
    assert flops_of_backward(model(x)) == second
    model[2].weight.requires_grad_(False)
    assert flops_of_backward(model(x)) == 0
    model.requires_grad_(False)
    assert flops_of_backward(model(make_input(6, 8, dtype=dtype))) == first + second


@pytest.mark.parametrize("recompute", ["none", "cheap"])
def test_nothing_is_computed_for_gradients_nobody_asked_for(device, recompute):
    dtype = counted_dtype(device)
    model = make_mlp(8, 16, recompute=recompute, dtype=dtype)
    product = gemm(6, 16, 8)
    x = make_input(6, 8, dtype=dtype)
    wanted = {
        model[3].bias: 0,
        model[3].weight: 1,
        model[1].bias: 1,
        model[1].weight: 2,
        model[0].weight: 2,
        x: 2,
    }
    for tensor, products in wanted.items():
        assert flops_of_backward(model(x), inputs=[tensor]) == products * product, tensor.shape
    assert flops_of_backward(model(x)) == 4 * product


def test_gradients_of_frozen_parameters_are_none(device):
    for frozen in ("0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "3.bias"):
        model = make_mlp()
        model.get_parameter(frozen).requires_grad_(False)
        x = make_input(6, 8)
        model(x).sum().backward()
        reference = Reference(model)
        reference(x.double()).sum().backward()
        for name, parameter in model.named_parameters():
            assert (parameter.grad is None) == (name == frozen)
            wanted = reference.parameters[name].grad
            assert_close(parameter.grad, wanted, torch.float32, scale=10, what=name)
