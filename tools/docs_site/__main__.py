"""Makes the documentation's site: HTML of README.md, docs/*.md and a reference of both languages.

    python tools/docs_site --out build/site

The reference is made from Python docstrings and from the comments of the C++ headers. A link that
leads nowhere is an error.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

import cpp_reference
import layout
import links
import python_reference
from convert import Converter, Page

ROOT = Path(__file__).resolve().parents[2]

# What comes first, in order; other pages of docs/ follow.
GUIDE = [
    "README",
    "install",
    "start",
    "concepts",
    "add_an_op",
    "add_a_fusion",
    "add_a_kernel",
    "add_a_format",
    "add_a_recipe",
    "add_a_backend",
    "explain",
    "testing",
]
GUIDE += ["from_te_ops", "integrations", "cpp_guide"]
PROJECT = ["architecture", "performance", "examples", "CONTRIBUTING", "CHANGELOG"]
TITLES = {"README": "Overview", "CHANGELOG": "Changes", "install": "Install"}
TITLES |= {"performance": "Performance"}


def source_pages() -> dict[Path, str]:
    """Markdown files, and the names of the pages made of them."""
    pages = {ROOT / "README.md": "index.html", ROOT / "examples/README.md": "examples.html"}
    for path in [ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")]:
        pages[path] = f"{path.stem.lower()}.html"
    return pages


def build(out: Path) -> list[Path]:
    """Writes the site and returns its pages; raises for a link that leads nowhere."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    sources = source_pages()
    convert = Converter(ROOT, sources)

    pages: dict[str, Page] = {}
    for path, name in sources.items():
        key = "examples" if name == "examples.html" else path.stem
        pages[key] = convert.file(path, name, TITLES.get(key))
    rest = sorted(set(pages) - {*GUIDE, *PROJECT})
    nav = [
        ("Guide", [pages[key] for key in [*GUIDE, *rest] if key in pages]),
        ("Project", [pages[key] for key in PROJECT]),
        ("Python", python_reference.make_pages(convert)),
        ("C++", cpp_reference.make_pages(convert, ROOT / "ligature")),
    ]
    shown = [page for _, group in nav for page in group]
    for page in [*shown, *convert.source_pages()]:
        (out / page.name).write_text(layout.render(page, nav), encoding="utf-8")
    (out / "style.css").write_text(layout.style(), encoding="utf-8")
    for picture in sorted((ROOT / "docs").glob("*.svg")):
        shutil.copy(picture, out / picture.name)
    links.check(out)
    return sorted(out.glob("*.html"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "build/site")
    args = parser.parse_args()
    try:
        pages = build(args.out.resolve())
    except links.BrokenLinkError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{len(pages)} pages in {args.out}; begin with {args.out}/index.html")
    return 0


if __name__ == "__main__":
    sys.exit(main())
