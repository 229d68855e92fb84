"""Parameters that are replaced, computed, shared or loaded after a model was made and called."""

from __future__ import annotations

import pytest
import torch
from reference import (
    FLOAT_DTYPES,
    Reference,
    assert_close,
    check_against_reference,
    float64_copy,
    make_input,
    make_mlp,
    torch_twin,
)
from torch.func import functional_call
from torch.nn.utils import parametrizations, parametrize

import ligature.ops as ops


@pytest.fixture
def called(device):
    """A model that was called forward and backward, so that everything is planned and cached."""
    model = make_mlp()
    model(make_input(6, 8)).sum().backward()
    model.zero_grad(set_to_none=True)
    return model


def check_gradients_arrive(model):
    model(make_input(6, 8).to(next(model.parameters()).dtype)).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
    model.zero_grad(set_to_none=True)


# -- replaced


@pytest.mark.parametrize("assign", [False, True])
def test_load_state_dict(called, assign):
    before = dict(called.named_parameters())
    state = {name: torch.randn_like(value) for name, value in called.state_dict().items()}
    called.load_state_dict(state, assign=assign)
    for name, parameter in called.named_parameters():
        assert torch.equal(parameter, state[name])
        assert (parameter is before[name]) != assign
    check_against_reference(called, make_input(6, 8))
    check_gradients_arrive(called)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_change_of_dtype(called, dtype):
    called.to(dtype)
    assert all(p.dtype == dtype for p in called.parameters())
    check_against_reference(called, make_input(6, 8, dtype=dtype), scale=2)
    check_gradients_arrive(called)
    called.double()
    check_against_reference(called, make_input(6, 8, dtype=torch.float64))


def test_change_of_dtype_with_swapped_tensors(called):
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        called.double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    check_against_reference(called, make_input(6, 8, dtype=torch.float64))


def test_a_parameter_set_by_name(called):
    called[1].weight = torch.nn.Parameter(torch.randn(16, 8))
    called[1].bias = torch.nn.Parameter(torch.randn(16))
    called[0].weight = torch.nn.Parameter(torch.randn(8), requires_grad=False)
    check_against_reference(called, make_input(6, 8))
    called[3].weight.data = torch.randn(8, 16)
    check_against_reference(called, make_input(6, 8))


def test_a_parameter_changed_in_place(called):
    with torch.no_grad():
        called[1].weight.mul_(2)
        called[0].bias.copy_(torch.randn(8))
    check_against_reference(called, make_input(6, 8))


def test_parameters_that_do_not_fit(device):
    linear = ops.Linear(8, 4, bias=False)
    with pytest.raises(ValueError, match="bias=False"):
        linear.bias = torch.nn.Parameter(torch.zeros(4))
    with pytest.raises(TypeError):
        linear.weight = torch.zeros(4, 8)
    linear.weight = torch.nn.Parameter(torch.zeros(4, 9))
    with pytest.raises(ValueError, match=r"\[Linear\] weight must be \[4, 8\], got \[4, 9\]"):
        linear(make_input(2, 8))


def test_from_the_meta_device(device):
    model = make_mlp(device="meta")
    assert all(p.is_meta for p in model.parameters())
    model.to_empty(device=device)
    for module in model:
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert not torch.equal(model[1].weight, torch.zeros(16, 8))
    check_against_reference(model, make_input(6, 8))


# -- computed


class Doubled(torch.nn.Module):
    def forward(self, value):
        return 2 * value

    def right_inverse(self, value):
        return value / 2


@pytest.mark.parametrize("place", ["0.weight", "0.bias", "1.weight", "1.bias", "3.weight"])
def test_parametrization(called, place):
    twin = torch_twin(called)
    index, name = place.split(".")
    for model in (called, twin):
        parametrize.register_parametrization(model[int(index)], name, Doubled())
    with torch.no_grad():
        for model in (called, twin):
            model[int(index)].parametrizations[name].original.add_(1)
    compare_with_twin(called, twin)
    with parametrize.cached():
        compare_with_twin(called, twin)
    for model in (called, twin):
        parametrize.remove_parametrizations(model[int(index)], name)
    compare_with_twin(called, twin)
    check_against_reference(called, make_input(6, 8))


def compare_with_twin(model, twin):
    assert list(model.state_dict()) == list(twin.state_dict())
    x = make_input(6, 8)
    x2 = x.detach().clone().requires_grad_()
    y, y2 = model(x), twin(x2)
    assert_close(y, y2, torch.float32)
    dy = torch.randn_like(y)
    y.backward(dy)
    y2.backward(dy)
    assert_close(x.grad, x2.grad, torch.float32)
    for (name, a), b in zip(model.named_parameters(), twin.named_parameters(), strict=True):
        assert name == b[0]
        assert_close(a.grad, b[1].grad, torch.float32, scale=4, what=name)
    model.zero_grad(set_to_none=True)
    twin.zero_grad(set_to_none=True)


@pytest.mark.parametrize("norm", [parametrizations.weight_norm, parametrizations.spectral_norm])
def test_weight_and_spectral_norm(called, norm):
    twin = torch_twin(called)
    for model in (called, twin):
        norm(model[1], "weight")
    twin.load_state_dict(called.state_dict())
    for _ in range(2):
        compare_with_twin(called, twin)
    called.eval()
    twin.eval()
    compare_with_twin(called, twin)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated")
def test_weight_norm_by_hook(called):
    twin = torch_twin(called)
    for model in (called, twin):
        torch.nn.utils.weight_norm(model[1], "weight")
    with torch.no_grad():
        called[1].weight_g.mul_(2)
    twin.load_state_dict(called.state_dict())
    compare_with_twin(called, twin)


def test_pruned_weight(called):
    from torch.nn.utils import prune

    twin = torch_twin(called)
    for model in (called, twin):
        prune.l1_unstructured(model[1], "weight", amount=0.5)
    compare_with_twin(called, twin)
    assert (called[1].weight == 0).sum() == 64


def test_functional_call(called):
    x = make_input(6, 8)
    own = called(x).detach()
    given = {name: torch.randn_like(p).requires_grad_() for name, p in called.named_parameters()}
    y = functional_call(called, given, (x,))
    twin = torch_twin(called)
    given2 = {name: p.detach().double().requires_grad_() for name, p in given.items()}
    x64 = float64_copy(x)
    wanted = functional_call(twin.double(), given2, (x64,))
    assert_close(y, wanted, torch.float32, scale=4)
    dy = torch.randn_like(y)
    y.backward(dy)
    wanted.backward(dy.double())
    for name in given:
        assert_close(given[name].grad, given2[name].grad, torch.float32, scale=10, what=name)
    assert_close(x.grad, x64.grad, torch.float32, scale=10)
    assert all(p.grad is None for p in called.parameters())
    assert torch.equal(called(x), own)


def test_functional_call_with_computed_weights(called):
    x = make_input(6, 8)
    factor = torch.tensor(0.5, requires_grad=True)
    y = functional_call(called, {"1.weight": called[1].weight * factor}, (x,))
    y.square().sum().backward()
    reference = Reference(called)
    weight = reference.parameters["1.weight"]
    twin = torch_twin(called).double()
    factor64 = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    z = functional_call(twin, {"1.weight": weight * factor64}, (x.detach().double(),))
    z.square().sum().backward()
    assert_close(factor.grad, factor64.grad, torch.float32, scale=10)
    assert_close(called[1].weight.grad, weight.grad, torch.float32, scale=10)


# -- shared


def test_tied_weights_add_their_gradients(device):
    model = ops.Sequential(
        ops.Linear(8, 8), ops.GELU(), ops.Linear(8, 8), ops.RMSNorm(8), ops.Linear(8, 8)
    )
    model[2].weight = model[0].weight
    model[4].weight = model[0].weight
    model[4].bias = model[0].bias
    assert len(list(model.parameters())) == 4
    check_against_reference(model, make_input(6, 8))


def test_one_operation_in_two_places(device):
    linear = ops.Linear(8, 8)
    model = ops.Sequential(linear, ops.GELU(), linear)
    check_against_reference(model, make_input(6, 8))


def test_weights_tied_to_torch_modules(device):
    embedding = torch.nn.Embedding(11, 8)
    head = ops.Linear(8, 11, bias=False)
    head.weight = embedding.weight
    tokens = torch.randint(11, (6,))
    head(embedding(tokens)).square().sum().backward()
    weight = float64_copy(embedding.weight)
    (weight[tokens] @ weight.t()).square().sum().backward()
    assert_close(embedding.weight.grad, weight.grad, torch.float32, scale=100)


# -- state_dict

SAME_IN_TORCH = {
    "Linear": lambda lib: lib.Linear(8, 4),
    "Linear without bias": lambda lib: lib.Linear(8, 4, bias=False),
    "LayerNorm": lambda lib: lib.LayerNorm(8),
    "RMSNorm": lambda lib: lib.RMSNorm(8),
    "Sequential": lambda lib: lib.Sequential(lib.LayerNorm(8), lib.Linear(8, 4), lib.GELU()),
    "nested": lambda lib: lib.Sequential(lib.Sequential(lib.Linear(8, 4)), lib.Identity()),
}


@pytest.mark.parametrize("kind", SAME_IN_TORCH)
def test_state_dict_as_torch(device, kind):
    make = SAME_IN_TORCH[kind]
    ours, theirs = make(ops), make(torch.nn)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert [n for n, _ in ours.named_parameters()] == [n for n, _ in theirs.named_parameters()]
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_()
    ours.load_state_dict(theirs.state_dict())
    for name, value in ours.state_dict().items():
        assert torch.equal(value, theirs.state_dict()[name])
    other = make(torch.nn)
    other.load_state_dict(ours.state_dict())
    for name, value in other.state_dict().items():
        assert torch.equal(value, theirs.state_dict()[name])
    check_against_reference(ours, make_input(6, 8))


def test_state_dict_with_the_parameters_below_the_parts(device):
    model = ops.Sequential(ops.Linear(8, 4), ops.Linear(4, 2, bias=False))
    values = {name: torch.randn_like(value) for name, value in model.state_dict().items()}
    state = {
        "0.basic_ops.0.weight": values["0.weight"],
        "0.basic_ops.1.bias": values["0.bias"],
        "1.basic_ops.0.weight": values["1.weight"],
    }
    model.load_state_dict(state)
    for name, value in model.state_dict().items():
        assert torch.equal(value, values[name])


def test_state_dict_that_does_not_fit(device):
    model = make_mlp()
    state = model.state_dict()
    missing = {name: value for name, value in state.items() if name != "1.weight"}
    with pytest.raises(RuntimeError, match=r'Missing key.*"1\.weight"'):
        model.load_state_dict(missing)
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"9\.weight"'):
        model.load_state_dict({**state, "9.weight": torch.zeros(1)})
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict({**state, "1.weight": torch.zeros(1)})


def test_initial_values_as_torch(device):
    for bias in (False, True):
        torch.manual_seed(7)
        ours = ops.Linear(64, 128, bias=bias)
        torch.manual_seed(7)
        theirs = torch.nn.Linear(64, 128, bias=bias)
        for name, value in theirs.state_dict().items():
            assert torch.equal(ours.state_dict()[name], value), name
    norm = ops.LayerNorm(8, zero_centered_gamma=True)
    assert torch.count_nonzero(norm.weight) == 0
    assert torch.count_nonzero(norm.bias) == 0
    assert torch.equal(ops.RMSNorm(8).weight, torch.ones(8))
