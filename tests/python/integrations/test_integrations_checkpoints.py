"""Checkpoints of replaced decoders by the tools of torch, safetensors, huggingface_hub, accelerate
and transformers' Trainer, and an optimizer's state from before ``replace``."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import state_dict as dcp_state
from transformers_support import loss_of, make, pair, tokens

import ligature as te
from ligature.integrations.transformers import convert_optimizer_state, replace

GATE = "model.layers.0.mlp.gate_proj.weight"
UP = "model.layers.0.mlp.up_proj.weight"
NORM = "model.layers.1.post_attention_layernorm.weight"
KINDS = [("Llama", {"mlp_bias": True}), ("Qwen3", {"tie_word_embeddings": True}), ("Phi3", {})]


def same(a: Any, b: Any) -> bool:
    return list(a) == list(b) and all(torch.equal(a[name], b[name]) for name in a)


# -- names and memory


@pytest.mark.parametrize(("kind", "options"), [*KINDS, ("Gemma2", {}), ("Olmo2", {})])
def test_names_resolve_as_attributes(kind: str, options: dict[str, Any]) -> None:
    model, changed = pair(replace, kind, **options)
    for name, value in model.state_dict().items():
        found: Any = changed
        for step in name.split("."):
            found = getattr(found, step)
        assert torch.equal(found, value), name


def test_halves() -> None:
    model, changed = pair(replace, mlp_bias=True)
    original, mlp = model.model.layers[0].mlp, changed.model.layers[0].mlp
    x = torch.randn(3, 64)
    for name in ("gate_proj", "up_proj"):
        half, whole = getattr(mlp, name), getattr(original, name)
        assert (half.in_features, half.out_features) == (64, 96)
        torch.testing.assert_close(half(x), whole(x))
        assert changed.get_submodule(f"model.layers.0.mlp.{name}").out_features == 96
    half = mlp.up_proj
    half.weight.sum().backward()
    assert mlp.gate_up_proj.weight.grad[96:].eq(1).all()
    assert not mlp.gate_up_proj.weight.grad[:96].any()
    assert not any("gate_proj" in name for name, _ in changed.named_modules())
    with pytest.raises(AttributeError):
        _ = pair(replace, "Phi3")[1].model.layers[0].mlp.gate_proj
    again = copy.deepcopy(changed).model.layers[0]
    assert again.post_attention_layernorm.weight is again.mlp.norm.weight
    assert again.mlp.gate_proj.weight.data_ptr() == again.mlp.gate_up_proj.weight.data_ptr()


def storage_of(tensor: torch.Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


def test_entries_have_storages_of_their_own() -> None:
    """In the model's memory all the same, and known to be changed when they are written to."""
    _, changed = pair(replace)
    state = changed.state_dict()
    seen: list[tuple[int, int]] = []
    for name, tensor in state.items():
        begin, size = storage_of(tensor)
        assert size == tensor.nbytes, name
        assert all(begin + size <= b or b + s <= begin for b, s in seen), name
        seen.append((begin, size))
    weight = changed.model.layers[0].mlp.gate_up_proj.weight
    version = weight._version
    state[UP].fill_(2)
    assert weight._version > version
    assert weight[96:].eq(2).all()
    file = io.BytesIO()
    torch.save({UP: state[UP]}, file)
    assert file.getbuffer().nbytes < 1.2 * state[UP].nbytes
    up = state[UP]
    del changed, state, weight
    assert up.eq(2).all()  # it holds the memory


def test_entries_are_written_into_before_backward() -> None:
    """What a graph saved and a checkpoint's entry overwrote is noticed, as with torch's modules."""
    _, changed = pair(replace)
    loss = loss_of(changed, tokens())
    changed.state_dict()[GATE].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# -- torch.distributed.checkpoint


@pytest.mark.parametrize(("kind", "options"), KINDS)
@pytest.mark.parametrize("full", [False, True])
def test_distributed_checkpoint(
    kind: str, options: dict[str, Any], full: bool, tmp_path: Path
) -> None:
    choice = dcp_state.StateDictOptions(full_state_dict=full)
    model, changed = pair(replace, kind, **options)
    optimizer = torch.optim.AdamW(changed.parameters(), lr=1e-2)
    ids = tokens()
    loss_of(changed, ids).backward()
    optimizer.step()
    weights, moments = dcp_state.get_state_dict(changed, optimizer, options=choice)
    assert list(weights) == list(model.state_dict())
    assert same(weights, dcp_state.get_model_state_dict(changed, options=choice))
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=tmp_path, no_dist=True)

    other = make(kind, **options)
    replace(other)
    second = torch.optim.AdamW(other.parameters(), lr=1e-2)
    assert not same(other.state_dict(), changed.state_dict())
    into = dict(zip(("model", "optimizer"), dcp_state.get_state_dict(other, second), strict=True))
    dcp.load(into, checkpoint_id=tmp_path, no_dist=True)
    dcp_state.set_state_dict(
        other,
        second,
        model_state_dict=into["model"],
        optim_state_dict=into["optimizer"],
        options=choice,
    )
    assert same(other.state_dict(), changed.state_dict())
    for each, optim in ((changed, optimizer), (other, second)):
        each.zero_grad()
        loss_of(each, ids).backward()
        optim.step()
    assert same(other.state_dict(), changed.state_dict())


@pytest.mark.parametrize("full", [False, True])
def test_distributed_checkpoint_of_the_original(full: bool) -> None:
    model, changed = pair(replace)
    other = make()
    weights = dcp_state.get_model_state_dict(other)
    choice = dcp_state.StateDictOptions(full_state_dict=full)
    result = dcp_state.set_model_state_dict(changed, weights, options=choice)
    assert not result.missing_keys
    assert not result.unexpected_keys
    assert same(changed.state_dict(), other.state_dict())
    dcp_state.set_model_state_dict(model, dcp_state.get_model_state_dict(changed), options=choice)
    assert same(model.state_dict(), other.state_dict())


def test_distributed_checkpoint_of_recipe_state(tmp_path: Path) -> None:
    """A fresh model takes it, which lists none before its first call."""
    recipe = te.recipe.DelayedScaling(amax_history_len=16)
    ids = tokens(4, 8)
    _, changed = pair(replace)
    fresh = make()
    replace(fresh)
    assert not any("_recipe_state" in name for name in fresh.state_dict())
    for _ in range(2):
        with te.autocast(recipe=recipe):
            loss_of(changed, ids).backward()
    dcp.save(dcp_state.get_model_state_dict(changed), checkpoint_id=tmp_path, no_dist=True)
    state = dcp_state.get_model_state_dict(fresh)
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    dcp_state.set_model_state_dict(fresh, state)
    assert same(fresh.state_dict(), changed.state_dict())
    losses = []
    for each in (changed, fresh):
        with te.autocast(recipe=recipe):
            losses.append(loss_of(each, ids).item())
    assert losses[0] == losses[1]


# -- safetensors, huggingface_hub, accelerate


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_safetensors(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    from safetensors.torch import load_model, save_model

    model, changed = pair(replace, kind, **options)
    file = tmp_path / "model.safetensors"
    save_model(changed, str(file))
    size = sum(p.nbytes for p in model.parameters())
    assert size < file.stat().st_size < 1.2 * size + 20000
    other = make(kind, **options)
    load_model(other, str(file), device=str(torch.get_default_device()))
    assert same(other.state_dict(), model.state_dict())
    replace(other)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert load_model(other, str(file), device=str(torch.get_default_device())) == (set(), [])
    assert same(other.state_dict(), model.state_dict())


def test_safetensors_of_two_entries(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    _, changed = pair(replace)
    state = changed.state_dict()
    save_file({name: state[name] for name in (GATE, UP)}, tmp_path / "x.safetensors")
    assert same(
        dict(sorted(load_file(tmp_path / "x.safetensors", device=state[UP].device.type).items())),
        {name: state[name] for name in (GATE, UP)},
    )


def test_huggingface_hub(tmp_path: Path) -> None:
    from huggingface_hub import load_torch_model, save_torch_model, save_torch_state_dict

    model, changed = pair(replace)
    for folder in ("model", "state"):
        (tmp_path / folder).mkdir()
    save_torch_model(changed, tmp_path / "model")
    save_torch_state_dict(changed.state_dict(), tmp_path / "state", max_shard_size="20KB")
    for folder in ("model", "state"):
        other = make()
        load_torch_model(other, tmp_path / folder)
        assert same(other.state_dict(), model.state_dict())


@pytest.mark.parametrize("safe", [True, False])
def test_accelerate(safe: bool, tmp_path: Path, device: str) -> None:
    from accelerate import Accelerator

    losses = []
    saved: dict[str, torch.Tensor] = {}
    ids = tokens(4, 8)
    _, changed = pair(replace)
    fresh = make()
    replace(fresh)
    for given in (changed, fresh):
        accelerator = Accelerator(cpu=device == "cpu")
        model, optimizer = accelerator.prepare(
            given, torch.optim.AdamW(given.parameters(), lr=1e-2)
        )
        if given is changed:
            accelerator.backward(loss_of(model, ids))
            optimizer.step()
            accelerator.save_state(str(tmp_path / "state"), safe_serialization=safe)
            saved = {name: value.clone() for name, value in changed.state_dict().items()}
        else:
            accelerator.load_state(str(tmp_path / "state"))
            assert same(fresh.state_dict(), saved)
        for _ in range(2):
            optimizer.zero_grad()
            loss = loss_of(model, ids)
            accelerator.backward(loss)
            optimizer.step()
            losses.append(loss.item())
    assert losses[:2] == losses[2:]


# -- transformers' Trainer


class Data(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __init__(self) -> None:
        generator = torch.Generator("cpu").manual_seed(5)
        self.ids = torch.randint(3, 128, (32, 12), generator=generator, device="cpu")

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def train(model: Any, folder: Path, recipe: Any, device: str, resume: str | None = None) -> Any:
    from transformers import Trainer, TrainingArguments

    class Own(Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            with te.autocast(enabled=recipe is not None, recipe=recipe):
                return super().compute_loss(*args, **kwargs)

    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=6,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        save_steps=3,
        logging_steps=1,
        report_to=[],
        use_cpu=device == "cpu",
        disable_tqdm=True,
        seed=3,
    )
    with torch.device("cpu"):
        trainer = Own(model=model, args=arguments, train_dataset=Data())
        trainer.train(resume_from_checkpoint=resume)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize(
    "recipe",
    [
        None,
        te.recipe.DelayedScaling(amax_history_len=4),
        te.recipe.DelayedScaling(amax_compute_algo="most_recent"),
        te.recipe.Float8CurrentScaling(),
    ],
    ids=["none", "delayed", "most recent", "current"],
)
def test_trainer_resumes_exactly(recipe: Any, tmp_path: Path, device: str) -> None:
    torch.manual_seed(7)
    _, changed = pair(replace)
    start = copy.deepcopy(changed)
    losses = train(changed, tmp_path / "whole", recipe, device)
    again = train(start, tmp_path / "again", recipe, device, str(tmp_path / "whole/checkpoint-3"))
    assert len(losses) == 6
    assert losses[3:] == again[3:]
    assert same(changed.state_dict(), start.state_dict())


def test_checkpoints_of_trainer_are_the_originals_too(tmp_path: Path, device: str) -> None:
    """The original loads them; what it does not know of recipes is reported, nothing else."""
    model, changed = pair(replace)
    with te.autocast(recipe=te.recipe.DelayedScaling()):
        loss_of(changed, tokens()).backward()
    for model_to_save, inside in ((changed, changed), (changed.model, changed.model)):
        model_to_save.save_pretrained(tmp_path / "checkpoint-12")
        model_to_save.save_pretrained(tmp_path / "checkpoint-last")
        original = model if inside is changed else model.model
        back, info = type(original).from_pretrained(
            tmp_path / "checkpoint-12", output_loading_info=True
        )
        assert same(back.to(device).state_dict(), original.state_dict())
        unexpected = info.pop("unexpected_keys")
        assert unexpected
        assert all("_proj._recipe_state" in key for key in unexpected)
        assert not any(info.values())
        _, info = type(original).from_pretrained(
            tmp_path / "checkpoint-last", output_loading_info=True
        )
        assert not any(info.values())
    again = copy.deepcopy(changed)
    assert again.save_pretrained._model is again


# -- the state of an optimizer

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
}


def groups(model: torch.nn.Module, split: bool, named: bool) -> Any:
    """All parameters, or those of norms and biases apart."""
    every = list(model.named_parameters())
    if not split:
        return every if named else [p for _, p in every]

    def undecayed(name: str) -> bool:
        return "norm" in name or name.endswith("bias")

    parts = [[(n, p) for n, p in every if undecayed(n) is b] for b in (False, True)]
    if not named:
        parts = [[p for _, p in part] for part in parts]  # type: ignore[misc]
    return [
        {"params": parts[0], "weight_decay": 0.1},
        {"params": parts[1], "weight_decay": 0.0, "lr": 1e-3},
    ]


def step(model: Any, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> None:
    optimizer.zero_grad()
    loss_of(model, ids).backward()
    optimizer.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_state_from_before(name: str, split: bool, kind: str, options: dict[str, Any]) -> None:
    """An optimizer goes on as that of the original does."""
    model = make(kind, **options).double()
    first = OPTIMIZERS[name](groups(model, split, named=False))
    batches = [tokens() for _ in range(4)]
    for ids in batches[:2]:
        step(model, first, ids)
    changed = copy.deepcopy(model)
    replace(changed)
    second = OPTIMIZERS[name](groups(changed, split, named=False))
    saved = copy.deepcopy(first.state_dict())
    second.load_state_dict(convert_optimizer_state(changed, second, saved))
    back = convert_optimizer_state(changed, second, second.state_dict(), to="original")
    check_equal(back, saved)
    for ids in batches[2:]:
        step(model, first, ids)
        step(changed, second, ids)
    for a, b in zip(changed.state_dict().values(), model.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    back = convert_optimizer_state(changed, second, second.state_dict(), to="original")
    check_equal(back, first.state_dict(), rtol=1e-3, atol=1e-5)
    first.load_state_dict(back)


def check_equal(a: Any, b: Any, **tolerance: float) -> None:
    torch.testing.assert_close(a["state"], b["state"], **(tolerance or {"rtol": 0, "atol": 0}))
    assert a["param_groups"] == b["param_groups"]


def test_named_state() -> None:
    """With names of torch's optimizers, and as torch.distributed.checkpoint has it."""
    model = make()
    ids = tokens()
    first = OPTIMIZERS["adamw"](groups(model, True, named=True))
    step(model, first, ids)
    changed = copy.deepcopy(model)
    replace(changed)
    second = OPTIMIZERS["adamw"](groups(changed, True, named=True))
    saved = copy.deepcopy(first.state_dict())
    made = convert_optimizer_state(changed, second, saved)
    assert "model.layers.0.mlp.gate_up_proj.weight" in made["param_groups"][0]["param_names"]
    second.load_state_dict(made)
    check_equal(convert_optimizer_state(changed, second, made, to="original"), saved)

    named = dcp_state.get_optimizer_state_dict(model, first)
    made = convert_optimizer_state(changed, second, named)
    wanted = dcp_state.get_optimizer_state_dict(changed, second)
    assert set(made["state"]) == set(wanted["state"])
    torch.testing.assert_close(made["state"], wanted["state"], rtol=0, atol=0)
    dcp_state.set_optimizer_state_dict(changed, second, made)
    back = convert_optimizer_state(changed, second, wanted, to="original")
    assert set(back["state"]) == set(named["state"])


def test_state_of_some_parameters() -> None:
    """Frozen ones have none, and an optimizer may be without some."""
    model = make()
    for parameter in model.model.layers[0].parameters():
        parameter.requires_grad_(False)
    changed = copy.deepcopy(model)
    replace(changed)
    first = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    second = torch.optim.AdamW([p for p in changed.parameters() if p.requires_grad])
    step(model, first, tokens())
    made = convert_optimizer_state(changed, second, first.state_dict())
    second.load_state_dict(made)
    assert len(made["state"]) == len(first.state_dict()["state"]) - 1


def test_state_that_cannot_be_converted() -> None:
    model, changed = pair(replace)
    ids = tokens()

    def state(optimizer: torch.optim.Optimizer) -> Any:
        step(model, optimizer, ids)
        return optimizer.state_dict()

    second = torch.optim.AdamW(changed.parameters())
    adam = state(torch.optim.AdamW(model.parameters()))
    with pytest.raises(ValueError, match="to must be 'replaced' or 'original', got 'plain'"):
        convert_optimizer_state(changed, second, adam, to="plain")
    with pytest.raises(TypeError, match="state_dict must be that of an optimizer"):
        convert_optimizer_state(changed, second, model.state_dict())
    with pytest.raises(ValueError, match="must have 1 param_groups, as the optimizer has, got 2"):
        convert_optimizer_state(changed, second, {**adam, "param_groups": adam["param_groups"] * 2})
    fewer = state(torch.optim.AdamW(list(model.parameters())[1:]))
    with pytest.raises(ValueError, match="group 0 of state_dict must have 21 parameters"):
        convert_optimizer_state(changed, second, fewer)
    with pytest.raises(ValueError, match="optimizer must be over the replaced model"):
        convert_optimizer_state(changed, torch.optim.AdamW(model.parameters()), adam)
    backwards = state(torch.optim.AdamW(list(model.parameters())[::-1]))
    with pytest.raises(ValueError, match=r"exp_avg of .* must be .* like the parameter, got"):
        convert_optimizer_state(changed, second, backwards)
    factored = state(torch.optim.Adafactor(model.parameters()))
    with pytest.raises(ValueError, match=r"'(row|col)_var' of .*gate_proj.weight and .*up_proj"):
        convert_optimizer_state(changed, torch.optim.Adafactor(changed.parameters()), factored)
    halves = copy.deepcopy(adam)
    names = [name for name, _ in model.named_parameters()]
    del halves["state"][names.index(UP)]
    with pytest.raises(ValueError, match=r"must have the same of .*gate_proj.weight and .*up_proj"):
        convert_optimizer_state(changed, second, halves)
    steps = copy.deepcopy(adam)
    steps["state"][names.index(UP)]["step"] += 1
    with pytest.raises(ValueError, match=r"'step' of .*or one number that both share"):
        convert_optimizer_state(changed, second, steps)
