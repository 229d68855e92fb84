"""Checkpoints that cannot be loaded: the entry is named, and the whole model stays as it was."""

from __future__ import annotations

import io
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from quantized_support import make as make_quantized
from torch._subclasses.fake_tensor import FakeTensorMode

import ligature as te
from ligature.common import recipe as recipes
from ligature.quantization.tensor import _rebuild_quantized

RECIPES = {
    "delayed": lambda: recipes.DelayedScaling(amax_history_len=4),
    "current": recipes.Float8CurrentScaling,
    "mxfp8": recipes.MXFP8BlockScaling,
    "nvfp4": recipes.NVFP4BlockScaling,
}


class Net(torch.nn.Module):
    """Operations among plain modules, some of which are loaded before them and some after."""

    def __init__(self, recipe: Any = None) -> None:
        super().__init__()
        self.own = torch.nn.Parameter(torch.randn(3))
        self.before = torch.nn.Linear(4, 4)
        with te.quantized_model_init(enabled=recipe is not None, recipe=recipe):
            self.blocks = torch.nn.ModuleList(
                torch.nn.ModuleDict(
                    OrderedDict(
                        mlp=te.ops.Sequential(
                            te.ops.LayerNorm(32), te.ops.Linear(32, 64), te.ops.BasicLinear(64, 32)
                        ),
                        alone=te.ops.Linear(32, 32),
                    )
                )
                for _ in range(2)
            )
        self.after = torch.nn.BatchNorm1d(4)


def trained(recipe: Any, quantized: bool = True) -> Net:
    net = Net(recipe if quantized else None)
    for block in net.blocks:
        for module in block.values():
            with te.autocast(recipe=recipe):
                y = module(torch.randn(8, 32))
            y.sum().backward()
    return net


def copied(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {key: value.clone() for key, value in model.state_dict().items()}


def content(model: torch.nn.Module) -> list[Any]:
    """Everything that a load may change, and the objects that must stay."""
    objects: list[Any] = [id(p) for p in model.parameters()]
    for module in model.modules():
        if isinstance(module, te.ops.FusibleOperation):
            owner = module._recipe_state_owner()
            objects.append("" if owner is None else str(owner._handle.recipe_states()))
    return [*objects, *(copied(model).items())]


def same(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(
        torch.equal(x[1], y[1]) if isinstance(x, tuple) else x == y
        for x, y in zip(a, b, strict=True)
    )


def refuses(model: torch.nn.Module, state: Any, message: str) -> None:
    before = content(model)
    for assign in (False, True):
        for strict in (True, False):
            with pytest.raises(RuntimeError, match=message):
                model.load_state_dict(state, strict=strict, assign=assign)
            assert same(content(model), before), (assign, strict)


LAST = "blocks.1.alone"


@pytest.fixture(params=RECIPES)
def recipe(request: pytest.FixtureRequest) -> Any:
    return RECIPES[request.param]()


@pytest.mark.parametrize(
    ("entry", "change", "message"),
    [
        ("weight.format", lambda t: t[:9], "must be JSON in UTF-8"),
        ("weight.rowwise_data", lambda t: t[:-1], r"must be uint8\["),
        ("weight.rowwise_data", lambda t: t.to_sparse(), "must be dense, got a sparse tensor"),
        ("weight.rowwise_data", lambda t: t[:1].expand(t.shape), r"own, got shape .* strides \[0"),
        ("weight.rowwise_data", lambda t: t.to("meta"), "must be a tensor with memory"),
        ("weight.rowwise_data", lambda t: None, "is missing"),
        ("weight.rowwise_data", lambda t: "bytes", "must be a tensor, got str"),
        ("bias", lambda t: t[:-1], "size mismatch for blocks.1.alone.bias"),
        ("bias", lambda t: t.to_sparse(), "must be dense, got"),
        ("bias", lambda t: [1.0], "must be a tensor, got list"),
    ],
)
def test_below_plain_modules(recipe: Any, entry: str, change: Any, message: str) -> None:
    net, state = trained(recipe), copied(trained(recipe))
    key = f"{LAST}.{entry}"
    made = change(state.pop(key))
    if made is not None:
        state[key] = made
    refuses(net, state, f"{key}.*{message}|{message}")


@pytest.mark.parametrize(
    ("entry", "change", "message"),
    [
        ("forward.scale", lambda t: t * float("nan"), "must be numbers, got NaN"),
        ("forward.scale", lambda t: t.to_sparse(), "must be dense, got a sparse tensor"),
        ("forward.scale", lambda t: t[:1].expand(2), r"own, got shape \[2\] with strides \[0\]"),
        ("forward.amax", lambda t: t.to("meta"), "must be a tensor with memory"),
        ("backward.amax_history", lambda t: t[1:], "must be float32"),
        ("version", lambda t: t.to("meta"), "must be a tensor with memory"),
        ("version", lambda t: t + 1, "must be of version 1"),
        ("recipe", lambda t: t.to_sparse(), "must be dense, got a sparse tensor"),
        ("recipe", lambda t: t[:-2], "must be JSON in UTF-8"),
    ],
)
@pytest.mark.parametrize("quantized", [False, True])
def test_recipe_state_below_plain_modules(
    entry: str, change: Any, message: str, quantized: bool
) -> None:
    recipe = RECIPES["delayed"]()
    net, state = trained(recipe, quantized), copied(trained(recipe, quantized))
    key = f"{LAST}._recipe_state.{entry}"
    state[key] = change(state[key])
    refuses(net, state, f"checkpoint entry '{key}' must.*{message.removeprefix('must')}")


def test_the_same_through_wrappers_of_torch() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    recipe = RECIPES["mxfp8"]()
    net, state = trained(recipe), copied(trained(recipe))
    net.blocks[1].alone = checkpoint_wrapper(net.blocks[1].alone)
    state[f"{LAST}.weight.format"] = state[f"{LAST}.weight.format"][:5]
    refuses(net, state, f"{LAST}.weight.format' must be JSON")
    outer = torch.nn.DataParallel(net)
    refuses(outer, {f"module.{k}": v for k, v in state.items()}, f"'module.{LAST}.weight.format'")


def test_names_of_te_ops_beside_parts() -> None:
    recipe = RECIPES["mxfp8"]()
    net, state = trained(recipe), copied(trained(recipe))
    state[f"{LAST}.basic_ops.0.weight"] = torch.randn(32, 32)
    refuses(net, state, f"'{LAST}.basic_ops.0.weight' is there twice: plain, and quantized as")
    plain = {k: v for k, v in state.items() if not k.startswith(f"{LAST}.weight")}
    net.load_state_dict(plain)
    plain[f"{LAST}.basic_ops.0.weight"] = torch.randn(32, 31)
    refuses(net, plain, "size mismatch")


def test_a_hook_may_repair_entries() -> None:
    """What hooks change is looked at when they have changed it."""
    linear = te.ops.Linear(32, 16)

    def transpose(module: Any, state: dict[str, Any], prefix: str, *unused: Any) -> None:
        state[f"{prefix}weight"] = state[f"{prefix}weight"].t()

    state = {k: v.clone() for k, v in linear.state_dict().items()}
    turned = {**state, "weight": torch.randn(32, 16)}
    linear.register_load_state_dict_pre_hook(transpose)
    linear.load_state_dict(turned)
    assert torch.equal(linear.weight, turned["weight"].t())
    outer = torch.nn.Sequential(te.ops.Linear(32, 16))
    outer.register_load_state_dict_pre_hook(
        lambda m, s, p, *u: transpose(m, s, f"{p}0."),
    )
    outer.load_state_dict({f"0.{k}": v for k, v in turned.items()})
    assert torch.equal(outer[0].weight, turned["weight"].t())


def test_other_modules_load_as_ever() -> None:
    plain = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    with pytest.raises(RuntimeError, match=r"Error\(s\) in loading state_dict for Sequential"):
        plain.load_state_dict({"0.weight": torch.randn(4, 4)})
    with pytest.raises(TypeError, match="Expected state_dict to be dict-like"):
        plain.load_state_dict([1])
    with pytest.raises(TypeError, match="Expected state_dict to be dict-like"):
        te.ops.Linear(3, 3).load_state_dict(3)
    assert str(plain.load_state_dict(plain.state_dict(), True, True)).startswith("<All keys")


@pytest.mark.parametrize("place", range(0, 190, 7))
def test_every_byte_of_a_format(place: int) -> None:
    """A byte over 0x7f makes the entry something else than UTF-8, wherever it is."""
    model = Net(RECIPES["mxfp8"]())
    state = copied(model)
    key = f"{LAST}.weight.format"
    if place >= state[key].numel():
        place = state[key].numel() - 1
    for byte in (0xC3, 0x80, 0xFF):
        state[key][place] = byte
        refuses(model, state, f"checkpoint entry '{key}' must be JSON in UTF-8")


def test_bytes_of_a_recipe() -> None:
    model = trained(RECIPES["delayed"]())
    state = copied(model)
    key = f"{LAST}._recipe_state.recipe"
    good = state[key]
    for place in range(0, good.numel(), 11):
        state[key] = good.clone()
        state[key][place] = 0xE9
        refuses(model, state, f"checkpoint entry '{key}' must be JSON in UTF-8")


# -- parts that cannot be computed with, by whatever way they come


class Wrapper(torch.Tensor):
    """A tensor that stands for another, without memory of its own."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, device=inner.device
        )

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        unwrapped = [a.inner if isinstance(a, Wrapper) else a for a in args]
        return func(*unwrapped, **(kwargs or {}))


def quantized_like(t: torch.Tensor) -> torch.Tensor:
    return te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3)(torch.ones(t.shape))


def freed(t: torch.Tensor) -> torch.Tensor:
    made = t.clone()
    made.untyped_storage().resize_(0)
    return made


def fake(t: torch.Tensor) -> torch.Tensor:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        return mode.from_tensor(t)


def overlapping(t: torch.Tensor) -> torch.Tensor:
    return torch.zeros(t.numel() + 1, dtype=t.dtype).as_strided(t.shape, (1, 1))


UNUSABLE: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor], str]] = {
    "quantized": ("scale", quantized_like, "a plain tensor, got a quantized one"),
    "wrapper": ("data", Wrapper, "a plain tensor, got one that stands for others"),
    "fake": ("data", fake, "a plain tensor, got one that stands for others"),
    "sparse": ("data", lambda t: t.to_sparse(), "dense, got a sparse tensor"),
    "stride 0": ("data", lambda t: t[:1].expand(t.shape), r"own, got shape .* with strides \[0"),
    "overlapping": ("data", overlapping, r"own, got shape .* with strides \[1, 1\]"),
    "freed": ("data", freed, "a tensor with memory, got one whose memory was freed"),
    "negative": ("scale", lambda t: torch._neg_view(t), "a plain tensor, got one that stands"),
}


@pytest.mark.parametrize("kind", UNUSABLE)
def test_unusable_parts(kind: str) -> None:
    part, change, message = UNUSABLE[kind]
    recipe = RECIPES["current"]()
    linear = Net(recipe).blocks[0].alone
    state = copied(linear)
    key = f"weight.rowwise_{part}"
    state[key] = change(state[key])
    refuses(linear, state, f"checkpoint entry '{key}' must be .*{message}")

    q = make_quantized("current", 16, 32)
    arguments = list(q.__reduce_ex__(2)[1])
    place = {"data": 0, "scale": 1}[part]
    arguments[4] = [change(t) if i == place else t for i, t in enumerate(arguments[4])]
    with pytest.raises((ValueError, TypeError), match=f"row-wise {part} of .*{message}"):
        _rebuild_quantized(*arguments)


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize("kind", ["current", "delayed", "block 2d", "nv"])
def test_a_file_whose_part_is_quantized(weights_only: bool, kind: str) -> None:
    q = make_quantized(kind, 32, 32)
    fields, sizes, dtype, parts = q.__reduce_ex__(2)[1][1:5]
    place = 2 if kind == "nv" else 1  # a part that is float

    class Nested:
        def __reduce__(self) -> Any:
            inner = quantized_like(parts[place])
            nested = [inner if i == place else t for i, t in enumerate(parts)]
            return _rebuild_quantized, (1, fields, sizes, dtype, nested, False)

    file = io.BytesIO()
    torch.save({"w": Nested()}, file)
    file.seek(0)
    with pytest.raises(ValueError, match="must be a plain tensor, got a quantized one"):
        torch.load(file, weights_only=weights_only)


def test_parts_that_share_memory_or_devices() -> None:
    q = make_quantized("mx", 32, 32)
    version, fields, sizes, dtype, parts, needs_grad = q.__reduce_ex__(2)[1]
    shared = [parts[0], parts[1], None, parts[0].view(32, 32), parts[4], None]
    with pytest.raises(ValueError, match=r"column-wise data of .* memory of its own, got that of"):
        _rebuild_quantized(version, fields, sizes, dtype, shared, needs_grad)
    elsewhere = [parts[0], parts[1].to("meta"), None, None, None, None]
    with pytest.raises(ValueError, match=r"row-wise scale of .* must be on .*, got meta"):
        _rebuild_quantized(version, fields, sizes, dtype, elsewhere, needs_grad)
    linear = Net(RECIPES["mxfp8"]()).blocks[0].alone
    state = copied(linear)
    state["weight.columnwise_data"] = state["weight.rowwise_data"]
    refuses(linear, state, "'weight.columnwise_data' must have memory of its own")


def test_both_orientations_may_have_one_scale_and_one_amax() -> None:
    for kind in ("current", "nv"):
        q = make_quantized(kind, 32, 32)
        file = io.BytesIO()
        torch.save(q, file)
        file.seek(0)
        found = torch.load(file, weights_only=True)
        assert torch.equal(found.dequantize(), q.dequantize())
