"""GroupedLinear: buffers of the caller, main_grad, weight gradients that wait, and errors."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from grouped_support import LAYOUTS, gradient, grouped
from reference import make_input

import ligature as te
from ligature.ops.basic.grouped_linear import GRAD_INPUT_BUFFER_KEY, OUTPUT_BUFFER_KEY

pytestmark = pytest.mark.usefixtures("device", "one_thread")

Tensor = torch.Tensor


# -- buffers, main_grad, weight gradients that wait


def test_buffers_of_the_caller() -> None:
    op = te.ops.Sequential(grouped(2, 8, 4), te.ops.SiLU(), grouped(2, 4, 8))
    sizes = torch.tensor([2, 3])
    x = make_input(6, 8)
    wanted = op(x, sizes, sizes)
    wanted.sum().backward()
    dx = x.grad
    x.grad = None
    out, grad_input = torch.full((6, 8), 7.0), torch.full((6, 8), 7.0)
    for _ in range(2):
        y = op(
            x,
            sizes,
            sizes,
            op_kwargs={-1: {OUTPUT_BUFFER_KEY: out}, 0: {GRAD_INPUT_BUFFER_KEY: grad_input}},
        )
        assert torch.equal(y, wanted)
        assert y.data_ptr() == out.data_ptr()
        y.sum().backward()
        assert torch.equal(x.grad, dx)
        assert torch.equal(grad_input, dx)
        x.grad = None
        out = out.detach()


@pytest.mark.parametrize("key", [OUTPUT_BUFFER_KEY, GRAD_INPUT_BUFFER_KEY])
def test_buffers_that_do_not_fit(key: str) -> None:
    op = grouped(2, 8, 8)
    x, sizes = make_input(5, 8), torch.tensor([2, 3])
    for buffer in (
        torch.empty(4, 8),
        torch.empty(5, 8, dtype=torch.float64),
        torch.empty(8, 5).t(),
        torch.empty(5, 8, requires_grad=True),
        torch.empty(5, 8, device="meta"),
    ):
        with pytest.raises(ValueError, match=rf"\[GroupedLinear\] {key} must"):
            op(x, sizes, **{key: buffer})
    for other in (3, [torch.empty(5, 8)]):
        with pytest.raises(TypeError, match=rf"\[GroupedLinear\] {key} must be a tensor"):
            op(x, sizes, **{key: other})
    op(x, sizes, **{key: None})


@pytest.mark.parametrize("key", [OUTPUT_BUFFER_KEY, GRAD_INPUT_BUFFER_KEY])
@pytest.mark.parametrize("fuse", [False, True])
def test_a_later_buffer_that_does_not_fit_changes_nothing(fuse: bool, key: str) -> None:
    block = te.ops.OperationFuser([grouped(2, 8, 8), te.ops.SiLU(), grouped(2, 8, 8)], fuse=fuse)
    sizes, out = torch.tensor([2, 3]), torch.full((5, 8), 7.0)
    with pytest.raises(ValueError, match=rf"\[GroupedLinear\] {key} must be \[5, 8\]"):
        block(
            make_input(5, 8),
            sizes,
            sizes,
            basic_op_kwargs=[{OUTPUT_BUFFER_KEY: out}, {}, {key: torch.empty(4, 8)}],
        )
    assert (out == 7).all()


@pytest.mark.parametrize("recipe", [None, te.recipe.MXFP8BlockScaling()])
@pytest.mark.parametrize("layout", ["separate", "one weight"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_main_grad(overwrite: bool, layout: str, recipe: te.recipe.Recipe | None) -> None:
    op = grouped(3, 32, 16, accumulate_into_main_grad=True, dtype=torch.bfloat16, **LAYOUTS[layout])
    plain = grouped(3, 32, 16, dtype=torch.float32)
    plain.load_state_dict(op.state_dict())
    weights = [p for n, p in op.named_parameters() if n.startswith("weight")]
    for weight in weights:
        weight.main_grad = torch.ones(weight.shape, dtype=torch.float32)
        weight.overwrite_main_grad = overwrite
        weight.grad_added_to_main_grad = False
    sizes = torch.tensor([5, 0, 7])
    x = make_input(12, 32, dtype=torch.bfloat16)
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        op(x, sizes).sum().backward()
        plain(x.detach().float(), sizes).sum().backward()
    for weight in weights:
        assert weight.grad_added_to_main_grad
        assert weight.grad is not None
        assert weight.grad.shape == weight.shape
    found = weights[0].main_grad if layout == "one weight" else [w.main_grad for w in weights]
    for group in range(3):
        wanted = gradient(plain, f"weight{group}") + (0.0 if overwrite else 1.0)
        torch.testing.assert_close(found[group], wanted, rtol=1e-2, atol=1e-2)
    assert gradient(op, "bias0") is not None


def test_main_grad_that_is_missing() -> None:
    op = grouped(2, 8, 4, accumulate_into_main_grad=True)
    x, sizes = make_input(5, 8), torch.tensor([2, 3])
    with torch.no_grad():
        op(x, sizes)  # inference needs none
    with pytest.raises(RuntimeError, match="main_grad"):
        op(x, sizes).sum().backward()


def test_main_grad_of_fsdp() -> None:
    op = grouped(2, 8, 4, accumulate_into_main_grad=True)
    for weight in (op.weight0, op.weight1):
        buffer = torch.zeros_like(weight)
        weight.__fsdp_param__ = True
        weight.get_main_grad = lambda buffer=buffer: buffer
    op(make_input(5, 8), torch.tensor([2, 3])).sum().backward()
    assert op.weight0.main_grad is op.weight0.get_main_grad()
    assert op.weight0.main_grad.any()
    assert op.weight1.main_grad.any()


@pytest.fixture(params=["separate", "one weight"])
def delayed(request: pytest.FixtureRequest) -> Iterator[te.ops.GroupedLinear]:
    return grouped(2, 32, 16, delay_wgrad_compute=True, **LAYOUTS[request.param])


def weight_grads(op: te.ops.GroupedLinear) -> list[Tensor | None]:
    if op.single_grouped_weight:
        return [None] * op.num_groups if op.weight.grad is None else list(op.weight.grad)
    return [getattr(op, f"weight{g}").grad for g in range(op.num_groups)]


@pytest.mark.parametrize("recipe", [None, te.recipe.MXFP8BlockScaling()])
def test_weight_gradients_that_wait(
    delayed: te.ops.GroupedLinear, recipe: te.recipe.Recipe | None
) -> None:
    plain = grouped(2, 32, 16)
    plain.load_state_dict(delayed.state_dict())
    sizes = torch.tensor([20, 12])
    calls: list[int] = []
    delayed.register_wgrad_accumulation_and_reduce_hooks(lambda: calls.append(len(calls)))
    assert delayed.need_backward_dw()
    assert not plain.need_backward_dw()
    assert delayed.wgrad_store.delay_wgrad_compute()
    assert not plain.wgrad_store.delay_wgrad_compute()
    delayed.backward_dw()  # nothing waits
    assert calls == []
    for _ in range(2):
        x = make_input(32, 32)
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            delayed(x, sizes).square().sum().backward()
            other = x.detach().requires_grad_()
            plain(other, sizes).square().sum().backward()
        assert torch.equal(x.grad, other.grad)
        assert torch.equal(gradient(delayed, "bias0"), gradient(plain, "bias0"))
    assert weight_grads(delayed) == [None, None]
    delayed.backward_dw()
    assert calls == [0]
    first = [g.clone() for g in weight_grads(delayed)]
    delayed.backward_dw()
    assert calls == [0, 1]
    for group, grad in enumerate(weight_grads(delayed)):
        assert torch.equal(grad, gradient(plain, f"weight{group}"))
        assert not torch.equal(grad, first[group])
    delayed.backward_dw()
    assert calls == [0, 1]


def test_weight_gradients_that_wait_for_main_grad() -> None:
    op = grouped(2, 8, 4, delay_wgrad_compute=True, accumulate_into_main_grad=True)
    assert op.weight0.skip_backward_post_hook
    op.register_parameter("weight1", torch.nn.Parameter(torch.randn(4, 8)))
    assert op.weight1.skip_backward_post_hook
    for weight in (op.weight0, op.weight1):
        weight.main_grad = torch.zeros_like(weight)
    op(make_input(5, 8), torch.tensor([2, 3])).sum().backward()
    assert not op.weight0.main_grad.any()
    op.backward_dw()
    assert op.weight0.main_grad.any()
    assert op.weight0.grad is None


# -- errors, before any kernel


def test_bad_arguments() -> None:
    for sizes in ((0, 8, 4), (2, 0, 4), (2, 8, -1)):
        with pytest.raises(ValueError, match="must be positive"):
            te.ops.GroupedLinear(*sizes)
    with pytest.raises(ValueError, match="dtype must be"):
        te.ops.GroupedLinear(2, 8, 4, dtype=torch.int32)


@pytest.mark.parametrize(
    ("sizes", "error", "words"),
    [
        (torch.tensor([2, 3, 0]), ValueError, r"split sizes must be \[num_groups=2\]"),
        (torch.tensor([[2, 3]]), ValueError, r"split sizes must be \[num_groups=2\]"),
        (torch.tensor([2.0, 3.0]), TypeError, "split sizes must be integers"),
        (torch.tensor([True, False]), TypeError, "split sizes must be integers"),
        (torch.tensor([-1, 3]), ValueError, "group 0 must not be negative, got -1"),
        (torch.tensor([2, 4]), ValueError, "at most the input's 5 rows"),
        (torch.tensor([2**62, 2**62]), ValueError, "at most the input's 5 rows"),
    ],
)
def test_bad_splits(sizes: Tensor, error: type[Exception], words: str) -> None:
    op = grouped(2, 8, 4)
    before = [p.clone() for p in op.parameters()]
    with pytest.raises(error, match=rf"\[GroupedLinear\].*{words}"):
        op(make_input(5, 8), sizes.cpu())
    assert all(torch.equal(a, b) for a, b in zip(op.parameters(), before, strict=True))


def test_bad_scales() -> None:
    op = grouped(2, 8, 4, scale_bias=True)
    x, sizes = make_input(5, 8), torch.tensor([2, 3])
    for scales, error in (
        (torch.ones(4), ValueError),
        (torch.ones(5, 2), ValueError),
        (torch.ones(5, dtype=torch.int64), TypeError),
    ):
        with pytest.raises(error, match=r"\[GroupedLinear\] scales must"):
            op(x, sizes, scales)


def test_parameters_must_be_alike() -> None:
    x, sizes = make_input(5, 8), torch.tensor([2, 3])
    for name, made, words in (
        ("weight1", torch.nn.Parameter(torch.randn(4, 8, dtype=torch.bfloat16)), "dtype"),
        ("weight1", torch.nn.Parameter(torch.randn(4, 7)), r"must be \[4, 8\]"),
        ("bias1", torch.nn.Parameter(torch.randn(5)), r"must be \[4\]"),
    ):
        op = grouped(2, 8, 4)
        op.register_parameter(name, made)
        with pytest.raises(
            (RuntimeError, ValueError), match=rf"\[GroupedLinear\] {name} .*{words}"
        ):
            op(x, sizes)


def test_it_has_extra_inputs_so_a_fuser_calls_it() -> None:
    with pytest.raises(RuntimeError, match="fuser_forward"):
        grouped(2, 8, 4).op_forward_compute(make_input(5, 8), requires_grad=True)
