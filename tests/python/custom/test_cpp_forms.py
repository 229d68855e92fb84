"""A C++ operation with half of the split form, or with both forms, does not compile."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from repository import ROOT
from torch.utils.cpp_extension import include_paths

#: tools/run_tests.py reads it: one long test.
IN_ONE_PROCESS = True

COMPUTE = """
  OpForwardResult op_forward_compute(const Value& x, const OpArgs&) override { return {x, {}}; }
"""
SAVE = """
  void op_forward_save_ctx(OperationContext&, const Value&, Kept&, const OpArgs&) override {}
"""
CLASSIC = """
  Value op_forward(OperationContext&, const Value& x, const OpArgs&) override { return x; }
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_forms_are_checked_when_compiled(tmp_path: Path) -> None:
    """One compilation with one class per case keeps this quick: each error names its own case."""
    cases = {
        "Half": (COMPUTE, "op_forward_compute and op_forward_save_ctx, not one of them"),
        "OtherHalf": (SAVE, "op_forward_compute and op_forward_save_ctx, not one of them"),
        "Both": (COMPUTE + SAVE + CLASSIC, "or in the classic form, not in both"),
        "Neither": ("", "an operation defines a forward"),
        "Split": (COMPUTE + SAVE, None),
        "Classic": (CLASSIC, None),
    }
    source = ['#include "ligature/operation.h"', "using namespace ligature;", "struct None {};"]
    for name, (methods, _) in cases.items():
        source.append(
            f"class {name} : public Operation<{name}> {{ public: using Options = None;"
            f'explicit {name}(Options given = {{}}) : Operation("{name}"), options(given) {{}}'
            f"{methods} Options options; }}; {name} make_{name};"
        )
    path = tmp_path / "forms.cpp"
    path.write_text("\n".join(source))
    flags = ["-std=c++20", "-fsyntax-only", f"-I{ROOT}"]
    flags += [f"-isystem{folder}" for folder in include_paths()]
    flags.append(f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}")
    done = subprocess.run(["g++", *flags, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    for name, (_, message) in cases.items():
        about = [
            block
            for block in done.stderr.split("In instantiation of ")
            if re.search(rf"with Self = {name}[];]", block)
        ]
        errors = [
            line for block in about for line in block.splitlines() if "static assertion" in line
        ]
        if message is None:
            assert not errors, errors
        else:
            assert any(message in line for line in errors), (name, done.stderr[-3000:])
