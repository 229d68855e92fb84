"""The frame of a page: navigation, title, style."""

from __future__ import annotations

import html
from pathlib import Path

from convert import Page
from pygments.formatters import HtmlFormatter

STYLE = Path(__file__).with_name("style.css")

TEMPLATE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title} · Ligature</title>
<link rel="stylesheet" href="style.css">
</head>
<body>
<input type="checkbox" id="menu" aria-label="Show the pages">
<header><a class="name" href="index.html">Ligature</a><label for="menu">Pages</label></header>
<nav>
{nav}
</nav>
<main>
{body}
</main>
</body>
</html>
"""


def render(page: Page, nav: list[tuple[str, list[Page]]]) -> str:
    """The whole HTML of a page."""
    return TEMPLATE.format(
        title=html.escape(page.title), nav=_navigation(page, nav), body=page.body
    )


def _navigation(current: Page, nav: list[tuple[str, list[Page]]]) -> str:
    lines = []
    for title, pages in nav:
        lines.append(f"<h2>{html.escape(title)}</h2>\n<ul>")
        for page in pages:
            here = ' aria-current="page"' if page is current else ""
            lines.append(f'<li><a href="{page.name}"{here}>{html.escape(page.title)}</a>')
            if page is current and len(page.headings) > 1:
                inner = "".join(
                    f'<li><a href="#{anchor}">{html.escape(text)}</a></li>'
                    for anchor, text in page.headings
                )
                lines.append(f"<ul>{inner}</ul>")
            lines.append("</li>")
        lines.append("</ul>")
    return "\n".join(lines)


def style() -> str:
    """Our style, and the colours of code for light and dark pages."""
    light = HtmlFormatter(style="default").get_style_defs(".code")
    dark = HtmlFormatter(style="github-dark").get_style_defs(".code")
    own = STYLE.read_text(encoding="utf-8")
    lines = [f"  {line}" for line in _tokens(dark)]
    dark_part = "\n".join(["@media (prefers-color-scheme: dark) {", *lines, "}"])
    return "\n".join([own, *_tokens(light), dark_part, ""])


def _tokens(rules: str) -> list[str]:
    """Only the colours of tokens: the background is ours."""
    return [line for line in rules.splitlines() if line.startswith(".code .")]
