"""How far one step of an MLP in BF16 walks through the library's source.

    .venv/bin/python tools/walk/walk.py [SOURCE]

Builds SOURCE's library (this checkout's unless told) with every function entry recorded, runs one
forward and backward on the CPU after the plans are made, and prints the files in the order in which
their functions are first entered, their number, and how often the folder changes on the way.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
FLAGS = "-O1 -g1 -finstrument-functions -finstrument-functions-exclude-file-list=/usr/,/torch/"


def run(*command: str | Path, **options: object) -> str:
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, **options)  # type: ignore[call-overload]
    if done.returncode:
        sys.exit(f"{command[0]} failed:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return str(done.stdout)


def build(source: Path, folder: Path, jobs: int) -> Path:
    import torch

    site = Path(torch.__file__).parent
    off = [f"-DLIGATURE_BUILD_{part}=OFF" for part in ("PYTHON", "TESTS", "EXAMPLES")]
    kind = ("-DCMAKE_BUILD_TYPE=Walk", f"-DCMAKE_CXX_FLAGS_WALK={FLAGS}")
    python = f"-DPython3_EXECUTABLE={sys.executable}"
    run("cmake", "-S", source, "-B", folder, "-G", "Ninja", *kind, python, *off)
    run("cmake", "--build", folder, "-j", str(jobs), "--target", "ligature")
    program = folder / "walk"
    headers = [f"-isystem{site}/include", f"-isystem{site}/include/torch/csrc/api/include"]
    folders = [f"-L{folder}/lib", f"-L{site}/lib", f"-Wl,-rpath,{folder}/lib:{site}/lib"]
    compiler = ("c++", "-std=c++20", "-O1", HERE / "walk.cpp", "-o", program, f"-I{source}")
    run(*compiler, *headers, *folders, "-lligature", "-ltorch", "-ltorch_cpu", "-lc10")
    return program


def entered(program: Path, folder: Path, source: Path) -> list[tuple[str, str]]:
    """(address, file below ligature/) of each entry, in order."""
    lines = run(program).splitlines()
    addresses = [int(line, 16) for line in lines if line.startswith("0x")]
    library = next(line for line in lines if "libligature.so" in line)
    base = int(library.split("-")[0], 16) - int(library.split()[2], 16)
    unique = sorted(set(addresses))
    found = run(
        "addr2line",
        "-e",
        folder / "lib" / "libligature.so",
        input="\n".join(hex(a - base) for a in unique),
    ).splitlines()
    root = str(source / "ligature") + "/"
    file_of = {a: str(Path(f.split(":")[0]).resolve()) for a, f in zip(unique, found, strict=True)}
    return [(hex(a), f.removeprefix(root)) for a in addresses if (f := file_of[a]).startswith(root)]


def changes(files: list[str]) -> int:
    folders = [str(Path(f).parent) for f in files]
    return sum(a != b for a, b in itertools.pairwise(folders))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", nargs="?", type=Path, default=HERE.parents[1])
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--files", action="store_true", help="list the files")
    args = parser.parse_args()
    source = args.source.resolve()
    # cmake and ninja are installed beside this Python
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    folder = source / "build" / "walk"
    walk = entered(build(source, folder, args.jobs), folder, source)
    first = list(dict(walk).values())
    sources = [f for f in first if f.endswith(".cpp")]
    if args.files:
        print(*dict.fromkeys(first), sep="\n")
    for name, files in (("all files", first), ("source files alone", sources)):
        print(f"{name}: {len(set(files))}, changes of folder: {changes(files)}")
    print(f"functions entered: {len(first)} different, {len(walk)} in all")


if __name__ == "__main__":
    main()
