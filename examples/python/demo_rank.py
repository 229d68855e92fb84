"""One rank of ``demo.py --processes N``: the same model over N processes, against one process.

The first rank also trains the model by itself, and writes the report. To be started by demo.py, or
as ``torchrun --nproc-per-node 2 examples/python/demo_rank.py --processes 2``.
"""

from __future__ import annotations

import copy
import os
import sys
from typing import Any

import demo
import torch
import torch.distributed as dist
from measure import saved_bytes, size
from processes import join
from progress import Progress
from report import LowPrecision, Result, section
from report import table as html_table
from spread import SpreadTrainer, distances, same_on_all, spread_model
from timeline import HEAD, Course, courses, step_figure, table
from transformer import make_pair

ALLOWED = 1e-4  # distance of float32 values and gradients of one batch from those of one process
ROUNDS = 40  # of one MLP alone


def mlp_figures(trainers: list[demo.Trainer]) -> tuple[list[float], list[int]]:
    """As those of the demo; every rank makes the same number of rounds."""
    times, saved = [], []
    share = demo.BATCH // dist.get_world_size()
    for trainer in trainers:
        batch = share if isinstance(trainer, SpreadTrainer) else demo.BATCH
        x = torch.randn(batch, demo.CONTEXT, demo.WIDTH, requires_grad=True)
        grad = torch.randn(batch, demo.CONTEXT, demo.WIDTH)
        spans = [demo.mlp_seconds(trainer, x, grad) for _ in range(ROUNDS)]
        times.append(1e3 * sorted(spans)[ROUNDS // 2])
        saved.append(demo.mlp_saved(trainer, x))
    return times, saved


def print_courses(name: str, ranks: list[Course]) -> None:
    print(f"\nOne step of {name}, rank by rank\n")
    rows = [HEAD, *table(ranks)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEAD))]
    for row in rows:
        cells = "".join(f"{cell:>{w + 3}}" for cell, w in zip(row[1:], widths[1:], strict=True))
        print(f"  {row[0]:<{widths[0]}}{cells}")


def course_section(steps: dict[str, list[Course]]) -> str:
    parts = []
    for name, ranks in steps.items():
        parts.append(
            step_figure(
                ranks,
                f"The median step of {name}'s last turn. Above each rank's processor: it computes, "
                "or waits; below, the collectives that are under way. A dot on a rank ends the "
                "wait of another one, that came to the same collective before it. Over loopback "
                "the processors copy what travels too.",
            )
        )
        parts.append(html_table(HEAD, table(ranks), numbers=True))
    return section("ranks", "Who computed, who communicated, who waited for whom", *parts)


def gathered(trainer: SpreadTrainer) -> list[Course]:
    """Each rank's course of the same step."""
    notes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(notes, (trainer.notes.entries, trainer.notes.steps))
    return courses(notes)


def main(arguments: list[str] | None = None) -> int:
    args = demo.options(arguments)
    rank = join(timeout=120.0)
    count = dist.get_world_size()
    if rank != 0:
        args.quiet = True
    say = demo.sayer(args.quiet)
    torch.manual_seed(args.seed)
    text, letters, batch, starts = demo.the_data(args)

    sizes = len(letters), demo.CONTEXT, demo.WIDTH, demo.HEADS, demo.LAYERS
    whole = make_pair(*sizes, args.recompute)[1]
    spread = spread_model(whole, demo.WIDTH, args.recompute)
    name = f"{count} processes"
    own = [demo.Trainer("1 process", whole, args)] if rank == 0 else []
    spreads = [SpreadTrainer(name, spread, args)]
    low_name, low_limit = demo.LOW_PRECISION.get(args.recipe, ("", 0.0))
    if low_name:
        # Not a copy of the other one: torch does not copy marks on parameters.
        low_spread = spread_model(whole, demo.WIDTH, args.recompute)
        spreads.append(SpreadTrainer(low_name, low_spread, args, args.recipe))
    trainers = [*own, *spreads]
    environment = demo.describe(args, whole, len(text))
    environment["processes"] = f"{count} on this machine, Gloo, one thread each"
    third = f", and again in {low_name}" if low_name else ""
    say(f"One model, trained in one process and over {count}{third}.\n")
    for what, value in environment.items():
        say(f"  {what:<10} {value}")

    tokens = batch(starts[0])
    apart = distances(copy.deepcopy(whole), spread, tokens)
    near = (
        f"Values of one batch are {apart[0]:.1e} from those of one process, gradients "
        f"{apart[1]:.1e} (allowed {ALLOWED:g}).",
        max(apart) <= ALLOWED,
    )
    for trainer in trainers:
        besides = [tokens, *trainer.model.parameters(), *trainer.model.buffers()]
        trainer.saved = saved_bytes(lambda t=trainer: t.loss(tokens), besides)
    explanation = spread.blocks[0].mlp.explain()
    say(f"\nThe plan of one MLP\n\n{str(explanation).rstrip()}\n")
    low_plan = spreads[-1].model.blocks[0].mlp.explain()

    say("Training, " + " | ".join(trainer.run.name for trainer in trainers))
    progress = Progress(args.steps, args.quiet)
    try:
        demo.train(trainers, batch, starts, progress)
    finally:
        progress.close()
    mlp = mlp_figures(trainers)
    for trainer in trainers:
        trainer.run.sample = demo.continued(trainer, letters, args.seed)
    steps = {trainer.run.name: gathered(trainer) for trainer in spreads}
    same = same_on_all(spreads)
    if rank != 0:
        return 0

    figures = demo.figures(trainers, "MLP", *mlp)
    sent = [trainer.notes.sent for trainer in spreads]
    ratio = "" if len(sent) == 1 else f"{sent[1] / sent[0]:.2f}"
    cells = [size(sent[0]), "", *([size(sent[1]), ""] if low_name else [])]
    figures.append(("one rank's MLPs send", "none", *cells))
    runs = trainers[0].run, trainers[1].run
    low = None
    if low_name:
        plan = demo.formats(low_plan, "MLP")
        told = f"{plan}; the MLPs send {ratio} of the bytes"
        low = LowPrecision(spreads[1].run, args.recipe, low_limit, told, low_plan)
    word = "the same bits" if same else "different values"
    checks = [near, (f"What every rank has ends with {word} on each.", same)]
    tolerances = demo.TOLERANCES["dense"][args.dtype]
    result = Result(
        runs, tolerances, figures, explanation, demo.PROMPT, environment, low, checks=checks
    )
    result.how = f"in one process and over {count}{third}"
    result.sections = [course_section(steps)]
    return demo.tell(result, args, lambda: [print_courses(*item) for item in steps.items()])


if __name__ == "__main__":
    try:
        code = main()
    except KeyboardInterrupt:
        code = 130
    sys.stdout.flush()
    os._exit(code)  # a group whose peer is gone would wait
