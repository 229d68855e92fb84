"""Times collectives beside GEMMs: two ranks of one thread each, over a link of a chosen rate.

Each rank is in a network namespace of its own; a veth pair joins them, shaped by `tc tbf`. That
takes root and iproute2. Where it cannot be had, the ranks are on loopback, which is not shaped.

- gather + GEMM, column + sequence-parallel, and GEMM + scatter, row + sequence-parallel, forward:
  the collective alone, the GEMM alone, one after the other (overlap off) and with overlap. The
  best there can be is the longer one ("max"). Gloo's reduce-scatter is an all-reduce, which sends
  twice the bytes. "cut" is the collective alone in four pieces: in one, Gloo's gather mostly takes
  half as long again as the wire, since one rank's second half waits for the other's; in four, an
  eighth. "on/cut" is to the longer of that and the GEMM.
- forward and backward of an MLP with overlap on and off, where communication takes a quarter, a
  half and three quarters of the step: its inner size is chosen from times that are measured first,
  "share" is what it came to. Predictions are to the sum; "uncut" is with whole collectives only.

Lanes are measured in turns, each after a barrier and with fresh inputs. A sample is the slowest
rank's, a figure the median over the rounds. "pieces" with a question mark are the plan's choice,
the number is overlap_model.py's. Beside it stands what that predicts from what was measured alone;
"waited" is how long a rank awaited collectives with overlap. Waiting takes no CPU time, but the
sockets do: on a busy machine all that is "alone" is not. "load" is that of the last minute.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import time
from pathlib import Path
from typing import Any

import overlap_model
import torch
from linked_ranks import SIZE, Link, Loopback, NoNamespacesError, Ranks
from overlap_cases import PIECES
from timing import cpu_name

import ligature as te

CASES = ("gather", "scatter", "mlp")
WARM_UP = 4  # plans learn from the first calls
Row = dict[str, Any]


class Lanes:
    """A case's lanes, measured in turns: all of them, or only those named."""

    def __init__(
        self, ranks: Ranks, rounds: int, case: str, *args: Any, only: tuple[str, ...] = ()
    ) -> None:
        self.load = os.getloadavg()[0]
        names: list[str] = ranks.call("prepare", case, *args)[0]
        names = [name for name in names if not only or name in only]
        self.seconds: dict[str, list[float]] = {name: [] for name in names}
        self.waits: dict[str, list[float]] = {name: [] for name in names}
        order = random.Random(0)
        for turn in range(-WARM_UP, rounds):
            for name in order.sample(names, len(names)):
                seconds, waits = zip(*ranks.call("sample", name), strict=True)
                if turn >= 0:
                    self.seconds[name].append(max(seconds))
                    self.waits[name].append(max(waits))

    def __getitem__(self, name: str) -> float:
        return statistics.median(self.seconds[name])

    def waited(self, name: str) -> float:
        return statistics.median(self.waits[name])

    def row(self, **more: Any) -> Row:
        return {"load": self.load, "samples": self.seconds, **more}


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:8.1f}"


def pieces_named(pieces: int | None, chosen: int) -> str:
    return f"{pieces}" if pieces else f"{chosen}?"


class Bench:
    def __init__(self, args: argparse.Namespace, link: Loopback, ranks: Ranks) -> None:
        self.args, self.link, self.ranks = args, link, ranks
        self.pieces: list[int | None] = [None, *args.pieces]
        self.cost: dict[int, float] = {}  # of a piece, by rate

    def measure(self, case: str, *args: Any) -> Lanes:
        return Lanes(self.ranks, self.args.rounds, case, *args, self.pieces)

    def linear(self, case: str, rate: int) -> list[Row]:
        """gather_gemm or gemm_scatter."""
        args = self.args
        lanes = self.measure(case, args.tokens, args.hidden, args.inner)
        communication, computation = lanes["communication"], lanes["computation"]
        cut = lanes["communication in pieces"]
        cost = max(0.0, (lanes["computation in pieces"] - computation) / (PIECES - 1))
        if case == "gather_gemm":
            self.cost[rate] = cost

        def model(pieces: int) -> float:
            each = max(0.0, (cut - communication) / (PIECES - 1))
            transfer = communication if pieces == 1 else cut + (pieces - PIECES) * each
            if case == "gather_gemm":
                return overlap_model.gather_gemm(transfer, computation, SIZE, pieces, cost)
            return overlap_model.gemm_scatter(transfer, computation, pieces, cost)

        chosen = overlap_model.best_pieces(model, args.tokens // SIZE)
        longer = max(communication, computation)
        least = max(min(communication, cut), computation)
        rows = []
        for pieces in self.pieces:
            name = f"overlap {pieces}"
            predicted = model(pieces or chosen)
            print(
                f"{rate or 'none':>5}{pieces_named(pieces, chosen):>7}{ms(communication)}"
                f"{ms(cut)}{ms(computation)}{ms(communication + computation)}"
                f"{ms(lanes['sequential'])}"
                f"{ms(lanes[name])}{ms(predicted)}{lanes[name] / longer:8.2f}"
                f"{predicted / longer:8.2f}{lanes[name] / least:8.2f}{ms(lanes.waited(name))}"
                f"{ms(cost)}{lanes.load:8.1f}",
                flush=True,
            )
            rows.append(
                lanes.row(
                    case=case,
                    rate=rate,
                    pieces=pieces,
                    predicted_pieces=chosen,
                    communication=communication,
                    communication_in_pieces=cut,
                    computation=computation,
                    sequential=lanes["sequential"],
                    overlap=lanes[name],
                    predicted=predicted,
                    ratio=lanes[name] / longer,
                    predicted_ratio=predicted / longer,
                    ratio_to_least=lanes[name] / least,
                    waited=lanes.waited(name),
                    cost_per_piece=cost,
                )
            )
        return rows

    def inner_for(self, share: float) -> int:
        """Columns per rank with which communication takes this share of the step."""
        args, guess = self.args, 512

        def alone(*names: str) -> Lanes:
            sizes = (args.step_tokens, args.step_hidden, guess)
            return Lanes(self.ranks, 5, "mlp", *sizes, [], only=names)

        lanes = alone("gather", "scatter")
        wanted = (3 * lanes["gather"] + 2 * lanes["scatter"]) * (1 - share) / share
        for _ in range(3):  # how fast a GEMM is depends on its size
            guess = round(guess * wanted / alone("computation")["computation"] / 64) * 64
            guess = min(max(guess, 64), args.most_inner)
        return guess

    def mlp(self, rate: int, share: float) -> list[Row]:
        args = self.args
        inner = self.inner_for(share)
        lanes = self.measure("mlp", args.step_tokens, args.step_hidden, inner)
        gather, scatter, computation = (lanes[n] for n in ("gather", "scatter", "computation"))
        off, communication = lanes["sequential"], 3 * gather + 2 * scatter
        rows_of_rank, cost = args.step_tokens // SIZE, self.cost.get(rate, 0.0)
        times = (gather, scatter, computation, SIZE, rows_of_rank, cost)
        in_pieces = lanes["gather in pieces"]
        cut, whole = (overlap_model.mlp_step(*times, c, in_pieces) for c in (True, False))
        both = communication + computation
        rows = []
        for pieces in self.pieces:
            name = f"overlap {pieces}"
            print(
                f"{rate or 'none':>5}{pieces or '?':>7}{inner:>7}{communication / off:7.2f}"
                f"{ms(communication)}{ms(computation)}{ms(both)}{ms(off)}{ms(lanes[name])}"
                f"{lanes[name] / off:8.2f}{cut / both:8.2f}{whole / both:8.2f}"
                f"{ms(lanes.waited(name))}{lanes.load:8.1f}",
                flush=True,
            )
            rows.append(
                lanes.row(
                    case="mlp",
                    rate=rate,
                    pieces=pieces,
                    inner=inner,
                    wanted_share=share,
                    share=communication / off,
                    gather=gather,
                    gather_in_pieces=in_pieces,
                    scatter=scatter,
                    computation=computation,
                    off=off,
                    on=lanes[name],
                    ratio=lanes[name] / off,
                    predicted=cut,
                    predicted_ratio=cut / both,
                    predicted_whole=whole,
                    waited=lanes.waited(name),
                )
            )
        return rows

    def run(self, rates: list[int]) -> list[Row]:
        args, rows = self.args, []
        titles = {
            "gather": "gather + GEMM, {0.tokens} x {0.hidden} x {0.inner} per rank, ms",
            "scatter": "GEMM + scatter (an all-reduce on Gloo), {0.tokens} x {0.inner} x "
            "{0.hidden} per rank, ms",
            "mlp": "MLP, forward and backward, {0.step_tokens} tokens, hidden {0.step_hidden}, ms",
        }
        linear = (
            "rate",
            "pieces",
            "comm",
            "cut",
            "GEMM",
            "sum",
            "off",
            "on",
            "model",
            "on/max",
            "model",
        )
        step = ("rate", "pieces", "inner", "share", "comm", "comp", "sum", "off", "on", "on/off")
        heads = {
            "gather": (*linear, "on/cut", "waited", "/piece", "load"),
            "scatter": (*linear, "on/cut", "waited", "/piece", "load"),
            "mlp": (*step, "model", "uncut", "waited", "load"),
        }
        for case in args.cases:
            print("\n" + titles[case].format(args))
            widths = (5, 7, 7, 7) if case == "mlp" else (5, 7)
            print(
                "".join(
                    f"{head:>{widths[i] if i < len(widths) else 8}}"
                    for i, head in enumerate(heads[case])
                )
            )
            for rate in rates:
                self.link.shape(rate)
                if case == "mlp":
                    for share in args.shares:
                        rows += self.mlp(rate, share)
                else:
                    rows += self.linear("gather_gemm" if case == "gather" else "gemm_scatter", rate)
        return rows


def arguments(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rates", type=int, nargs="+", default=[150, 300, 600], help="Mbit/s")
    parser.add_argument("--loopback", action="store_true", help="no namespaces, no rate")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--pieces",
        type=int,
        nargs="+",
        default=[],
        help="cut GEMMs into so many too, besides as many as the plan chooses",
    )
    parser.add_argument("--tokens", type=int, default=1024, help="of both ranks")
    parser.add_argument("--hidden", type=int, default=1024, help="columns that travel")
    parser.add_argument("--inner", type=int, default=2048, help="the weight's other side, per rank")
    parser.add_argument("--step-tokens", type=int, default=512, help="of the MLP")
    parser.add_argument("--step-hidden", type=int, default=512, help="of the MLP")
    parser.add_argument("--most-inner", type=int, default=24576, help="of the MLP, per rank")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.25, 0.5, 0.75])
    parser.add_argument("--timeout", type=int, default=1800, help="seconds for everything")
    parser.add_argument("--json", help="write everything here too")
    return parser.parse_args(given)


SIGNALS = (signal.SIGALRM, signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


def end(number: int, _: object) -> None:
    """Processes and namespaces go as on any error; a second signal does not stop that."""
    for each in SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    raise SystemExit(f"ended by {signal.Signals(number).name}")


def main(given: list[str] | None = None) -> None:
    args = arguments(given)
    for number in SIGNALS:
        signal.signal(number, end)
    signal.alarm(args.timeout)
    result: Row = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": cpu_name(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "ligature": te.__version__,
    }
    print("{machine}, {cores} cores, torch {torch}, Ligature {ligature}".format(**result))
    links: list[Loopback] = [Loopback()] if args.loopback else [Link(), Loopback()]
    for link in links:
        try:
            with link:
                result["link"] = type(link).__name__
                rates = args.rates if isinstance(link, Link) else [0]
                with Ranks(link, Path(__file__).with_name("overlap_cases.py")) as ranks:
                    result["rows"] = Bench(args, link, ranks).run(rates)
            break
        except NoNamespacesError as error:
            print(f"no shaped link: {error}; on loopback instead")
    signal.alarm(0)
    if args.json:
        with open(args.json, "w") as file:
            json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
