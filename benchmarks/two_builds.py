"""Two builds of Ligature in one run: each in a process of its own, in turns, medians.

    .venv/bin/python benchmarks/two_builds.py /path/to/the/other/checkout [--rounds 15]

Prints microseconds of a training step of an MLP (forward and backward) in both, and their ratio,
this checkout's over the other's.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# rows, model, hidden, dtype, recipe, steps in a turn
CASES = [
    (2, 8, 16, "float32", "", 400),
    (2, 8, 16, "bfloat16", "", 400),
    (64, 256, 512, "float32", "", 100),
    (64, 256, 512, "bfloat16", "", 100),
    (64, 256, 512, "bfloat16", "DelayedScaling", 60),
    (64, 256, 512, "bfloat16", "Float8CurrentScaling", 60),
    (64, 256, 512, "bfloat16", "Float8BlockScaling", 60),
    (64, 256, 512, "bfloat16", "MXFP8BlockScaling", 60),
    (64, 256, 512, "bfloat16", "NVFP4BlockScaling", 60),
    (1024, 512, 1024, "float32", "", 4),
    (1024, 512, 1024, "bfloat16", "", 4),
]


def worker() -> None:
    """Answers each number on standard input with the seconds of one turn of that case."""
    import torch

    import ligature as te

    torch.set_num_threads(2)
    steps = {}
    for case in CASES:
        rows, model, hidden, name, recipe, count = case
        dtype = getattr(torch, name)
        torch.manual_seed(0)
        with torch.device("cpu"):
            mlp = te.ops.Sequential(
                te.ops.LayerNorm(model, dtype=dtype),
                te.ops.Linear(model, 2 * hidden, dtype=dtype),
                te.ops.SwiGLU(),
                te.ops.Linear(hidden, model, dtype=dtype),
            )
        x = torch.randn(rows, model, dtype=dtype, requires_grad=True)
        dy = torch.randn(rows, model, dtype=dtype)
        made = getattr(te.recipe, recipe)() if recipe else None

        def turn(mlp=mlp, x=x, dy=dy, made=made, count=count) -> float:
            began = time.perf_counter()
            for _ in range(count):
                with te.autocast(enabled=made is not None, recipe=made):
                    y = mlp(x)
                y.backward(dy)
            return (time.perf_counter() - began) / count

        turn()
        steps[case] = turn
    print("ready", flush=True)
    for line in sys.stdin:
        print(steps[CASES[int(line)]](), flush=True)


class Build:
    def __init__(self, root: Path) -> None:
        env = {**os.environ, "PYTHONPATH": str(root / "python"), "OMP_WAIT_POLICY": "passive"}
        command = [sys.executable, __file__, "--worker"]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, text=True)
        self.ask()

    def ask(self, case: int | None = None) -> str:
        assert self.process.stdin
        assert self.process.stdout
        if case is not None:
            self.process.stdin.write(f"{case}\n")
            self.process.stdin.flush()
        answer = self.process.stdout.readline().strip()
        if not answer:
            sys.exit("a build failed")
        return answer

    def end(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait(timeout=60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("other", type=Path)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    builds = [Build(ROOT), Build(args.other.resolve())]
    print("| rows model hidden | dtype | recipe | this µs | other µs | this / other |")
    print("|---|---|---|---|---|---|")
    for i, (rows, model, hidden, dtype, recipe, _) in enumerate(CASES):
        seconds: list[list[float]] = [[], []]
        for turn in range(args.rounds):
            for which in (0, 1) if turn % 2 else (1, 0):
                seconds[which].append(float(builds[which].ask(i)))
        this, other = (statistics.median(s) for s in seconds)
        sizes = f"{rows} {model} {hidden}"
        print(
            f"| {sizes} | {dtype} | {recipe or 'none'} | {this * 1e6:.0f} | {other * 1e6:.0f} "
            f"| {this / other:.2f} |",
            flush=True,
        )
    for build in builds:
        build.end()


if __name__ == "__main__":
    if "--worker" in sys.argv:
        worker()
    else:
        main()
