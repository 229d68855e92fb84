"""Checks that every link inside the site leads somewhere."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path


class BrokenLinkError(Exception):
    """Says which links of which pages lead nowhere."""


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            if name == "id" and value:
                self.anchors.add(value)
            elif name in ("href", "src") and value is not None:
                self.links.append(value)


def check(site: Path) -> int:
    """The number of links; raises `BrokenLinkError` with all that lead nowhere."""
    pages: dict[str, _Reader] = {}
    for path in site.glob("*.html"):
        pages[path.name] = _Reader()
        pages[path.name].feed(path.read_text(encoding="utf-8"))
    broken, count = [], 0
    for name, page in sorted(pages.items()):
        for link in page.links:
            if re.match(r"(https?|mailto):", link):
                continue
            count += 1
            target, _, anchor = link.partition("#")
            target = target or name
            if not (site / target).is_file():
                broken.append(f"{name}: {link}: there is no such page")
            elif anchor and anchor not in pages[target].anchors:
                broken.append(f"{name}: {link}: the page has no such place")
    if broken:
        raise BrokenLinkError("\n".join(dict.fromkeys(broken)))
    return count
