"""The reference of the Python package, from its signatures and docstrings."""

from __future__ import annotations

import ast
import html
import importlib
import inspect
import re
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

from convert import Converter, Page, code

PACKAGE = "ligature"
SECTIONS = ("Args", "Returns", "Raises", "Yields", "Attributes", "Example", "Examples", "Note")


def make_pages(convert: Converter) -> list[Page]:
    """One page per public module that has names of its own."""
    shown = exported()
    places = {
        name: f"{page_name(module)}#{name}" for module, names in shown.items() for name in names
    }
    return [_module_page(module, names, places, convert) for module, names in shown.items()]


def page_name(module: str) -> str:
    return f"python_{module}.html"


def exported() -> dict[str, dict[str, Any]]:
    """Public modules and their names; a name belongs to the first module that has it."""
    modules = [importlib.import_module(PACKAGE)]
    pages: dict[str, dict[str, Any]] = {}
    seen: set[int] = set()
    for module in modules:  # grows
        names: dict[str, Any] = {}
        for name in module.__all__:
            value = getattr(module, name)
            if isinstance(value, ModuleType):
                if value not in modules and hasattr(value, "__all__"):
                    modules.append(value)
            elif isinstance(value, str) or id(value) not in seen:
                seen.add(id(value))
                names[name] = value
        if names:
            pages[module.__name__] = names
    return pages


# -- a module


def _module_page(
    module: str, names: dict[str, Any], places: dict[str, str], convert: Converter
) -> Page:
    groups: dict[str, list[str]] = {}
    for name, value in names.items():
        home = getattr(value, "__module__", module)
        known = isinstance(home, str) and home.startswith(f"{PACKAGE}.") and "_C" not in home
        groups.setdefault(home if known else module, []).append(name)
    doc = inspect.getdoc(importlib.import_module(module)) or ""
    body = [f"<h1>{module}</h1>", _doc(doc, places, convert)]
    headings = []
    for home in sorted(groups, key=lambda name: (name == module, len(groups[name]), name)):
        intro = inspect.getdoc(importlib.import_module(home)) or ""
        title = re.split(r"[.,:;](?:\s|$)", intro)[0].replace("\n", " ")
        anchor = re.sub(r"\W+", "-", home)
        if len(groups) > 1:
            title = "Others" if home == module else title
            headings.append((anchor, title))
            body.append(f'<h2 id="{anchor}">{html.escape(title)}</h2>')
        members = sorted(groups[home], key=str.lower)
        if len(members) > 6:
            listed = " ".join(f'<a href="#{name}"><code>{name}</code></a>' for name in members)
            body.append(f'<p class="names">{listed}</p>')
        body.extend(_entry(name, names[name], places, convert) for name in members)
    return Page(page_name(module), module, "\n".join(body), headings)


def _entry(name: str, value: Any, places: dict[str, str], convert: Converter) -> str:
    stub = _stubs().get(getattr(value, "__name__", ""))
    if getattr(value, "__module__", "") == f"{PACKAGE}._C" and stub is not None:
        return _stub_entry(name, stub, places, convert)
    parts = [f'<h3 id="{name}"><code>{name}</code></h3>']
    if inspect.isclass(value):
        made_by_users = "_C." not in signature(value)
        head = f"class {name}{signature(value) if made_by_users else ''}"
        parts.append(code(head, "python", ""))
        parts.append(_doc(_own_doc(value), places, convert))
        parts.extend(_members(value, places, convert))
    elif callable(value):
        parts.append(code(f"{name}{signature(value)}", "python", ""))
        parts.append(_doc(inspect.getdoc(value) or "", places, convert))
    else:
        parts.append(code(f"{name}: {type(value).__name__}", "python", ""))
    return "\n".join(parts)


def _own_doc(cls: type) -> str:
    """The docstring of the class itself; an inherited one tells of another."""
    return inspect.cleandoc(vars(cls).get("__doc__") or "")


def _members(cls: type, places: dict[str, str], convert: Converter) -> list[str]:
    """Public methods and properties with a docstring, also those of private base classes."""
    found: dict[str, Any] = {}
    for owner in cls.__mro__:
        if owner is not cls and not owner.__name__.startswith("_"):
            continue
        if not owner.__module__.startswith(PACKAGE):
            continue
        for name, member in vars(owner).items():
            if not name.startswith("_") and name not in found:
                found[name] = member
    parts = []
    for name, member in found.items():
        member = getattr(member, "__func__", member)  # class and static methods
        doc = inspect.cleandoc(getattr(member, "__doc__", None) or "")
        if not doc or not (inspect.isfunction(member) or isinstance(member, property)):
            continue
        if isinstance(member, property):
            text = convert.inline(f"`{name}`: {_inline(doc, places)}")
        else:
            text = code(f"{name}{signature(member)}", "python", "") + _doc(doc, places, convert)
        parts.append(f'<div class="member" id="{cls.__name__}.{name}">{text}</div>')
    return parts


# -- what is written in C++ has stubs


def _stubs() -> dict[str, ast.ClassDef]:
    path = Path(importlib.import_module(PACKAGE).__file__ or "").with_name("_C.pyi")
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def _stub_entry(name: str, stub: ast.ClassDef, places: dict[str, str], convert: Converter) -> str:
    lines = [f"class {name}:"]
    for node in stub.body:
        if isinstance(node, (ast.FunctionDef, ast.AnnAssign)):
            text = ast.unparse(node).replace(":\n    ...", ": ...")
            if not text.startswith("def _"):
                lines.append(textwrap.indent(text, "    "))
    doc = ast.get_docstring(stub) or ""
    head = f'<h3 id="{name}"><code>{name}</code></h3>'
    return head + code("\n".join(lines), "python", "") + _doc(doc, places, convert)


# -- signatures and docstrings


def signature(value: Any) -> str:
    """As it is written, on several lines where it is long."""
    try:
        found = inspect.signature(value)
    except (TypeError, ValueError):
        return "(...)"
    parts, star = [], False
    for parameter in found.parameters.values():
        if parameter.name == "self":
            continue
        if parameter.kind is parameter.VAR_POSITIONAL:
            star = True
        if parameter.kind is parameter.KEYWORD_ONLY and not star:
            parts.append("*")
            star = True
        prefix = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}
        text = prefix.get(parameter.kind, "") + parameter.name
        annotation = parameter.annotation
        if annotation is not parameter.empty:
            text += f": {annotation if isinstance(annotation, str) else _plain(annotation)}"
        if parameter.default is not parameter.empty:
            equals = " = " if annotation is not parameter.empty else "="
            text += f"{equals}{parameter.default!r}"
        parts.append(text)
    returned = found.return_annotation
    end = ""
    if returned not in (found.empty, None, "None") and not inspect.isclass(value):
        end = f" -> {returned if isinstance(returned, str) else _plain(returned)}"
    line = f"({', '.join(parts)}){end}"
    if len(line) <= 76:
        return line
    return "(\n" + "".join(f"    {part},\n" for part in parts) + f"){end}"


def _plain(annotation: Any) -> str:
    return inspect.formatannotation(annotation)


def _doc(text: str, places: dict[str, str], convert: Converter) -> str:
    return convert.inline(docstring_to_markdown(text, places)) if text else ""


def docstring_to_markdown(text: str, places: dict[str, str]) -> str:
    """Turns the marks that our docstrings use into Markdown."""
    out: list[str] = []
    lines = text.splitlines()
    at = 0
    while at < len(lines):
        line = lines[at]
        at += 1
        if line.endswith(":") and line[:-1] in SECTIONS:
            body, at = _indented(lines, at)
            out += [f"**{line[:-1]}**", "", *_section(body), ""]
        elif line.rstrip().endswith("::"):
            body, at = _indented(lines, at)
            kept = line.rstrip()[:-2].rstrip()
            if kept:
                out.append(kept if kept.endswith((".", ":")) else f"{kept}:")
            out += ["", "```python", *body, "```", ""]
        else:
            out.append(line)
    pieces = re.split(r"(^```python$.*?^```$)", "\n".join(out), flags=re.M | re.S)
    return "".join(p if p.startswith("```") else _inline(p, places) for p in pieces)


def _indented(lines: list[str], at: int) -> tuple[list[str], int]:
    """The indented lines from `at` on, without their indent, and where they end."""
    body = []
    while at < len(lines) and (not lines[at].strip() or lines[at].startswith(" ")):
        body.append(lines[at])
        at += 1
    return textwrap.dedent("\n".join(body)).strip("\n").splitlines(), at


def _section(body: list[str]) -> list[str]:
    """Entries `name: text` become a list."""
    out = []
    for line in body:
        entry = re.match(r"([\w*, .`]+): (.*)", line)
        if entry and not line.startswith(" "):
            names = ", ".join(f"`{name.strip('` ')}`" for name in entry[1].split(","))
            out.append(f"- {names}: {entry[2]}")
        else:
            out.append(f"  {line.strip()}" if line.startswith(" ") else line)
    return out


def _inline(text: str, places: dict[str, str]) -> str:
    def reference(found: re.Match[str]) -> str:
        name = found[1].lstrip("~").removeprefix(f"{PACKAGE}.ops.").removeprefix(f"{PACKAGE}.")
        return f"[`{name}`]({places[name]})" if name in places else f"`{name}`"

    text = re.sub(r":(?:class|func|meth|mod|attr):`([^`]*)`", reference, text)
    return re.sub(r"``([^`]*)``", r"`\1`", text)
