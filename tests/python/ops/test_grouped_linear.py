"""GroupedLinear against float64, and against a Linear per group, bit for bit."""

from __future__ import annotations

import pytest
import torch
from grouped_support import LAYOUTS, gradient, grouped
from quantized_reference import EVERY_RECIPE, is_stochastic
from reference import FLOAT_DTYPES, check_against_reference, make_input

import ligature as te

pytestmark = pytest.mark.usefixtures("device", "one_thread")

Tensor = torch.Tensor

#: Sizes of groups, and rows behind them.
SPLITS = [
    ([5, 0, 12], 0),
    ([0, 4, 0], 3),
    ([17, 3, 20], 1),
    ([0, 0, 0], 2),
    ([0, 0, 0], 0),
    ([0, 33, 0], 0),
    ([1, 1, 1], 0),
]


def parts_of(op: te.ops.GroupedLinear) -> list[te.ops.Linear]:
    """A Linear per group, with copies of its parameters."""
    made = []
    weights = op._get_weight_tensors()
    biases = op._get_packed_bias_tensor(weights[0].dtype)
    for group, weight in enumerate(weights):
        one = te.ops.Linear(op.in_features, op.out_features, bias=op.has_bias, dtype=weight.dtype)
        with torch.no_grad():
            one.weight.copy_(weight)
            if biases is not None:
                one.bias.copy_(biases[group])
        made.append(one)
    return made


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_forward_and_gradients(layout: str, dtype: torch.dtype) -> None:
    op = grouped(3, 24, 17, dtype=dtype, **LAYOUTS[layout])
    for sizes, tail in SPLITS:
        x = make_input(sum(sizes) + tail, 24, dtype=dtype)
        for kind in (torch.int64, torch.int32):
            check_against_reference(op, x, torch.tensor(sizes, dtype=kind), scale=3)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("layout", ["separate", "one of each"])
def test_scaled_biases(layout: str, dtype: torch.dtype) -> None:
    op = grouped(3, 24, 17, dtype=dtype, scale_bias=True, **LAYOUTS[layout])
    assert op.num_extra_inputs == 2
    for sizes, tail in SPLITS:
        rows = sum(sizes) + tail
        for kind in (dtype, torch.float32):
            scales = make_input(rows, dtype=kind)
            x = make_input(rows, 24, dtype=dtype)
            check_against_reference(op, x, torch.tensor(sizes), scales, scale=3)


def test_the_gradient_of_scales_is_of_their_dtype() -> None:
    op = grouped(2, 8, 4, scale_bias=True, dtype=torch.bfloat16)
    scales = make_input(5)
    op(make_input(5, 8, dtype=torch.bfloat16), torch.tensor([2, 3]), scales).sum().backward()
    assert scales.grad.dtype is torch.float32


def test_without_a_bias_there_is_nothing_to_scale() -> None:
    assert grouped(2, 8, 4, bias=False, scale_bias=True).num_extra_inputs == 1


def test_some_groups_are_frozen() -> None:
    op = grouped(3, 8, 4)
    op.weight1.requires_grad_(False)
    op.bias2.requires_grad_(False)
    check_against_reference(op, make_input(9, 8), torch.tensor([2, 3, 4]))
    delayed = grouped(2, 8, 4, delay_wgrad_compute=True, accumulate_into_main_grad=True)
    delayed.weight0.requires_grad_(False)
    delayed.weight1.main_grad = torch.zeros(4, 8)
    delayed(make_input(5, 8), torch.tensor([2, 3])).sum().backward()
    delayed.backward_dw()
    assert delayed.weight1.main_grad.any()


def test_layouts_of_inputs_and_gradients() -> None:
    op = grouped(2, 24, 8)
    sizes = torch.tensor([3, 2])
    inputs = [
        torch.randn(24, 5).t(),
        torch.randn(5, 48)[:, ::2],
        torch.randn(1, 24).expand(5, 24),
        torch.randn(7, 30)[1:6, 3:27],
    ]
    for x in inputs:
        assert not x.is_contiguous()
        for grad in (torch.randn(8, 5).t(), torch.randn(()).expand(5, 8), torch.randn(5, 8)):
            check_against_reference(op, x.requires_grad_(), sizes, grad_outputs=[grad])
    check_against_reference(op, make_input(5, 1, 24), sizes)  # rows are all leading dimensions
    check_against_reference(op, make_input(24), torch.tensor([0, 1]))


def test_every_subset_of_gradients() -> None:
    for pattern in range(16):
        flags = [bool(pattern >> i & 1) for i in range(4)]
        op = grouped(2, 24, 8, scale_bias=True)
        for name, parameter in op.named_parameters():
            parameter.requires_grad_(flags[0 if name.startswith("weight") else 1])
        x = make_input(6, 24, requires_grad=flags[2])
        scales = make_input(6, requires_grad=flags[3])
        check_against_reference(op, x, torch.tensor([2, 3]), scales)


@pytest.mark.parametrize("groups", [1, 2, 70, 1000])
def test_numbers_of_groups(groups: int) -> None:
    op = grouped(groups, 8, 4)
    sizes = torch.zeros(groups, dtype=torch.int64)
    sizes[0] = 3
    sizes[-1] += 4
    check_against_reference(op, make_input(8, 8), sizes)


def test_the_tail_is_never_read() -> None:
    op = grouped(2, 24, 8, scale_bias=True)
    sizes = torch.tensor([3, 2])

    def run(fill: float) -> list[Tensor]:
        torch.manual_seed(5)
        x, scales, grad = torch.randn(9, 24), torch.randn(9), torch.randn(9, 8)
        for t in (x, scales, grad):
            t[5:] = fill
        x.requires_grad_()
        scales.requires_grad_()
        y = op(x, sizes, scales)
        found = torch.autograd.grad(y, [x, scales, *op.parameters()], grad)
        assert not y[5:].any()
        assert not found[0][5:].any()
        assert not found[1][5:].any()
        return [y, *found]

    wanted = run(1.0)
    for fill in (float("nan"), float("inf")):
        for a, b in zip(run(fill), wanted, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [[64, 0, 40], [3, 200, 1], [16, 15, 17]])
@pytest.mark.parametrize("features", [(64, 96), (33, 19), (512, 256)])
def test_bits_are_those_of_a_linear_per_group(
    features: tuple[int, int], sizes: list[int], dtype: torch.dtype
) -> None:
    op = grouped(3, *features, dtype=dtype)
    check_bits(op, sizes, dtype)


def check_bits(
    op: te.ops.GroupedLinear,
    sizes: list[int],
    dtype: torch.dtype,
    recipe: te.recipe.Recipe | None = None,
    steps: int = 1,
) -> None:
    parts = parts_of(op)
    for _ in range(steps):
        x = make_input(sum(sizes), op.in_features, dtype=dtype)
        grad = torch.randn(sum(sizes), op.out_features, dtype=dtype)
        op.zero_grad()
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            y = op(x, torch.tensor(sizes))
        y.backward(grad)
        begin = 0
        for group, size in enumerate(sizes):
            if size == 0:
                assert not gradient(op, f"weight{group}").any()
                assert not gradient(op, f"bias{group}").any()
                continue
            own = slice(begin, begin + size)
            begin += size
            part = x.detach()[own].requires_grad_()
            parts[group].zero_grad()
            with te.autocast(enabled=recipe is not None, recipe=recipe):
                wanted = parts[group](part)
            wanted.backward(grad[own])
            assert torch.equal(y[own], wanted)
            assert torch.equal(x.grad[own], part.grad)
            assert torch.equal(gradient(op, f"weight{group}"), parts[group].weight.grad)
            assert torch.equal(gradient(op, f"bias{group}"), parts[group].bias.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [n for n, r in EVERY_RECIPE.items() if not is_stochastic(r())])
def test_bits_in_low_precision(name: str, dtype: torch.dtype) -> None:
    """Three steps: delayed scaling has a history per group, which an empty group leaves alone."""
    op = grouped(3, 48, 32, dtype=dtype)
    check_bits(op, [40, 0, 7], dtype, EVERY_RECIPE[name](), steps=3)


def test_number_of_quantizers() -> None:
    op = grouped(3, 16, 8)
    assert op.num_quantizers("forward") == 6
    assert op.num_quantizers("backward") == 3
    roles = op.get_quantizer_roles("forward")
    assert [role.tensor_type for role in roles] == ["input", "weight"] * 3


@pytest.mark.parametrize("layout", ["separate", "one of each", "one weight"])
def test_a_recipe_for_every_layout(layout: str) -> None:
    torch.manual_seed(1)
    op = grouped(2, 32, 16, **LAYOUTS[layout])
    twin = grouped(2, 32, 16)
    twin.load_state_dict(op.state_dict())
    x = make_input(20, 32)
    sizes = torch.tensor([8, 12])
    for recipe in (te.recipe.MXFP8BlockScaling(), te.recipe.DelayedScaling()):
        with te.autocast(recipe=recipe):
            y, wanted = op(x, sizes), twin(x, sizes)
        assert torch.equal(y, wanted)
        grads = torch.autograd.grad(y.sum(), list(op.parameters()))
        names = [name for name, _ in op.named_parameters()]
        found = dict(zip(names, grads, strict=True))
        wanted.sum().backward()
        for group in range(2):
            for kind in ("weight", "bias"):
                got = found[kind][group] if kind in found else found[f"{kind}{group}"]
                assert torch.equal(got, gradient(twin, f"{kind}{group}"))
        twin.zero_grad()


def test_names_and_order_of_parameters() -> None:
    def names(**options: bool) -> list[str]:
        return [name for name, _ in te.ops.GroupedLinear(2, 4, 4, **options).named_parameters()]

    assert names() == ["weight0", "weight1", "bias0", "bias1"]
    assert names(bias=False) == ["weight0", "weight1"]
    assert names(**LAYOUTS["one weight"]) == ["bias0", "bias1", "weight"]
    assert names(**LAYOUTS["one bias"]) == ["weight0", "weight1", "bias"]
    assert names(**LAYOUTS["one of each"]) == ["weight", "bias"]
    assert te.ops.GroupedLinear(2, 4, 4, bias=False).bias0 is None


def test_initial_values() -> None:
    op = te.ops.GroupedLinear(4, 64, 32)
    for group in range(4):
        weight = getattr(op, f"weight{group}")
        assert 0.8 / 8 < weight.abs().max() <= 1 / 8
        assert not getattr(op, f"bias{group}").any()
    whole = te.ops.GroupedLinear(4, 64, 32, single_grouped_weight=True)
    for weight in whole.weight:
        assert 0.8 / 8 < weight.abs().max() <= 1 / 8


def test_each_weight_is_initialized_under_the_tracker() -> None:
    forks = []

    class Fork:
        def __enter__(self) -> None:
            forks.append(True)

        def __exit__(self, *exception: object) -> None:
            pass

    class Tracker:
        def fork(self) -> Fork:
            return Fork()

    te.ops.GroupedLinear(3, 8, 8, rng_state_tracker_function=Tracker)
    assert len(forks) == 3


# -- checkpoints and modules


@pytest.mark.parametrize(
    ("of", "into"),
    [(a, b) for a in LAYOUTS for b in LAYOUTS if ("no bias" in a) == ("no bias" in b)],
)
@pytest.mark.parametrize("nested", [False, True])
def test_either_layout_loads_into_either(of: str, into: str, nested: bool) -> None:
    first = te.ops.Sequential(grouped(2, 8, 4, **LAYOUTS[of]), te.ops.Identity())
    second = te.ops.Sequential(grouped(2, 8, 4, **LAYOUTS[into]), te.ops.Identity())
    a, b = (first, second) if nested else (first[0], second[0])
    state = a.state_dict()
    before = dict(state)
    for assign in (False, True):
        b.load_state_dict(state, assign=assign)
        assert state.keys() == before.keys()
        x = make_input(5, 8)
        sizes = torch.tensor([2, 3])
        assert torch.equal(first(x, sizes), second(x, sizes))


def test_a_checkpoint_that_does_not_fit_changes_nothing() -> None:
    op = grouped(2, 8, 4)
    before = {k: v.clone() for k, v in op.state_dict().items()}
    bad = grouped(3, 8, 4, single_grouped_weight=True, single_grouped_bias=True).state_dict()
    with pytest.raises(RuntimeError):
        op.load_state_dict(bad)
    for name, value in op.state_dict().items():
        assert torch.equal(value, before[name])


def test_delayed_state_is_in_the_checkpoint() -> None:
    recipe = te.recipe.DelayedScaling(amax_history_len=4)
    op, other = grouped(2, 32, 16), grouped(2, 32, 16)
    sizes = torch.tensor([6, 10])
    for _ in range(2):
        with te.autocast(recipe=recipe):
            op(make_input(16, 32), sizes).sum().backward()
    other.load_state_dict(op.state_dict())
    x = make_input(16, 32)
    with te.autocast(recipe=recipe):
        assert torch.equal(op(x, sizes), other(x, sizes))


def test_made_on_the_meta_device() -> None:
    sizes = torch.tensor([2, 3])
    x = torch.randn(5, 8)
    op = te.ops.GroupedLinear(2, 8, 4, device="meta")
    assert op.weight0.is_meta
    given = [torch.nn.Parameter(torch.randn(4, 8)) for _ in range(2)]
    op.register_parameter("weight0", given[0])
    op.weight1 = given[1]
    op.bias0 = torch.nn.Parameter(torch.ones(4))
    op.bias1 = torch.nn.Parameter(torch.ones(4))
    op.register_parameter("weight", None)
    y = op(x, sizes)
    assert torch.equal(y[:2], torch.nn.functional.linear(x[:2], given[0], op.bias0))
    assert op.weight0 is given[0]

    deferred = te.ops.GroupedLinear(2, 8, 4, device="meta", dtype=torch.bfloat16)
    deferred(x, sizes)
    assert deferred.weight1.device == x.device
    assert deferred.weight1.dtype is torch.bfloat16
    assert deferred.weight1.abs().max() > 0
    assert not deferred.bias0.any()

    again = te.ops.GroupedLinear(2, 8, 4, device="meta")
    again.reset_parameters()
    assert not again.weight0.is_meta
    assert again.weight0.abs().max() > 0


def test_parameters_may_be_replaced_between_calls() -> None:
    op = grouped(2, 8, 4)
    sizes = torch.tensor([2, 3])
    x = torch.randn(5, 8)
    op(x, sizes)
    for group in range(2):
        del op._parameters[f"weight{group}"]
        object.__setattr__(op, f"weight{group}", torch.zeros(4, 8))
    y = op(x, sizes)
    assert torch.equal(y[:2], op.bias0.expand(2, 4))


def test_copies() -> None:
    import copy
    import pickle

    op = grouped(2, 8, 4, delay_wgrad_compute=True)
    op.anything = "kept"
    x, sizes = torch.randn(5, 8), torch.tensor([2, 3])
    for made in (copy.deepcopy(op), pickle.loads(pickle.dumps(op))):
        assert torch.equal(made(x, sizes), op(x, sizes))
        assert made.anything == "kept"
        assert made.need_backward_dw()
        assert made.weight0.skip_backward_post_hook
        assert made.weight0 is not op.weight0


@pytest.mark.parametrize("name", ["delayed", "current", "mxfp8", "nvfp4"])
def test_weights_in_low_precision_from_the_start(name: str) -> None:
    recipe = EVERY_RECIPE[name]()
    with te.quantized_model_init(recipe=recipe):
        op = te.ops.GroupedLinear(2, 32, 16)
    assert type(op.weight0.data).__name__ == "QuantizedTensor" or te._C.quantized_of(op.weight0)
    assert op._with_quantized_weight
    assert not grouped(2, 32, 16, single_grouped_weight=True)._with_quantized_weight
    sizes = torch.tensor([20, 12])
    with te.autocast(recipe=recipe):
        y = op(make_input(32, 32), sizes)
    y.sum().backward()
    assert gradient(op, "weight1").shape == (16, 32)
    twin = grouped(2, 32, 16)
    with torch.no_grad():
        for group in range(2):
            getattr(twin, f"weight{group}").copy_(getattr(op, f"weight{group}").dequantize())
    before = [getattr(op, f"weight{g}").dequantize().clone() for g in range(2)]
    torch.optim.SGD(op.parameters(), lr=1.0).step()
    for group in range(2):
        assert not torch.equal(getattr(op, f"weight{group}").dequantize(), before[group])


def test_low_precision_from_the_start_on_the_meta_device() -> None:
    recipe = te.recipe.MXFP8BlockScaling()
    sizes = torch.tensor([20, 12])
    for reset in (False, True):
        with te.quantized_model_init(recipe=recipe):
            op = te.ops.GroupedLinear(2, 32, 16, device="meta")
        if reset:
            op.reset_parameters()
        with te.autocast(recipe=recipe):
            y = op(make_input(32, 32), sizes)
        y.sum().backward()
        for weight in (op.weight0, op.weight1):
            assert te._C.quantized_of(weight) is not None
            assert weight.dequantize().abs().max() > 0
            assert weight.grad is not None


def test_a_checkpoint_in_low_precision_loads_into_one_parameter() -> None:
    with te.quantized_model_init(recipe=te.recipe.MXFP8BlockScaling()):
        op = te.ops.GroupedLinear(2, 32, 16)
    one = grouped(2, 32, 16, **LAYOUTS["one of each"])
    for assign in (False, True):
        one.load_state_dict(op.state_dict(), assign=assign)
        for group, weight in enumerate((op.weight0, op.weight1)):
            assert torch.equal(one.weight[group], weight.dequantize())
    fresh = grouped(2, 32, 16, **LAYOUTS["one of each"])
    op.load_state_dict(fresh.state_dict())
    assert te._C.quantized_of(op.weight1) is not None
    torch.testing.assert_close(op.weight1.dequantize(), fresh.weight[1], rtol=0.1, atol=1e-3)


@pytest.mark.parametrize("assign", [False, True])
def test_another_layout_that_does_not_fit_changes_nothing(assign: bool) -> None:
    """Neither the operations before the one that it does not fit."""
    saved = te.ops.Sequential(grouped(2, 8, 4), grouped(2, 4, 5)).state_dict()
    model = te.ops.Sequential(
        grouped(2, 8, 4), grouped(2, 4, 8, **LAYOUTS["one of each"]), te.ops.Identity()
    )
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(RuntimeError, match=r"size mismatch for 1\.weight0"):
        model.load_state_dict(saved, assign=assign)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def test_one_weight_is_not_made_in_low_precision() -> None:
    with (
        te.quantized_model_init(recipe=te.recipe.MXFP8BlockScaling()),
        pytest.raises(RuntimeError, match="single_grouped_weight"),
    ):
        te.ops.GroupedLinear(2, 32, 16, single_grouped_weight=True)
