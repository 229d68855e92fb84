"""Makes what a user would install, in temporary folders: a wheel, an environment, C++ projects."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from repository import ROOT

import ligature

TORCH = Path(torch.__file__).parent
TOOLS = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])

TINY_CMAKE = """\
cmake_minimum_required(VERSION 3.25)
project(tiny LANGUAGES CXX)
find_package(Ligature {version} REQUIRED)
add_executable(program main.cpp)
target_link_libraries(program PRIVATE Ligature::ligature)
"""

TINY_CPP = """\
#include <ligature/config.h>
#include <ligature/version.h>

#include <cstdio>

int main() {
  std::printf("%s %s\\n", ligature::version(), ligature::config().torch.running.c_str());
}
"""


def outside_env(**extra: str) -> dict[str, str]:
    """The environment of somebody who has never seen the source tree."""
    env = {k: v for k, v in os.environ.items() if k not in {"PYTHONPATH", "CMAKE_PREFIX_PATH"}}
    return {**env, "PATH": TOOLS, **extra}


def run(*command: str | Path, cwd: Path, env: Mapping[str, str] | None = None) -> str:
    """What the command prints; all of it in the failure when it fails."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=outside_env() if env is None else env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, f"{command} failed with {done.returncode}:\n{done.stdout}"
    return done.stdout


def tool(name: str) -> str:
    found = shutil.which(name, path=TOOLS)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def cache_entry(build: Path, name: str) -> str:
    """A variable of a CMake build tree."""
    match = re.search(rf"^{name}:\w+=(.*)$", (build / "CMakeCache.txt").read_text(), re.M)
    assert match, f"{build} has no {name}"
    return match[1]


def build_wheel(build: Path, folder: Path) -> Path:
    """The wheel, compiled as the build tree was: ccache has every object."""
    strict = cache_entry(build, "LIGATURE_WARNINGS_AS_ERRORS")
    env = {
        **os.environ,
        "PATH": TOOLS,
        "CXX": cache_entry(build, "CMAKE_CXX_COMPILER"),
        "CMAKE_BUILD_PARALLEL_LEVEL": str(os.cpu_count()),
    }
    pip = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--no-index"]
    settings = [f"cmake.define.LIGATURE_WARNINGS_AS_ERRORS={strict}", f"build-dir={build}-wheel"]
    options = [f"--config-settings={setting}" for setting in settings]
    run(*pip, *options, "--wheel-dir", folder, ROOT, cwd=folder, env=env)
    (wheel,) = folder.glob("*.whl")
    return wheel


def make_environment(folder: Path, wheel: Path) -> Path:
    """The python of a fresh environment with the wheel in it, and torch from where it is."""
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    python = folder / "bin" / "python"
    site = Path(run(python, "-c", "import site; print(site.getsitepackages()[0])", cwd=folder)[:-1])
    (site / "torch_from_elsewhere.pth").write_text(f"{TORCH.parent}\n")
    pip = [sys.executable, "-m", "pip", "--python", str(python)]
    run(*pip, "install", "--no-deps", "--no-index", "--quiet", wheel, cwd=folder)
    return python


def write_tiny_project(folder: Path, version: str = "") -> Path:
    folder.mkdir()
    (folder / "CMakeLists.txt").write_text(TINY_CMAKE.format(version=version))
    (folder / "main.cpp").write_text(TINY_CPP)
    return folder


def configure(project: Path, prefix_path: str | Path, *options: str) -> str:
    """Configures a project that knows nothing but where Ligature is."""
    compiler = cache_entry(Path(ligature.cmake_prefix_path), "CMAKE_CXX_COMPILER")
    generator = "Ninja" if shutil.which("ninja", path=TOOLS) else "Unix Makefiles"
    return run(
        *(tool("cmake"), "-S", ".", "-B", "build", "-G", generator),
        *(f"-DCMAKE_CXX_COMPILER={compiler}", f"-DCMAKE_PREFIX_PATH={prefix_path}", *options),
        cwd=project,
    )


def build_and_run(project: Path, program: str) -> str:
    run(tool("cmake"), "--build", "build", cwd=project)
    return run(project / "build" / program, cwd=project)
