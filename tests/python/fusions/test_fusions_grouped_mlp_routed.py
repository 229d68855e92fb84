"""GroupedMLP with the routing around it, what it saves, when it does not fire, te's idioms."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
from fusion_support import parameters_of
from grouped_mlp_support import (
    GROUPS,
    HIDDEN,
    INNER,
    ROWS,
    SCALED,
    SPLITS,
    Ran,
    check_bits,
    expected,
    experts,
    inputs_of,
    joined,
    routed_inputs,
    same_bits,
    wide_experts,
)
from quantized_reference import EVERY_RECIPE
from reference import (
    FLOAT_DTYPES,
    assert_close,
    float64_copy,
)

import ligature as te
from ligature.testing import check_fusion

pytestmark = pytest.mark.usefixtures("one_thread")

Tensor = torch.Tensor
ops = te.ops


# -- with the routing around it


@pytest.mark.parametrize("scale_bias", [False, True])
@pytest.mark.parametrize("activation", [*SCALED, "SwiGLU", "GELU"])
def test_routing_against_float64(activation: str, scale_bias: bool) -> None:
    for dtype in FLOAT_DTYPES:
        block = experts(activation, dtype=dtype, scale_bias=scale_bias)
        inputs = routed_inputs(dtype=dtype)
        got = check_bits(joined(block), *inputs)
        x, probabilities = float64_copy(inputs[0]), float64_copy(inputs[2])
        slots = [
            [(t, k) for t, k in product(range(7), range(2)) if inputs[1][t, k] == e]
            for e in range(GROUPS)
        ]
        order = [slot for own in slots for slot in own]
        token = torch.tensor([t for t, _ in order])
        scales = probabilities[token, torch.tensor([k for _, k in order])]
        rows, parameters = expected(
            block,
            x[token],
            [len(own) for own in slots],
            scales if activation in SCALED else None,
            scales if scale_bias else None,
        )
        y = torch.zeros_like(x).index_add(0, token, rows)
        torch.manual_seed(0)
        y.backward(torch.randn(y.shape).to(dtype).double())
        values = list(got.results.values())
        assert_close(values[0], y, dtype, scale=6, what="output")
        uses = activation in SCALED or scale_bias
        grads = [g for g in values[1:] if g is not None]
        leaves = [x, *([probabilities] if uses else []), *parameters]
        if not uses:
            assert len(grads) == len(leaves) or not grads.pop(1).any()
        assert len(grads) == len(leaves)
        for k, (a, t) in enumerate(zip(grads, leaves, strict=True)):
            wanted = torch.zeros_like(t) if t.grad is None else t.grad
            assert_close(a, wanted, dtype, scale=12, what=f"gradient {k}")


@pytest.mark.parametrize("tokens", [0, 1, 19])
@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_routing_of_any_number_of_tokens(tokens: int, top_k: int) -> None:
    block = experts("ScaledSwiGLU", scale_bias=True)
    check_bits(joined(block), *routed_inputs(tokens, top_k))


def test_routing_of_more_dimensions() -> None:
    block = experts("ScaledSwiGLU")
    x, indices, probabilities = routed_inputs(6)
    inputs = [x.detach().view(2, 3, HIDDEN).requires_grad_(), indices, probabilities]
    check_bits(joined(block), *inputs)


def test_what_dispatch_gives_to_the_caller_too() -> None:
    """Its row probabilities then have a gradient from outside as well."""
    for activation, scale_bias in (("ScaledSwiGLU", True), ("GELU", False)):
        block = experts(activation, scale_bias=scale_bias)
        got = check_bits(joined(block, to_caller=True), *routed_inputs())
        assert len(got.outputs) == 4
        assert got.outputs[2].requires_grad


@pytest.mark.parametrize("name", EVERY_RECIPE)
def test_routing_in_every_recipe(name: str) -> None:
    for activation, scale_bias in (("ScaledSwiGLU", True), ("GELU", False)):
        ran = []
        for fuse in (True, False):
            torch.manual_seed(2)
            block = wide_experts(activation, torch.bfloat16, scale_bias)
            inputs = routed_inputs(60, 2, dtype=torch.bfloat16, width=48)
            ran.append(Ran(joined(block), inputs, recipe=EVERY_RECIPE[name](), steps=3, fuse=fuse))
        assert ran[0].names == ["GroupedMLP"]
        same_bits(*ran, what=f"{name} {activation}")


def test_scales_of_its_own_beside_the_routing() -> None:
    """Not on the channel: the caller's, as in a block whose router is elsewhere."""
    block = experts("ScaledSwiGLU", scale_bias=True)
    modules = joined(block)
    block[1].set_extra_input_channel(0, None)
    scales = torch.rand(14, requires_grad=True)
    check_bits(modules, *routed_inputs(), scales)


# -- what it saves


class Packed:
    """Counts what saved-tensor hooks see."""

    def __init__(self, modules: Sequence[Any], inputs: Sequence[Tensor], **options: Any) -> None:
        self.fuser = ops.OperationFuser(list(modules), **options)
        self.known = {p.untyped_storage().data_ptr() for p in parameters_of(self.fuser)}
        self.tensors: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda t: t):
            self.y = self.fuser(*inputs)

    def _pack(self, t: Tensor) -> Tensor:
        if t.untyped_storage().data_ptr() not in self.known:
            self.tensors.append(t)
        return t

    @property
    def bytes(self) -> int:
        return sum(t.nbytes for t in self.tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("routed", [False, True])
def test_saves_its_input_and_the_first_output(routed: bool, dtype: torch.dtype) -> None:
    tokens, top_k, hidden, inner = 64, 4, 128, 96
    torch.manual_seed(0)
    block = [
        ops.GroupedLinear(8, hidden, 2 * inner, dtype=dtype),
        ops.ScaledSwiGLU(),
        ops.GroupedLinear(8, inner, hidden, dtype=dtype, scale_bias=True),
    ]
    rows = tokens * top_k
    if routed:
        modules = joined(block)
        inputs = routed_inputs(tokens, top_k, groups=8, dtype=dtype, width=hidden)
        x_rows = tokens
    else:
        modules, x_rows = block, rows
        sizes, scales = torch.full((8,), rows // 8), torch.rand(rows, requires_grad=True)
        x = torch.randn(rows, hidden).to(dtype).requires_grad_()
        inputs = [x, sizes, scales, sizes, scales]
    least = (x_rows * hidden + rows * 2 * inner) * dtype.itemsize
    fused, plain = Packed(modules, inputs), Packed(modules, inputs, fuse=False)
    assert least <= fused.bytes <= 1.05 * least, f"{fused.bytes / least}"
    assert plain.bytes >= least + rows * inner * dtype.itemsize
    addresses = [t.data_ptr() for t in fused.tensors]
    assert len(addresses) == len(set(addresses)), "a tensor was saved twice"
    fused.y.sum().backward()


@pytest.mark.parametrize("activation", ["ScaledSwiGLU", "ScaledSReLU"])
def test_activation_recompute_in_mlp(activation: str) -> None:
    """An attribute that can be read; it changes neither results nor what is saved."""
    ran, saved = [], []
    for flag in (True, False):
        torch.manual_seed(0)
        block = experts(activation, act_options={"activation_recompute_in_mlp": flag})
        assert block[1].activation_recompute_in_mlp is flag
        inputs = inputs_of(block)
        ran.append(check_bits(block, *inputs))
        saved.append(Packed(block, inputs).bytes)
    same_bits(*ran)
    assert saved[0] == saved[1]


# -- when it does not fire


def reasons(fuser: ops.OperationFuser, fusion: str) -> list[str]:
    return [reason for _, name, _, reason in fuser._considered if name == fusion]


def test_why_not() -> None:
    def refused(modules: Sequence[Any], inputs: Sequence[Tensor], name: str = "GroupedMLP") -> str:
        got = Ran(modules, inputs)
        return reasons(got.fuser, name)[0]

    block = experts()
    block[1] = ops.SwiGLU(cache_quantized_input=True)
    assert refused(block, inputs_of(block)) == "its activation caches a quantized input"

    produce = ops.MakeExtraOutput()  # of a floating dtype, so only planned
    produce.set_extra_output_channel(0, "other", output_to_caller=False)
    block = experts("ScaledSwiGLU")
    block[2].set_extra_input_channel(0, "other")
    fuser = ops.OperationFuser([produce, *block])
    with pytest.raises(TypeError, match="split sizes must be integers"):
        fuser(*inputs_of(block)[:3])
    assert (
        reasons(fuser, "GroupedMLP")[0]
        == "its linears have different split sizes, the caller's and channel 'other'"
    )

    block = joined(experts("ScaledSwiGLU"))
    block[4] = ops.Combine(weighted=True)
    block[4].set_extra_input_channel(0, "map")
    inputs = routed_inputs()
    weights = torch.rand(7, 2, requires_grad=True)
    name = "GroupedMLP with routing"
    assert refused(block, [*inputs, weights], name) == "its Combine is weighted"
    # What is left of it is the three operations inside.
    check_bits(block, *inputs, weights, names=["Dispatch", "GroupedMLP", "Combine"])

    block = joined(experts("GELU"))
    block[1].set_extra_input_channel(0, None)
    block[3].set_extra_input_channel(0, None)
    sizes = torch.bincount(inputs[1].flatten() + 1, minlength=GROUPS + 1)[1:]
    reason = refused(block, [*inputs, sizes, sizes], name)
    assert reason == "its GroupedLinear does not take its split sizes from its Dispatch's channel"
    check_bits(block, *inputs, sizes, sizes, names=["Dispatch", "GroupedMLP", "Combine"])


def test_different_numbers_of_groups() -> None:
    block = experts()
    block[2] = experts(groups=2)[2]
    x = torch.randn(ROWS, HIDDEN)
    sizes = torch.tensor((6, 7))
    got = Ran(block, [x, torch.tensor(SPLITS), sizes])
    wanted = "its linears have different numbers of groups, 4 and 2"
    assert reasons(got.fuser, "GroupedMLP")[0] == wanted


def test_sizes_that_do_not_fit() -> None:
    block = experts()
    block[1] = ops.GELU()
    fuser = ops.OperationFuser(block)
    with pytest.raises(ValueError, match="last dimension must be in_features=16"):
        fuser(*inputs_of(block))
    assert (
        reasons(fuser, "GroupedMLP")[0]
        == "its sizes do not fit: out_features and what the activation wants are 32 and 16"
    )


def test_a_hook_on_an_operation_inside() -> None:
    """That one runs alone, so that its hook runs."""
    block = experts("ScaledSwiGLU")
    inputs = inputs_of(block)
    wanted = ops.Sequential(*block)(*inputs)
    seen: list[int] = []
    block[1].register_forward_hook(lambda *_: seen.append(1))
    model = ops.Sequential(*block)
    y = model(*inputs)
    assert seen == [1]
    assert torch.equal(y, wanted)


# -- idioms of te.ops


def test_main_grad() -> None:
    ran = []
    for fuse in (True, False):
        torch.manual_seed(0)
        block = experts("ScaledSwiGLU", dtype=torch.bfloat16, accumulate_into_main_grad=True)
        weights = [p for op in block for n, p in op.named_parameters() if n.startswith("weight")]
        for k, p in enumerate(weights):
            p.main_grad = torch.full_like(p, 0.5, dtype=torch.float32)
            p.overwrite_main_grad = k % 3 == 0
        got = Ran(block, inputs_of(block, dtype=torch.bfloat16), fuse=fuse)
        for k, p in enumerate(weights):
            assert p.grad is None
            got.results[f"main_grad {k}"] = p.main_grad
        ran.append(got)
    assert ran[0].names == ["GroupedMLP"]
    same_bits(*ran)


@pytest.mark.parametrize("main_grad", [False, True])
def test_delayed_weight_gradients(main_grad: bool) -> None:
    ran = []
    for fuse, delayed in ((True, True), (False, True), (False, False)):
        torch.manual_seed(0)
        block = experts(
            "ScaledSwiGLU", delay_wgrad_compute=delayed, accumulate_into_main_grad=main_grad
        )
        weights = [p for op in block for n, p in op.named_parameters() if n.startswith("weight")]
        for p in weights:
            p.main_grad = torch.zeros_like(p)
        fuser = ops.OperationFuser(block, fuse=fuse)
        for _ in range(2):  # two microbatches, which add up
            fuser(*inputs_of(block)).square().sum().backward()
        if delayed:
            assert all(p.grad is None for p in weights)
            for _ in range(2):
                block[2].backward_dw()
                block[0].backward_dw()
        ran.append([p.main_grad if main_grad else p.grad for p in weights])
    for a, b, c in zip(*ran, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)


@pytest.mark.parametrize("routed", [False, True])
def test_buffers_of_the_caller(routed: bool) -> None:
    """Of any of both linears; nothing else is written into them."""
    rows = 14 if routed else ROWS
    ran = []
    for fuse in (True, False):
        torch.manual_seed(0)
        block = experts("ScaledSwiGLU")
        inputs = routed_inputs() if routed else inputs_of(block)
        buffers = {
            (0, "output"): torch.zeros(rows, 2 * INNER),
            (0, "grad_input"): torch.zeros(rows, HIDDEN),
            (2, "output"): torch.zeros(rows, HIDDEN),
            (2, "grad_input"): torch.zeros(rows, INNER),
        }
        kwargs: list[dict[str, Tensor]] = [{}, {}, {}]
        for (at, name), buffer in buffers.items():
            kwargs[at][name] = buffer
        if routed:
            kwargs = [{}, *kwargs, {}]
        got = Ran(joined(block) if routed else block, inputs, kwargs=kwargs, fuse=fuse)
        if not routed:
            assert got.outputs[0].data_ptr() == buffers[2, "output"].data_ptr()
            assert torch.equal(buffers[0, "grad_input"], got.results["gradient of input 0"])
        for key, buffer in buffers.items():
            got.results[str(key)] = buffer
        ran.append(got)
    assert ran[0].names == ["GroupedMLP"]
    same_bits(*ran)


@pytest.mark.parametrize("fuse", [False, True])
def test_a_buffer_that_is_saved_must_not_change(fuse: bool) -> None:
    block = experts()
    fuser = ops.OperationFuser(block, fuse=fuse)
    buffer = torch.empty(ROWS, 2 * INNER)
    for changes in (False, True):
        y = fuser(*inputs_of(block), basic_op_kwargs=[{"output": buffer.detach()}, {}, {}])
        if not changes:
            y.sum().backward()
            continue
        buffer.zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


@pytest.mark.parametrize("activation", SCALED)
def test_scales_that_are_ones(activation: str) -> None:
    """Megatron's shared experts: one group, and one scale for all rows."""
    block = experts(activation, groups=1)
    x, sizes = torch.randn(ROWS, HIDDEN, requires_grad=True), torch.tensor([ROWS])
    ones = torch.ones(ROWS, requires_grad=True)
    wanted = Ran(block, [x, sizes, ones, sizes])
    with pytest.raises(ValueError, match="scales must have the input's shape"):
        Ran(block, [x, sizes, torch.ones(1), sizes])
    assert not block[1]._grouped_mlp_unit_activation_scale
    block[1]._grouped_mlp_unit_activation_scale = True
    for scales in (torch.ones(1, requires_grad=True), ones):
        got = check_bits(block, x, sizes, scales, sizes)
        assert got.results.pop("gradient of input 1") is None
        for name, t in got.results.items():
            assert t is None or torch.equal(t, wanted.results[name]), name


def test_names_of_te() -> None:
    for name in ("GroupedMLP_CuTeGEMMGLU", "GroupedMLP_CuTeGEMMUnary"):
        cls = getattr(ops.fused, name)
        assert cls.is_supported()
    block = experts("ScaledSwiGLU")
    got = Ran(block, inputs_of(block))
    assert isinstance(got.fuser._forward_ops[0][0], ops.fused.GroupedMLP_CuTeGEMMGLU)
    made = ops.fused.GroupedMLP(*block)
    inputs = inputs_of(block)
    assert torch.equal(made(*inputs), got.fuser(*inputs))


def test_made_by_hand_with_the_routing() -> None:
    """Called alone, it takes what was on channels from the caller."""
    block = joined(experts("ScaledSwiGLU", scale_bias=True))
    inputs = routed_inputs()
    fuser = ops.OperationFuser(block, fuse=False)
    wanted = fuser(*inputs)
    made = ops.fused.GroupedMLP(*block)
    _, sizes, rows, routing = block[0](*inputs)
    rows = rows.detach().requires_grad_()
    y = made(*inputs, sizes, rows, sizes, rows, routing)
    y = y[0] if isinstance(y, tuple) else y
    assert torch.equal(y, wanted)
    y.sum().backward()
    assert rows.grad is not None
    wanted.sum().backward()


def test_threads_do_not_change_bits() -> None:
    block = experts("ScaledSwiGLU", scale_bias=True, dtype=torch.bfloat16)
    inputs = inputs_of(block, dtype=torch.bfloat16)
    one = Ran(block, inputs)
    torch.set_num_threads(2)
    same_bits(one, Ran(block, inputs))


def test_explain_tells_what_is_saved() -> None:
    block = joined(experts("ScaledSwiGLU"))
    inputs = routed_inputs()
    fused, plain = (ops.OperationFuser(block, fuse=fuse) for fuse in (True, False))
    text = fused.explain(*inputs)
    assert "GroupedMLP" in str(text)
    assert f"(channel 'splits'): sizes of {GROUPS} groups on {inputs[0].device}" in str(text)
    assert "host syncs: 0" in str(text)
    (splits,) = text.to_dict()["parts"][0]["ops"][1]["extra_inputs"]
    assert splits["what"] == f"sizes of {GROUPS} groups"
    assert text.saved_bytes < plain.explain(*inputs).saved_bytes


@pytest.mark.parametrize("activation", ["SwiGLU", "ScaledSwiGLU"])
def test_check_fusion(activation: str) -> None:
    def make(dtype: torch.dtype, device: Any) -> list[Any]:
        return experts(activation, dtype=dtype)

    assert check_fusion("GroupedMLP", make, [(ROWS, HIDDEN)], max_patterns=8).runs > 0

    def make_routed(dtype: torch.dtype, device: Any) -> list[Any]:
        return joined(make(dtype, device))

    name = "GroupedMLP with routing"
    assert check_fusion(name, make_routed, [(7, HIDDEN), (2, 3, HIDDEN)], max_patterns=8).runs > 0
