"""Refuses a torch that the core was not compiled for, before the loader trips over its symbols."""

from __future__ import annotations


def check_torch(running: str, where: str) -> None:
    """Raise ImportError unless `running` is of the minor version that ligature was built for."""
    try:
        from ._build import torch_version as built
    except ModuleNotFoundError as error:
        raise ImportError(
            "ligature is not built: run 'make build' in its source tree, "
            "or install it with 'pip install .'"
        ) from error
    wanted, got = (version.split(".")[:2] for version in (built, running))
    if wanted != got:
        raise ImportError(
            f"ligature was built for torch {built}, but torch {running} is running (from {where}). "
            f"Install torch {'.'.join(wanted)}, or rebuild ligature for this one with "
            f"'pip install --no-build-isolation .'"
        )
