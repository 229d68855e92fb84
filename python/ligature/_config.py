"""What this build of Ligature is, what it can do here, and where C++ finds it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, overload

from . import _C
from ._build import cmake_dir

# To be put on CMAKE_PREFIX_PATH for find_package(Ligature).
cmake_prefix_path = str(Path(__file__).parent / cmake_dir)


def set_launch_graphs(enabled: bool) -> None:
    """Choose whether small pipelines on a GPU launch their kernels together.

    They do unless ``LIGATURE_LAUNCH_GRAPHS=0`` is set: the launches of one direction are held until
    its end, and go out as one CUDA graph once the same launches with the same memory have been
    seen. Results are the same bits. Without the CUDA backend there is nothing to choose.
    """
    _C.set_launch_graphs(enabled)


@overload
def show_config(mode: Literal["print"] = "print") -> None: ...
@overload
def show_config(mode: Literal["dict"]) -> dict[str, Any]: ...


def show_config(mode: str = "print") -> dict[str, Any] | None:
    """Show the build, torch, the devices, and which backends and formats there are, or why not.

    Args:
        mode: ``"print"`` prints it, ``"dict"`` returns it as plain data.
    """
    if mode == "dict":
        return _C.config()
    if mode != "print":
        raise ValueError(f"[show_config] mode must be 'print' or 'dict', got {mode!r}")
    print(_C.config_text(), end="")
    return None
