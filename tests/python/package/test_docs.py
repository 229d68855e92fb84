"""Runs the Python blocks of every page, looks at the commands, and checks the reader of blocks.

The C++ blocks are compiled into the C++ tests; here it is checked that wrong ones would be noticed.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
import shutil
import subprocess
import traceback
from pathlib import Path
from typing import Any

import doc_blocks
import format_pictures
import pytest
import torch
from doc_blocks import matches, read_blocks
from repository import ROOT

PAGES = doc_blocks.pages()
PYTHON_PAGES = [p for p in PAGES if any(b.language == "python" for b in read_blocks(p))]


@pytest.fixture(params=["cpu"], autouse=True)
def device() -> Any:
    """The pages say what happens on a CPU."""
    with torch.device("cpu"):
        yield "cpu"


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def run_page(page: Path) -> None:
    """Runs the blocks of a page in order and compares what they print."""
    try:
        run_blocks(page)
    finally:
        if torch.distributed.is_initialized():  # the next page is a process by itself
            torch.distributed.destroy_process_group()


def run_blocks(page: Path) -> None:
    names: dict[str, Any] = {"__name__": page.stem}
    for block in read_blocks(page):
        if block.language != "python":
            continue
        # Empty lines before it, so that an error names the line of the page.
        code = compile("\n" * (block.line - 1) + block.code, str(page), "exec", dont_inherit=True)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, names)
        if block.output is not None and not matches(printed.getvalue(), block.output):
            raise AssertionError(
                f"{block.place} printed\n{printed.getvalue()}and the page says\n{block.output}"
            )


@pytest.mark.parametrize("page", PYTHON_PAGES, ids=name_of)
def test_page(page: Path) -> None:
    if page.name == "integrations.md":
        pytest.importorskip("transformers", reason="the page needs transformers")
    run_page(page)


def test_every_page_shows_code() -> None:
    """A page whose blocks are not found would pass unseen."""
    prose = {"docs/architecture.md", "docs/performance.md"}
    counts = {name_of(page): len(read_blocks(page)) for page in PAGES}
    assert {name for name, count in counts.items() if not count} <= prose
    languages = [block.language for page in PAGES for block in read_blocks(page)]
    assert languages.count("python") > 30
    assert languages.count("cpp") > 20
    assert languages.count("sh") > 1


def test_every_example_is_listed() -> None:
    listed = (ROOT / "examples/README.md").read_text()
    names = {p.name for folder in ("python", "cpp") for p in (ROOT / "examples" / folder).iterdir()}
    names |= {p.name for p in (ROOT / "examples").iterdir() if p.is_dir()}
    names -= {"__pycache__"}
    assert "train_mlp.cpp" in names
    assert not [name for name in names if name not in listed]


def test_pictures_of_formats_are_as_drawn() -> None:
    for name, svg in format_pictures.pictures().items():
        assert (ROOT / "docs" / name).read_text(encoding="utf-8") == svg
        assert f"({name})" in (ROOT / "docs/low_precision.md").read_text(encoding="utf-8")
        assert "prefers-color-scheme:dark" in svg


def test_the_op_in_ten_lines_has_ten() -> None:
    block = read_blocks(ROOT / "docs/add_an_op.md")[0]
    lines = [line for line in block.code.splitlines() if line.strip() and "import " not in line]
    assert lines[0].startswith("class ")
    assert len(lines) == 10


# -- commands

COMMANDS = {
    "apt-get",
    "cd",
    "cmake",
    "ctest",
    "git",
    "pip",
    "python",
    "python3",
    "sudo",
    "torchrun",
}


def check_command(words: list[str]) -> None:
    """Raises for a target, preset, script or option of this project that is not there."""
    program, *arguments = [word for word in words if not re.match(r"\w+=", word)]
    makefile = (ROOT / "Makefile").read_text()
    if program == "make":
        for target in arguments:
            assert re.search(rf"^{re.escape(target)}:", makefile, re.M), f"no make target {target}"
    elif example := re.fullmatch(r"build/release/bin/example_(\w+)", program):
        assert (ROOT / f"examples/cpp/{example[1]}.cpp").is_file(), f"no example {example[1]}"
    elif program not in COMMANDS:
        assert (ROOT / program).is_file(), f"no such command: {program}"
        check_script(program, arguments)
    if program in ("python", "python3") and arguments and arguments[0].endswith(".py"):
        check_script(arguments[0], arguments[1:])
    if program == "torchrun":
        place = next(i for i, word in enumerate(arguments) if word.endswith(".py"))
        check_script(arguments[place], arguments[place + 1 :])
    if program == "cmake" and "--preset" in arguments:
        presets = json.loads((ROOT / "CMakePresets.json").read_text())["configurePresets"]
        wanted = arguments[arguments.index("--preset") + 1]
        assert wanted in [preset["name"] for preset in presets], f"no preset {wanted}"


def check_script(path: str, arguments: list[str]) -> None:
    text = (ROOT / path).read_text()
    for option in arguments:
        if option.startswith("--"):
            assert option in text, f"{path} has no option {option}"


def commands(text: str) -> list[list[str]]:
    """The words of every command."""
    found: list[list[str]] = []
    for line in text.replace("\\\n", " ").splitlines():
        found.append([])
        for word in shlex.shlex(line, posix=True, punctuation_chars=True):
            if set(word) <= set("&|;()"):
                found.append([])
            else:
                found[-1].append(word)
    return [words for words in found if words]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands(page: Path) -> None:
    for block in read_blocks(page):
        if block.language == "sh":
            for words in commands(block.code):
                try:
                    check_command(words)
                except AssertionError as error:
                    raise AssertionError(f"{block.place}: {' '.join(words)}: {error}") from None


@pytest.mark.parametrize(
    "command",
    [
        "make dance",
        "examples/python/nothing.py",
        "python examples/python/demo.py --nothing 1",
        "torchrun --nproc-per-node 2 examples/python/nothing.py",
        "cmake --preset nothing",
        "tools/nothing.sh",
        "build/release/bin/example_nothing",
    ],
)
def test_a_command_that_is_not_there(command: str) -> None:
    (words,) = commands(command)
    with pytest.raises((AssertionError, FileNotFoundError)):
        check_command(words)


def test_commands_are_taken_apart() -> None:
    text = "# a word\nmake run ARGS=2 && cd 'a; b' | cat  # more\npip \\\n  install .\n"
    wanted = [["make", "run", "ARGS=2"], ["cd", "a; b"], ["cat"], ["pip", "install", "."]]
    assert commands(text) == wanted


# -- the reader of blocks


def page_of(tmp_path: Path, text: str) -> Path:
    page = tmp_path / "page.md"
    page.write_text(text.replace("'''", "```"))
    return page


def test_blocks_are_read(tmp_path: Path) -> None:
    page = page_of(
        tmp_path,
        "# Title\n\n'''python\na = 1\n'''\n\n'''text\nout\n'''\n\n'''text\nfree\n'''\n"
        "'''cpp namespace\nint b;\n'''\nword\n\n'''text\nfree too\n'''\n'''sh\nmake help\n'''\n",
    )
    blocks = read_blocks(page)
    assert [(b.language, b.role, b.line) for b in blocks] == [
        ("python", "", 4),
        ("text", "", 12),
        ("cpp", "namespace", 15),
        ("text", "", 20),
        ("sh", "", 23),
    ]
    assert [b.output for b in blocks] == ["out\n", None, None, None, None]
    assert blocks[0].code == "a = 1\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("'''pyhton\na\n'''\n", r"page\.md:1: a block starts"),
        ("'''\na\n'''\n", r"page\.md:1: a block starts"),
        ("- item\n\n  '''python\n  a\n  '''\n", r"page\.md:3: a block starts"),
        ("\n'''python\na\n", r"page\.md:3: this block is not closed"),
    ],
)
def test_blocks_that_cannot_be_read(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        read_blocks(page_of(tmp_path, text))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("'''python\nassert 1 == 2\n'''\n", "assert 1 == 2"),
        ("'''python\nunknown\n'''\n", "unknown"),
        ("'''python\nprint(1)\n'''\n\n'''text\n2\n'''\n", "page.md:2 printed\n1\nand"),
        ("'''python\na = 1\n'''\n\n'''text\n1\n'''\n", "page.md:2 printed\nand"),
    ],
)
def test_a_wrong_python_block_fails(text: str, message: str, tmp_path: Path) -> None:
    page = page_of(tmp_path, text)
    with pytest.raises((AssertionError, NameError)) as caught:
        run_page(page)
    report = "".join(traceback.format_exception(caught.value))
    assert message in report
    assert f'{page}", line 2' in report or "page.md:2" in report


def test_blocks_share_a_namespace(tmp_path: Path) -> None:
    text = "'''python\na = 1\n'''\nand\n'''python\nprint(a + 1)\n'''\n'''text\n2\n'''\n"
    run_page(page_of(tmp_path, text))


def test_outputs() -> None:
    assert matches("a \nb\n", "\na\nb")
    assert matches("loss 0.25 and more", "loss ... more")
    assert matches("one\ntwo\nthree", "one\n...\nthree")
    for got, wanted in [("a", ""), ("", "a"), ("ab", "b"), ("ab", "a"), ("a c", "a ... b")]:
        assert not matches(got, wanted)


# -- C++


CPP_PAGE = """\
'''cpp namespace
#include <string>
struct Thing { int n = 2; };
'''

'''cpp
Thing thing;
'''

'''cpp
std::cout << thing.n;
'''

'''text
2
'''

'''cpp
int main() {
  return 0;
}
'''
"""


def test_cpp_blocks_become_a_test(tmp_path: Path) -> None:
    source = doc_blocks.cpp_tests([page_of(tmp_path, CPP_PAGE)], tmp_path)
    assert source.count("TEST(Docs, page)") == 1
    assert source.index("#include <string>") < source.index("namespace doc_page")
    assert '#line 2 "page.md"\n\nstruct Thing' in source
    assert source.index("struct Thing") < source.index("Thing thing;") < source.index("thing.n")
    assert 'output.stop(R"doc(page.md:11)doc", R"doc(2\n)doc")' in source
    assert '#line 19 "page.md"\nint main_of_line_19() {' in source
    assert "EXPECT_EQ(main_of_line_19(), 0)" in source
    assert "TEST" not in doc_blocks.cpp_tests([page_of(tmp_path, "words\n")], tmp_path)


PLAIN_PROLOGUE = """\
#include <iostream>
#define TEST(a, b) void b##_of_##a()
#define EXPECT_EQ(a, b) std::cerr << (a == b)
namespace ligature {}
using Tensor = int;
int doc_input() { return 0; }
struct DocOutput { void start(); void stop(const char*, const char*); };
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
@pytest.mark.parametrize(
    ("change", "error"),
    [
        (("", ""), ""),
        (("Thing thing;", "Thing thing = 1;"), "page.md:7:15: error"),
        (("thing.n", "thing.m"), "page.md:11:20: error"),
        (("int n = 2;", "int n = two;"), "page.md:3:24: error"),
        (("return 0;", "return zero;"), "page.md:20:10: error"),
    ],
)
def test_a_wrong_cpp_block_fails(change: tuple[str, str], error: str, tmp_path: Path) -> None:
    page = page_of(tmp_path, CPP_PAGE.replace(*change))
    source = tmp_path / "docs.cpp"
    source.write_text(doc_blocks.cpp_tests([page], tmp_path, PLAIN_PROLOGUE))
    call = ["g++", "-std=c++20", "-Wall", "-Werror", "-fsyntax-only", source]
    result = subprocess.run(call, capture_output=True, text=True, check=False)
    assert error in result.stderr, result.stderr
    assert bool(error) == bool(result.returncode)
