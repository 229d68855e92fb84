"""Decoders of the transformers package compute the same with their MLPs and norms replaced."""

from __future__ import annotations

import copy
import subprocess
import sys
from typing import Any

import pytest
import torch
from transformers_support import backward, error, loss_of, make, pair, tokens

import ligature as te
from ligature.integrations.transformers import gradient_checkpointing_enable, replace

PLAIN = ("RMSNorm", "Linear", "SwiGLU", "Linear")
AFTER = "post_attention_layernorm"
FAMILIES = [
    ("Llama", {}, PLAIN, AFTER),
    ("Llama", {"mlp_bias": True, "rms_norm_eps": 1e-2}, PLAIN, AFTER),
    ("Llama", {"hidden_act": "relu"}, ("RMSNorm", "Linear", "ReGLU", "Linear"), AFTER),
    ("Llama", {"hidden_act": "relu2"}, ("RMSNorm", "Linear", "SReGLU", "Linear"), AFTER),
    ("Llama", {"hidden_act": "sigmoid"}, ("RMSNorm", "Linear", "GLU", "Linear"), AFTER),
    ("Llama", {"hidden_act": "quick_gelu"}, ("RMSNorm", "Linear", "QGEGLU", "Linear"), AFTER),
    ("Mistral", {}, PLAIN, AFTER),
    ("Qwen2", {}, PLAIN, AFTER),
    ("Qwen3", {}, PLAIN, AFTER),
    ("Phi3", {}, PLAIN, AFTER),
    ("Gemma", {}, ("RMSNorm", "Linear", "GEGLU", "Linear"), AFTER),
    ("Gemma2", {}, ("RMSNorm", "Linear", "GEGLU", "Linear"), "pre_feedforward_layernorm"),
    ("Olmo2", {}, ("Linear", "SwiGLU", "Linear"), None),
]


@pytest.mark.parametrize(
    ("kind", "options", "operations", "norm"),
    FAMILIES,
    ids=[" ".join([kind, *map(str, options.values())]) for kind, options, *_ in FAMILIES],
)
def test_same_as_the_original(
    kind: str, options: dict[str, Any], operations: tuple[str, ...], norm: str | None
) -> None:
    model = make(kind, **options)
    changed = copy.deepcopy(model)
    report = replace(changed)
    mlps = [entry for entry in report.replaced if entry.name.endswith(".mlp")]
    assert [entry.operations for entry in mlps] == [operations] * 2
    assert [entry.norm and entry.norm.rpartition(".")[2] for entry in mlps] == [norm] * 2
    assert not report.left
    ours = (te.ops.RMSNorm, torch.nn.RMSNorm)
    assert not [
        m for m in changed.modules() if "RMSNorm" in type(m).__name__ and type(m) not in ours
    ]

    ids = tokens()
    reference = copy.deepcopy(model).double()
    assert error(changed(input_ids=ids).logits, reference(input_ids=ids).logits) < 1e-5
    wanted, wanted_gradients = backward(reference, ids)
    loss, found = backward(changed, ids, norm or "")
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-5)
    assert set(found) == set(wanted_gradients)
    for name, gradient in found.items():
        assert error(gradient, wanted_gradients[name]) < 5e-5, name


def test_bfloat16() -> None:
    """As near to float64 as the original is."""
    model, changed = pair(replace)
    model, changed = model.bfloat16(), changed.bfloat16()
    reference = copy.deepcopy(model).double()
    ids = tokens(4, 32)
    logits = reference(input_ids=ids).logits
    ours, theirs = (error(m(input_ids=ids).logits, logits) for m in (changed, model))
    assert ours < 1.2 * theirs
    _, wanted = backward(reference, ids)
    _, originals = backward(model, ids)
    _, found = backward(changed, ids)
    for name, gradient in found.items():
        assert gradient.dtype is torch.bfloat16
        assert error(gradient, wanted[name]) < 1.5 * error(originals[name], wanted[name]), name


def test_under_torch_autocast(device: str) -> None:
    model, changed = pair(replace)
    reference = copy.deepcopy(model).double()
    ids = tokens(4, 32)
    _, wanted = backward(reference, ids)
    with torch.autocast(device, torch.bfloat16):
        ours, theirs = loss_of(changed, ids), loss_of(model, ids)
    assert ours.item() == pytest.approx(theirs.item(), rel=2e-3)
    ours.backward()
    gradient = changed.model.layers[0].mlp.gate_up_proj.weight.grad
    both = [wanted[f"model.layers.0.mlp.{half}_proj.weight"] for half in ("gate", "up")]
    assert error(gradient, torch.cat(both)) < 2e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_hundred_steps_of_training(dtype: torch.dtype) -> None:
    models = [model.to(dtype) for model in pair(replace)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3) for model in models]
    batches = [tokens(4, 16) for _ in range(4)]
    losses: list[list[float]] = [[], []]
    for step in range(100):
        for model, optimizer, kept in zip(models, optimizers, losses, strict=True):
            loss = loss_of(model, batches[step % 4])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            kept.append(loss.item())
    assert losses[0][-1] < 0.5 * losses[0][0]
    tolerance = 2e-3 if dtype is torch.float32 else 5e-2
    torch.testing.assert_close(losses[1], losses[0], rtol=tolerance, atol=0)


def test_generate_with_a_cache() -> None:
    model, changed = pair(replace)
    ids = tokens(2, 5)
    options = {"max_new_tokens": 12, "do_sample": False, "use_cache": True}
    wanted = model.eval().generate(ids, **options)
    assert wanted.shape[1] > 5
    assert torch.equal(changed.eval().generate(ids, **options), wanted)


@pytest.mark.parametrize("recipe", [None, te.recipe.DelayedScaling])
def test_compiled_without_graph_breaks(recipe: Any) -> None:
    _, changed = pair(replace)
    other = copy.deepcopy(changed)
    compiled = torch.compile(other, backend="aot_eager", fullgraph=True)
    ids = tokens()
    torch._dynamo.reset()
    for _ in range(2):
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


# -- Ligature's own settings


@pytest.mark.parametrize(
    "recipe",
    [te.recipe.DelayedScaling, te.recipe.Float8CurrentScaling, te.recipe.MXFP8BlockScaling],
)
def test_recipes(recipe: Any) -> None:
    _, changed = pair(replace)
    ids = tokens(4, 16)
    plain, wanted = backward(changed, ids)
    with te.autocast(recipe=recipe()):
        for _ in range(2):  # the second time with factors that the first has found
            loss = loss_of(changed, ids)
    loss.backward()
    assert loss.item() != plain.item()
    assert loss.item() == pytest.approx(plain.item(), rel=2e-2)
    gradient = changed.model.layers[1].mlp.down_proj.weight.grad
    assert 0 < error(gradient, wanted["model.layers.1.mlp.down_proj.weight"]) < 0.2
    steps = changed.model.layers[0].mlp.explain().to_dict()["parts"][0]["forward"]
    assert "e4m3" in str(steps)


def test_recompute() -> None:
    model = make()
    ids = tokens()
    found = {}
    for recompute in ("none", "cheap"):
        changed = copy.deepcopy(model)
        replace(changed, recompute=recompute)
        assert changed.model.layers[0].mlp.recompute == recompute
        _, gradients = backward(changed, ids)
        found[recompute] = te.explain(changed).saved_bytes, gradients
    assert found["cheap"][0] < found["none"][0]
    for name, gradient in found["cheap"][1].items():
        torch.testing.assert_close(gradient, found["none"][1][name])


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_of_torch(reentrant: bool) -> None:
    model, changed = pair(replace)
    ids = tokens()
    _, wanted = backward(model, ids)
    changed.gradient_checkpointing_enable({"use_reentrant": reentrant})
    _, found = backward(changed.train(), ids)
    for name, gradient in found.items():
        assert error(gradient, wanted[name]) < 5e-5, name


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("recipe", [te.recipe.DelayedScaling, te.recipe.Float8CurrentScaling])
def test_gradient_checkpointing_with_a_recipe(recipe: Any, reentrant: bool, device: str) -> None:
    """Backward is called outside of the context; the layers run again with its recipe."""
    _, changed = pair(replace)
    other = copy.deepcopy(changed)
    gradient_checkpointing_enable(other, use_reentrant=reentrant)
    ids = tokens()
    for model in (changed, other):
        for _ in range(2):
            model.train().zero_grad()
            with te.autocast(recipe=recipe()):
                loss = loss_of(model, ids)
            loss.backward()
    most = 0 if device == "cpu" else 1e-2  # a GPU adds up in any order
    for ours, wanted in zip(other.parameters(), changed.parameters(), strict=True):
        assert error(ours.grad, wanted.grad) <= most


# -- what is taken over


def test_what_is_taken_over(device: str) -> None:
    model = make("Gemma2", tie_word_embeddings=True, torch_dtype=torch.bfloat16).bfloat16()
    model.model.layers[0].requires_grad_(False)
    model.model.layers[1].mlp.eval()
    kept = model.model.layers[0].mlp.down_proj.weight
    changed = model
    replace(changed)
    first, second = changed.model.layers
    assert first.mlp.down_proj.weight is kept
    assert changed.lm_head.weight is changed.model.embed_tokens.weight
    assert not any(p.requires_grad for p in first.parameters())
    assert all(p.requires_grad for p in second.parameters())
    assert all(p.dtype is torch.bfloat16 for p in changed.parameters())
    assert all(p.device.type == device for p in changed.parameters())
    assert (first.mlp.training, second.mlp.training) == (True, False)
    assert second.mlp.norm.eps == changed.config.rms_norm_eps
    assert second.mlp.norm.zero_centered_gamma
    changed.eval()
    assert not any(m.training for m in changed.modules())


def test_frozen_parameters_get_no_gradients() -> None:
    model, changed = pair(replace)
    for m in (model, changed):
        m.requires_grad_(False)
        m.model.layers[0].self_attn.requires_grad_(True)
    ids = tokens()
    _, wanted = backward(model, ids)
    _, found = backward(changed, ids)
    assert set(found) == set(wanted)
    for name, gradient in found.items():
        assert error(gradient, wanted[name]) < 5e-5, name


def test_copies() -> None:
    _, changed = pair(replace)
    other = copy.deepcopy(changed)
    ids = tokens()
    torch.testing.assert_close(other(input_ids=ids).logits, changed(input_ids=ids).logits)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert all(changed.state_dict()[name].any() for name in other.state_dict())
    other.load_state_dict(changed.state_dict())
    torch.testing.assert_close(other(input_ids=ids).logits, changed(input_ids=ids).logits)


def test_another_dtype_afterwards() -> None:
    model, changed = pair(replace)
    ids = tokens()
    logits = changed.double()(input_ids=ids).logits
    assert logits.dtype is torch.float64
    assert error(logits, model.double()(input_ids=ids).logits) < 1e-6


def test_a_hook_on_the_norm_in_the_pipeline() -> None:
    model, changed = pair(replace)
    seen: list[torch.Tensor] = []
    for norm in (model.model.layers[0].post_attention_layernorm, changed.model.layers[0].mlp.norm):
        norm.register_forward_hook(lambda module, args, output: seen.append(output))
    ids = tokens()
    torch.testing.assert_close(changed(input_ids=ids).logits, model(input_ids=ids).logits)
    torch.testing.assert_close(*seen)


# -- the report, and when transformers is asked for


def test_report() -> None:
    report = replace(make("Llama", hidden_act="tanh"), strict=False)
    *replaced, title, left = str(report).splitlines()
    assert replaced == [
        "replaced:",
        "  model.layers.*.input_layernorm           2 x RMSNorm",
        "  model.layers.*.post_attention_layernorm  2 x RMSNorm",
        "  model.norm                               1 x RMSNorm",
    ]
    assert title == "left alone:"
    assert left.startswith("  model.layers.*.mlp  2 x LlamaMLP: it computes something else than ")
    assert str(replace(make())).splitlines()[1] == (
        "  model.layers.*.mlp              2 x RMSNorm, Linear, SwiGLU, Linear "
        "(with post_attention_layernorm)"
    )


def test_transformers_is_imported_on_use_only() -> None:
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "import ligature, torch\n"
        "module = ligature.integrations.transformers\n"
        "assert 'transformers' in dir(ligature.integrations)\n"
        "try: module.replace(torch.nn.Linear(1, 1))\n"
        "except ImportError as error: print(error)\n"
        "try: ligature.integrations.nothing\n"
        "except AttributeError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "needs the package transformers" in done.stdout
    assert "no attribute 'nothing'" in done.stdout
