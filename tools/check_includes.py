"""Checks that the library's folders include each other in one direction only.

Each row of the table is a room: its folder, or the files at the root that belong to it, and what it
may include. Rooms stand in the order in which they are built on each other, so a room may include
those above it that it names, and never one below. Part of `make lint`.

`check_includes.py --installed` prints the headers that users need, which are installed.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = ROOT / "ligature"

VALUES = "value.h meta.h prepare.h readable.h readable.cpp quantized/"
OPERATION = "operation.h operation.cpp context.h flags.h op_quantization.h options.h plain_state.h"
OPERATION += " context_state.h"
TOP = "ligature.h sequential.h sequential.cpp sequential_explain.cpp archive.h archive.cpp "
TOP += "config.h config.cpp"
# room, its files, the rooms that it may include
ROOMS = [
    ("base", "base/ check.h version.h version.cpp pch.h", ""),
    ("format", "format/", "base"),
    ("kernels", "kernels/", "base format"),
    ("aten", "backend/aten/", "base format kernels"),
    ("meta", "backend/meta/", "base format kernels"),
    ("cpu", "backend/cpu/", "base format kernels"),
    ("cuda", "backend/cuda/", "base format kernels"),
    ("values", VALUES, "base format kernels"),
    ("distributed", "distributed/", "base format kernels values"),
    ("operation", OPERATION, "base format kernels values"),
    ("recipes", "recipes/", "base format kernels values distributed operation"),
    ("ops", "ops/", "base kernels values distributed operation recipes"),
    ("fuser", "fuser/", "base kernels values distributed operation recipes"),
    ("fused", "fused/", "base kernels values distributed operation recipes ops fuser"),
    ("explain", "explain/", "base kernels values distributed operation recipes fuser"),
    ("compile", "compile/", "base kernels values operation recipes fuser explain"),
    ("top", TOP, "base kernels values distributed operation recipes ops fuser fused explain"),
    (
        "testing",
        "testing/",
        "base format kernels values distributed operation recipes ops fuser fused explain top",
    ),
]

# What users include; headers that these include are installed with them.
PUBLIC = """ligature.h config.h version.h readable.h ops/checks.h fused/ explain/explain.h
    kernels/backend.h kernels/run.h kernels/stored.h testing/testing.h"""


def includes(path: Path) -> list[str]:
    return re.findall(r'^#include "ligature/([^"]+)"', path.read_text(), re.MULTILINE)


def installed() -> list[str]:
    waiting = []
    for name in PUBLIC.split():
        found = sorted((LIBRARY / name).glob("*.h")) if name.endswith("/") else [LIBRARY / name]
        waiting += [path.relative_to(LIBRARY).as_posix() for path in found]
    seen: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            waiting += includes(LIBRARY / name)
    return sorted(seen)


def room_of(path: str) -> str | None:
    for name, files, _ in ROOMS:
        for file in files.split():
            if path == file or (file.endswith("/") and path.startswith(file)):
                return name
    return None


def problems() -> list[str]:
    may = {name: set(allowed.split()) for name, _, allowed in ROOMS}
    out = []
    for order, (name, _, allowed) in enumerate(ROOMS):
        above = {other for other, _, _ in ROOMS[:order]}
        out += [
            f"{name} may not include {room}, which is not above it"
            for room in allowed.split()
            if room not in above
        ]
    for path in sorted(LIBRARY.rglob("*")):
        if path.suffix not in (".h", ".cpp", ".cu", ".cuh"):
            continue
        name = path.relative_to(LIBRARY).as_posix()
        room = room_of(name)
        if room is None:
            out.append(f"ligature/{name} is in no room of tools/check_includes.py")
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            found = re.match(r'#include "ligature/([^"]+)"', line)
            if found is None:
                continue
            other = room_of(found[1])
            if other != room and other not in may[room]:
                out.append(f"ligature/{name}:{number}: {room} may not include {other} ({found[1]})")
    return out


if __name__ == "__main__":
    if sys.argv[1:] == ["--installed"]:
        print("\n".join(installed()))
        sys.exit(0)
    found = problems()
    print("\n".join(found), end="\n" if found else "")
    sys.exit(1 if found else 0)
