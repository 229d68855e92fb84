"""tools/soak.py: its numbers, and a run that is stopped by the clock and goes on."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import soak


def test_numbers_are_handed_out_once_and_in_order() -> None:
    numbers = soak.Numbers(range(5, 9), None)
    assert [numbers.take() for _ in range(3)] == [5, 6, 7]
    numbers.running -= {5, 7}
    assert numbers.first_left() == 6
    numbers.running.remove(6)
    numbers.again.append(6)  # its worker crashed before it ran
    assert [numbers.take() for _ in range(3)] == [6, 8, None]
    assert not numbers.any_left()


def test_numbers_end_with_the_time(monkeypatch: Any) -> None:
    now = [0.0]
    monkeypatch.setattr(soak.time, "monotonic", lambda: now[0])
    numbers = soak.Numbers(range(9), 10.0)
    assert numbers.take() == 0
    now[0] = 11.0
    numbers.again.append(0)
    assert numbers.take() == 0
    assert numbers.take() is None


def run(*options: str) -> str:
    done = subprocess.run(
        [sys.executable, soak.__file__, *options], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_run_that_is_stopped_says_where_to_go_on() -> None:
    text = run("--seed", "11", "--cases", "4000", "--jobs", "2", "--seconds", "0.5")
    first, left = map(int, re.findall(r"--first (\d+) --cases (\d+) --seconds 0.5", text)[0])
    assert first >= 2
    assert first + left == 4000
    assert f"\n{first:,} cases of seed 11 in" in text
    text = run("--seed", "11", "--first", "3998", "--cases", "2", "--jobs", "5")
    assert "2 cases of seed 11" in text
    assert "Go on" not in text
