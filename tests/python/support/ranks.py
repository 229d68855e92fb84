"""Several processes that compute together, for tests: started once, given functions to run.

Each rank has one thread and Gloo on loopback. ``Ranks(2).run(function, *args)`` calls
``function(*args)`` on each of them and gives the results in the order of the ranks; a function has
to be importable. Whatever happens, the processes end with the one that started them.
"""

from __future__ import annotations

import atexit
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

TIMEOUT = 120.0  # of one function, in seconds
GROUP_TIMEOUT = 20.0  # of a collective


class RankError(AssertionError):
    """What went wrong on the ranks, by rank; None for those that came through."""

    def __init__(self, errors: list[str | None]) -> None:
        self.errors = errors
        super().__init__("\n".join(f"rank {i}: {e}" for i, e in enumerate(errors) if e))


class Ranks:
    def __init__(self, size: int) -> None:
        self.size = size
        self._folder = tempfile.TemporaryDirectory()
        self._listener = Listener(str(Path(self._folder.name) / "socket"), "AF_UNIX")
        env = os.environ | {
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        }
        store = Path(self._folder.name) / "store"
        self._processes = [
            subprocess.Popen(
                [sys.executable, __file__, self._listener.address, str(store), str(r), str(size)],
                env=env,
                start_new_session=True,
            )
            for r in range(size)
        ]
        atexit.register(self.stop)
        with self._listener:
            connections = [self._listener.accept() for _ in range(size)]
        by_rank = sorted(((c.recv(), c) for c in connections), key=lambda item: item[0])
        self._connections: list[Connection] = [c for _, c in by_rank]

    def run(self, function: Callable[..., Any], *args: Any, each: list[Any] | None = None) -> Any:
        """``each``: one more first argument per rank."""
        name = (function.__module__, function.__qualname__)
        for rank, connection in enumerate(self._connections):
            own = args if each is None else (each[rank], *args)
            connection.send_bytes(pickle.dumps((name, own)))
        end = time.monotonic() + TIMEOUT
        results: list[Any] = [None] * self.size
        errors: list[str | None] = [None] * self.size
        for rank, connection in enumerate(self._connections):
            if not connection.poll(max(0.0, end - time.monotonic())):
                self.stop()
                raise RankError([*errors[:rank], f"no answer within {TIMEOUT} s"])
            try:
                good, value = pickle.loads(connection.recv_bytes())
            except EOFError:
                self.stop()
                raise RankError([*errors[:rank], "it ended"]) from None
            if good:
                results[rank] = value
            else:
                errors[rank] = value
        if any(errors):
            raise RankError(errors)
        return results

    @property
    def alive(self) -> bool:
        return all(process.poll() is None for process in self._processes)

    def stop(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


_KNOWN: dict[int, Ranks] = {}


def ranks(size: int) -> Ranks:
    """Those of this size, started anew where one has ended."""
    if size not in _KNOWN or not _KNOWN[size].alive:
        if size in _KNOWN:
            _KNOWN[size].stop()
        _KNOWN[size] = Ranks(size)
    return _KNOWN[size]


def _serve(address: str, store: str, rank: int, size: int) -> None:
    import importlib
    from datetime import timedelta
    from multiprocessing.connection import Client

    import torch

    torch.set_num_threads(1)
    connection = Client(address, "AF_UNIX")
    connection.send(rank)
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=GROUP_TIMEOUT),
    )
    while True:
        try:
            (module, name), args = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        try:
            target: Any = importlib.import_module(module)
            for part in name.split("."):
                target = getattr(target, part)
            answer = (True, target(*args))
        except BaseException as error:
            answer = (False, f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
        connection.send_bytes(pickle.dumps(answer))


if __name__ == "__main__":
    _serve(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    os._exit(0)  # a group whose peer is gone would wait
