"""torch's checkpoint tools on models with recipe state: dcp, its state dicts, old files."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from delayed_reference import recipe_state, state_of
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.default_planner import create_default_local_load_plan
from torch.distributed.checkpoint.planner import LoadPlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.nn.parallel import DistributedDataParallel

import ligature as te
from ligature.common import recipe as recipes

DATA = Path(__file__).parent / "data"


@pytest.fixture(autouse=True)
def _on_the_cpu(device: str) -> None:
    if device != "cpu":
        pytest.skip("files are the same for every device")


def delayed(length: int = 4) -> recipes.DelayedScaling:
    return recipes.DelayedScaling(amax_history_len=length)


def make(recipe: Any = None, size: int = 32) -> te.ops.Sequential:
    with te.quantized_model_init(enabled=recipe is not None, recipe=recipe):
        return te.ops.Sequential(
            OrderedDict(
                norm=te.ops.LayerNorm(size),
                fc1=te.ops.Linear(size, 64),
                act=te.ops.GELU(),
                quantize=te.ops.Quantize(),
                fc2=te.ops.BasicLinear(64, size),
            )
        )


class Block(torch.nn.Module):
    """Operations below a plain module."""

    def __init__(self, recipe: Any = None) -> None:
        super().__init__()
        self.first = torch.nn.Linear(32, 32)
        self.mlp = make(recipe)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(self.first(x))


def train(model: torch.nn.Module, recipe: Any, steps: int = 2) -> Any:
    for step in range(steps):
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            y = model(torch.randn(16, 32) * (step + 1))
        y.square().sum().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(1e-3 * parameter.grad)
        model.zero_grad()
    return model


def ops_of(model: torch.nn.Module) -> list[Any]:
    ops = [m for m in model.modules() if isinstance(m, te.ops.FusibleOperation)]
    return [op for op in ops if op._recipe_state_owner() is not None]


def states_of(model: torch.nn.Module) -> list[str]:
    return [str(op._recipe_state_owner()._handle.recipe_states()[-1:]) for op in ops_of(model)]


def same(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    one, other = a.state_dict(), b.state_dict()
    return (
        list(one) == list(other)
        and all(torch.equal(one[k], other[k]) for k in one)
        and states_of(a) == states_of(b)
    )


def goes_on_alike(a: torch.nn.Module, b: torch.nn.Module, recipe: Any) -> bool:
    """Two further steps give the same outputs, bit for bit."""
    for _ in range(2):
        x = torch.randn(16, 32)
        outputs = []
        for model in (a, b):
            with te.autocast(enabled=recipe is not None, recipe=recipe):
                y = model(x)
            y.sum().backward()
            outputs.append(y.detach())
            with torch.no_grad():  # a weight that stays is not quantized anew
                for parameter in model.parameters():
                    parameter.sub_(1e-2 * parameter.grad)
            model.zero_grad()
        if not torch.equal(*outputs):
            return False
    return same(a, b)


def quiet(function: Any, *args: Any, **kwargs: Any) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.distributed is disabled.*")
        return function(*args, no_dist=True, **kwargs)


def by_entries(model: Any, other: Any, path: Path) -> None:
    quiet(dcp.save, {"model": model.state_dict()}, checkpoint_id=path)
    state = {"model": other.state_dict()}
    quiet(dcp.load, state, checkpoint_id=path)
    other.load_state_dict(state["model"])


def by_module(model: Any, other: Any, path: Path) -> None:
    quiet(dcp.save, {"model": model}, checkpoint_id=path)
    quiet(dcp.load, {"model": other}, checkpoint_id=path)


def by_model_state(model: Any, other: Any, path: Path) -> None:
    quiet(dcp.save, get_model_state_dict(model), checkpoint_id=path)
    state = get_model_state_dict(other)
    quiet(dcp.load, state, checkpoint_id=path)
    set_model_state_dict(other, state)


def in_the_background(model: Any, other: Any, path: Path) -> None:
    saved = quiet(dcp.async_save, {"model": model.state_dict()}, checkpoint_id=path)
    saved.result()
    state = {"model": other.state_dict()}
    quiet(dcp.load, state, checkpoint_id=path)
    other.load_state_dict(state["model"])


WAYS = {f.__name__: f for f in (by_entries, by_module, by_model_state, in_the_background)}
RECIPES = {
    "delayed": delayed,
    "default": recipes.DelayedScaling,
    "current": recipes.Float8CurrentScaling,
    "none": lambda: None,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", RECIPES)
def test_dcp_into_a_fresh_model(way: str, name: str, tmp_path: Path) -> None:
    recipe = RECIPES[name]()
    model, other = train(Block(), recipe), Block()
    WAYS[way](model, other, tmp_path)
    assert same(model, other)
    if name in ("delayed", "default"):
        assert recipe_state(other.state_dict())
        assert state_of(other.mlp.fc1)[0][0][2][0] > 0
    assert goes_on_alike(model, other, recipe)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "make_recipe", [delayed, recipes.MXFP8BlockScaling, recipes.Float8CurrentScaling]
)
def test_dcp_with_quantized_weights(way: str, make_recipe: Any, tmp_path: Path) -> None:
    recipe = make_recipe()
    model, other = train(Block(recipe), recipe), Block(recipe)
    WAYS[way](model, other, tmp_path)
    assert same(model, other)
    assert isinstance(other.mlp.fc1.weight, te.QuantizedTensor)
    assert goes_on_alike(model, other, recipe)


class Planner(LoadPlanner):
    """One of a user's, not derived from torch's."""

    def set_up_planner(
        self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict, self.metadata = state_dict, metadata

    def create_local_plan(self) -> Any:
        return create_default_local_load_plan(self.state_dict, self.metadata)

    def create_global_plan(self, global_plan: Any) -> Any:
        return global_plan

    def finish_plan(self, central_plan: Any) -> Any:
        return central_plan

    def load_bytes(self, read_item: Any, value: Any) -> None:
        raise AssertionError(read_item)

    def resolve_tensor(self, read_item: Any) -> torch.Tensor:
        return self.state_dict[read_item.dest_index.fqn].detach()

    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
        pass


@pytest.mark.parametrize("make_recipe", [delayed, lambda: None])
def test_dcp_with_a_planner_of_a_users(make_recipe: Any, tmp_path: Path) -> None:
    recipe = make_recipe()
    model, other = train(Block(), recipe), Block()
    quiet(dcp.save, model.state_dict(), checkpoint_id=tmp_path)
    state = other.state_dict()
    planner = Planner()
    quiet(dcp.load, state, checkpoint_id=tmp_path, planner=planner)
    assert "set_up_planner" not in vars(planner)
    other.load_state_dict(state)
    assert same(model, other)


def test_parts_of_a_checkpoint(tmp_path: Path) -> None:
    """Into a model that has some of its operations: their state, and nothing else."""
    recipe = delayed()
    model, other = train(Block(), recipe), torch.nn.ModuleDict({"mlp": make()[:2]})
    quiet(dcp.save, {"model": model.state_dict(), "step": torch.ones(1)}, checkpoint_id=tmp_path)
    state = {
        "model": OrderedDict(
            (f"mlp.{name}", value)
            for name, value in OrderedDict(
                (key.replace("0.", "norm.").replace("1.", "fc1."), value)
                for key, value in other["mlp"].state_dict().items()
            ).items()
        ),
        "step": torch.zeros(1),
    }
    before = set(state["model"])
    quiet(dcp.load, state, checkpoint_id=tmp_path)
    added = set(state["model"]) - before
    # Quantize has no parameters to be known by.
    assert {name.split("._recipe_state")[0] for name in added} == {"mlp.fc1", "mlp.quantize"}
    assert set(state) == {"model", "step"}
    plain = {"weight": torch.zeros(32, 32), "bias": torch.zeros(32)}
    quiet(dcp.load, {"model": {"first.weight": plain["weight"]}}, checkpoint_id=tmp_path)
    assert torch.equal(plain["weight"], model.first.weight)


def test_checkpoints_without_state_load_as_ever(tmp_path: Path) -> None:
    plain = torch.nn.Linear(32, 64)
    quiet(dcp.save, {"model": plain.state_dict()}, checkpoint_id=tmp_path)
    linear = te.ops.Linear(32, 64)
    state = {"model": linear.state_dict()}
    quiet(dcp.load, state, checkpoint_id=tmp_path)
    assert list(state["model"]) == ["weight", "bias"]
    assert torch.equal(linear.weight, plain.weight)


def test_names_are_attributes() -> None:
    model = train(make(), delayed())
    for key, value in recipe_state(model.state_dict()).items():
        found: Any = model
        for part in key.split("."):
            found = getattr(found, part)
        assert torch.equal(found, value)
    assert not vars(make().fc1._recipe_state)


def test_state_dicts_with_an_optimizer(tmp_path: Path) -> None:
    recipe = delayed()
    model, other = Block(), Block()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (model, other)]
    for _ in range(2):
        with te.autocast(recipe=recipe):
            model(torch.randn(8, 32)).sum().backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
    dcp_states = get_state_dict(model, optimizers[0])
    quiet(dcp.save, dict(zip("mo", dcp_states, strict=True)), checkpoint_id=tmp_path)
    state = dict(zip("mo", get_state_dict(other, optimizers[1]), strict=True))
    quiet(dcp.load, state, checkpoint_id=tmp_path)
    set_state_dict(other, optimizers[1], model_state_dict=state["m"], optim_state_dict=state["o"])
    assert same(model, other)
    assert goes_on_alike(model, other, recipe)


@pytest.mark.parametrize("wrap", ["compiled", "twice"])
def test_names_below_a_wrapper(wrap: str) -> None:
    """Names of a compiled model, and of operations below containers, are found as attributes."""
    recipe = delayed()
    model, other = train(Block(), recipe), Block()
    outer = {
        "compiled": lambda m: torch.compile(m),
        "twice": lambda m: torch.nn.Sequential(OrderedDict(a=torch.nn.ModuleList([m]))),
    }[wrap]
    state = get_model_state_dict(outer(model))
    set_model_state_dict(outer(other), state)
    assert same(model, other)


@pytest.mark.parametrize("whole", [False, True])
def test_names_below_ddp(whole: bool, tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        recipe = delayed()
        model, other = train(Block(), recipe), Block()
        options = StateDictOptions(full_state_dict=whole)
        state = get_model_state_dict(DistributedDataParallel(model), options=options)
        assert not any(name.startswith("module.") for name in state)
        dcp.save(state, checkpoint_id=tmp_path)
        wrapped = DistributedDataParallel(other)
        fresh = get_model_state_dict(wrapped, options=options)
        dcp.load(fresh, checkpoint_id=tmp_path)
        set_model_state_dict(wrapped, fresh, options=options)
    finally:
        dist.destroy_process_group()
    assert same(model, other)


@pytest.mark.parametrize("make_recipe", [delayed, recipes.MXFP8BlockScaling])
@pytest.mark.parametrize("wrap", [DistributedDataParallel, torch.compile])
@pytest.mark.parametrize("whole", [False, True])
def test_quantized_weights_below_a_wrapper(
    make_recipe: Any, wrap: Any, whole: bool, tmp_path: Path
) -> None:
    recipe = make_recipe()
    model, other = train(Block(recipe), recipe), Block(recipe)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        options = StateDictOptions(full_state_dict=whole)
        state = get_model_state_dict(wrap(model), options=options)
        before = list(state)
        set_model_state_dict(wrap(other), state, options=options)
    finally:
        dist.destroy_process_group()
    assert all(key in state for key in before if "weight" in key)
    assert same(model, other)
    assert goes_on_alike(model, other, recipe)


def test_recipe_state_alone() -> None:
    model, other = train(Block(), delayed()), Block()
    state = recipe_state(model.state_dict())
    set_model_state_dict(other, state, options=StateDictOptions(strict=False))
    assert states_of(model) == states_of(other)


def _broadcast(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    file = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=file, rank=rank, world_size=2)
    found = {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    for name, weights in [
        ("plain", None),
        ("delayed", delayed()),
        ("current", RECIPES["current"]()),
    ]:
        for wrap in (None, DistributedDataParallel):
            torch.manual_seed(0)
            model = train(Block(weights), weights or delayed())
            torch.manual_seed(1)
            other = Block(weights)
            target = other if wrap is None else wrap(other)
            state = get_model_state_dict(model) if rank == 0 else {}
            set_model_state_dict(target, state, options=options)
            found[f"{name} {wrap}"] = same(model, other)
            del target
    torch.save(found, f"{folder}/{rank}")
    dist.barrier()
    dist.destroy_process_group()


def test_broadcast_from_rank_0(tmp_path: Path) -> None:
    mp.spawn(_broadcast, args=(str(tmp_path),), nprocs=2)
    for rank in range(2):
        found = torch.load(tmp_path / str(rank))
        assert len(found) == 6
        assert all(found.values()), (rank, found)


def test_safetensors(tmp_path: Path) -> None:
    model, other = train(Block(), delayed()), Block()
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    other.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert same(model, other)


# -- files of version 0.1.0

OLD = ["delayed", "delayed weights", "mxfp8 weights", "nvfp4 weights", "current"]
OLD_RECIPES = {
    "delayed": recipes.DelayedScaling(amax_history_len=4, margin=1),
    "delayed weights": delayed(),
    "mxfp8 weights": recipes.MXFP8BlockScaling(),
    "nvfp4 weights": recipes.NVFP4BlockScaling(disable_stochastic_rounding=True),
    "current": recipes.Float8CurrentScaling(),
}


def old_file(name: str) -> Any:
    return torch.load(DATA / "checkpoints_0_1_0.pt", weights_only=True)[name]


def old_model(name: str) -> te.ops.Sequential:
    with te.quantized_model_init(enabled="weights" in name, recipe=OLD_RECIPES[name]):
        return te.ops.Sequential(
            OrderedDict(
                norm=te.ops.LayerNorm(8),
                fc1=te.ops.Linear(8, 16),
                act=te.ops.GELU(),
                fc2=te.ops.BasicLinear(16, 8),
            )
        )


@pytest.mark.parametrize("name", OLD)
@pytest.mark.parametrize("assign", [False, True])
def test_files_of_0_1_0(name: str, assign: bool) -> None:
    old = old_file(name)
    model = old_model(name)
    result = model.load_state_dict(old["state_dict"], assign=assign)
    assert not result.missing_keys
    assert not result.unexpected_keys
    states = [
        [[None if t is None else tuple(t) for t in mode] for mode in state[1:]]
        for op in (model.fc1.basic_ops[0], model.fc2)
        for state in op._handle.recipe_states()
    ]
    assert str(states) == str(old["recipe_states"])
    assert list(model.state_dict()) == list(old["state_dict"])
    for key, value in model.state_dict().items():
        assert torch.equal(value, old["state_dict"][key]), key
    with torch.no_grad(), te.autocast(recipe=OLD_RECIPES[name]):
        torch.testing.assert_close(model(old["x"]), old["y"])


def test_a_pickled_model_of_0_1_0() -> None:
    model = torch.load(DATA / "model_0_1_0.pt", weights_only=False)
    old = old_file("delayed weights")
    for key, value in model.state_dict().items():
        assert torch.equal(value, old["state_dict"][key]), key
    with torch.no_grad(), te.autocast(recipe=OLD_RECIPES["delayed weights"]):
        torch.testing.assert_close(model(old["x"]), old["y"])
