"""The site of `make docs`: its pages, its reference, its links; and the picture of the README."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from repository import ROOT

import ligature as te

pytest.importorskip("markdown", reason="the site needs markdown")
pytest.importorskip("pygments", reason="the site needs pygments")

sys.path.insert(0, str(ROOT / "tools/docs_site"))

import cpp_reference
import links
import plan_picture
import python_reference
from convert import Converter


@pytest.fixture(params=["cpu"], autouse=True)
def device() -> Iterator[str]:
    """Once is enough: no page depends on the device."""
    with torch.device("cpu"):
        yield "cpu"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import runpy

    made = tmp_path_factory.mktemp("site")
    build = runpy.run_path(str(ROOT / "tools/docs_site/__main__.py"))["build"]
    build(made)
    return made


class Text(HTMLParser):
    """The words of a page."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.words = ""
        self.feed(page.read_text(encoding="utf-8"))

    def handle_data(self, data: str) -> None:
        self.words += data


def test_every_page_is_there(site: Path) -> None:
    for path in (ROOT / "docs").glob("*.md"):
        assert (site / f"{path.stem}.html").is_file()
    assert {"index.html", "examples.html", "contributing.html"} <= {p.name for p in site.iterdir()}
    assert [p.name for p in site.glob("*.css")] == ["style.css"]
    for page in site.glob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert "http://" not in text.replace("http://www.apache.org", "")
        assert not re.search(r'<(script|link|img)[^>]*"https?:', text)
        assert '<div class="block-' not in text
        assert "```" not in Text(page).words


def test_python_reference_is_complete(site: Path) -> None:
    text = (site / "python_ligature.ops.html").read_text(encoding="utf-8")
    names = [name for name in te.ops.__all__ if name not in ("basic", "fused", "fuser")]
    missing = [name for name in names if f'<h3 id="{name}">' not in text]
    assert not missing
    fused = (site / "python_ligature.ops.fused.html").read_text(encoding="utf-8")
    classes = {getattr(te.ops.fused, name).__name__ for name in te.ops.fused.__all__}
    assert all(f'<h3 id="{name}">' in fused for name in classes)
    top = Text(site / "python_ligature.html").words
    assert all(name in top for name in te.__all__)
    words = Text(site / "python_ligature.ops.html").words
    assert "in_features: int,\n    out_features: int,\n    *,\n    bias: bool = True," in words
    assert "recompute: str = 'none'" in words
    assert "saved_tensors" in words  # of a class written in C++


def test_cpp_reference_shows_what_headers_declare(site: Path) -> None:
    words = Text(site / "cpp_fuser.html").words
    assert "ligature/fuser/registry.h" in words
    assert "FusionHandle register_fusion(Pass pass, Fusion fusion, bool prepend = false);" in words
    for header in (ROOT / "ligature/ops").glob("*.h"):
        for name in re.findall(r"^TORCH_MODULE\((\w+)\);", header.read_text(), re.M):
            assert f"<h3><code>{name}Impl</code></h3>" in (site / "cpp_operations.html").read_text()
    table = (ROOT / "ligature/kernels/activation_kind.h").read_text()
    activations = re.findall(r"^  (?:PLAIN|GATED|OWN)\((\w+),", table, re.M)
    assert {"GELU", "SwiGLU", "SiTUGLU"} <= set(activations)
    operations, kernels = Text(site / "cpp_operations.html").words, site / "cpp_kernels.html"
    for name in activations:
        assert f"explicit {name}Impl(Options given = {{}});" in operations
        assert f"  {name}," in Text(kernels).words
    assert "silu(a) * b" in operations


HEADER = """\
// Why this file
// exists.
#pragma once

#include <string>

namespace ligature {

class Later;

/// A thing.
/// More of it.
struct Thing : Base {
  explicit Thing(int n) : Base{n}, size_(n) {}
  Thing() = default;

  int width = 3;  ///< in characters
  std::vector<int> shape{1, 2};

  /// Its name,
  /// as text.
  std::string name(const std::string& end = ";}") const { return "{" + end; }
  template <class T>
  T as(int at,
       int to) const;
  OPTIONS_AS_DATA

 private:
  /// Hidden.
  int size_ = 0;
};

class Closed {
  int secret_ = 1;

 public:
  int open();

 protected:
  /// For classes that derive from it.
  void derive();
  void quiet();
};

namespace detail {
int hidden();
}

enum class Kind {
  First,  ///< one
  Second,
};

/// Makes one.
inline Thing make(int n) {
  if (n > 0) { return Thing(n); }
  return {};
}
void use(const Thing& thing);

}  // namespace ligature
"""

OUTLINE = """\
struct Thing : Base {
  explicit Thing(int n);
  Thing() = default;
  int width = 3;  // in characters
  std::vector<int> shape{};

  // Its name,
  // as text.
  std::string name(const std::string& end = ";}") const;
  template <class T>
  T as(int at,
       int to) const;
};
"""


CLOSED_OUTLINE = """\
class Closed {
 public:
  int open();
 protected:
  // For classes that derive from it.
  void derive();
};
"""


def test_scanner_of_headers(tmp_path: Path) -> None:
    path = tmp_path / "thing.h"
    path.write_text(HEADER)
    header = cpp_reference.read_header(path, tmp_path)
    assert header.intro == "Why this file\nexists."
    assert [item.name for item in header.items] == ["Thing", "Closed", "Kind", "make", "use"]
    thing, closed, kind, make, use = header.items
    assert thing.doc == "A thing.\nMore of it."
    assert cpp_reference.outline(thing) == OUTLINE
    assert cpp_reference.outline(closed) == CLOSED_OUTLINE
    assert "First,  ///< one" in cpp_reference.outline(kind)
    assert cpp_reference.outline(make) == "inline Thing make(int n);\n"
    assert make.doc == "Makes one."
    assert cpp_reference.outline(use) == "void use(const Thing& thing);\n"


TABLE = """\
#define COLOURS(ROW, OTHER) \\
  /* like a   \\
     rose */  \\
  ROW(Red, 1) \\
  OTHER(Grey)
"""

PAINTS = """\
namespace ligature {
#define PAINT(Name, Number) \\
  struct Name##Paint {      \\
    int Name = Number;      \\
  };
#define PLAIN_PAINT(Name, ...) \\
  const char* Name();          \\
  inline const char* text = #Name;
COLOURS(PAINT, PLAIN_PAINT)
#undef PAINT
}  // namespace ligature
"""


def test_tables_of_macros(tmp_path: Path) -> None:
    (tmp_path / "table.h").write_text(TABLE)
    (tmp_path / "paints.h").write_text(PAINTS)
    items = cpp_reference.read_header(tmp_path / "paints.h", tmp_path).items
    assert [item.name for item in items] == ["RedPaint", "Grey", "text"]
    assert items[0].doc == "like a rose"
    assert cpp_reference.outline(items[0]) == "struct RedPaint {\n  int Red = 1;\n};\n"
    assert cpp_reference.outline(items[2]) == 'inline const char* text = "Grey";\n'


def test_docstrings_become_markdown() -> None:
    text = (
        "Runs :class:`Linear` with ``x``.\n\nArgs:\n    a: one\n        more\n    b, c: two\n\n"
        "Example::\n\n    y = ``not code``\n"
    )
    wanted = (
        "Runs [`Linear`](page#Linear) with `x`.\n\n**Args**\n\n- `a`: one\n  more\n"
        "- `b`, `c`: two\n\nExample:\n\n```python\ny = ``not code``\n```\n"
    )
    assert python_reference.docstring_to_markdown(text, {"Linear": "page#Linear"}) == wanted


def test_signatures() -> None:
    def small(self: Any, a: int, *rest: str, b: str = "x", **more: float) -> str: ...

    def long(first_of_them: int, *, second_of_them: dict[str, Any], third_of_them=(1, 2)): ...

    assert python_reference.signature(small) == (
        "(a: int, *rest: str, b: str = 'x', **more: float) -> str"
    )
    lines = python_reference.signature(long).splitlines()
    assert lines[0] == "("
    assert lines[2:] == [
        "    *,",
        "    second_of_them: dict[str, Any],",
        "    third_of_them=(1, 2),",
        ")",
    ]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ('<a href="b.html#there">', ""),
        ('<a href="#here" id="here">', ""),
        ('<a href="https://example.org/nothing">', ""),
        ('<a href="c.html">', "a.html: c.html: there is no such page"),
        ('<a href="b.html#nowhere">', "a.html: b.html#nowhere: the page has no such place"),
        ('<a href="#nowhere">', "a.html: #nowhere: the page has no such place"),
        ('<img src="picture.svg">', "a.html: picture.svg: there is no such page"),
    ],
)
def test_links(body: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(body)
    (tmp_path / "b.html").write_text('<p id="there">')
    if not message:
        assert links.check(tmp_path) >= 0
        return
    with pytest.raises(links.BrokenLinkError, match=re.escape(message)):
        links.check(tmp_path)


def test_pages_of_markdown(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "tool.py").write_text("print(1)\n")
    other = tmp_path / "docs/other.md"
    text = (
        "# One & all\n\nSee [it](docs/other.md#here), [code](tool.py), [lost](lost.md).\n\n"
        "```python\na = 1 < 2\n```\n\n```text\nout\n```\n\n```cpp namespace\nint a;\n```\n\n"
        "```cpp\na;\n```\n\n"
        "## Part `x`\n\n```sh\nmake\n```\n"
    )
    convert = Converter(tmp_path, {other: "other.html"})
    page = convert.text(text, tmp_path, "one.html")
    assert page.title == "One & all"
    assert page.headings == [("part-x", "Part x")]
    assert 'href="other.html#here"' in page.body
    assert 'href="lost.md"' in page.body
    assert page.body.count('<div class="pair">') == 1
    assert page.body.count('class="code text output"') == 1
    pair = page.body[page.body.index('<div class="pair">') : page.body.index("<h2")]
    assert pair.count("<div><div") == 2
    assert pair.count('class="code cpp"') == 2
    assert page.body.index('class="code sh"') > page.body.index('<h2 id="part-x">')
    (source,) = convert.source_pages()
    assert f'href="{source.name}"' in page.body
    assert "print" in source.body


def test_picture_of_the_readme() -> None:
    """It is the plan that the README's example has today."""
    kept = (ROOT / "docs/plan.svg").read_text(encoding="utf-8")
    assert plan_picture.picture() == kept, "tools/plan_picture.py writes docs/plan.svg anew"
    example = (ROOT / "README.md").read_text(encoding="utf-8")
    for line in ("LayerNorm(256)", "Linear(256, 1024)", "SwiGLU()", "Linear(512, 256)"):
        assert f"    te.ops.{line},\n" in example
        assert f"te.ops.{line},\n" in (ROOT / "tools/plan_picture.py").read_text()
