"""Starts the ranks of a group on this machine, and ends them with whoever started them.

They find each other as those of ``torchrun`` do, by the same environment variables, over Gloo on
loopback; each has one thread.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from datetime import timedelta

import torch


def start(count: int, command: list[str], seconds: float) -> int:
    """Runs a command on so many ranks; gives 0, or how the first of them failed.

    When one fails the others are given a moment to say what they know of it, and end too; so do all
    when the time is over.
    """
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        # The store is here, and no rank has to make it.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(count):
            env = os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            ranks.append(subprocess.Popen(command, env=env, stdin=subprocess.PIPE))
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            codes = [rank.poll() for rank in ranks]
            if any(codes):
                end = min(end, time.monotonic() + 5.0)
            if None not in codes:
                return next((code for code in codes if code), 0)
            time.sleep(0.05)
        codes = [rank.poll() for rank in ranks]
        if not any(codes):
            print(f"The {count} processes did not end within {seconds:.0f} s.", file=sys.stderr)
        return next((code for code in codes if code), 1)
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
            assert rank.stdin is not None
            rank.stdin.close()
            rank.wait()


def join(timeout: float = 60.0) -> int:
    """Makes this process one of the ranks, which ends with the one that started it; its rank."""
    if os.environ.get("TORCHELASTIC_RUN_ID") is None:  # not under torchrun, which does that itself
        threading.Thread(target=_follow, daemon=True).start()
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=timeout))
    return torch.distributed.get_rank()


def _follow() -> None:
    """The other end of standard input is held by the process that started this one."""
    sys.stdin.buffer.read()
    os._exit(1)
