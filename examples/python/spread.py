"""The small language model over several processes, and a trainer for it.

Each rank has some of the sequences of a batch. Attention computes with those alone; the linears of
an MLP are cut into parts, one per rank, and compute with all sequences: ``sequence_parallel``
gathers them before the first linear and scatters the sums after the second.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from demo import TURN, Trainer
from timeline import Entry, Step
from torch import nn
from transformer import Block, Model

import ligature as te

LARGEST = 1.0  # norm of the gradients


# -- the model


def part_of(name: str, whole: torch.Tensor) -> torch.Tensor:
    """This rank's part of a parameter of the MLP, or of its gradient."""
    rank, size = dist.get_rank(), dist.get_world_size()
    linear, _, kind = name.partition(".")
    if linear == "fc1":
        # The first half of its outputs is the gate: a rank has some of either half.
        return torch.cat([half.chunk(size)[rank] for half in whole.chunk(2)])
    if linear == "fc2" and kind == "weight":
        return whole.chunk(size, dim=1)[rank]
    return whole


def spread_mlp(width: int, recompute: str) -> te.ops.Sequential:
    """``transformer.ligature_mlp`` over the ranks, with one bias behind the sum."""
    start, end = te.ops.MakeExtraOutput(), te.ops.AddExtraInput()
    start.set_extra_output_channel(0, "residual", output_to_caller=False)
    end.set_extra_input_channel(0, "residual")
    return te.ops.Sequential(
        start,
        te.ops.LayerNorm(width),
        te.ops.Linear(width, 8 * width, tensor_parallel_mode="column", sequence_parallel=True),
        te.ops.SwiGLU(),
        te.ops.BasicLinear(4 * width, width, tensor_parallel_mode="row", sequence_parallel=True),
        te.ops.Bias(width),
        end,
        recompute=recompute,
    )


# The parameters of an MLP, whole and spread, in their order.
NAMES = ["norm.weight", "norm.bias", "fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"]
CUT = {"fc1.weight", "fc1.bias", "fc2.weight"}


def spread_model(whole: Model, width: int, recompute: str) -> Model:
    """The same model over the ranks, with the same parameters."""
    model = copy.deepcopy(whole)
    cut = set()
    for block in model.blocks:
        assert isinstance(block, Block)
        mlp = spread_mlp(width, recompute)
        with torch.no_grad():
            for name, source, to in zip(
                NAMES, block.mlp.parameters(), mlp.parameters(), strict=True
            ):
                to.copy_(part_of(name, source))
                if name in CUT:
                    cut.add(to)
        block.mlp = mlp
    for parameter in model.parameters():
        # Of all that is not cut a rank's gradient is the sum over its own sequences.
        if parameter not in cut:
            parameter.sequence_parallel = True
    return model


def is_cut(parameter: nn.Parameter) -> bool:
    return not getattr(parameter, "sequence_parallel", False)


def names_of(model: Model) -> dict[str, str]:
    """Of each parameter of an MLP, by its name in the model: which of NAMES it is."""
    return {
        f"blocks.{i}.mlp.{inner}": name
        for i, block in enumerate(model.blocks)
        for name, (inner, _) in zip(NAMES, block.mlp.named_parameters(), strict=True)
    }


# -- training


@dataclass
class Notes:
    """What a rank notes of its last turn, for a picture."""

    entries: list[Entry] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    sent: float = 0.0  # bytes given to the MLPs' collectives in a step


class SpreadTrainer(Trainer):
    """One rank's part of a model that learns over several processes."""

    def __init__(self, name: str, model: Model, args: Any, recipe: str = "none") -> None:
        super().__init__(name, model, args, recipe)
        self.cut = [p for p in model.parameters() if is_cut(p)]
        self.rest = [p for p in model.parameters() if not is_cut(p)]
        self.notes = Notes()
        self._marks: list[float] = []

    @property
    def _notes_now(self) -> bool:
        return len(self.run.losses) >= (self.steps - 1) // TURN * TURN

    @contextlib.contextmanager
    def _noted(self, name: str, op: str, size: int) -> Iterator[None]:
        """For a collective of torch's own, which the library does not note."""
        begin = time.monotonic()
        yield
        if self._notes_now:
            end = time.monotonic()
            self.notes.entries.append(Entry(name, op, begin, end, begin, end, size))

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().loss(tokens.chunk(dist.get_world_size())[dist.get_rank()])

    def backward(self, loss: torch.Tensor) -> None:
        """The loss of the batch is the mean of the ranks'."""
        self._marks.append(time.monotonic())
        super().backward(loss / dist.get_world_size())
        self._marks.append(time.monotonic())
        size = sum(p.numel() * p.element_size() for p in self.rest)
        with self._noted("all_reduce", "partial gradients", size):
            te.distributed.reduce_partial_grads(self.model)

    def clip(self, loss: torch.Tensor) -> torch.Tensor:
        """As ``clip_grad_norm_``, with the squares of all ranks' parts."""
        cut, rest = ([p.grad for p in part] for part in (self.cut, self.rest))
        norms = torch.nn.utils.get_total_norm
        sums = torch.stack([loss.detach() / dist.get_world_size(), norms(cut) ** 2])
        with self._noted("all_reduce", "loss and norm", sums.nbytes):
            dist.all_reduce(sums)
        norm = (sums[1] + norms(rest) ** 2).sqrt()
        torch.nn.utils.clip_grads_with_norm_(self.model.parameters(), LARGEST, norm)
        return sums[0]

    def step(self, tokens: torch.Tensor) -> None:
        noted = self._notes_now
        if noted and not self.notes.steps:
            before = time.monotonic()
            te.distributed.record_timeline()
            self._began = (before + time.monotonic()) / 2
        self._marks = [time.monotonic()]
        super().step(tokens)
        if noted:
            self.notes.steps.append(Step(*self._marks, time.monotonic()))
        if len(self.run.losses) == self.steps:
            self._collect()

    def _collect(self) -> None:
        """What the library noted, on the clock of all processes of this machine."""
        te.distributed.record_timeline(False)
        entries = [Entry.of(entry, self._began) for entry in te.distributed.timeline()]
        self.notes.sent = sum(entry.bytes for entry in entries) / len(self.notes.steps)
        self.notes.entries += entries


def same_on_all(trainers: list[SpreadTrainer]) -> bool:
    """Whether what every rank has is the same, to the last bit."""
    bits = hashlib.sha256()
    for trainer in trainers:
        for parameter in trainer.rest:
            bits.update(parameter.detach().numpy().tobytes())
    found = [b""] * dist.get_world_size()
    dist.all_gather_object(found, bits.digest())
    return len(set(found)) == 1


# -- against one process


def distances(whole: Model, spread: Model, tokens: torch.Tensor) -> tuple[float, float]:
    """How far values and gradients of one batch are from those of one process, on all ranks."""
    size, rank = dist.get_world_size(), dist.get_rank()
    mine = tokens.chunk(size)[rank]
    outputs = []
    for model, own, share in ((whole, tokens, 1), (spread, mine, size)):
        model.zero_grad()
        logits = model(own[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), own[:, 1:].flatten())
        (loss / share).backward()
        outputs.append(logits.detach())
    te.distributed.reduce_partial_grads(spread)
    value = distance(outputs[1], outputs[0].chunk(size)[rank])
    parts = names_of(spread)
    gradient = 0.0
    pairs = zip(whole.parameters(), spread.named_parameters(), strict=True)
    for wanted, (name, got) in pairs:
        part = part_of(parts[name], wanted.grad) if name in parts else wanted.grad
        gradient = max(gradient, distance(got.grad, part))
    furthest: list[tuple[float, float]] = [(0.0, 0.0)] * size
    dist.all_gather_object(furthest, (value, gradient))
    for model in (whole, spread):
        model.zero_grad()
    return max(v for v, _ in furthest), max(g for _, g in furthest)


def distance(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative, in the norm."""
    return ((got - wanted).norm() / wanted.norm()).item()
