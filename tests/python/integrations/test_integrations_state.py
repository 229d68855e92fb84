"""Checkpoints of replaced decoders are the original's, and what cannot be replaced is refused."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers_support import loss_of, make, pair, tokens

import ligature as te
from ligature.integrations.transformers import replace

GATE = "model.layers.0.mlp.gate_proj.weight"
UP = "model.layers.0.mlp.up_proj.weight"
NORM = "model.layers.1.post_attention_layernorm.weight"


def same(a: Any, b: Any) -> bool:
    """Whether two state dicts hold the same, in the same order."""
    return list(a) == list(b) and all(torch.equal(a[name], b[name]) for name in a)


# -- state_dict and load_state_dict


@pytest.mark.parametrize(
    ("kind", "options"),
    [("Llama", {"mlp_bias": True}), ("Gemma2", {}), ("Phi3", {}), ("Olmo2", {}), ("Qwen3", {})],
)
@pytest.mark.parametrize("assign", [False, True])
def test_state_dict_is_the_originals(kind: str, options: dict[str, Any], assign: bool) -> None:
    model, changed = pair(replace, kind, **options)
    assert same(changed.state_dict(), model.state_dict())
    assert same(changed.model.state_dict(prefix="a."), model.model.state_dict(prefix="a."))
    other = make(kind, **options)
    state = {name: value.clone() for name, value in other.state_dict().items()}
    assert not same(changed.state_dict(), state)
    assert str(changed.load_state_dict(state, assign=assign)) == "<All keys matched successfully>"
    assert same(changed.state_dict(), state)
    ids = tokens()
    torch.testing.assert_close(changed(input_ids=ids).logits, other(input_ids=ids).logits)
    model.load_state_dict(changed.state_dict())
    assert same(model.state_dict(), state)


def test_state_dict_is_of_the_models_memory() -> None:
    """As torch's: what is written into it is written into the model."""
    _, changed = pair(replace)
    mlp = changed.model.layers[0].mlp
    half = mlp.gate_up_proj.out_features // 2
    changed.state_dict()[UP].zero_()
    assert mlp.gate_up_proj.weight[:half].ne(0).all()
    assert not mlp.gate_up_proj.weight[half:].any()
    kept = changed.state_dict(keep_vars=True)
    assert kept[NORM] is changed.model.layers[1].mlp.norm.weight
    assert kept[GATE].requires_grad


def test_names_that_are_missing_or_too_many() -> None:
    model, changed = pair(replace)
    state = model.state_dict()
    del state[GATE], state[UP], state[NORM]
    state["model.layers.0.mlp.side_proj.weight"] = torch.zeros(1)
    before = copy.deepcopy(changed.state_dict())
    with pytest.raises(RuntimeError) as raised:
        changed.load_state_dict(state)
    for name in (GATE, UP, NORM, "model.layers.0.mlp.side_proj.weight"):
        assert name in str(raised.value)
    assert "gate_up_proj" not in str(raised.value)
    result = changed.load_state_dict(state, strict=False)
    assert sorted(result.missing_keys) == sorted([GATE, UP, NORM])
    assert result.unexpected_keys == ["model.layers.0.mlp.side_proj.weight"]
    assert same(changed.state_dict(), before)


@pytest.mark.parametrize("assign", [False, True])
def test_one_half_alone(assign: bool) -> None:
    model, changed = pair(replace)
    value = torch.randn_like(model.state_dict()[UP]).bfloat16()
    result = changed.load_state_dict({UP: value}, strict=False, assign=assign)
    assert UP not in result.missing_keys
    assert GATE in result.missing_keys
    assert torch.equal(changed.state_dict()[UP], value.float())
    assert torch.equal(changed.state_dict()[GATE], model.state_dict()[GATE])


def test_wrong_shapes() -> None:
    model, changed = pair(replace)
    for name in (GATE, NORM):
        state = model.state_dict()
        state[name] = torch.zeros(3, 5)
        with pytest.raises(RuntimeError) as raised:
            changed.load_state_dict(state)
        assert f"size mismatch for {name}:" in str(raised.value)


def test_a_model_without_memory() -> None:
    """Replaced before it has weights, which come by load_state_dict."""
    model = make()
    with torch.device("meta"):
        changed = type(model)(model.config)
    replace(changed)
    changed.load_state_dict(model.state_dict(), assign=True)
    assert same(changed.state_dict(), model.state_dict())
    assert not any(p.is_meta for p in changed.parameters())


def test_saved_by_torch() -> None:
    _, changed = pair(replace)
    file = io.BytesIO()
    torch.save(changed, file)
    file.seek(0)
    other = torch.load(file, weights_only=False)
    assert same(other.state_dict(), changed.state_dict())
    ids = tokens()
    torch.testing.assert_close(other(input_ids=ids).logits, changed(input_ids=ids).logits)


# -- save_pretrained and from_pretrained


@pytest.mark.parametrize("size", ["50GB", "20KB"])
def test_save_pretrained(tmp_path: Path, size: str, device: str) -> None:
    model, changed = pair(replace)
    changed.save_pretrained(tmp_path, max_shard_size=size)
    back, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    assert same(back.to(device).state_dict(), model.state_dict())
    replace(back)
    ids = tokens()
    torch.testing.assert_close(back(input_ids=ids).logits, changed(input_ids=ids).logits)


def test_save_pretrained_of_the_inner_model(tmp_path: Path, device: str) -> None:
    model, changed = pair(replace)
    changed.model.save_pretrained(tmp_path)
    back = type(model.model).from_pretrained(tmp_path).to(device)
    assert same(back.state_dict(), model.model.state_dict())


def test_recipe_state(tmp_path: Path, device: str) -> None:
    """A state dict resumes delayed scaling; what save_pretrained writes is the original's."""
    model, changed = pair(replace)
    ids = tokens(4, 8)
    for _ in range(2):
        with te.autocast(recipe=te.recipe.DelayedScaling()):
            loss_of(changed, ids).backward()
    state = changed.state_dict()
    assert any("_recipe_state" in name for name in state)
    other = copy.deepcopy(model)
    replace(other)
    other.load_state_dict(state)
    losses = []
    for each in (changed, other):
        with te.autocast(recipe=te.recipe.DelayedScaling()):
            losses.append(loss_of(each, ids).item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    changed.save_pretrained(tmp_path)
    back, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    assert same(back.to(device).state_dict(), model.state_dict())


# -- what is refused


def use_a_subclass(model: Any) -> None:
    class Quantized(torch.nn.Linear):
        pass

    model.model.layers[1].mlp.up_proj = Quantized(64, 96, bias=False)


def use_int8(model: Any) -> None:
    linear = model.model.layers[1].mlp.down_proj
    linear.weight = torch.nn.Parameter(linear.weight.to(torch.int8), requires_grad=False)


def patch_the_forward(model: Any) -> None:
    model.model.norm.forward = model.model.norm.forward


def change_the_eps(model: Any) -> None:
    model.model.norm.variance_epsilon = None


def share_a_layer(model: Any) -> None:
    model.model.layers[1].mlp = model.model.layers[0].mlp


def share_a_weight(model: Any) -> None:
    model.model.layers[1].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight


def remember(module: Any, args: Any, output: Any) -> None:
    return None


class OddNorm(torch.nn.Module):
    """Calls itself an RMSNorm, and adds one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(64))
        self.eps = 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, (64,), self.weight, self.eps) + 1


class OddRMSNorm(OddNorm):
    pass


class OddMLP(torch.nn.Module):
    """The halves the other way round."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = mlp.gate_proj, mlp.up_proj, mlp.down_proj

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down_proj(
            self.gate_proj(x) * torch.nn.functional.silu(self.up_proj(x))
        )
        return y


class SeveralMLP(OddMLP):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), None


def layer(model: Any) -> Any:
    return model.model.layers[1]


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "linear": (use_a_subclass, "up_proj is a Quantized, not a torch.nn.Linear"),
    "int8": (use_int8, r"down_proj.weight is quantized \(torch.int8\)"),
    "forward": (patch_the_forward, "model.norm: LlamaRMSNorm: it has a forward of its own"),
    "eps": (change_the_eps, "no eps that is a number, got None"),
    "layer": (share_a_layer, "used in several places"),
    "weight": (share_a_weight, "shares a weight with another module"),
    "hook": (
        lambda m: layer(m).mlp.gate_proj.register_forward_hook(remember),
        "model.layers.1.mlp: LlamaMLP: gate_proj has hooks",
    ),
    "norm hook": (
        lambda m: layer(m).input_layernorm.register_forward_hook(remember),
        "model.layers.1.input_layernorm: LlamaRMSNorm: it has hooks",
    ),
    "frozen half": (
        lambda m: layer(m).mlp.up_proj.requires_grad_(False),
        "differ in requires_grad: True and False",
    ),
    "dtype": (lambda m: layer(m).mlp.up_proj.bfloat16(), "differ in dtype"),
    "gradient": (lambda m: loss_of(m, tokens()).backward(), "call zero_grad"),
    "compiled": (lambda m: layer(m).mlp.compile(), "is compiled; replace first"),
    "bias": (
        lambda m: setattr(layer(m).mlp, "up_proj", torch.nn.Linear(64, 96)),
        "one has a bias and the other has none",
    ),
    "norm": (
        lambda m: setattr(layer(m), "input_layernorm", OddRMSNorm()),
        "OddRMSNorm: it computes something else than an RMSNorm",
    ),
    "mlp": (
        lambda m: setattr(layer(m), "mlp", OddMLP(layer(m).mlp)),
        "something else than down.* hidden_act is 'silu'",
    ),
    "tuple": (
        lambda m: setattr(layer(m), "mlp", SeveralMLP(layer(m).mlp)),
        "gives a tuple, not a tensor",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    """The model stays as it is; without strict only that module does."""
    prepare, message = REFUSED[case]
    model = make()
    prepare(model)
    kinds = [type(module) for module in model.modules()]
    with pytest.raises(ValueError, match=rf"\[replace\][\s\S]*{message}"):
        replace(model)
    assert [type(module) for module in model.modules()] == kinds
    ids = tokens()
    runs = case not in ("compiled", "dtype", "eps", "int8", "tuple")
    wanted = model(input_ids=ids).logits if runs else None
    report = replace(model, strict=False)
    assert report.replaced
    assert 1 <= len(report.left) <= 2
    for entry in report.left:
        assert not isinstance(model.get_submodule(entry.name), te.ops.Sequential | te.ops.RMSNorm)
    if wanted is not None:
        torch.testing.assert_close(model(input_ids=ids).logits, wanted)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("Llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ("Starcoder2", {}, "not made of gate_proj, up_proj and down_proj"),
    ],
)
def test_models_that_are_refused(kind: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(make(kind, **options))


def test_a_norm_that_only_looks_like_one() -> None:
    """Its name promises nothing, so it is not asked for."""
    model = make()
    model.model.norm = OddNorm()
    report = replace(model)
    assert "model.norm" not in [entry.name for entry in report.replaced]


def test_a_norm_that_is_used_twice() -> None:
    """Then it stays by itself, and the report says why."""
    model = make()
    mlp = model.model.layers[0].mlp

    class Layer(type(model.model.layers[0])):  # type: ignore[misc]
        def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
            normed = self.post_attention_layernorm(hidden_states)
            result: torch.Tensor = self.mlp(normed) + normed
            return result

    class Opaque(Layer):
        def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
            assert hidden_states.sum() != 0
            result: torch.Tensor = self.mlp(self.post_attention_layernorm(hidden_states))
            return result

    model.model.layers[0].__class__ = Layer
    model.model.layers[1].__class__ = Opaque
    ids = tokens()
    wanted = model(input_ids=ids).logits
    notes = [entry.note for entry in replace(model).replaced if entry.name.endswith("mlp")]
    assert notes[0] == "post_attention_layernorm is used elsewhere too"
    assert notes[1].startswith("the layer's forward cannot be traced")
    assert model.model.layers[0].mlp is not mlp
    torch.testing.assert_close(model(input_ids=ids).logits, wanted)


def test_wrong_arguments() -> None:
    with pytest.raises(TypeError, match=r"\[replace\] model must be a torch.nn.Module, got int"):
        replace(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"must be a transformers.PreTrainedModel or hold one"):
        replace(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="recompute must be 'none' or 'cheap', got 'all'"):
        replace(make(), recompute="all")
    model = make()
    replace(torch.nn.Sequential(model))
    with pytest.raises(ValueError, match="no MLP and no RMSNorm that is not replaced already"):
        replace(model)
    assert not replace(model, strict=False).replaced
