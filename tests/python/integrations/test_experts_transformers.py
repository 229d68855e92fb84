"""Mixtures of experts of the transformers package: their experts are computed by operations."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from experts_support import (
    MIXTURES,
    assert_same_step,
    experts_of,
    make_mixture,
    mixture_pair,
)
from torch import nn
from transformers.integrations.moe import ExpertsInterface
from transformers_support import error, loss_of, tokens

import ligature as te
from ligature.integrations.transformers import (
    convert_optimizer_state,
    gradient_checkpointing_enable,
    replace,
)
from ligature.integrations.transformers.experts import pipeline_of

TOGETHER = ("Dispatch", "GroupedLinear", "ScaledSwiGLU", "GroupedLinear", "Combine")
CLAMPED = ("Dispatch", "GroupedLinear", "ScaledClampedQGeGLU", "GroupedLinear", "Combine")


def use_ligature(model: Any) -> None:
    model.set_experts_implementation("ligature")


# -- real models


@pytest.mark.parametrize("change", [use_ligature, replace])
@pytest.mark.parametrize("kind", MIXTURES)
def test_same_as_the_original(kind: str, change: Any) -> None:
    model, changed = mixture_pair(change, kind)
    assert_same_step(changed, copy.deepcopy(model).double(), tokens(), 1e-5)
    assert list(changed.state_dict()) == list(model.state_dict())
    wanted = CLAMPED if kind == "GptOss" else TOGETHER
    assert {pipeline_of(experts).operations for experts in experts_of(changed)} == {wanted}


def test_report() -> None:
    report = replace(make_mixture("DeepseekV3"))
    assert not report.left
    lines = [" ".join(line.split()) for line in str(report).splitlines()]
    assert f"model.layers.*.mlp.experts 1 x {', '.join(TOGETHER)}" in lines
    assert (
        "model.layers.*.mlp.shared_experts 1 x Linear, SwiGLU, Linear; its input goes to the "
        "experts too"
    ) in lines
    assert (
        "model.layers.*.mlp 1 x RMSNorm, Linear, SwiGLU, Linear (with post_attention_layernorm)"
    ) in lines


def test_no_parameter_is_copied() -> None:
    model = make_mixture("GptOss")
    before = dict(model.named_parameters())
    replace(model)
    loss_of(model, tokens()).backward()
    after = dict(model.named_parameters())
    assert all(after[name] is before[name] for name in before if "experts" in name)
    for experts in experts_of(model):
        pipeline = pipeline_of(experts)
        assert pipeline.first.weight.data_ptr() == experts.gate_up_proj.data_ptr()
        assert not list(pipeline.parameters())
        assert all(p.grad is not None for p in experts.parameters())


@pytest.mark.parametrize("kind", ["Mixtral", "Qwen3Moe"])
@pytest.mark.parametrize(
    ("dtype", "recipe", "tolerance"),
    [
        (torch.float32, None, 1e-5),
        (torch.bfloat16, None, 3e-2),
        (torch.float32, te.recipe.Float8CurrentScaling, 6e-2),
        (torch.bfloat16, te.recipe.DelayedScaling, 6e-2),
        (torch.bfloat16, te.recipe.MXFP8BlockScaling, 6e-2),
    ],
    ids=["float32", "bfloat16", "fp8 current", "fp8 delayed", "mxfp8"],
)
def test_fifty_steps_of_training(
    kind: str, dtype: torch.dtype, recipe: Any, tolerance: float
) -> None:
    models = [model.to(dtype) for model in mixture_pair(replace, kind)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3) for model in models]
    batches = [tokens(4, 16) for _ in range(4)]
    losses: list[list[float]] = [[], []]
    for step in range(50):
        for place, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            with te.autocast(enabled=recipe is not None and place == 1, recipe=recipe and recipe()):
                loss = loss_of(model, batches[step % 4])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[place].append(loss.item())
    assert losses[0][-1] < 0.75 * losses[0][0]
    assert (losses[1] != losses[0]) or recipe is None
    torch.testing.assert_close(losses[1], losses[0], rtol=tolerance, atol=0)


@pytest.mark.parametrize("kind", MIXTURES)
def test_generate_with_a_cache(kind: str) -> None:
    model, changed = mixture_pair(replace, kind)
    ids = tokens(2, 5)
    options = {"max_new_tokens": 8, "do_sample": False, "use_cache": True}
    wanted = model.eval().generate(ids, **options)
    assert wanted.shape[1] > 5
    assert torch.equal(changed.eval().generate(ids, **options), wanted)


@pytest.mark.parametrize(
    ("kind", "recipe"), [("Mixtral", te.recipe.DelayedScaling), ("GptOss", None)]
)
def test_compiled_without_graph_breaks(kind: str, recipe: Any) -> None:
    _, changed = mixture_pair(replace, kind, num_hidden_layers=1)
    other = copy.deepcopy(changed)
    torch._dynamo.reset()
    compiled = torch.compile(other, backend="aot_eager", fullgraph=True)
    for ids in (tokens(), tokens()):
        losses = []
        for model in (changed, compiled):
            model.zero_grad()
            with te.autocast(enabled=recipe is not None, recipe=recipe and recipe()):
                loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            losses.append(loss.item())
        assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    most = 5e-5 if recipe is None else 1e-2
    for ours, wanted in zip(other.parameters(), changed.parameters(), strict=True):
        assert error(ours.grad, wanted.grad) < most


def test_under_torch_autocast(device: str) -> None:
    model, changed = mixture_pair(replace, "Mixtral")
    ids = tokens(4, 32)
    with torch.autocast(device, torch.bfloat16):
        ours, theirs = loss_of(changed, ids), loss_of(model, ids)
    assert ours.item() == pytest.approx(theirs.item(), rel=5e-3)
    for loss in (ours, theirs):
        loss.backward()
    gradients = [experts_of(m)[0].down_proj.grad for m in (changed, model)]
    assert gradients[0].dtype is torch.float32
    assert error(*gradients) < 5e-2


def test_explained_with_the_model() -> None:
    model = make_mixture("Mixtral")
    replace(model)
    loss_of(model, tokens()).backward()
    text = str(te.explain(model))
    for layer in range(2):
        assert f"model.layers.{layer}.mlp.experts" in text
    assert "Dispatch, GroupedLinear, ScaledSwiGLU, GroupedLinear, Combine" in text


def test_recompute() -> None:
    model = make_mixture("Mixtral")
    replace(model, recompute="cheap")
    pipelines = [pipeline_of(experts) for experts in experts_of(model)]
    assert all(p.pipeline is not None and p.pipeline.recompute == "cheap" for p in pipelines)
    loss_of(model, tokens()).backward()


@pytest.mark.parametrize("recipe", [None, te.recipe.Float8CurrentScaling])
def test_gradient_checkpointing(recipe: Any) -> None:
    _, changed = mixture_pair(replace, "Qwen3Moe")
    other = copy.deepcopy(changed)
    gradient_checkpointing_enable(other)
    ids = tokens()
    for model in (changed, other):
        with te.autocast(enabled=recipe is not None, recipe=recipe and recipe()):
            loss = loss_of(model.train(), ids)
        loss.backward()
    for ours, wanted in zip(other.parameters(), changed.parameters(), strict=True):
        assert error(ours.grad, wanted.grad) <= 1e-6


def test_frozen_parameters_get_no_gradients() -> None:
    model, changed = mixture_pair(replace, "Mixtral")
    ids = tokens()
    for m in (model, changed):
        m.requires_grad_(False)
        experts_of(m)[0].down_proj.requires_grad_(True)
        loss_of(m, ids).backward()
    with_gradients = [n for n, p in changed.named_parameters() if p.grad is not None]
    assert with_gradients == ["model.layers.0.mlp.experts.down_proj"]
    assert error(*(experts_of(m)[0].down_proj.grad for m in (changed, model))) < 5e-5


# -- copies, checkpoints, optimizers


def copied(model: Any) -> Any:
    return copy.deepcopy(model)


def pickled(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("again", [copied, pickled])
def test_a_copy_has_parameters_of_its_own(again: Any) -> None:
    model = make_mixture("Qwen3Moe")
    replace(model)
    ids = tokens()
    logits = model(input_ids=ids).logits
    other = again(model)
    torch.testing.assert_close(other(input_ids=ids).logits, logits, rtol=0, atol=0)
    with torch.no_grad():
        for experts in experts_of(model):
            experts.down_proj.zero_()
    torch.testing.assert_close(other(input_ids=ids).logits, logits, rtol=0, atol=0)
    assert error(model(input_ids=ids).logits, logits) > 1e-3
    loss_of(other, ids).backward()
    assert all(experts.down_proj.grad is not None for experts in experts_of(other))
    assert all(experts.down_proj.grad is None for experts in experts_of(model))


def test_other_parameters_for_a_call() -> None:
    model, changed = mixture_pair(replace, "GptOss")
    ids = tokens()
    changed(input_ids=ids)
    twice = {n: 2 * p.detach() for n, p in changed.named_parameters() if "experts" in n}
    call = torch.func.functional_call
    found, wanted = (call(m, twice, (), {"input_ids": ids}).logits for m in (changed, model))
    assert error(found, wanted) < 1e-5
    assert error(found, model(input_ids=ids).logits) > 1e-3


def test_another_dtype_afterwards() -> None:
    model, changed = mixture_pair(replace, "Mixtral")
    ids = tokens()
    changed(input_ids=ids)
    logits = changed.double()(input_ids=ids).logits
    assert logits.dtype is torch.float64
    assert error(logits, model.double()(input_ids=ids).logits) < 1e-6


def test_states_of_recipes_are_in_checkpoints(tmp_path: Any) -> None:
    model = make_mixture("Mixtral")
    replace(model)
    ids = tokens()
    names = list(model.state_dict())
    for _ in range(3):
        with te.autocast(recipe=te.recipe.DelayedScaling()):
            loss = loss_of(model, ids)
        loss.backward()
    saved = model.state_dict()
    more = [name for name in saved if name not in names]
    assert more
    assert all(".experts._ligature." in name for name in more)
    other = make_mixture("Mixtral")
    replace(other)
    other.load_state_dict(saved)
    losses = []
    for m in (model, other):
        with te.autocast(recipe=te.recipe.DelayedScaling()):
            losses.append(loss_of(m, ids).item())
    assert losses[0] == losses[1]
    # What save_pretrained writes is the original's.
    model.save_pretrained(tmp_path)
    plain = type(model).from_pretrained(tmp_path)
    assert plain.get_experts_implementation()[""] != "ligature"
    assert error(plain(input_ids=ids).logits, model(input_ids=ids).logits) < 1e-5
    # A checkpoint without them, and one with something else, are as for any model.
    other.load_state_dict({name: saved[name] for name in names})
    with pytest.raises(RuntimeError, match=r"_ligature\.first\.something"):
        other.load_state_dict(
            {**saved, "model.layers.0.mlp.experts._ligature.first.something": ids}
        )


def test_optimizer_state_of_the_original() -> None:
    model, changed = mixture_pair(replace, "DeepseekV3")
    batches = [tokens() for _ in range(3)]
    before = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loss_of(model, batches[0]).backward()
    before.step()
    before.zero_grad()
    changed.load_state_dict(model.state_dict())
    after = torch.optim.AdamW(changed.parameters(), lr=1e-3)
    after.load_state_dict(convert_optimizer_state(changed, after, before.state_dict()))
    for batch in batches[1:]:
        losses = []
        for m, optimizer in ((model, before), (changed, after)):
            loss = loss_of(m, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert losses[1] == pytest.approx(losses[0], rel=1e-4)


# -- what is left alone


def test_another_activation_is_in_the_report() -> None:
    model = make_mixture("Mixtral", hidden_act="gelu")
    changed = copy.deepcopy(model)
    report = replace(changed)
    (entry, _) = [e for e in report.replaced if e.name.endswith("experts")]
    assert entry.operations[2] == "MixtralExperts._apply_gate"
    assert "runs between the operations, since no operation computes the same" in entry.note
    assert_same_step(changed, model.double(), tokens(), 1e-5)


def test_experts_that_take_no_implementation() -> None:
    import transformers

    config = transformers.Llama4TextConfig(
        hidden_size=32,
        intermediate_size=32,
        intermediate_size_mlp=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=128,
        num_local_experts=2,
        pad_token_id=0,
    )
    model = transformers.Llama4ForCausalLM(config)
    with pytest.raises(ValueError, match="mixture of experts that takes no other implementation"):
        replace(model)


def test_one_configuration_has_one_implementation() -> None:
    model = make_mixture("Mixtral")
    second = experts_of(model)[1]
    second.down_proj = nn.Parameter(second.down_proj.detach().to(torch.float8_e4m3fn), False)
    with pytest.raises(ValueError, match="down_proj is quantized"):
        replace(model)
    report = replace(model, strict=False)
    reasons = {left.name: left.reason for left in report.left}
    assert "down_proj is quantized" in reasons["model.layers.1.mlp.experts"]
    assert "has the same configuration" in reasons["model.layers.0.mlp.experts"]
    assert model.get_experts_implementation()[""] == "eager"


def test_replaced_once() -> None:
    model = make_mixture("Mixtral")
    replace(model)
    with pytest.raises(ValueError, match="not replaced already"):
        replace(model)
    model.set_experts_implementation("eager")
    assert len(replace(model).replaced) == 2  # the experts again


def test_registered_when_imported() -> None:
    assert "ligature" in ExpertsInterface().valid_keys()
