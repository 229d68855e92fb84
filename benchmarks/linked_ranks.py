"""Ranks in network namespaces of their own, joined by a link of a chosen rate.

Link makes the namespaces and takes them down again; Loopback has its interface, and no rate. Ranks
starts one process in each. All addresses are those of the namespaces, or loopback. Only a run that
is ended by SIGKILL leaves something: two namespaces without processes, `ligature-<pid>-<rank>`.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

SIZE = 2
COLLECTIVE_TIMEOUT = 60.0
CALL_TIMEOUT = 180.0

# For times that repeat: no guess at the link's rate, and little waits in the queue.
TCP = {
    "tcp_congestion_control": "cubic",
    "tcp_slow_start_after_idle": 0,
    "tcp_limit_output_bytes": 65536,
}


class NoNamespacesError(Exception):
    """Why this machine cannot have them, in one line."""


def _do(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    if done.returncode != 0:
        said = (done.stderr.strip() or f"it exited with {done.returncode}").splitlines()[-1]
        raise NoNamespacesError(f"`{' '.join(command)}`: {said}")


class Loopback:
    """No namespaces: both ranks on this machine's loopback."""

    interface = "lo"

    def __enter__(self) -> Loopback:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def inside(self, rank: int) -> list[str]:
        return []

    def shape(self, rate: int) -> None:
        pass


class Link(Loopback):
    """Two namespaces and a veth pair between them."""

    def __init__(self) -> None:
        self.interface = f"lig{os.getpid()}"
        self._names = [f"ligature-{os.getpid()}-{rank}" for rank in range(SIZE)]
        self._made: list[str] = []

    def __enter__(self) -> Link:
        for tool in ("ip", "tc"):
            if shutil.which(tool) is None:
                raise NoNamespacesError(f"there is no `{tool}` (Debian: iproute2)")
        if os.geteuid() != 0:
            raise NoNamespacesError("only root makes them")
        try:
            self._make()
        except BaseException:
            self._unmake()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._unmake()

    def _make(self) -> None:
        for name in self._names:
            self._made.append(name)
            _do("ip", "netns", "add", name)
        here, there = self._names
        end = ("type", "veth", "peer", "name", self.interface, "netns", there)
        _do("ip", "link", "add", self.interface, "netns", here, *end)
        for rank, name in enumerate(self._names):
            _do("ip", "-n", name, "link", "set", "lo", "up")
            address = f"192.0.2.{rank + 1}/24"
            _do("ip", "-n", name, "address", "add", address, "dev", self.interface)
            # Packets that fit the bucket: tbf would split larger ones, which takes CPU time.
            only_ipv4 = ("addrgenmode", "none", "gso_max_size", "32768")
            _do("ip", "-n", name, "link", "set", self.interface, *only_ipv4)
            _do("ip", "-n", name, "link", "set", self.interface, "up")
            for setting, value in TCP.items():
                with suppress(NoNamespacesError):
                    write = f"echo {value} > /proc/sys/net/ipv4/{setting}"
                    _do("ip", "netns", "exec", name, "sh", "-c", write)

    def _unmake(self) -> None:
        while self._made:  # with them goes the pair
            with suppress(NoNamespacesError, subprocess.TimeoutExpired):
                _do("ip", "netns", "delete", self._made.pop())

    def inside(self, rank: int) -> list[str]:
        return ["ip", "netns", "exec", self._names[rank]]

    def shape(self, rate: int) -> None:
        """Both directions, in Mbit/s."""
        for name in self._names:
            how = ("tbf", "rate", f"{rate}mbit", "burst", "64kb", "latency", "400ms")
            _do("tc", "-n", name, "qdisc", "replace", "dev", self.interface, "root", *how)


class Ranks:
    """One process per rank, with one thread, that runs ``script``; see :func:`serve`."""

    def __init__(self, link: Loopback, script: Path) -> None:
        self._link, self._script = link, script
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []

    def __enter__(self) -> Ranks:
        self._folder = tempfile.TemporaryDirectory()
        try:
            for rank in range(SIZE):
                self._start(rank)
            self.call("ready")
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def _start(self, rank: int) -> None:
        env = os.environ | {
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": self._link.interface,
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        }
        own, other = Pipe()
        with other:
            store = str(Path(self._folder.name) / "store")
            numbers = (rank, other.fileno(), os.getpid())
            self._processes.append(
                subprocess.Popen(
                    [
                        *self._link.inside(rank),
                        sys.executable,
                        str(self._script),
                        store,
                        *map(str, numbers),
                    ],
                    env=env,
                    pass_fds=[other.fileno()],
                    stdout=subprocess.DEVNULL,  # where Gloo says that it is connected
                    start_new_session=True,
                )
            )
        self._connections.append(own)

    def call(self, name: str, *args: Any) -> list[Any]:
        """What the function of this name gives on each rank."""
        for connection in self._connections:
            connection.send((name, args))
        end = time.monotonic() + CALL_TIMEOUT
        answers, errors = [], []
        for rank, connection in enumerate(self._connections):
            try:
                if not connection.poll(max(0.0, end - time.monotonic())):
                    raise TimeoutError(f"rank {rank}, {name}: no answer in {CALL_TIMEOUT} s")
                good, value = connection.recv()
            except (EOFError, ConnectionError):
                good, value = False, "it ended"
            (answers if good else errors).append(value if good else f"rank {rank}: {value}")
        if errors:
            raise RuntimeError("\n".join(errors))
        return answers

    def stop(self) -> None:
        for process in self._processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for connection in self._connections:
            connection.close()
        self._processes, self._connections = [], []
        self._folder.cleanup()


def serve(functions: dict[str, Callable[..., Any]]) -> None:
    """What a rank's script does: runs what it is asked for, as long as the one who asks lives."""
    import torch

    store, rank, pipe, parent = sys.argv[1], *map(int, sys.argv[2:])
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=SIZE,
        timeout=timedelta(seconds=COLLECTIVE_TIMEOUT),
    )
    connection = Connection(pipe)
    while True:
        try:
            name, args = connection.recv()
        except EOFError:
            os._exit(0)
        try:
            answer = (True, functions[name](*args))
        except Exception:
            answer = (False, traceback.format_exc())
        connection.send(answer)
