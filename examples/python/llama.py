"""Trains a small Llama with random weights, as the transformers package has it and with Ligature.

    python examples/python/llama.py [--modes original eager compiled] [--recipe current]
    python examples/python/llama.py --experts 8  # a Mixtral

Every mode starts from the same weights and sees the same tokens; one table shows their losses,
their tokens per second and what they save for backward. Sizes are small on a CPU and those of a
real layer on a GPU.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from measure import machine, saved_bytes
from transformer import RECIPES, low_precision

from ligature.integrations.transformers import Report, replace

MODES = {
    "original": "as transformers has it",
    "original-loop": "the same, with one expert after the other",
    "original-compiled": "as transformers has it, in torch.compile",
    "eager": "replaced",
    "compiled": "replaced, in torch.compile",
    "graphed": "replaced, each step as one CUDA graph",
}
SIZES = {
    "cpu": {
        "hidden": 64,
        "intermediate": 192,
        "layers": 2,
        "heads": 4,
        "kv_heads": 2,
        "vocabulary": 256,
        "batch": 4,
        "length": 64,
        "dtype": "float32",
        "lr": 1e-3,
    },
    "cuda": {
        "hidden": 4096,
        "intermediate": 14336,
        "layers": 2,
        "heads": 32,
        "kv_heads": 8,
        "vocabulary": 32000,
        "batch": 2,
        "length": 2048,
        "dtype": "bfloat16",
        "lr": 1e-4,
    },
}
WARM = 5  # steps that are not timed; the first of a graphed run are not replayed either


def arguments(given: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    told = "; ".join(f"{name}: {text}" for name, text in MODES.items())
    parser.add_argument("--modes", nargs="+", choices=MODES, help=told)
    parser.add_argument("--recipe", choices=RECIPES, default="none", help="of what is replaced")
    parser.add_argument("--recompute", choices=["none", "cheap"], default="none")
    parser.add_argument("--experts", type=int, default=0, help="of a Mixtral; 0: a Llama")
    parser.add_argument("--top-k", type=int, default=2, help="experts of a token")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batches", type=int, default=4, help="that are learned, in turn")
    parser.add_argument("--device", choices=SIZES, help="default: a GPU if there is one")
    for name, value in SIZES["cpu"].items():
        text = f"default: {value}, on a GPU {SIZES['cuda'][name]}"
        if name == "dtype":
            parser.add_argument("--dtype", choices=["float32", "bfloat16"], help=text)
        else:
            parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), help=text)
    args = parser.parse_args(given)
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    for name, value in SIZES[args.device].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.modes is None:
        loop = ["original-loop"] if args.experts else []
        args.modes = ["original", *loop, "eager"]
        if args.device == "cuda":
            args.modes = [mode for mode in MODES if mode not in ("original-loop", *loop)] + loop
    if "original-loop" in args.modes and not args.experts:
        parser.error("original-loop needs --experts")
    if "graphed" in args.modes and args.device != "cuda":
        parser.error("graphed needs --device cuda")
    if args.steps <= WARM:
        parser.error(f"--steps must be more than {WARM}, which are not timed, got {args.steps}")
    return args


def make_model(args: argparse.Namespace) -> Any:
    """The same weights every time."""
    torch.manual_seed(0)
    sizes = {
        "hidden_size": args.hidden,
        "intermediate_size": args.intermediate,
        "num_hidden_layers": args.layers,
        "num_attention_heads": args.heads,
        "num_key_value_heads": args.kv_heads,
        "vocab_size": args.vocabulary,
        "max_position_embeddings": args.length,
        "use_cache": False,
    }
    kind = "Mixtral" if args.experts else "Llama"
    if args.experts:
        sizes |= {"num_local_experts": args.experts, "num_experts_per_tok": args.top_k}
    config = getattr(transformers, f"{kind}Config")(**sizes)
    with torch.device(args.device):
        model = getattr(transformers, f"{kind}ForCausalLM")(config)
    return model.to(getattr(torch, args.dtype)).train()


class Training:
    """A model and its optimizer; ``step`` trains on tokens and gives the loss, still on its way."""

    def __init__(self, args: argparse.Namespace, mode: str) -> None:
        model = make_model(args)
        self.report: Report | None = None
        if mode == "original-loop":
            model.set_experts_implementation("eager")
        if not mode.startswith("original"):
            self.report = replace(model, recompute=args.recompute)
        self._recipe = "none" if self.report is None else args.recipe
        on_gpu = args.device == "cuda"
        self._optimizer = torch.optim.AdamW(
            model.parameters(), lr=args.lr, fused=True, capturable=on_gpu
        )
        self._model = torch.compile(model) if mode.endswith("compiled") else model
        self._graph: torch.cuda.CUDAGraph | None = None
        self._graphed = mode == "graphed"
        self._tokens = torch.empty(0)
        self._loss = torch.empty(0)
        self._count = 0

    def saved(self, tokens: torch.Tensor) -> int | None:
        """The bytes that a forward keeps for backward, where torch's hooks see them."""
        if self._graphed or self._model is not getattr(self._model, "_orig_mod", self._model):
            return None
        with low_precision(self._recipe):
            return saved_bytes(
                lambda: self._model(input_ids=tokens, labels=tokens).loss,
                [tokens, *self._model.parameters(), *self._model.buffers()],
            )

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        self._count += 1
        if not self._graphed:
            return self._run(tokens)
        if self._graph is None and self._count < WARM:
            return self._run_aside(tokens)
        if self._graph is None:
            self._capture(tokens)
        assert self._graph is not None
        self._tokens.copy_(tokens)
        self._graph.replay()
        return self._loss.clone()

    def _run(self, tokens: torch.Tensor) -> torch.Tensor:
        with low_precision(self._recipe):
            loss: torch.Tensor = self._model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.detach()

    def _run_aside(self, tokens: torch.Tensor) -> torch.Tensor:
        """On a stream of its own, as a graph will be captured."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            loss = self._run(tokens)
        torch.cuda.current_stream().wait_stream(stream)
        return loss

    def _capture(self, tokens: torch.Tensor) -> None:
        self._tokens = tokens.clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._loss = self._run(self._tokens)
        self._graph = graph


@dataclass
class Row:
    mode: str
    losses: list[float]
    seconds: float  # of a step, the median
    memory: int  # bytes at the peak, on a GPU
    saved: int | None = None  # bytes for backward


def clock(args: argparse.Namespace) -> tuple[Callable[[], Any], Callable[[Any, Any], float]]:
    """How to note a moment, and the seconds between two; a GPU is not waited for."""
    if args.device == "cpu":
        return time.perf_counter, lambda a, b: b - a

    def note() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    return note, lambda a, b: a.elapsed_time(b) / 1e3


def train(args: argparse.Namespace, mode: str, batches: list[torch.Tensor]) -> tuple[Row, Any]:
    if args.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    training = Training(args, mode)
    note, between = clock(args)
    losses, moments = [], [note()]
    for step in range(args.steps):
        losses.append(training.step(batches[step % len(batches)]))
        moments.append(note())
    if args.device == "cuda":
        torch.cuda.synchronize()
    pairs = list(itertools.pairwise(moments))[WARM:]
    seconds = statistics.median(between(a, b) for a, b in pairs)
    memory = torch.cuda.max_memory_allocated() if args.device == "cuda" else 0
    saved = training.saved(batches[0])
    return Row(mode, torch.stack(losses).tolist(), seconds, memory, saved), training.report


def table(rows: list[Row], tokens: int) -> str:
    """The first row is what the others are compared with."""
    lines = [
        f"{'mode':<18}{'first loss':>11}{'last loss':>11}{'difference':>12}"
        f"{'ms/step':>10}{'tokens/s':>12}{'ratio':>8}{'saved MiB':>11}{'GiB':>8}"
    ]
    base = rows[0]
    for row in rows:
        far = max(abs(a / b - 1) for a, b in zip(row.losses, base.losses, strict=True))
        saved = "-" if row.saved is None else f"{row.saved / 2**20:.2f}"
        memory = f"{row.memory / 2**30:8.2f}" if row.memory else f"{'-':>8}"
        lines.append(
            f"{row.mode:<18}{row.losses[0]:11.4f}{row.losses[-1]:11.4f}{far:12.2e}"
            f"{1e3 * row.seconds:10.2f}{tokens / row.seconds:12.0f}"
            f"{base.seconds / row.seconds:8.2f}{saved:>11}{memory}"
        )
    return "\n".join(lines)


def main(given: list[str]) -> int:
    args = arguments(given)
    torch.manual_seed(1)
    shape = (args.batch, args.length)
    batches = [
        torch.randint(args.vocabulary, shape, device=args.device) for _ in range(args.batches)
    ]
    kind = f"Mixtral, {args.top_k} of {args.experts} experts" if args.experts else "Llama"
    print(
        f"{kind}: {args.layers} layers, hidden {args.hidden}, intermediate {args.intermediate}, "
        f"vocabulary {args.vocabulary}, {args.dtype}, recipe {args.recipe}\n"
        f"{args.steps} steps of {args.batch} x {args.length} tokens on {machine_of(args)}"
    )
    rows: list[Row] = []
    failed = told = False
    for mode in args.modes:
        try:
            row, report = train(args, mode, batches)
        except Exception as error:
            print(f"{mode} failed: {type(error).__name__}: {str(error)[:500]}", file=sys.stderr)
            failed = True
        else:
            rows.append(row)
            if report is not None and not told:
                print(report)
                told = True
        gc.collect()
        if args.device == "cuda":
            torch.cuda.empty_cache()
    if rows:
        print("\n" + table(rows, args.batch * args.length))
        print(
            f"difference: the largest of a loss from that of {rows[0].mode}, relative; "
            f"ratio: speed to that of {rows[0].mode}"
        )
    return 1 if failed else 0


def machine_of(args: argparse.Namespace) -> str:
    return machine(torch.device(args.device))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
