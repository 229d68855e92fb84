"""Activations and bias gradients in cuBLASLt's epilogues, where they are asked for."""

from __future__ import annotations

import os
import subprocess
import sys

import epilogue_check
import pytest
import torch

import ligature as te

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or not te.show_config("dict")["cuda"]["built"],
    reason="no CUDA device, or a build without CUDA",
)


def run(use: str, *command: str) -> str:
    """In a process of its own: the environment is read once."""
    env = {**os.environ, "LIGATURE_GEMM_EPILOGUES": use}
    done = subprocess.run(
        [sys.executable, *command], env=env, timeout=300, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("device", ["cuda"], indirect=True)
def test_steps_with_every_epilogue(device: str) -> None:
    assert "all right" in run("always", epilogue_check.__file__)


@pytest.mark.parametrize("device", ["cuda"], indirect=True)
def test_never(device: str) -> None:
    code = """
import torch, ligature as te
model = te.ops.Sequential(te.ops.Linear(64, 64), te.ops.GELU(), te.ops.Linear(64, 64))
model.to("cuda", torch.bfloat16)
model(torch.randn(64, 64, dtype=torch.bfloat16, device="cuda")).sum().backward()
print(model.explain())
"""
    text = run("never", "-c", code)
    assert "linear_forward" in text
    assert "linear_activated" not in text
    assert "linear_weight_bias_grad" not in text
