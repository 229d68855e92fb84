"""Writes docs/plan.svg anew: the plan of the README's example, on the CPU."""

from pathlib import Path

import torch

import ligature as te

PICTURE = Path(__file__).resolve().parent.parent / "docs/plan.svg"


def picture() -> str:
    with torch.device("cpu"):
        mlp = te.ops.Sequential(
            te.ops.LayerNorm(256),
            te.ops.Linear(256, 1024),
            te.ops.SwiGLU(),
            te.ops.Linear(512, 256),
        )
    return mlp.explain((1, 256)).svg()  # one row: then every processor has the same plan


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
