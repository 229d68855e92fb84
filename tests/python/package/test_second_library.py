"""Other libraries beside Ligature's: one that uses torch's keys for tests, and the binding."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils import cpp_extension

from ligature import _C

SOURCE = """
#include <torch/library.h>

namespace {

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER,
                                         c10::DispatchKey::TESTING_ONLY_GenericWrapper), stack);
}

}  // namespace

TORCH_LIBRARY_IMPL(_, TESTING_ONLY_GenericWrapper, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}
"""

STEP = """
import torch, ligature as te
with te.quantized_model_init(recipe=te.recipe.MXFP8BlockScaling()):
    linear = te.ops.Linear(32, 32)
with te.autocast(recipe=te.recipe.MXFP8BlockScaling()):
    y = linear(torch.ones(4, 32, requires_grad=True, device=linear.weight.device))
y.sum().backward()
assert linear.weight.grad.shape == (32, 32)
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("c++")
    assert compiler is not None
    folder = tmp_path_factory.mktemp("second")
    (folder / "second.cpp").write_text(SOURCE)
    made = folder / "second.so"
    command = [compiler, "-std=c++20", "-shared", "-fPIC", "-O0", str(folder / "second.cpp")]
    command += [f"-isystem{path}" for path in cpp_extension.include_paths()]
    command += [f"-L{path}" for path in cpp_extension.library_paths()]
    command += ["-ltorch_cpu", "-lc10"]
    subprocess.run([*command, "-o", str(made)], check=True, capture_output=True, text=True)
    return made


@pytest.mark.parametrize("first", ["second library", "ligature"])
def test_its_fallback_and_ligature(library: Path, first: str) -> None:
    load = f"import torch; torch.ops.load_library({str(library)!r})\n"
    code = load + STEP if first == "second library" else "import ligature\n" + load + STEP
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_binding_has_no_copy_of_what_the_library_holds() -> None:
    """Its symbols are hidden, so a variable that is `inline` in a header would be another one."""
    if (nm := shutil.which("nm")) is None:
        pytest.skip("nm is not installed")

    def variables(path: Path) -> set[str]:
        lines = subprocess.check_output([nm, "-C", "--defined-only", path], text=True).splitlines()
        found = (line.split(maxsplit=2) for line in lines)
        return {name for _, kind, name in found if kind in "bBdDuV" and "ligature::" in name}

    library, binding = (
        {name for name in variables(Path(path)) if not name.startswith(("typeinfo", "vtable"))}
        for path in (Path(_C.__file__).with_name("libligature.so"), _C.__file__)
    )
    assert library
    assert not library & binding
