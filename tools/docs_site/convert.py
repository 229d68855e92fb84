"""Markdown to HTML: our own code blocks, and links that lead to the pages of the site."""

from __future__ import annotations

import html
import os
import re
from dataclasses import dataclass, field
from pathlib import Path

import markdown
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name

LABELS = {"python": "Python", "cpp": "C++", "text": "", "sh": "Shell", "cmake": "CMake"}
FENCE = re.compile(r"^```([^\n`]*)\n(.*?)^```[ ]*$", re.M | re.S)


@dataclass
class Page:
    name: str  # of the file
    title: str
    body: str
    headings: list[tuple[str, str]] = field(default_factory=list)  # (anchor, text)


def code(text: str, language: str, label: str | None = None) -> str:
    """A highlighted block."""
    formatter = HtmlFormatter(nowrap=True)
    inner = highlight(text, get_lexer_by_name(language, stripnl=False), formatter)
    name = LABELS.get(language, "") if label is None else label
    title = f'<span class="label">{name}</span>' if name else ""
    return f'<div class="code {language}">{title}<pre tabindex="0">{inner.rstrip()}</pre></div>'


class Converter:
    """Knows the pages of the site by the files they come from."""

    def __init__(self, root: Path, sources: dict[Path, str]) -> None:
        self.root = root
        self.sources = sources
        self._shown: dict[Path, str] = {}  # files of the project that a page links to

    def file(self, path: Path, name: str, title: str | None = None) -> Page:
        """The page made of a Markdown file."""
        page = self.text(path.read_text(encoding="utf-8"), path.parent, name)
        page.title = title or page.title
        return page

    def text(self, text: str, folder: Path, name: str, title: str = "") -> Page:
        """The page made of some Markdown whose links start at `folder`."""
        converter = markdown.Markdown(extensions=["tables", "toc"], tab_length=2)
        body = converter.convert(self._take_fences(text, blocks := []))
        for number, block in enumerate(blocks):
            body = body.replace(_mark(number), block)
        body = re.sub(r"<table>.*?</table>", r'<div class="scroll">\g<0></div>', body, flags=re.S)
        body = re.sub(
            r'(href|src)="([^"]*)"', lambda m: f'{m[1]}="{self._target(m[2], folder)}"', body
        )
        tokens = converter.toc_tokens  # type: ignore[attr-defined]
        first = html.unescape(tokens[0]["name"]) if tokens else ""
        parts = tokens[0]["children"] if len(tokens) == 1 else tokens
        headings = [(part["id"], html.unescape(part["name"])) for part in parts]
        return Page(name, title or first, body, headings)

    def inline(self, text: str) -> str:
        """A piece of a page."""
        return self.text(text, self.root, "").body

    def source_pages(self) -> list[Page]:
        """Pages that show the files and folders of the project that others link to."""
        pages = []
        for path, name in self._shown.items():
            where = html.escape(str(path.relative_to(self.root)))
            body = f"<h1>{where}</h1>"
            files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
            for file in files:
                if file is not path:
                    body += f"<h2>{html.escape(str(file.relative_to(path)))}</h2>"
                body += code(file.read_text(encoding="utf-8"), _language(file))
            pages.append(Page(name, where, body))
        return pages

    def _take_fences(self, text: str, blocks: list[str]) -> str:
        """Puts marks in place of code blocks; neighbours in two languages stand side by side."""

        def take(found: re.Match[str]) -> str:
            languages: list[str] = []
            columns: list[str] = []
            at = 0
            while block := FENCE.match(found[0], at):
                language = block[1].split(" ")[0] or "text"
                shown = code(block[2], language)
                if language == "text" and columns:
                    columns[-1] += shown.replace('class="code text"', 'class="code text output"')
                elif languages and language == languages[-1]:
                    columns[-1] += shown
                else:
                    languages.append(language)
                    columns.append(shown)
                at = block.end()
                at += len(found[0][at:]) - len(found[0][at:].lstrip("\n"))
            pair = languages == ["python", "cpp"]
            joined = "".join(f"<div>{column}</div>" for column in columns)
            blocks.append(f'<div class="pair">{joined}</div>' if pair else "".join(columns))
            return f"\n\n{_mark(len(blocks) - 1)}\n\n"

        run = re.compile(rf"(?:{FENCE.pattern}\n*)+", re.M | re.S)
        # Inside the repeated group the numbers of groups do not matter: `take` reads again.
        return run.sub(take, text)

    def _target(self, link: str, folder: Path) -> str:
        link = html.unescape(link)
        if re.match(r"[a-z]+:", link) or link.startswith("#"):
            return html.escape(link)
        path, _, anchor = link.partition("#")
        target = Path(os.path.normpath(folder / path))
        end = f"#{anchor}" if anchor else ""
        if target in self.sources:
            return self.sources[target] + end
        if target.suffix == ".svg" and target.is_file():
            return target.name
        if target.exists() and self.root in target.parents:
            name = str(target.relative_to(self.root)).replace("/", "_")
            return self._shown.setdefault(target, f"source_{name}.html") + end
        return html.escape(link)  # a page of the site, or a broken link that will be found


def _language(path: Path) -> str:
    if path.name == "CMakeLists.txt":
        return "cmake"
    return {".py": "python", ".cpp": "cpp", ".h": "cpp"}.get(path.suffix, "text")


def _mark(number: int) -> str:
    return f'<div class="block-{number}"></div>'
