"""Trains one small language model in plain PyTorch, with Ligature and in FP8, and compares.

The text is examples/data/joined_letters.txt, the model a transformer that predicts its next letter,
with MLPs or, with --model moe, with mixtures of experts in their place. With --processes 2 it
learns over two processes and is compared with one.
All start from the same parameters and see the same batches, so the losses of the first two must
agree, and that in low precision must end near them. They take turns, so that their times can be
compared. At the end stands a report, one HTML page.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import os
import platform
import statistics
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from measure import machine, saved_bytes, size
from mixture import EXPERTS, TOP_K
from processes import start
from progress import Progress
from report import EARLY, LowPrecision, Result, Run, html_report
from torch import nn
from transformer import RECIPES, Model, low_precision, make_pair

import ligature as te

ROOT = Path(__file__).resolve().parents[2]
TEXT = ROOT / "examples" / "data" / "joined_letters.txt"
PROMPT = "The printer "
CONTEXT, WIDTH, HEADS, LAYERS, BATCH = 64, 96, 4, 2, 8
LEARNING_RATE = 1.5e-3
TURN = 10  # steps that one model makes before it is the other's turn
# How far rounding may drive the losses apart, early and later: differences grow as a model learns.
TOLERANCES = {
    "dense": {
        torch.float32: (1e-4, 0.01),
        torch.bfloat16: (0.02, 0.3),
        torch.float16: (0.02, 0.3),
    },
    # A token that is sent to another expert is another computation.
    "moe": {
        torch.float32: (1e-3, 0.1),
        torch.bfloat16: (0.05, 0.3),
        torch.float16: (0.05, 0.3),
    },
}
PROCESSES = (1, 2, 4, 8)  # they share the sequences of a batch and the inner width of an MLP
PARTS = {"dense": "MLP", "moe": "mixture"}  # what stands behind attention in a block
# What the run in low precision is called, and how far from the other it may end.
LOW_PRECISION = {
    "delayed": ("FP8", 0.1),
    "current": ("FP8", 0.1),
    "block": ("FP8 blocks", 0.1),
    "mxfp8": ("MXFP8", 0.1),
    "nvfp4": ("NVFP4", 0.4),
}


# -- options


def whole(least: int, most: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(
                f"wanted a whole number from {least} to {most}, got {text!r}"
            )
        return int(text)

    return parse


def device(text: str) -> torch.device:
    try:
        value = torch.device(text)
    except RuntimeError:
        value = torch.device("meta")
    if value.type not in ("cpu", "cuda"):
        raise argparse.ArgumentTypeError(f"wanted cpu, cuda or cuda:N, got {text!r}")
    if value.type == "cuda" and (value.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise argparse.ArgumentTypeError(f"torch sees {count} CUDA devices here, got {text!r}")
    return value


def report_path(text: str) -> Path:
    path = Path(text).absolute()
    reason = "it is a folder" if path.is_dir() else ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            reason = "no permission"
    except OSError as error:
        reason = str(error.strerror)
    if reason:
        raise argparse.ArgumentTypeError(f"cannot write {text!r}: {reason}")
    return path


def options(arguments: list[str] | None) -> argparse.Namespace:
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], prog="demo.py")
    add = parser.add_argument
    add(
        "--model",
        default="dense",
        choices=PARTS,
        help="dense, or moe: with mixtures of experts; default dense",
    )
    add(
        "--processes",
        type=int,
        default=1,
        choices=PROCESSES,
        help="over how many processes the MLPs are spread; default 1",
    )
    add("--device", type=device, default=default, help=f"cpu or cuda; default {default}")
    add("--steps", type=whole(1, 10**6), default=1200, help="default %(default)s")
    add(
        "--dtype",
        default="float32",
        choices=["float32", "bfloat16", "float16"],
        help="the two short ones under torch.autocast; float16 on a GPU only",
    )
    add(
        "--recompute",
        default="none",
        choices=["none", "cheap"],
        help="what backward may compute again instead of saving it; default none",
    )
    add(
        "--recipe",
        choices=RECIPES,
        help="of the run in low precision; none: without it; default current, on a GPU none",
    )
    add(
        "--seed",
        type=whole(0, 2**32 - 1),
        default=0,
        help="of parameters, batches and samples; default 0",
    )
    add(
        "--report",
        type=report_path,
        default=str(ROOT / "build" / "report.html"),
        metavar="PATH",
        help="where the page goes; default build/report.html",
    )
    add("--no-report", dest="report", action="store_const", const=None, help="write none")
    add("--quiet", action="store_true", help="print the result only")
    args = parser.parse_args(arguments)
    args.dtype = getattr(torch, args.dtype)
    if args.dtype is torch.float16 and args.device.type == "cpu":
        parser.error("argument --dtype: float16 is for GPUs; on the CPU use float32 or bfloat16")
    if args.processes > 1 and (args.model != "dense" or args.device.type != "cpu"):
        parser.error("argument --processes: takes --model dense and --device cpu")
    there, why_not = te.is_fp8_available(return_reason=True, device=args.device)
    if args.recipe is None:
        args.recipe = "current" if there else "none"
    elif args.recipe != "none" and not there:
        parser.error(f"argument --recipe: {why_not}")
    return args


# -- training


class Trainer:
    """A model with its optimizer, and what it has done so far."""

    def __init__(
        self, name: str, model: Model, args: argparse.Namespace, recipe: str = "none"
    ) -> None:
        self.run = Run(name)
        self.model = model
        self.recipe = recipe
        self.steps = args.steps
        self.short = args.device.type, args.dtype
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=LEARNING_RATE, eps=1e-6, fused=True
        )
        self.scaler = torch.amp.GradScaler(args.device.type, enabled=args.dtype is torch.float16)
        self.saved = 0

    @contextlib.contextmanager
    def precision(self) -> Iterator[None]:
        device, dtype = self.short
        short = torch.autocast(device, dtype=dtype, enabled=dtype is not torch.float32)
        with short, low_precision(self.recipe):
            yield

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        with self.precision():
            logits = self.model(tokens[:, :-1])
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())

    def backward(self, loss: torch.Tensor) -> None:
        self.scaler.scale(loss + self.model.balance).backward()

    def clip(self, loss: torch.Tensor) -> torch.Tensor:
        """Limits the norm of the gradients; gives the loss of the batch."""
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        return loss

    def step(self, tokens: torch.Tensor) -> None:
        start = time.perf_counter()
        done = len(self.run.losses) / self.steps
        for group in self.optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, 0.05 + 20 * done) * (1 - 0.9 * done)
        self.optimizer.zero_grad()
        loss = self.loss(tokens)
        self.backward(loss)
        self.scaler.unscale_(self.optimizer)
        told = self.clip(loss)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.run.losses.append(told.item())  # waits for the device
        self.run.seconds.append(time.perf_counter() - start)
        self.run.counts.append([counts.tolist() for counts in self.model.counts])

    @property
    def milliseconds(self) -> float:
        return 1e3 * statistics.median(self.run.seconds)


def train(
    trainers: list[Trainer],
    batch: Callable[[torch.Tensor], torch.Tensor],
    starts: torch.Tensor,
    progress: Progress,
) -> None:
    """``starts`` says for each step where its batch begins in the text."""
    for turn, part in enumerate(starts.split(TURN)):
        # Who begins changes from turn to turn.
        for trainer in trainers[:: -1 if turn % 2 else 1]:
            for places in part:
                trainer.step(batch(places))
        progress.show(
            len(trainers[0].run.losses),
            [trainer.run.losses[-1] for trainer in trainers],
            [trainer.milliseconds for trainer in trainers],
        )


# -- measuring


def first_of(result: torch.Tensor | tuple[torch.Tensor, ...]) -> torch.Tensor:
    return result[0] if isinstance(result, tuple) else result


def mlp_seconds(trainer: Trainer, x: torch.Tensor, grad: torch.Tensor) -> float:
    """Of forward and backward of the model's first MLP alone."""
    mlp = trainer.model.blocks[0].mlp
    mlp.zero_grad()
    x.grad = None
    start = time.perf_counter()
    with trainer.precision():
        y = first_of(mlp(x))
    y.backward(grad.to(y.dtype))
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
    return time.perf_counter() - start


def mlp_saved(trainer: Trainer, x: torch.Tensor) -> int:
    """Bytes that it saves."""
    mlp = trainer.model.blocks[0].mlp
    with trainer.precision():
        return saved_bytes(lambda: first_of(mlp(x)), [x, *mlp.parameters()])


def mlp_figures(trainers: list[Trainer], seconds: float) -> tuple[list[float], list[int]]:
    """Milliseconds, and bytes saved, of each model's first MLP."""
    x = torch.randn(BATCH, CONTEXT, WIDTH, requires_grad=True)
    grad = torch.randn(BATCH, CONTEXT, WIDTH)
    times: list[list[float]] = [[] for _ in trainers]
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[0]) < 5:
        for trainer, result in zip(trainers, times, strict=True):
            result.append(1e3 * mlp_seconds(trainer, x, grad))
    saved = [mlp_saved(trainer, x) for trainer in trainers]
    return [statistics.median(result) for result in times], saved


@torch.no_grad()
def continued(trainer: Trainer, letters: list[str], seed: int, length: int = 320) -> str:
    """What the model writes after the prompt, with the same luck for every model."""
    random = torch.Generator("cpu").manual_seed(seed)
    tokens = [letters.index(letter) for letter in PROMPT]
    for _ in range(length):
        with low_precision(trainer.recipe):
            logits = trainer.model(torch.tensor([tokens[-CONTEXT:]]))[0, -1]
        chances = (logits.double().cpu() / 0.5).softmax(-1)
        luck = torch.rand((), dtype=torch.float64, generator=random, device="cpu")
        tokens.append(min(int((chances.cumsum(-1) < luck).sum()), len(letters) - 1))
    return "".join(letters[token] for token in tokens[len(PROMPT) :])


def describe(args: argparse.Namespace, model: Model, letters: int) -> dict[str, str]:
    count = sum(p.numel() for p in model.parameters())
    dtype = str(args.dtype).removeprefix("torch.")
    threads = torch.get_num_threads()
    experts = f"{TOP_K} of {EXPERTS} experts, " if args.model == "moe" else ""
    return {
        "machine": f"{machine(args.device)}, {args.device}, {threads} thread{'s' * (threads > 1)}",
        "software": f"Ligature {te.__version__}, torch {torch.__version__}, "
        f"Python {platform.python_version()}",
        "numbers": dtype if args.dtype is torch.float32 else f"{dtype} under torch.autocast",
        "model": f"{LAYERS} blocks, width {WIDTH}, {HEADS} heads, {experts}{count:,} parameters",
        "batches": f"{args.steps:,} of {BATCH} x {CONTEXT} letters",
        "text": f"{TEXT.name}, {letters:,} letters",
        "recompute": args.recompute,
        "recipe": args.recipe,
        "seed": str(args.seed),
    }


# -- telling


def figures(
    trainers: list[Trainer], part: str, mlp_ms: list[float], mlp_saved: list[int]
) -> list[Any]:
    """What, of PyTorch, and of each other run with its ratio to that, ready to be printed."""
    losses = [statistics.fmean(t.run.losses[-50:]) for t in trainers]
    rows = [
        ("loss, last 50 steps", losses, lambda value: f"{value:.4f}"),
        ("step of the model", [t.milliseconds for t in trainers], lambda ms: f"{ms:.2f} ms"),
        (f"step of one {part}", mlp_ms, lambda ms: f"{ms:.3f} ms"),
        ("saved by the model", [t.saved for t in trainers], size),
        (f"saved by one {part}", mlp_saved, size),
    ]
    table = []
    for what, (first, *rest), form in rows:
        others = [text for value in rest for text in (form(value), f"{value / first:.2f}")]
        table.append((what, form(first), *others))
    return table


def formats(explanation: Any, part: str) -> str:
    """What goes from step to step in forward: "float32, fp8 e4m3, float32"."""
    if part == PARTS["moe"]:
        return "each expert's rows and weights are quantized alone, in its linear layers"
    steps = explanation.to_dict()["parts"][0]["forward"]
    dtypes = [steps[0]["input"]["dtype"], *(step["output"]["dtype"] for step in steps)]
    return f"from step to step {', '.join(dtypes)}"


def print_losses(result: Result) -> None:
    a, b, *low = result.all_runs
    steps = len(a.losses)
    names = f"{a.name:>12}{b.name:>12}{'difference':>14}" + "".join(f"{r.name:>12}" for r in low)
    print(f"\nLosses\n\n{'step':>8}{names}")
    for i in sorted({1, *(round(steps * k / 6) for k in range(1, 7))} - {0}):
        row = f"{a.losses[i - 1]:>12.4f}{b.losses[i - 1]:>12.4f}{result.differences[i - 1]:>14.1e}"
        print(f"{i:>8}{row}" + "".join(f"{r.losses[i - 1]:>12.4f}" for r in low))


def print_figures(result: Result) -> None:
    first, *rest = (run.name for run in result.all_runs)
    names = f"{first:>12}" + "".join(f"{name:>12}{'ratio':>8}" for name in rest)
    print(f"\nFigures\n\n  {'':<26}{names}")
    for what, plain, *others in result.figures:
        cells = "".join(f"{text:>{8 if i % 2 else 12}}" for i, text in enumerate(others))
        print(f"  {what:<26}{plain:>12}{cells}")
    print(f"\n  fusions that fired: {', '.join(result.explanation.fusions) or 'none'}")
    if result.low is not None:
        print(f"  in {result.low.run.name}: {result.low.formats}")


def print_load(result: Result) -> None:
    for block in range(len(result.runs[0].counts[-1])):
        print(f"\nShare of each expert in block {block + 1}, last {EARLY} steps\n")
        for run in result.all_runs:
            cells = "".join(f"{share:>7.1%}" for share in run.load(block))
            print(f"  {run.name:<12}{cells}")


def tell(result: Result, args: argparse.Namespace, more: Callable[[], object]) -> int:
    """Prints it all, and what there is more, and writes the report; the exit status."""
    if not args.quiet:
        print_losses(result)
        print_figures(result)
        more()
        print(f"\nWhat they write after {PROMPT!r}\n")
        for run in result.all_runs:
            print(f"  {run.name}\n{indented(PROMPT + run.sample)}")
        print(f"\n  {result.samples_alike}\n")
    for sentence, _ in result.verdicts:
        print(sentence)
    if args.report is not None:
        args.report.write_text(html_report(result), encoding="utf-8")
        print(f"Report: {args.report}")
    return 0 if result.good else 1


def indented(text: str) -> str:
    return textwrap.fill(text, 76, initial_indent="    ", subsequent_indent="    ")


def sayer(quiet: bool) -> Callable[..., None]:
    with contextlib.suppress(AttributeError):
        sys.stdout.reconfigure(errors="replace")
    return (lambda *text: None) if quiet else print


def the_data(
    args: argparse.Namespace,
) -> tuple[str, list[str], Callable[[torch.Tensor], torch.Tensor], torch.Tensor]:
    """The text, its letters, what gives the batch of some places, and the places of each step."""
    text = TEXT.read_text(encoding="utf-8")
    letters = sorted(set(text))
    data = torch.tensor([letters.index(letter) for letter in text])
    starts = torch.randint(len(data) - CONTEXT, (args.steps, BATCH))

    torch.set_default_device(args.device)
    data, starts, window = data.to(args.device), starts.to(args.device), torch.arange(CONTEXT + 1)

    def batch(places: torch.Tensor) -> torch.Tensor:
        return data[places[:, None] + window]

    return text, letters, batch, starts


def main(arguments: list[str] | None = None) -> int:
    args = options(arguments)
    if args.processes > 1:
        given = sys.argv[1:] if arguments is None else arguments
        script = str(Path(__file__).with_name("demo_rank.py"))
        return start(args.processes, [sys.executable, script, *given], 120.0 + args.steps)
    say = sayer(args.quiet)
    torch.manual_seed(args.seed)
    text, letters, batch, starts = the_data(args)

    models = make_pair(len(letters), CONTEXT, WIDTH, HEADS, LAYERS, args.recompute, args.model)
    trainers = [
        Trainer(name, model, args)
        for name, model in zip(("PyTorch", "Ligature"), models, strict=True)
    ]
    low_name, low_limit = LOW_PRECISION.get(args.recipe, ("", 0.0))
    if low_name:
        trainers.append(Trainer(low_name, copy.deepcopy(models[1]), args, args.recipe))
    environment, part = describe(args, models[0], len(text)), PARTS[args.model]
    third = f", and again in {low_name}" if low_name else ""
    say(f"One model, trained in plain PyTorch and with Ligature{third}.\n")
    for name, value in environment.items():
        say(f"  {name:<10} {value}")

    tokens = batch(starts[0])
    for trainer in trainers:
        besides = [tokens, *trainer.model.parameters(), *trainer.model.buffers()]
        trainer.saved = saved_bytes(lambda t=trainer: t.loss(tokens), besides)
    explanation = models[1].blocks[0].mlp.explain()
    say(f"\nThe plan of one {part}\n\n{str(explanation).rstrip()}\n")

    low_plan = trainers[-1].model.blocks[0].mlp.explain()

    say("Training, " + " | ".join(trainer.run.name for trainer in trainers))
    progress = Progress(args.steps, args.quiet)
    try:
        train(trainers, batch, starts, progress)
    finally:
        progress.close()
    table = figures(trainers, part, *mlp_figures(trainers, seconds=min(2.0, args.steps / 50)))
    for trainer in trainers:
        trainer.run.sample = continued(trainer, letters, args.seed)
    runs = trainers[0].run, trainers[1].run
    low = None
    if low_name:
        low = LowPrecision(
            trainers[2].run, args.recipe, low_limit, formats(low_plan, part), low_plan
        )
    tolerances = TOLERANCES[args.model][args.dtype]
    result = Result(runs, tolerances, table, explanation, PROMPT, environment, low, part)

    return tell(result, args, lambda: print_load(result))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
