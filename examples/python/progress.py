"""A progress bar: one line updated in place on a terminal, elsewhere a line now and then."""

from __future__ import annotations

import os
import shutil
import sys
import time


class Progress:
    def __init__(self, total: int, quiet: bool) -> None:
        self.total = total
        self.quiet = quiet
        self.in_place = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
        self.start = time.perf_counter()
        self.next = 0.0  # the step from which on a line is due
        try:
            "█░".encode(sys.stdout.encoding or "ascii")
            self.full, self.empty = "█", "░"
        except UnicodeError:
            self.full, self.empty = "#", "."

    def show(self, done: int, losses: list[float], milliseconds: list[float]) -> None:
        """``done`` steps of ``total``; losses and milliseconds of each model."""
        elapsed = time.perf_counter() - self.start
        left = round(elapsed / done * (self.total - done))
        text = (
            f" {done:{len(str(self.total))}}/{self.total}"
            f"  {left // 60}:{left % 60:02d} left"
            f"  loss {' | '.join(f'{loss:.4f}' for loss in losses)}"
            f"  ms/step {' | '.join(f'{ms:.1f}' for ms in milliseconds)}"
        )
        if self.quiet or (not self.in_place and self.next > done < self.total):
            return
        if not self.in_place:
            self.next += self.total / 10
            print(f"step{text}", flush=True)
            return
        columns = shutil.get_terminal_size().columns - 1
        room = max(0, min(30, columns - len(text)))
        filled = int(done * room / self.total)
        line = self.full * filled + self.empty * (room - filled) + text
        # Back to the start of the line, and away with what a longer one left there.
        print(f"\r{line[:columns]}\x1b[K", end="", flush=True)

    def close(self) -> None:
        """Ends the line, so that what follows begins a new one."""
        if self.in_place and not self.quiet:
            print(flush=True)
