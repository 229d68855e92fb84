"""Recipe state and quantized weights in checkpoints."""

from __future__ import annotations

import copy
import io
import json
from collections import OrderedDict

import pytest
import torch
from delayed_reference import state_of
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors

import ligature as te
from ligature.common import recipe as recipes

RECIPES = {
    "delayed": lambda: recipes.DelayedScaling(amax_history_len=4),
    "current": recipes.Float8CurrentScaling,
    "block": recipes.Float8BlockScaling,
    "block 1x128": lambda: recipes.Float8BlockScaling(w_block_scaling_dim=1, use_f32_scales=True),
    "mxfp8": recipes.MXFP8BlockScaling,
    "nvfp4": recipes.NVFP4BlockScaling,
    "nvfp4 1x16": lambda: recipes.NVFP4BlockScaling(disable_2d_quantization=True),
}


def make(recipe=None, dtype=torch.float32):
    with te.quantized_model_init(enabled=recipe is not None, recipe=recipe):
        return te.ops.Sequential(
            OrderedDict(
                norm=te.ops.LayerNorm(40, dtype=dtype),
                fc1=te.ops.Linear(40, 64, dtype=dtype),
                act=te.ops.GELU(),
                fc2=te.ops.BasicLinear(64, 40, dtype=dtype),
            )
        )


def train(model, recipe, steps: int = 2):
    for step in range(steps):
        with te.autocast(recipe=recipe):
            y = model(torch.randn(16, 40) * (step + 1))
        y.square().sum().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(1e-3 * parameter.grad)
                parameter.grad = None
    return model


def by_torch(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def by_safetensors(state):
    made = load_safetensors(save_safetensors({k: v.contiguous() for k, v in state.items()}))
    return {k: v.to(state[k].device) for k, v in made.items()}


FILES = {"torch": by_torch, "safetensors": by_safetensors, "memory": copy.deepcopy}


@pytest.fixture(params=FILES)
def stored(request):
    return FILES[request.param]


def content(model) -> dict:
    """On the CPU, whatever the model is on."""
    return {k: v.to("cpu", copy=True) for k, v in model.state_dict().items()}


def same(a: dict, b: dict) -> bool:
    return list(a) == list(b) and all(
        a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a
    )


# -- what is kept


def test_keys() -> None:
    plain = ["norm.weight", "norm.bias", "fc1.weight", "fc1.bias", "fc2.weight"]
    model = make()
    assert list(model.state_dict()) == plain
    train(model, recipes.Float8CurrentScaling())
    assert list(model.state_dict()) == plain  # nothing to remember
    train(model, recipes.DelayedScaling(amax_history_len=4))
    names = [
        f"{mode}.{what}"
        for mode in ("forward", "backward")
        for what in ("scale", "amax", "amax_history")
    ]
    state = ["version", "recipe", *names]
    wanted = {*plain, *(f"{op}._recipe_state.{n}" for op in ("fc1", "fc2") for n in state)}
    got = model.state_dict()
    assert set(got) == wanted
    assert got["fc1._recipe_state.version"].dtype == torch.int64
    assert got["fc1._recipe_state.recipe"].dtype == torch.uint8
    assert got["fc1._recipe_state.forward.amax_history"].shape == (4, 2)
    assert got["fc1._recipe_state.backward.scale"].shape == (1,)
    assert all(type(value) is torch.Tensor for value in got.values())


def test_keys_of_quantized_weights() -> None:
    linear = make(recipes.NVFP4BlockScaling(disable_2d_quantization=True))[1]
    assert list(linear.state_dict()) == [
        "bias",
        "weight.format",
        "weight.rowwise_data",
        "weight.rowwise_scale",
        "weight.rowwise_amax",
        "weight.columnwise_data",
        "weight.columnwise_scale",
        "weight.columnwise_amax",
    ]
    about = json.loads(bytes(linear.state_dict()["weight.format"].tolist()))
    assert about["version"] == 1
    assert about["shape"] == [64, 40]
    assert about["dtype"] == "float32"
    assert linear.state_dict()["weight.rowwise_data"].data_ptr() == (
        linear.weight.rowwise_data.data_ptr()
    )


def test_a_reset_state_is_not_worth_keeping() -> None:
    recipe = recipes.DelayedScaling()
    model = train(make(), recipe)
    for op in (model[1].basic_ops[0], model[3]):
        op.reset_recipe_state(recipe=recipe)
    assert not [k for k in model.state_dict() if "_recipe_state" in k]


# -- round trips


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("assign", [False, True])
def test_round_trip(name, quantized, stored, assign) -> None:
    """What was trained goes on as if nothing had happened."""
    recipe = RECIPES[name]()
    if name.startswith("nvfp4"):
        recipe.disable_stochastic_rounding = True
    model = train(make(recipe if quantized else None), recipe)
    other = make(recipe if quantized else None)
    result = other.load_state_dict(stored(model.state_dict()), assign=assign)
    assert not result.missing_keys
    assert not result.unexpected_keys
    assert same(content(model), content(other))
    x = torch.randn(16, 40)
    for _ in range(2):
        outputs = []
        for subject in (model, other):
            with te.autocast(recipe=recipe):
                y = subject(x)
            y.square().sum().backward()
            outputs.append((y.detach(), [p.grad for p in subject.parameters()]))
            with torch.no_grad():
                for parameter in subject.parameters():
                    parameter.sub_(1e-2 * parameter.grad)
            subject.zero_grad(set_to_none=True)
        assert torch.equal(outputs[0][0], outputs[1][0])
        assert all(torch.equal(a, b) for a, b in zip(outputs[0][1], outputs[1][1], strict=True))
    assert same(content(model), content(other))
    if quantized:
        assert isinstance(other[1].weight, te.QuantizedTensor)


@pytest.mark.parametrize("source", [*RECIPES, "none"])
@pytest.mark.parametrize("target", [*RECIPES, "none"])
def test_from_any_to_any(source, target) -> None:
    """Saved in one recipe, loaded into another: the values, as the target's format has them."""
    made = RECIPES[source]() if source != "none" else None
    wanted = RECIPES[target]() if target != "none" else None
    model = make(made)
    with torch.no_grad():
        model[1].weight.copy_(torch.randn(64, 40) * 3)  # far from an initialization
    if made is not None:
        train(model, made, 1)
    other = make(wanted)
    other.load_state_dict(model.state_dict())
    for a, b in ((model[1], other[1]), (model[3], other[3])):
        values = a.weight.dequantize() if source != "none" else a.weight.detach()
        got = b.weight.dequantize() if target != "none" else b.weight.detach()
        if source == target or target == "none":
            assert torch.equal(got, values)
        error = ((got - values).norm() / values.norm()).item()
        assert error < (0.2 if "nvfp4" in target else 0.06), error
        assert isinstance(b.weight, te.QuantizedTensor) == (target != "none")
    assert torch.equal(other[1].bias, model[1].bias)


def test_into_another_dtype() -> None:
    model = make(recipes.MXFP8BlockScaling())
    other = make(dtype=torch.bfloat16)
    other.load_state_dict(model.state_dict())
    assert other[1].weight.dtype == torch.bfloat16
    assert torch.equal(other[1].weight.float(), model[1].weight.dequantize())
    back = make(recipes.MXFP8BlockScaling())
    back.load_state_dict(other.state_dict())
    assert torch.equal(back[1].weight.dequantize(), model[1].weight.dequantize())


def test_from_and_to_torch_linear() -> None:
    source = torch.nn.Linear(40, 64)
    with te.quantized_model_init(recipe=recipes.Float8CurrentScaling()):
        linear = te.ops.Linear(40, 64)
    linear.load_state_dict(source.state_dict())
    error = (linear.weight.dequantize() - source.weight).norm() / source.weight.norm()
    assert error < 0.04
    plain = te.ops.Linear(40, 64)
    plain.load_state_dict(linear.state_dict())
    back = torch.nn.Linear(40, 64)
    back.load_state_dict(plain.state_dict())
    assert torch.equal(back.weight, linear.weight.dequantize())


def test_checkpoints_of_te_ops() -> None:
    """Their empty extra state is accepted."""
    linear = te.ops.Linear(40, 64)
    state = {
        "basic_ops.0.weight": torch.randn(64, 40),
        "basic_ops.0._extra_state": torch.empty(0, dtype=torch.uint8),
        "basic_ops.1.bias": torch.randn(64),
        "basic_ops.1._extra_state": torch.empty(0, dtype=torch.uint8),
    }
    linear.load_state_dict(state)
    assert torch.equal(linear.weight, state["basic_ops.0.weight"])


def test_state_of_another_delayed_recipe_is_taken_over() -> None:
    """An operation has one state of delayed scaling, whatever the recipe's fields."""
    four, eight = (recipes.DelayedScaling(amax_history_len=n) for n in (4, 8))
    model = train(make(), four)
    other = train(make(), eight)
    other.load_state_dict(model.state_dict())
    assert str(state_of(other[1])) == str(state_of(model[1]))
    with te.autocast(recipe=eight):
        quantizer = other[1].basic_ops[0].get_quantizer("forward", 0)
    scale, _, history = state_of(model[1])[0][0]
    assert quantizer.scale.item() == torch.as_tensor(scale).item()
    now = torch.as_tensor(state_of(other[1])[0][0][2])
    assert now.shape == (8,)
    assert torch.equal(now[:4], torch.as_tensor(history))
    assert not now[4:].any()


def test_plain_checkpoints_leave_recipe_state() -> None:
    model = train(make(), recipes.DelayedScaling())
    before = str(state_of(model[1]))
    model.load_state_dict(make().state_dict())
    assert str(state_of(model[1])) == before


def largest(history: torch.Tensor) -> torch.Tensor:
    return history.max()


def test_functions_are_known_by_name() -> None:
    """Never imported from a file: the state waits for a recipe that has the function."""
    recipe = recipes.DelayedScaling(amax_history_len=4, amax_compute_algo=largest)
    model = train(make(), recipe)
    state = by_torch(model.state_dict())
    assert b"largest" in bytes(state["fc1._recipe_state.recipe"].tolist())
    other = make()
    other.load_state_dict(state)
    train(other, recipe, 1)
    assert state_of(other[1])[0][0][2][1] == state_of(model[1])[0][0][2][0]
    unnamed = recipes.DelayedScaling(amax_compute_algo=lambda history: history.max())
    assert not [k for k in train(make(), unnamed).state_dict() if "_recipe_state" in k]


def test_a_python_operation_keeps_its_state_too() -> None:
    class Own(te.ops.BasicOperation):
        def num_quantizers(self, mode):
            return 1 if mode == "forward" else 0

        def op_forward(self, ctx, input_, **unused):
            return self.get_quantizer("forward", 0)(input_).dequantize()

        def op_backward(self, ctx, grad_output):
            return grad_output, ()

    recipe = recipes.DelayedScaling(amax_history_len=2)
    op, other = Own(), Own()
    with te.autocast(recipe=recipe):
        op(torch.full((4, 4), 7.0))
    assert op.state_dict()["_recipe_state.forward.amax_history"].tolist() == [[7], [0]]
    other.load_state_dict(op.state_dict())
    assert same(content(op), content(other))
    wrong = {**op.state_dict(), "_recipe_state.backward.scale": torch.ones(1)}
    with pytest.raises(RuntimeError, match=r"'_recipe_state\.backward\.scale' is for backward, wh"):
        other.load_state_dict(wrong)


# -- strict


def test_strict_names_keys() -> None:
    model = make(recipes.MXFP8BlockScaling())
    state = content(model)
    for key in [k for k in state if k.startswith("fc1.weight")]:
        del state[key]
    state["fc2.weight.bogus"] = torch.ones(1)
    state["fc1._recipe_state.bogus"] = torch.ones(1)
    with pytest.raises(RuntimeError) as error:
        model.load_state_dict(state)
    assert 'Missing key(s) in state_dict: "fc1.weight"' in str(error.value)
    assert '"fc2.weight.bogus"' in str(error.value)
    assert '"fc1._recipe_state.bogus"' in str(error.value)
    result = model.load_state_dict(state, strict=False)
    assert result.missing_keys == ["fc1.weight"]
    assert sorted(result.unexpected_keys) == ["fc1._recipe_state.bogus", "fc2.weight.bogus"]


def test_below_another_module() -> None:
    model = torch.nn.ModuleDict({"mlp": make(recipes.MXFP8BlockScaling())})
    train(model["mlp"], recipes.DelayedScaling())
    other = torch.nn.ModuleDict({"mlp": make(recipes.MXFP8BlockScaling())})
    other.load_state_dict(by_torch(model.state_dict()))
    assert same(content(model), content(other))
    state = content(model)
    state["mlp.fc1.weight.rowwise_scale"][0, 0] = 255
    with pytest.raises(RuntimeError, match=r"mlp\.fc1\.weight\.rowwise_scale"):
        other.load_state_dict(state)


# -- files that are wrong


def as_bytes(**changes):
    """JSON with some entries changed."""

    def change(tensor):
        value = json.loads(bytes(tensor.tolist()))
        value.update(changes)
        return torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8)

    return change


def set_to(value):
    def change(tensor):
        out = tensor.clone()
        out.flatten()[0] = value
        return out

    return change


DELAYED = [
    ("version", lambda t: t + 1, "must be of version 1, which this version of Ligature reads"),
    ("version", lambda t: t.float(), r"must be int64\[\], got float32\[\]"),
    ("version", None, "is missing"),
    ("recipe", None, "is missing"),
    ("recipe", lambda t: t[:-3], "must be JSON in UTF-8"),
    ("recipe", lambda t: t.long(), "must be uint8"),
    ("recipe", as_bytes(recipe="Other"), "wanted DelayedScaling with"),
    ("recipe", as_bytes(fp8_format="E9M9"), "must be the name of a Format, got 'E9M9'"),
    ("recipe", as_bytes(margin="1"), "margin must be an int"),
    ("recipe", as_bytes(amax_history_len=10**12), r"amax_history' must be float32\["),
    ("recipe", as_bytes(amax_history_len=-1), "positive amax_history_len, got -1"),
    ("recipe", as_bytes(amax_compute_algo={"function": 3}), "must name a function"),
    ("recipe", as_bytes(extra=1), "wanted DelayedScaling with"),
    ("forward.scale", None, "is missing"),
    ("forward.scale", set_to(float("nan")), "must be numbers, got NaN"),
    ("forward.scale", set_to(-1), "must be positive and finite, got -1"),
    ("forward.scale", set_to(0), "must be positive and finite, got 0"),
    ("forward.scale", set_to(float("inf")), "must be positive and finite"),
    ("forward.scale", lambda t: t[:1], r"must be float32\[2\], got float32\[1\]"),
    ("forward.scale", lambda t: t.double(), r"must be float32\[2\], got float64\[2\]"),
    ("forward.amax", set_to(-2), "must be zero or more, got -2"),
    ("forward.amax_history", lambda t: t[:3], r"must be float32\[4, 2\], got float32\[3, 2\]"),
    ("backward.amax_history", set_to(float("nan")), "must be numbers, got NaN"),
    ("backward.scale", lambda t: [1.0], "must be a tensor, got list"),
]


def refuses(model, state, key: str, message: str) -> None:
    before = content(model)
    plain = [p.detach().clone() for p in model.parameters()]
    for strict in (True, False):
        with pytest.raises(RuntimeError, match=message) as error:
            model.load_state_dict(state, strict=strict)
        assert key in str(error.value)
    assert same(content(model), before)
    for parameter, value in zip(model.parameters(), plain, strict=True):
        assert torch.equal(parameter, value)


@pytest.mark.parametrize(("entry", "change", "message"), DELAYED)
def test_wrong_recipe_state(entry, change, message) -> None:
    recipe = RECIPES["delayed"]()
    state = content(train(make(), recipe))
    key = f"fc2._recipe_state.{entry}"
    if change is None:
        del state[key]
    else:
        state[key] = change(state[key])
    wanted = "fc2._recipe_state." if entry == "recipe" else key
    refuses(train(make(), recipe), state, wanted, message)


WEIGHTS = [
    ("mxfp8", "format", None, "is missing"),
    ("mxfp8", "format", as_bytes(version=2), "must be of version 1"),
    ("mxfp8", "format", as_bytes(dtype="float64"), "of dtype float32, bfloat16, float16"),
    ("mxfp8", "format", as_bytes(shape=[41, 64]), r"says shape \[41, 64\], the shape in current"),
    ("mxfp8", "format", as_bytes(shape=None), "says shape None"),
    ("mxfp8", "format", as_bytes(format={"scaling": "odd"}), "of a known scaling, got odd"),
    ("mxfp8", "format", as_bytes(format=3), "of a known scaling"),
    ("mxfp8", "format", as_bytes(format={"scaling": "mx", "bogus": 1}), "no field 'bogus'"),
    ("mxfp8", "format", as_bytes(format={"scaling": "mx", "element": "e2m1"}), "E2M1|e2m1"),
    ("mxfp8", "format", lambda t: t[:10], "must be JSON in UTF-8"),
    ("mxfp8", "rowwise_data", None, "is missing"),
    ("mxfp8", "rowwise_data", lambda t: t[:-1], r"must be uint8\[40, 64\], got uint8\[39, 64\]"),
    ("mxfp8", "rowwise_data", lambda t: t.to(torch.int8), r"must be uint8\[40, 64\], got int8"),
    ("mxfp8", "columnwise_scale", None, "is missing"),
    ("mxfp8", "rowwise_scale", set_to(255), "must be numbers, got NaN"),
    ("delayed", "rowwise_scale", set_to(float("nan")), "must be numbers, got NaN"),
    ("current", "rowwise_scale", set_to(-1), "must be positive and finite, got -1"),
    ("current", "rowwise_scale", lambda t: t.repeat(2), r"float32\[1\], got float32\[2\]"),
    ("block", "rowwise_scale", set_to(float("inf")), "must be positive and finite"),
    ("nvfp4", "rowwise_scale", set_to(0x7F), "must be numbers, got NaN"),
    ("nvfp4", "rowwise_scale", set_to(0x80), "must be zero or more, got a negative"),
    ("nvfp4", "rowwise_amax", set_to(float("nan")), "must be numbers, got NaN"),
    ("nvfp4", "rowwise_amax", set_to(float("inf")), "must be finite"),
    ("nvfp4", "rowwise_amax", None, "is missing"),
]


@pytest.mark.parametrize(("name", "entry", "change", "message"), WEIGHTS)
@pytest.mark.parametrize("into", ["the same", "plain"])
def test_wrong_quantized_weight(name, entry, change, message, into) -> None:
    recipe = RECIPES[name]()
    state = content(make(recipe))
    key = f"fc2.weight.{entry}"
    if change is None:
        del state[key]
    else:
        state[key] = change(state[key])
    refuses(make(recipe if into == "the same" else None), state, key, message)


def test_a_weight_that_is_there_twice() -> None:
    model = make(recipes.MXFP8BlockScaling())
    state = {**content(model), "fc1.weight": torch.randn(64, 40)}
    refuses(model, state, "fc1.weight", "is there twice")


def test_a_part_that_the_format_does_not_have() -> None:
    model = make(recipes.MXFP8BlockScaling())
    state = {**content(model), "fc1.weight.rowwise_amax": torch.ones(1)}
    refuses(model, state, "fc1.weight.rowwise_amax", "its format has none")


def test_a_plain_weight_of_another_shape() -> None:
    model = make(recipes.MXFP8BlockScaling())
    state = content(make())
    state["fc2.weight"] = torch.randn(40, 65)
    refuses(model, state, "fc2.weight", "size mismatch for fc2.weight")
