"""How Megatron-LM builds and calls its experts out of operations, without Megatron-LM."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

import ligature.ops as ops
from ligature.ops.basic.grouped_linear import GRAD_INPUT_BUFFER_KEY, OUTPUT_BUFFER_KEY

GROUPS, HIDDEN, INNER = 4, 12, 10
COUNTS = [3, 0, 6, 2]
SPLIT = pytest.param((False, False), id="a parameter per expert")
SINGLE = pytest.param((True, True), id="one parameter")
MIXED = pytest.param((True, False), id="one weight, a bias per expert")


class Existing(torch.nn.Module):
    """A grouped linear layer that owns the parameters, under Megatron's names."""

    def __init__(self, inputs: int, outputs: int, single: tuple[bool, bool], bias: bool) -> None:
        super().__init__()
        for kind, shape, is_single in (
            ("weight", (outputs, inputs), single[0]),
            ("bias", (outputs,), single[1]),
        ):
            if kind == "bias" and not bias:
                continue
            if is_single:
                self.register_parameter(kind, _parameter(GROUPS, *shape))
            for group in range(0 if is_single else GROUPS):
                self.register_parameter(f"{kind}{group}", _parameter(*shape))

    def stacked(self, kind: str) -> torch.Tensor:
        """Of all experts, in float64."""
        found = self._parameters.get(kind)
        if found is None:
            found = torch.stack([getattr(self, f"{kind}{group}") for group in range(GROUPS)])
        return found.detach().double().requires_grad_()

    def grads(self, kind: str, of: str = "grad") -> torch.Tensor:
        if kind in self._parameters:
            return getattr(self._parameters[kind], of)
        return torch.stack([getattr(getattr(self, f"{kind}{g}"), of) for g in range(GROUPS)])


def _parameter(*shape: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(0.3 * torch.randn(*shape))


def linear_on_meta(
    owner: Existing, inputs: int, outputs: int, single: tuple[bool, bool], **options: Any
) -> ops.GroupedLinear:
    """An operation without memory that is given the parameters of a layer by their names."""
    bias = any(name.startswith("bias") for name in owner._parameters)
    op = ops.GroupedLinear(
        GROUPS,
        inputs,
        outputs,
        bias=bias,
        device="meta",
        dtype=torch.float32,
        single_grouped_weight=single[0],
        single_grouped_bias=single[1],
        **options,
    )
    for kind, is_single in (("weight", single[0]), ("bias", single[1])):
        numbered = [f"{kind}{group}" for group in range(GROUPS)]
        used, unused = ([kind], numbered) if is_single else (numbered, [kind])
        for name in used:
            op.register_parameter(name, owner._parameters.get(name))
        for name in unused:
            op.register_parameter(name, None)
    return op


class Experts(torch.nn.Module):
    """The idiom: parameters live in two layers, a fuser outside of the modules computes."""

    def __init__(
        self, single: tuple[bool, bool], activation: Any, bias: bool = True, **options: Any
    ) -> None:
        super().__init__()
        gated = not isinstance(activation, ops.ScaledSReLU)
        wide = INNER * (2 if gated else 1)
        self.linear_fc1 = Existing(HIDDEN, wide, single, bias)
        self.linear_fc2 = Existing(INNER, HIDDEN, single, bias)
        self.single, self.activation, self.options = single, activation, options
        self._fused_ops: tuple[ops.Sequential] | None = None

    def make_fused_ops(self) -> ops.Sequential:
        made = ops.Sequential()
        wide = INNER * (1 if isinstance(self.activation, ops.ScaledSReLU) else 2)
        bias = bool(self.linear_fc1._parameters.keys() & {"bias", "bias0"})
        made.append(
            linear_on_meta(self.linear_fc1, HIDDEN, wide, self.single, **self.options)
        ).append(self.activation)
        made.append(
            linear_on_meta(
                self.linear_fc2, INNER, HIDDEN, self.single, scale_bias=bias, **self.options
            )
        )
        for op in made:
            op.ep_mxfp8_carrier_input = False
            op.ep_mxfp8_carrier_grad = False
            op._glu_interleave_size = None
        return made

    def forward(
        self, x: torch.Tensor, counts: torch.Tensor, probs: torch.Tensor, **kwargs: Any
    ) -> torch.Tensor:
        if self._fused_ops is None:
            self._fused_ops = (self.make_fused_ops(),)
        (fused,) = self._fused_ops
        more = [probs] if "bias" in self.linear_fc2._parameters else []
        more = more or ([probs] if "bias0" in self.linear_fc2._parameters else [])
        return fused(x, counts, probs, counts, *more, **kwargs)


def glu(z: torch.Tensor) -> torch.Tensor:
    gate, linear = z.chunk(2, -1)
    return torch.nn.functional.silu(gate) * linear


def clamped(z: torch.Tensor) -> torch.Tensor:
    gate, linear = z.chunk(2, -1)
    gate, linear = gate.clamp(max=1.5), linear.clamp(-1.5, 1.5)
    return torch.nn.functional.silu(gate) * linear


def squared(z: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.relu(z).square()


ACTIVATIONS = {
    "swiglu": (lambda: ops.ScaledSwiGLU(glu_interleave_size=None), glu),
    "clamped": (
        lambda: ops.ScaledClampedQGeGLU(alpha=1.0, limit=1.5, glu_linear_offset=0.0),
        clamped,
    ),
    "squared relu": (ops.ScaledSReLU, squared),
}


def inputs(rows: int = sum(COUNTS)) -> list[torch.Tensor]:
    return [torch.randn(rows, HIDDEN), torch.tensor(COUNTS), torch.rand(rows) + 0.1]


class Reference:
    """The same in float64, an expert after the other, with the gradients of a given dy."""

    def __init__(self, experts: Experts, x: torch.Tensor, probs: torch.Tensor, act: Any) -> None:
        self.x, self.probs = (t.detach().double().requires_grad_() for t in (x, probs))
        layers = experts.linear_fc1, experts.linear_fc2
        kinds = [k for k in ("weight", "bias") if layers[0]._parameters.keys() & {k, f"{k}0"}]
        self.parameters = [{kind: layer.stacked(kind) for kind in kinds} for layer in layers]
        fc1, fc2 = self.parameters
        parts, start = [], 0
        for group, count in enumerate(COUNTS):
            rows = slice(start, start + count)
            start += count
            scale = self.probs[rows, None]
            z = self.x[rows] @ fc1["weight"][group].T + (fc1["bias"][group] if kinds[1:] else 0)
            y = (scale * act(z)) @ fc2["weight"][group].T
            parts.append(y + (scale * fc2["bias"][group] if kinds[1:] else 0))
        self.y = torch.cat(parts)

    def backward(self, dy: torch.Tensor) -> None:
        self.y.backward(dy.double())


def close(ours: torch.Tensor, wanted: torch.Tensor | None) -> None:
    assert wanted is not None
    torch.testing.assert_close(ours.double(), wanted, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("single", [SPLIT, SINGLE, MIXED])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_parameters_of_other_modules(single: tuple[bool, bool], activation: str) -> None:
    make, act = ACTIVATIONS[activation]
    experts = Experts(single, make())
    x, counts, probs = inputs()
    x.requires_grad_()
    probs.requires_grad_()
    reference = Reference(experts, x, probs, act)
    y = experts(x, counts, probs)
    close(y, reference.y)
    dy = torch.randn_like(y)
    y.backward(dy)
    reference.backward(dy)
    close(x.grad, reference.x.grad)
    close(probs.grad, reference.probs.grad)
    for layer, wanted in zip(
        (experts.linear_fc1, experts.linear_fc2), reference.parameters, strict=True
    ):
        for kind, value in wanted.items():
            close(layer.grads(kind), value.grad)
    assert list(experts.state_dict()) == [
        *(f"linear_fc1.{name}" for name in experts.linear_fc1._parameters),
        *(f"linear_fc2.{name}" for name in experts.linear_fc2._parameters),
    ]


@pytest.mark.parametrize("bias", [False, True])
def test_an_assigned_parameter_is_used(bias: bool) -> None:
    """``op.weight0 = parameter`` on the meta device, then the next one."""
    op = ops.GroupedLinear(2, 3, 5, bias=bias, device="meta")
    weights = [_parameter(5, 3) for _ in range(2)]
    op.weight0, op.weight1 = weights
    if bias:
        op.bias0, op.bias1 = _parameter(5), _parameter(5)
    x = torch.randn(4, 3)
    y = op(x, torch.tensor([4, 0]))
    torch.testing.assert_close(
        y, torch.nn.functional.linear(x, weights[0], op.bias0 if bias else None)
    )
    assert op.weight0 is weights[0]
    op.weight0 = _parameter(5, 3)
    y = op(x, torch.tensor([4, 0]))
    torch.testing.assert_close(
        y, torch.nn.functional.linear(x, op.weight0, op.bias0 if bias else None)
    )


def test_signatures_say_what_there_is() -> None:
    """Megatron asks the signatures what this version can do."""
    parameters = inspect.signature(ops.GroupedLinear.__init__).parameters
    names = list(parameters)
    assert names[:4] == ["self", "num_groups", "in_features", "out_features"]
    assert set(names[4:]) == {
        "bias",
        "device",
        "dtype",
        "rng_state_tracker_function",
        "accumulate_into_main_grad",
        "single_grouped_weight",
        "single_grouped_bias",
        "delay_wgrad_compute",
        "scale_bias",
    }
    keyword_only = inspect.Parameter.KEYWORD_ONLY
    assert all(parameters[name].kind is keyword_only for name in names[4:])
    for activation in (ops.ScaledSwiGLU, ops.ScaledClampedQGeGLU, ops.ScaledSReLU):
        found = inspect.signature(activation).parameters
        assert "activation_recompute_in_mlp" in found
        assert all(
            p.kind not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
            for p in found.values()
        )
    clamped_names = inspect.signature(ops.ScaledClampedQGeGLU).parameters
    assert {"alpha", "limit", "glu_linear_offset"} <= set(clamped_names)


def test_buffers_are_given_by_negative_index() -> None:
    experts = Experts((False, False), ops.ScaledSwiGLU())
    x, counts, probs = inputs()
    x.requires_grad_()
    wanted = experts(x, counts, probs)
    dy = torch.randn_like(wanted)
    (dx,) = torch.autograd.grad(wanted, x, dy)
    output, grad_input = torch.full_like(wanted, torch.nan), torch.full_like(x, torch.nan).detach()
    y = experts(
        x,
        counts,
        probs,
        op_kwargs={
            -1: {OUTPUT_BUFFER_KEY: output.detach()},
            0: {GRAD_INPUT_BUFFER_KEY: grad_input},
        },
    )
    assert y.data_ptr() == output.data_ptr()
    torch.testing.assert_close(y, wanted, rtol=0, atol=0)
    y.backward(dy)
    torch.testing.assert_close(grad_input, dx, rtol=0, atol=0)
    torch.testing.assert_close(x.grad, dx, rtol=0, atol=0)


@pytest.mark.parametrize("single", [SPLIT, SINGLE])
def test_a_hook_finds_main_grad(single: tuple[bool, bool]) -> None:
    """As DDP does: the pre-forward hook of the fuser runs those of the layers, and looks up
    ``main_grad``; backward adds to it."""
    experts = Experts(single, ops.ScaledSwiGLU(), accumulate_into_main_grad=True)
    x, counts, probs = inputs()
    order: list[str] = []
    layers = experts.linear_fc1, experts.linear_fc2
    buffers: dict[int, torch.Tensor] = {}
    for layer in layers:
        layer.register_forward_pre_hook(lambda module, args: order.append("layer"))
        for name, parameter in layer.named_parameters():
            if name.startswith("weight"):
                buffers[id(parameter)] = torch.ones(parameter.shape)
                parameter.get_main_grad = lambda p=parameter: buffers[id(p)]
                parameter.grad_added_to_main_grad = False

    def before(fused: torch.nn.Module, *_: Any) -> None:
        for layer in layers:
            for hook in layer._forward_pre_hooks.values():
                hook(layer, None)
        for layer in layers:
            for name, parameter in layer.named_parameters():
                if name.startswith("weight"):
                    parameter.main_grad = parameter.get_main_grad()

    fused = experts.make_fused_ops()
    fused.register_forward_pre_hook(before)
    experts._fused_ops = (fused,)
    y = experts(x, counts, probs)
    assert order == ["layer", "layer"]
    dy = torch.randn_like(y)
    y.backward(dy)
    reference = Reference(experts, x, probs, glu)
    reference.backward(dy)
    for layer, wanted in zip(layers, reference.parameters, strict=True):
        close(layer.grads("weight", "main_grad"), wanted["weight"].grad + 1)
        close(layer.grads("bias"), wanted["bias"].grad)
        for name, parameter in layer.named_parameters():
            if name.startswith("weight"):
                assert parameter.grad_added_to_main_grad


def test_weight_gradients_later() -> None:
    """``backward_dw`` of the second layer, then of the first, after the hooks were given."""
    experts = Experts((False, False), ops.ScaledSwiGLU(), delay_wgrad_compute=True)
    x, counts, probs = inputs()
    y = experts(x, counts, probs)
    dy = torch.randn_like(y)
    y.backward(dy)
    (fused,) = experts._fused_ops or ()
    layers = experts.linear_fc1, experts.linear_fc2
    assert all(layer.weight0.grad is None for layer in layers)
    assert all(parameter.skip_backward_post_hook for parameter in (layers[0].weight3,))
    done: list[str] = []
    for place in (2, 0):
        op = list(fused.children())[place]
        assert op.wgrad_store.delay_wgrad_compute()
        op.register_wgrad_accumulation_and_reduce_hooks(lambda p=place: done.append(str(p)))
        op.backward_dw()
    assert done == ["2", "0"]
    reference = Reference(experts, x, probs, glu)
    reference.backward(dy)
    for layer, wanted in zip(layers, reference.parameters, strict=True):
        close(layer.grads("weight"), wanted["weight"].grad)


@pytest.mark.parametrize("bias", [False, True])
def test_one_group_with_one_scale(bias: bool) -> None:
    """Megatron's shared experts: one group, and a scale of one element that stands for 1."""
    fused = ops.Sequential(
        ops.GroupedLinear(1, HIDDEN, 2 * INNER, bias=bias, device="cpu"),
        ops.ScaledSwiGLU(),
        ops.GroupedLinear(1, INNER, HIDDEN, bias=bias, device="cpu"),
    )
    fused[1]._grouped_mlp_unit_activation_scale = True
    x = torch.randn(7, HIDDEN, requires_grad=True)
    counts, one = torch.tensor([7]), torch.ones(1)
    y = fused(x, counts, one, counts)
    fc1, fc2 = fused[0], fused[2]
    wide = x.detach().double().requires_grad_()
    z = torch.nn.functional.linear(wide, fc1.weight0.double(), fc1.bias0.double() if bias else None)
    wanted = torch.nn.functional.linear(
        glu(z), fc2.weight0.double(), fc2.bias0.double() if bias else None
    )
    close(y, wanted)
    dy = torch.randn_like(y)
    y.backward(dy)
    wanted.backward(dy.double())
    close(x.grad, wide.grad)
    assert one.grad is None


def test_attributes_that_nobody_knows() -> None:
    op = ops.GroupedLinear(1, 4, 4, device="cpu")
    op.ep_mxfp8_carrier_input = torch.zeros(2)
    op._glu_interleave_size = 32
    assert op.num_extra_inputs == 1
    assert "ep_mxfp8_carrier_input" not in op.state_dict()
    y = op(torch.randn(3, 4), torch.tensor([3]))
    assert y.shape == (3, 4)


def test_the_fuser_in_a_tuple_is_no_module() -> None:
    experts = Experts((False, False), ops.ScaledSwiGLU())
    experts(*inputs())
    assert isinstance(experts._fused_ops, tuple)
    assert [name for name, _ in experts.named_modules()] == [
        "",
        "linear_fc1",
        "linear_fc2",
        "activation",
    ]
