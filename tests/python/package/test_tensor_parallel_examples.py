"""The examples of tensor parallelism: ranks agree with one process, in Python and in C++."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from repository import EXAMPLES, ROOT

import ligature as te


@pytest.fixture(autouse=True)
def device() -> str:
    """The examples choose their device by themselves."""
    return "cpu"


def run(command: list[str]) -> str:
    env = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("ranks", [1, 2])
def test_in_python(ranks: int) -> None:
    script = str(EXAMPLES / "tensor_parallel.py")
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    printed = run([sys.executable, *torchrun, script])
    rows = re.findall(rf"^step +(\d+)  one process (\S+)  {ranks} ranks (\S+)$", printed, re.M)
    assert [int(row[0]) for row in rows] == list(range(1, 11))
    assert all(abs(float(a) - float(b)) < 1e-5 for _, a, b in rows)
    assert ("reduce_scatter [gloo]" in printed) == (ranks > 1)
    names = "0.weight, 0.bias, 4.bias" if ranks > 1 else "none"
    assert f"partial gradients: {names}\n" in printed


def program(name: str) -> Path:
    """Beside the package, where that has a build folder of its own."""
    folders = [Path(te.__file__).parents[2] / "bin", ROOT / "build/release/bin"]
    found = [folder / f"example_{name}" for folder in folders]
    built = [path for path in found if path.is_file()]
    if not built:
        pytest.skip("the examples in C++ are not built")
    return built[0]


@pytest.mark.parametrize("name", ["tensor_parallel", "train_mlp"])
def test_in_cpp(name: str) -> None:
    printed = run([str(program(name))])
    first, last = re.findall(r"^loss (\S+) -> ([\d.]+)", printed, re.M)[0]
    assert float(last) < 0.8 * float(first)
    if name == "tensor_parallel":
        assert "reduce_scatter [custom]" in printed
        assert re.search(r"over 2 ranks at most \d\.\de-0[789] from that$", printed, re.M)
