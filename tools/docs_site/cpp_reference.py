"""The reference of the C++ library: what its headers declare, with the comments above it.

A header is read by a scanner that knows just enough: comments, brackets, where a body ends. Bodies,
private members and `detail` namespaces are left out. Where a header applies a macro to the rows of
a table (kernels/activation_kind.h), it declares what the macro says of each row.
"""

from __future__ import annotations

import functools
import html
import re
import textwrap
from dataclasses import dataclass, field
from pathlib import Path

from convert import Converter, Page, code

# Folders in the order of their pages; others follow under their own names.
FOLDERS = {".": "Core", "ops": "Operations", "fuser": "Fuser", "fused": "Fused operations"}
HIDDEN = {"backend"}
LEFT_OUT = {"pch.h", "ligature.h"}


@dataclass
class Item:
    """One declaration. A class holds others."""

    text: str  # the declaration, without its body
    doc: str = ""  # the /// comment above
    note: str = ""  # the ///< comment behind
    members: list[Item] | None = None
    access: str = "public"

    @property
    def is_type(self) -> bool:
        return self.members is not None or self.text.startswith("enum")

    @property
    def name(self) -> str:
        if self.is_type:
            found = re.search(r"(?:class|struct|enum(?: class)?) (\w+)\s*(?:[:{;]|$)", self.text)
            return found[1] if found else self.text
        if found := re.match(r"using (\w+) =", self.text):
            return found[1]
        if found := re.match(r"#define (\w+)", self.text):
            return found[1]
        head = re.sub(r"\s*=[^=].*", "", self.text.split("(")[0], flags=re.S)
        return head.rstrip(";").split()[-1].lstrip("*&")


@dataclass
class Header:
    path: str
    intro: str
    items: list[Item] = field(default_factory=list)


class Scanner:
    """Reads the declarations of one header."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def read(self) -> list[Item]:
        return self._scope(namespace=True)

    def _scope(self, *, namespace: bool, default: str = "public") -> list[Item]:
        """The declarations up to the closing bracket."""
        items: list[Item] = []
        doc: list[str] = []
        access = default
        while self.at < len(self.text):
            if found := self._take(r"[ \t]*///<? ?(.*)\n"):
                doc.append(found[1])
            elif found := self._take(r"[ \t]*//.*\n|[ \t]*\n"):
                doc = [] if not found[0].strip() else doc
            elif found := self._take(r"[ \t]*#define (?:.*\\\n)*.*\n"):
                if doc:
                    head = re.sub(r"\s*\\?$", "", found[0].split("\n")[0].strip())
                    items.append(Item(re.sub(r"(\(.*?\)).*", r"\1", head), "\n".join(doc)))
                doc = []
            elif self._take(r"[ \t]*#(?:.*\\\n)*.*\n"):
                doc = []
            elif found := self._take(r"\s*(public|private|protected):"):
                access = found[1]
            elif self._take(r"\s*\}"):
                return items
            elif found := self._take(r"\s*(?:inline )?namespace ([\w:]*) ?\{"):
                inner = self._scope(namespace=True)
                items += [] if found[1].endswith("detail") or not found[1] else inner
                doc = []
            elif self._take(r"\s+"):
                continue
            else:
                item = self._declaration("\n".join(doc), access)
                if item is not None:
                    items.append(item)
                doc = []
        return items

    def _declaration(self, doc: str, access: str) -> Item | None:
        """One declaration from here on; its body is skipped, or read if it is a class."""
        start = self.at
        depth = 0
        while self.at < len(self.text):
            char = self.text[self.at]
            if self._take(r"//[^\n]*|\"(?:\\.|[^\"\\])*\"|'(?:\\.|[^'\\])'"):
                continue
            if char == "\n" and depth == 0 and self._is_macro(self.text[start : self.at]):
                return None
            if char in "([":
                depth += 1
            elif char in ")]":
                depth -= 1
            elif char == ";" and depth == 0:
                text = self._clean(start)
                self.at += 1
                return self._finish(Item(text + ";", doc, access=access))
            elif char == "{" and depth == 0:
                return self._with_body(start, doc, access)
            elif char == "{":
                self._skip_body()
                continue
            self.at += 1
        return None

    def _with_body(self, start: int, doc: str, access: str) -> Item | None:
        text = self._clean(start)
        kind = re.match(r"(?:template <.*?>\s*)?(class|struct|enum)\b", text, re.S)
        if kind and kind[1] == "enum":
            body_start = self.at
            self._skip_body()
            body = self._clean(body_start, keep_comments=True)
            self._take(r"\s*;")
            return Item(f"{text} {body};", doc, access=access)
        if kind:
            self.at += 1
            default = "private" if kind[1] == "class" else "public"
            members = self._scope(namespace=False, default=default)
            self._take(r"\s*;")
            return Item(text, doc, members=members, access=access)
        text = re.sub(r"\)\s*:(?!:)\s.*", ")", text, flags=re.S)  # without the list of initializers
        text = re.sub(r"\s*=$", "", text)
        initialized = re.search(r"[\w>]\s*$", text) and "(" not in text
        self._skip_body()
        while self._take(r"\s*,\s*[\w<>:]+\s*(?=[{(])|\s*(?=\{)"):
            if self.text[self.at] == "(":
                self.at = self.text.index(")", self.at) + 1
                self._take(r"\s*")
            if self.at < len(self.text) and self.text[self.at] == "{":
                self._skip_body()
        self._take(r"\s*;")
        return self._finish(Item(text + ("{};" if initialized else ";"), doc, access=access))

    def _finish(self, item: Item) -> Item:
        if found := self._take(r"[ \t]*///< ?(.*)\n"):
            item.note = found[1]
            while more := self._take(r"[ \t]*///< ?(.*)\n"):
                item.note += f" {more[1]}"
        return item

    def _skip_body(self) -> None:
        """From an opening bracket to behind its closing one."""
        depth = 0
        while self.at < len(self.text):
            if self._take(r"//[^\n]*|\"(?:\\.|[^\"\\])*\"|'(?:\\.|[^'\\])'"):
                continue
            char = self.text[self.at]
            self.at += 1
            depth += (char == "{") - (char == "}")
            if depth == 0:
                return

    def _take(self, pattern: str) -> re.Match[str] | None:
        found = re.compile(pattern).match(self.text, self.at)
        if found and found.end() > self.at:
            self.at = found.end()
            return found
        return None

    @staticmethod
    def _is_macro(text: str) -> bool:
        return re.fullmatch(r"\s*[A-Z_]{4,}", text) is not None

    def _clean(self, start: int, keep_comments: bool = False) -> str:
        """What was read since `start`, moved to the left."""
        text = self.text[start : self.at]
        if not keep_comments:
            text = re.sub(r"[ \t]*//[^\n]*", "", text)
        line = self.text[self.text.rfind("\n", 0, start) + 1 : start]
        indent = len(line) - len(line.lstrip())
        lines = text.rstrip().split("\n")
        return "\n".join(line[indent:] if not line[:indent].strip() else line for line in lines)


@dataclass
class Table:
    """A macro whose body is rows: calls of its parameters, each with its comment before it."""

    parameters: list[str]
    rows: list[tuple[str, str, list[str]]]  # comment, parameter, arguments


ROW = re.compile(r"\s*(?:/\*(.*?)\*/)?\s*(\w+)\(([^()]*)\)", re.S)


def _macros(text: str) -> list[tuple[int, str, list[str], str]]:
    """The macros with arguments: where, name, parameters, body."""
    return [
        (found.start(), found[1], _listed(found[2]), found[3].replace("\\\n", "\n"))
        for found in re.finditer(r"^#define (\w+)\((.*?)\)((?:.*\\\n)*.*\n)", text, re.M)
    ]


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")]


@functools.cache
def find_tables(root: Path) -> dict[str, Table]:
    tables = {}
    for path in sorted(root.rglob("*.h")):
        for _, name, parameters, body in _macros(path.read_text(encoding="utf-8")):
            rows = [
                (re.sub(r"\s+", " ", row[1] or "").strip(), row[2], _listed(row[3]))
                for row in ROW.finditer(body)
            ]
            if rows and not ROW.sub("", body).strip() and {r[1] for r in rows} <= {*parameters}:
                tables[name] = Table(parameters, rows)
    return tables


def expand_tables(text: str, tables: dict[str, Table]) -> str:
    """The text with each `TABLE(MACRO, ...)` written out row by row."""
    for name, table in tables.items():
        while found := re.search(rf"^([ \t]*){name}\(([^()]*)\)", text, re.M):
            known = {m: (p, body) for at, m, p, body in _macros(text) if at < found.start()}
            macros = dict(zip(table.parameters, _listed(found[2]), strict=True))
            rows = []
            for comment, parameter, arguments in table.rows:
                parameters, body = known[macros[parameter]]
                values = dict(zip(parameters, arguments, strict=False))
                rows.append(f"/// {comment}\n" if comment else "")
                rows[-1] += textwrap.dedent(_filled_in(body, values)).strip("\n")
            written = textwrap.indent("\n".join(rows), found[1])
            text = text[: found.start()] + written + text[found.end() :]
    return text


def _filled_in(body: str, values: dict[str, str]) -> str:
    """The body of a macro with its arguments."""

    def put(found: re.Match[str]) -> str:
        value = values.get(found[2], found[2])
        return f'"{value}"' if found[1] else value

    body = re.sub(r"((?<!#)#(?!#))?\b(\w+)", put, body).replace("##", "")
    return "\n".join(line.rstrip() for line in body.splitlines())


def read_header(path: Path, root: Path) -> Header:
    text = expand_tables(path.read_text(encoding="utf-8"), find_tables(root))
    intro = []
    for line in text.splitlines():
        if not line.startswith("//"):
            break
        intro.append(line[2:].strip())
    items = [item for item in Scanner(text).read() if _is_shown(item)]
    return Header(f"ligature/{path.relative_to(root)}", "\n".join(intro), items)


def _is_shown(item: Item) -> bool:
    forward = re.match(r"(class|struct) \w+;", item.text)
    other = re.match(r"(TORCH_MODULE|static_assert|using namespace|using [\w:]+;)", item.text)
    return not forward and not other and bool(item.text.strip(";"))


def outline(item: Item, indent: str = "") -> str:
    """The declaration as code, with public members and their comments."""

    def put(text: str, prefix: str = "") -> str:
        return "".join(f"{indent}{prefix}{line}".rstrip() + "\n" for line in text.split("\n"))

    if item.members is None:
        return put(item.text + (f"  // {item.note}" if item.note else ""))
    public = [m for m in item.members if m.access == "public" and _is_shown(m)]
    protected = [m for m in item.members if m.access == "protected" and m.doc]
    if not public and not protected:
        return put(f"{item.text} {{}};")
    out = put(f"{item.text} {{")
    is_class = re.match(r"(?:template <.*?>\s*)?class", item.text, re.S)
    for access, members in (("public", public), ("protected", protected)):
        if members and (is_class or access != "public"):
            out += put(f" {access}:")
        for number, member in enumerate(members):
            if member.doc:
                out += "\n" if number > 0 else ""
                out += put(member.doc, "  // ")
            out += outline(member, indent + "  ")
    return out + put("};")


def make_pages(convert: Converter, root: Path) -> list[Page]:
    """One page per folder of headers."""
    pages = []
    others = sorted({p.parent.name for p in root.glob("*/*.h")} - {*FOLDERS, *HIDDEN})
    for folder, title in {**FOLDERS, **{name: name.capitalize() for name in others}}.items():
        headers = [p for p in sorted((root / folder).glob("*.h")) if p.name not in LEFT_OUT]
        name = f"cpp_{title.split()[0].lower()}.html"
        body = [f"<h1>C++: {title.lower()}</h1>"]
        headings = []
        for path in headers:
            header = read_header(path, root)
            headings.append((path.stem, path.name))
            body.append(f'<h2 id="{path.stem}"><code>{header.path}</code></h2>')
            body.append(convert.inline(header.intro))
            body.extend(_entry(items, convert) for items in _together(header.items))
        pages.append(Page(name, title, "\n".join(body), headings))
    return pages


def _together(items: list[Item]) -> list[list[Item]]:
    """What has a comment begins a group; small things without one belong to those before them."""
    groups: list[list[Item]] = []
    for item in items:
        joins = groups and not item.doc and not item.is_type and not groups[-1][-1].is_type
        if joins:
            groups[-1].append(item)
        else:
            groups.append([item])
    return groups


def _entry(items: list[Item], convert: Converter) -> str:
    doc = convert.inline(re.sub(r"^```$", "```cpp", items[0].doc, count=1, flags=re.M))
    shown = code("".join(outline(item) for item in items), "cpp", "")
    if items[0].is_type:
        return f"<h3><code>{html.escape(items[0].name)}</code></h3>\n{doc}\n{shown}"
    return f"{shown}\n{doc}"
