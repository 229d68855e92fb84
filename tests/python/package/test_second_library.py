"""Another library may use the keys of torch's dispatcher that are meant for tests."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils import cpp_extension

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
    y = linear(torch.ones(4, 32, requires_grad=True))
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
