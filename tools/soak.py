"""Runs random pipelines against plain PyTorch for as long as you like: ``make soak``.

Case N of seed S is the same everywhere. Each worker runs in a process of its own, so that a crash
is a failure like any other. What fails is printed as data, with the one command that runs it again.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
import warnings
from collections import Counter
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

SUPPORT = Path(__file__).resolve().parents[1] / "tests" / "python" / "support"
#: Failures after which there is no use in going on.
MOST_FAILURES = 5
SHRINK_SECONDS = 30.0
#: Cases that a worker has been sent, so that it need not wait for the next one.
AHEAD = 2


def load() -> Any:
    """The generator and the check, which import torch."""
    sys.path.insert(0, str(SUPPORT))
    import pipeline_case
    import pipeline_check
    import pipelines
    import torch

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=UserWarning)
    return pipelines, pipeline_check, pipeline_case


def run_case(check: Any, case: Any, device: str) -> Counter[str]:
    import torch

    with torch.device(device):
        return check.check(case)


def shrink(check: Any, data: Any, case: Any, device: str) -> Any:
    """A smaller case in which the same thing differs, or the same error is raised."""
    end = time.monotonic() + SHRINK_SECONDS

    def outcome(candidate: Any) -> tuple[type, str] | None:
        try:
            run_case(check, candidate, device)
        except Exception as error:
            return type(error), str(error).split(":")[0]
        return None

    wanted = outcome(case)
    shrunk = True
    while shrunk:
        shrunk = False
        for candidate in data.smaller(case):
            if time.monotonic() > end:
                return case
            if outcome(candidate) == wanted:
                case, shrunk = candidate, True
                break
    return case


def work(pipe: Connection, args: argparse.Namespace) -> None:
    """A worker: runs the cases it is sent, one after the other, and reports what came of each."""
    pipelines, check, data = load()
    while (number := pipe.recv()) is not None:
        case = pipelines.numbered_case(args.seed, number, args.recipes)
        try:
            fused = run_case(check, case, args.device)
        except check.TooLargeError:
            pipe.send(("left out", number, None))
        except Exception as error:
            kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
            smaller = shrink(check, data, case, args.device)
            pipe.send(("failed", number, (f"{kind}{error}", repr(case), repr(smaller))))
        else:
            pipe.send(("agreed", number, fused))
    pipe.close()


class Numbers:
    """Hands out the numbers of cases in order, until ``seconds`` are over."""

    def __init__(self, numbers: range, seconds: float | None) -> None:
        self.next, self.end = numbers.start, numbers.stop
        self.again: list[int] = []  # handed out before a crash
        self.running: set[int] = set()
        self.until = None if seconds is None else time.monotonic() + seconds

    def any_left(self) -> bool:
        late = self.until is not None and time.monotonic() > self.until
        return bool(self.again) or (self.next < self.end and not late)

    def take(self) -> int | None:
        if not self.any_left():
            return None
        if self.again:
            number = self.again.pop(0)
        else:
            number, self.next = self.next, self.next + 1
        self.running.add(number)
        return number

    def first_left(self) -> int:
        """All before it are done."""
        return min([self.next, *self.again, *self.running])


class Progress:
    """A live bar on a terminal, a line now and then elsewhere."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.live = sys.stdout.isatty()
        self.start = self.shown = time.monotonic()
        self.done = self.told = self.failures = 0

    def show(self, last: bool = False) -> None:
        now = time.monotonic()
        if not last and now - self.shown < (0.1 if self.live else 15.0):
            return
        if not self.live and self.done == self.told:
            return
        self.told = self.done
        self.shown = now
        rate = self.done / max(now - self.start, 1e-9)
        left = (self.total - self.done) / rate if rate else 0.0
        part = self.done / self.total
        speed = f"{rate:.{0 if rate >= 10 else 1}f}/s"
        text = f"{self.done:,} of {self.total:,} · {speed} · {clock(left)} left"
        if self.failures:
            text += f" · {self.failures} failed"
        if self.live:
            bar = "█" * round(24 * part) + "░" * (24 - round(24 * part))
            print(f"\r\x1b[2K{bar} {text}", end="\n" if last else "", flush=True)
        else:
            print(f"{part:4.0%}  {text}", flush=True)

    def clear(self) -> None:
        if self.live:
            print("\r\x1b[2K", end="")


def clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def report(args: argparse.Namespace, number: int, details: tuple[str, str, str]) -> None:
    error, case, smaller = details
    print(f"\nCase {number} of seed {args.seed} fails: {error}\n\n{case}\n")
    if smaller != case:
        print(f"A smaller one that fails the same way:\n\n{smaller}\n")
    print(f"Run it again:\n  {command(args, f'--case {number}')}\n", flush=True)


def command(args: argparse.Namespace, what: str) -> str:
    options = "" if args.device == "cpu" else f" --device {args.device}"
    options += " --recipes" if args.recipes else ""
    return f'make soak ARGS="--seed {args.seed} {what}{options}"'


@dataclass
class Worker:
    process: Any
    given: list[int] = field(default_factory=list)  # the first one runs


def soak(args: argparse.Namespace) -> int:
    context = multiprocessing.get_context("spawn")
    numbers = Numbers(range(args.first, args.first + args.cases), args.seconds)
    progress = Progress(args.cases)
    fused: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    workers: dict[Connection, Worker] = {}

    def start() -> None:
        ours, theirs = context.Pipe()
        process = context.Process(target=work, args=(theirs, args), daemon=True)
        process.start()
        theirs.close()
        workers[ours] = Worker(process)
        for _ in range(AHEAD):
            give(ours)

    def give(pipe: Connection) -> None:
        number = numbers.take()
        if number is not None:
            workers[pipe].given.append(number)
            pipe.send(number)
        elif not workers[pipe].given:
            pipe.send(None)

    def done(number: int, what: str, details: Any) -> None:
        numbers.running.remove(number)
        progress.done += 1
        counts[what] += 1
        if what == "failed":
            progress.failures += 1
            progress.clear()
            report(args, number, details)
        elif what == "agreed":
            fused.update(details)

    def ended(pipe: Connection) -> None:
        """Of a crash the case that ran is guilty; those behind it are handed out again."""
        worker = workers.pop(pipe)
        worker.process.join()
        if not worker.given:
            return
        current, *others = worker.given
        numbers.running.difference_update(others)
        numbers.again += others
        case = repr(load()[0].numbered_case(args.seed, current, args.recipes))
        why = f"the process ended with {worker.process.exitcode}"
        done(current, "failed", (why, case, case))
        if numbers.any_left():
            start()

    for _ in range(min(args.jobs, args.cases)):
        start()
    while workers and progress.failures < MOST_FAILURES:
        for pipe in wait(list(workers), timeout=1.0):
            assert isinstance(pipe, Connection)
            try:
                what, number, details = pipe.recv()
            except (EOFError, ConnectionResetError):
                ended(pipe)
                continue
            workers[pipe].given.remove(number)
            done(number, what, details)
            give(pipe)
        progress.show()
    for worker in workers.values():
        worker.process.terminate()
    progress.show(last=True)

    seconds = clock(time.monotonic() - progress.start)
    print(
        f"\n{progress.done:,} cases of seed {args.seed} in {seconds}: {counts['agreed']:,} agree",
        end="",
    )
    print(f", {counts['failed']} fail, {counts['left out']} left out (too large for float16)")
    names = ", ".join(f"{name} {count:,}" for name, count in fused.most_common())
    print(f"Fused operations in their plans: {names}")
    left = numbers.end - numbers.first_left()
    if left:
        limit = "" if args.seconds is None else f" --seconds {args.seconds:g}"
        again = command(args, f"--first {numbers.first_left()} --cases {left}{limit}")
        print(f"All before case {numbers.first_left()} are done. Go on:\n  {again}")
    return 1 if progress.failures else 0


def one(args: argparse.Namespace) -> int:
    """One case, in this process, with its traceback."""
    pipelines, check, _ = load()
    case = pipelines.numbered_case(args.seed, args.case, args.recipes)
    print(f"Case {args.case} of seed {args.seed}:\n\n{case}\n", flush=True)
    try:
        fused = run_case(check, case, args.device)
    except check.TooLargeError:
        print("Left out: its values are too large for float16.")
        return 0
    print(f"Agrees. Fused operations in its plans: {', '.join(fused) or 'none'}")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=10_000, help="how many (10,000)")
    parser.add_argument("--seed", type=int, default=0, help="which sequence of cases (0)")
    parser.add_argument("--first", type=int, default=0, help="the number to begin with (0)")
    parser.add_argument("--seconds", type=float, help="stop after so long and say where to go on")
    parser.add_argument("--case", type=int, help="only this one, in this process")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--recipes", action="store_true", help="in low precision")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    args = parser.parse_args()
    if args.cases < 1 or args.jobs < 1:
        parser.error(f"--cases and --jobs must be positive, got {args.cases} and {args.jobs}")
    if args.first < 0 or (args.seconds is not None and not args.seconds > 0):
        parser.error(
            "--first must not be negative and --seconds must be positive, got "
            f"{args.first} and {args.seconds}"
        )
    return one(args) if args.case is not None else soak(args)


if __name__ == "__main__":
    sys.exit(main())
