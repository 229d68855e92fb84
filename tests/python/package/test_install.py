"""Ligature as others use it: a wheel in a fresh environment and a CMake package in a folder.

The wheel is compiled with the same commands as the build tree, so that ccache has every object.
"""

from __future__ import annotations

import re
import shutil
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from install_support import (
    TORCH,
    build_and_run,
    build_wheel,
    configure,
    make_environment,
    run,
    tool,
    write_tiny_project,
)
from repository import ROOT

import ligature

#: tools/run_tests.py reads it: each part of this file would build a wheel.
IN_ONE_PROCESS = True
VERSION = (ROOT / "VERSION").read_text().strip()
TORCH_VERSION = torch.__version__.split("+")[0]


@pytest.fixture(scope="session")
def build_tree() -> Path:
    build = Path(ligature.cmake_prefix_path)
    if not (build / "CMakeCache.txt").exists():
        pytest.skip(f"ligature is not used from its source tree: no build tree at {build}")
    tool("cmake")
    tool("c++")
    return build


@pytest.fixture(scope="session")
def wheel(build_tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    for module in ("pip", "scikit_build_core"):
        if find_spec(module) is None:
            pytest.skip(f"{sys.executable} has no {module} to build a wheel with")
    return build_wheel(build_tree, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_environment(tmp_path_factory.mktemp("environment") / "env", wheel)


@pytest.fixture(scope="session")
def package(environment: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the installed Python package."""
    script = "import ligature; print(ligature.__file__)"
    where = run(environment, "-c", script, cwd=tmp_path_factory.mktemp("elsewhere"))
    return Path(where.strip()).parent


@pytest.fixture(scope="session")
def prefix(build_tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prefix") / "usr"
    run(tool("cmake"), "--install", build_tree, "--prefix", folder, "--strip", cwd=folder.parent)
    return folder


@pytest.fixture(scope="session")
def trained(
    prefix: Path, package: Path, environment: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[str]]:
    """What the example project prints when it is built against each; both at once, to save time."""

    def train(installed: Path) -> list[str]:
        project = tmp_path_factory.mktemp("example") / "project"
        shutil.copytree(ROOT / "examples" / "cpp_project", project)
        configure(project, installed, f"-DPython3_EXECUTABLE={environment}")
        return build_and_run(project, "train_mlp").splitlines()

    with ThreadPoolExecutor() as pool:
        return dict(zip(["prefix", "package"], pool.map(train, [prefix, package]), strict=True))


@pytest.fixture(params=["prefix", "package"])
def installed(request: pytest.FixtureRequest) -> Path:
    """Both layouts hold the same: lib, include and share."""
    return request.getfixturevalue(request.param)


def test_wheel_holds_what_a_user_needs(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {
        "ligature/__init__.py",
        "ligature/_C.pyi",
        "ligature/_build.py",
        "ligature/py.typed",
        "ligature/lib/libligature.so",
        "ligature/include/ligature/ligature.h",
        "ligature/share/cmake/Ligature/LigatureConfig.cmake",
        f"ligature-{VERSION}.dist-info/licenses/LICENSE",
    } <= names
    assert sum(name.startswith("ligature/_C.") and name.endswith(".so") for name in names) == 1
    tops = {name.split("/")[0] for name in names}
    assert tops == {"ligature", f"ligature-{VERSION}.dist-info"}
    assert "ligature/libligature.so" not in names
    assert wheel.stat().st_size < 5_000_000


def test_wheel_asks_for_the_torch_it_was_built_with(wheel: Path) -> None:
    metadata = zipfile.ZipFile(wheel).read(f"ligature-{VERSION}.dist-info/METADATA").decode()
    major, minor = (int(part) for part in TORCH_VERSION.split(".")[:2])
    wanted = {f">={major}.{minor}", f"<{major}.{minor + 1}"}
    (requirement,) = re.findall(r"^Requires-Dist: torch(.*)$", metadata, re.M)
    assert set(requirement.replace(" ", "").split(",")) == wanted


def test_versions_agree(environment: Path, prefix: Path, tmp_path: Path) -> None:
    script = """
import importlib.metadata, ligature
print(importlib.metadata.version("ligature"), ligature.__version__,
      ligature.show_config("dict")["version"])
"""
    assert run(environment, "-c", script, cwd=tmp_path).split() == [VERSION] * 3
    project = write_tiny_project(tmp_path / "tiny", version=f"{VERSION} EXACT")
    configure(project, prefix, f"-DPython3_EXECUTABLE={sys.executable}")
    assert build_and_run(project, "program").split() == [VERSION, TORCH_VERSION]


def test_no_file_knows_this_machine(installed: Path) -> None:
    folders = {ROOT, TORCH, Path(ligature.cmake_prefix_path), Path(sys.prefix)}
    secrets = {str(f).encode() for folder in folders for f in (folder, folder.resolve())}
    for file in installed.rglob("*"):
        if file.is_file() and file.suffix != ".pyc":
            data = file.read_bytes()
            assert [s for s in secrets if s in data] == [], file
            if file.suffix == ".so":
                assert b"site-packages" not in data, file
                assert b".debug_info" not in data, file


def test_libraries_look_beside_themselves(installed: Path) -> None:
    for library in installed.rglob("*.so"):
        entries = run(tool("readelf"), "-dW", library, cwd=installed)
        (paths,) = re.findall(r"RUNPATH.*\[(.*)\]", entries)
        assert all(path.startswith("$ORIGIN") for path in paths.split(":")), paths
        # With these alone, it loads beside a torch with and a torch without CUDA.
        torch_libraries = set(re.findall(r"NEEDED.*\[(lib(?:torch|c10).*)\]", entries))
        assert torch_libraries <= {"libtorch_cpu.so", "libc10.so", "libtorch_python.so"}


def test_headers_need_only_installed_headers(installed: Path) -> None:
    headers = list((installed / "include").rglob("*.h"))
    assert len(headers) > 30
    for header in headers:
        for name in re.findall(r'^#include ["<](ligature/.*)[">]', header.read_text(), re.M):
            assert (installed / "include" / name).exists(), f"{header} includes {name}"
    assert not [h for h in headers if h.name == "pch.h" or "backend" in h.parts]


def test_wheel_works_far_from_the_source_tree(environment: Path, tmp_path: Path) -> None:
    script = """
import torch

import ligature

torch.manual_seed(0)
model = ligature.ops.Sequential(
    ligature.ops.LayerNorm(8, device="cpu"),
    ligature.ops.Linear(8, 32, device="cpu"),
    ligature.ops.SwiGLU(),
    ligature.ops.Linear(16, 8, device="cpu"),
)
x = torch.randn(4, 8, requires_grad=True)
y = model(x)
y.sum().backward()
norm, up, _, down = model
h = torch.nn.functional.layer_norm(x, (8,), norm.weight, norm.bias)
a, b = torch.nn.functional.linear(h, up.weight, up.bias).chunk(2, -1)
expected = torch.nn.functional.linear(torch.nn.functional.silu(a) * b, down.weight, down.bias)
torch.testing.assert_close(y, expected)
(dx,) = torch.autograd.grad(expected.sum(), x)
torch.testing.assert_close(x.grad, dx)
ligature.show_config()
print(ligature.__file__)
print(ligature.cmake_prefix_path)
"""
    *config, file, cmake = run(environment, "-c", script, cwd=tmp_path).splitlines()
    assert config[0] == f"Ligature {VERSION}"
    assert Path(file).is_relative_to(environment.parents[1])
    assert not Path(file).resolve().is_relative_to(ROOT)
    assert (Path(cmake) / "Ligature" / "LigatureConfig.cmake").exists()


def test_another_torch_is_refused_by_name(environment: Path, tmp_path: Path) -> None:
    script = """
import sys
import torch
torch.__version__ = "1.99.3+cu1"
try:
    import ligature
except ImportError as error:
    print(error)
assert "ligature._C" not in sys.modules
"""
    message = run(environment, "-c", script, cwd=tmp_path)
    assert f"built for torch {TORCH_VERSION}, but torch 1.99.3+cu1" in message


def test_a_package_that_was_not_built_says_so(package: Path, tmp_path: Path) -> None:
    shutil.copytree(package, tmp_path / "ligature")
    (tmp_path / "ligature" / "_build.py").unlink()
    script = """
try:
    import ligature
except ImportError as error:
    print(error)
"""
    assert "ligature is not built" in run(sys.executable, "-c", script, cwd=tmp_path)


@pytest.mark.parametrize("where", ["prefix", "package"])
def test_example_project_builds_and_trains(trained: dict[str, list[str]], where: str) -> None:
    lines = trained[where]
    assert lines[0] == f"Ligature {VERSION}"
    steps = [line.split() for line in lines if line.startswith(("forward", "backward"))]
    assert ["forward", "ForwardLinearBiasActivation"] in steps
    assert ["backward", "BackwardActivationBias"] in steps
    assert lines[-1].startswith("loss ")


def test_build_tree_is_a_package(build_tree: Path, tmp_path: Path) -> None:
    project = write_tiny_project(tmp_path / "tiny")
    configure(project, ligature.cmake_prefix_path, f"-DPython3_EXECUTABLE={sys.executable}")
    assert build_and_run(project, "program").split() == [VERSION, TORCH_VERSION]


def test_prefix_moves_and_needs_no_cuda_toolkit(prefix: Path, tmp_path: Path) -> None:
    """A torch that has CUDA, named by the prefix path alone, on a machine without the toolkit."""
    root = TORCH
    if not (TORCH / "lib" / "libtorch_cuda.so").exists():
        root = tmp_path / "torch"
        (root / "lib").mkdir(parents=True)
        for name in ("include", "share"):
            (root / name).symlink_to(TORCH / name)
        for library in (TORCH / "lib").iterdir():
            (root / "lib" / library.name).symlink_to(library)
        (root / "lib" / "libtorch_cuda.so").symlink_to(TORCH / "lib" / "libtorch.so")
    moved = tmp_path / "moved"
    shutil.copytree(prefix, moved)
    project = write_tiny_project(tmp_path / "tiny")
    disable = [f"-DCMAKE_DISABLE_FIND_PACKAGE_{name}=ON" for name in ("CUDAToolkit", "Python3")]
    configure(project, f"{moved};{root}", *disable)
    assert build_and_run(project, "program").split() == [VERSION, TORCH_VERSION]


def test_cmake_refuses_another_torch_by_name(prefix: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(prefix, other)
    config = other / "share" / "cmake" / "Ligature" / "LigatureConfig.cmake"
    config.write_text(config.read_text().replace(f"VERSION {TORCH_VERSION})", "VERSION 1.99.3)"))
    project = write_tiny_project(tmp_path / "tiny")
    with pytest.raises(AssertionError) as failure:
        configure(project, other, f"-DPython3_EXECUTABLE={sys.executable}")
    message = " ".join(str(failure.value).split())
    assert f"was built for torch 1.99.3; got torch {TORCH_VERSION}" in message
