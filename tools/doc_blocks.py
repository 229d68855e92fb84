"""The code blocks of the documentation, and the C++ tests that are made of them.

A block starts with three backticks and a language. What each language means:

  python         runs; the blocks of a page share one namespace, in order
  cpp            statements, in one function per page; each block sees the ones before it. `x` is
                 a tensor [64, 256] that requires a gradient, and `using namespace ligature` holds
  cpp namespace  definitions, before all statements of the page
  cpp with main  a program of its own; what it returns must be 0
  text           right after a python or cpp block: what it prints (`...` stands for anything).
                 Anywhere else: a drawing or an excerpt
  sh             commands; whatever of this project they name must exist
  cmake          an excerpt

Run as a script it writes the C++ tests of some pages: doc_blocks.py OUTPUT.cpp PAGE...
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KINDS = {"python", "cpp", "cpp namespace", "sh", "text", "cmake"}


@dataclass
class Block:
    page: Path
    line: int  # of the first line of code, from 1
    language: str
    role: str  # the word after the language, or ""
    code: str
    output: str | None = None  # of the text block right after it

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def is_program(self) -> bool:
        return self.language == "cpp" and re.search(r"^int main\(", self.code, re.M) is not None


def pages() -> list[Path]:
    """Every page whose blocks are tested."""
    names = ["README.md", "CONTRIBUTING.md", "examples/README.md"]
    return [ROOT / name for name in names] + sorted((ROOT / "docs").glob("*.md"))


def read_blocks(page: Path) -> list[Block]:
    """The blocks of a page in order, those that are the output of another one left out."""
    blocks: list[Block] = []
    current: Block | None = None
    code: list[str] = []
    alone = True  # something else stands between this place and the block before
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if current is not None:
            if line.rstrip() != "```":
                code.append(line)
                continue
            current.code = "".join(f"{text}\n" for text in code)
            before = blocks[-1] if blocks else None
            if current.language == "text" and not alone and before and before.output is None:
                before.output = current.code
            else:
                blocks.append(current)
            alone, current, code = current.language not in ("python", "cpp"), None, []
        elif line.lstrip().startswith("```"):
            kind = line.strip("`").strip()
            if kind not in KINDS or not line.startswith("```"):
                raise ValueError(
                    f"{page}:{number}: a block starts at the left with one of "
                    f"{', '.join(sorted(KINDS))}, got {line!r}"
                )
            language, _, role = kind.partition(" ")
            current = Block(page, number + 1, language, role, "")
        elif line.strip():
            alone = True
    if current is not None:
        raise ValueError(f"{current.place}: this block is not closed")
    return blocks


def matches(got: str, wanted: str) -> bool:
    """Whether an output is the wanted one. `...` is anything; spaces at ends do not count."""
    lines = [
        "\n".join(line.rstrip() for line in text.strip().split("\n")) for text in (got, wanted)
    ]
    pieces = [re.escape(piece) for piece in lines[1].split("...")]
    return re.fullmatch(".*".join(pieces), lines[0], re.S) is not None


# -- C++

PROLOGUE = """\
// Made from the pages of the documentation by tools/doc_blocks.py.
#include <gtest/gtest.h>
#include <ligature/ligature.h>
#include <torch/torch.h>

#include "tests/cpp/doc_page.h"
"""

# The blocks are compiled to be run once, not fast, and show more than they use.
PRAGMAS = """\
#pragma GCC optimize("O0")
#pragma GCC diagnostic ignored "-Wshadow"
#pragma GCC diagnostic ignored "-Wunused-variable"
#pragma GCC diagnostic ignored "-Wunused-but-set-variable"
"""


def _literal(text: str) -> str:
    return f'R"doc({text})doc"'


def cpp_tests(pages: Iterable[Path], directory: Path, prologue: str = PROLOGUE) -> str:
    """A source file with one test per page. Errors name the page, as seen from `directory`."""
    includes: list[str] = []
    tests: list[str] = []
    for page in pages:
        blocks = [block for block in read_blocks(page) if block.language == "cpp"]
        if blocks:
            name = os.path.relpath(page, directory)
            tests.append(_page_test(page.stem.replace("-", "_"), name, blocks, includes))
    unique = "\n".join(dict.fromkeys(includes))
    return f"{prologue}{unique}\n{PRAGMAS}\n" + "\n".join(tests)


def _page_test(name: str, page: str, blocks: list[Block], includes: list[str]) -> str:
    definitions: list[str] = []
    statements: list[str] = []
    depth = 0
    for block in blocks:
        code = block.code
        for include in re.findall(r"^#include .*$", code, re.M):
            includes.append(include)
        code = re.sub(r"^#include .*$", "", code, flags=re.M)
        place = _literal(f"{page}:{block.line}")
        wanted = "..." if block.output is None else block.output
        source = f'#line {block.line} "{page}"\n{code}'
        if block.is_program:
            main = f"main_of_line_{block.line}"
            definitions.append(re.sub(r"^int main\(", f"int {main}(", source, flags=re.M))
            source = f"EXPECT_EQ({main}(), 0) << {place};\n"
        elif block.role == "namespace":
            definitions.append(source)
            continue
        statements.append(
            f"{{ output.start();\n{source}output.stop({place}, {_literal(wanted)});\n"
        )
        depth += 1
    body = "".join(statements) + "}" * depth
    return (
        f"namespace doc_{name} {{\nusing namespace ligature;\n{''.join(definitions)}\n"
        f"TEST(Docs, {name}) {{\nDocOutput output;\nTensor x = doc_input();\n{body}\n}}\n}}\n"
    )


def main(output: str, *names: str) -> None:
    target = Path(output)
    source = cpp_tests([Path(name) for name in names], Path.cwd())
    target.write_text(source, encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
