"""Draws the pictures of docs/low_precision.md that show how a tensor is cut into blocks."""

from __future__ import annotations

from html import escape
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "docs"
STYLE = """<style>
text{font:12px system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif;fill:#1b1f24}
.title{font-weight:600;font-size:13px}.note{fill:#57606a}
.a{fill:#dbeafe}.b{fill:#bfdbfe}.s{fill:#fef3c7}.t{fill:#fde68a}.f{fill:#fecaca}
.line{fill:none;stroke:#57606a}.edge{stroke:#57606a;stroke-width:1}.tip{fill:#57606a}
@media (prefers-color-scheme:dark){text{fill:#e6edf3}.note{fill:#9da7b3}
.a{fill:#172f55}.b{fill:#24457a}.s{fill:#4a3a10}.t{fill:#6b5416}.f{fill:#6b2a2a}
.line,.edge{stroke:#9da7b3}.tip{fill:#9da7b3}}
</style>"""
WIDTH, CELL = 640, 12


class Picture:
    """Panels below each other, 640 wide."""

    def __init__(self, about: str) -> None:
        self.about = about
        self.parts: list[str] = []
        self.y = 8

    def text(self, x: float, y: float, words: str, kind: str = "note", anchor: str = "") -> None:
        end = f' text-anchor="{anchor}"' if anchor else ""
        self.parts.append(f'<text class="{kind}" x="{x:g}" y="{y:g}"{end}>{escape(words)}</text>')

    def box(self, x: float, y: float, w: float, h: float, kind: str) -> None:
        self.parts.append(
            f'<rect class="{kind} edge" x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}"/>'
        )

    def arrow(self, x: float, y: float, to: float) -> None:
        self.parts.append(f'<path class="line" d="M{x:g} {y:g}H{to - 5:g}"/>')
        self.parts.append(f'<path class="tip" d="M{to:g} {y:g}l-7 -4v8z"/>')

    def grid(
        self, x: float, y: float, size: tuple[int, int], block: tuple[int, int], kinds: str
    ) -> None:
        """``size`` cells down and across, in blocks of ``block`` cells, in two colours."""
        (down, across), (h, w) = size, block
        for i in range(0, down, h):
            for j in range(0, across, w):
                kind = kinds[(i // h + j // w) % 2]
                height, width = min(h, down - i) * CELL, min(w, across - j) * CELL
                self.box(x + j * CELL, y + i * CELL, width, height, kind)

    def panel(
        self,
        title: str,
        block: tuple[int, int],
        notes: tuple[str, str],
        above: str = "",
        size: tuple[int, int] = (8, 16),
    ) -> None:
        """A tensor in blocks, its scales beside it, and what is above those."""
        y = self.y + 14
        self.text(8, y, title, "title")
        y += 10
        down, across = size
        self.grid(8, y, size, block, "ab")
        x = 8 + across * CELL + 56
        middle = y + down * CELL / 2
        self.arrow(x - 48, middle, x - 8)
        scales = (-(-down // block[0]), -(-across // block[1]))
        self.grid(x, middle - scales[0] * CELL / 2, scales, (1, 1), "st")
        if above:
            to = x + scales[1] * CELL + 56
            self.arrow(to - 48, middle, to - 8)
            self.box(to, middle - CELL / 2, CELL, CELL, "f")
            self.text(to + 20, middle + 4, above)
        self.text(8, y + down * CELL + 16, notes[0])
        self.text(x, y + down * CELL + 16, notes[1])
        self.y = y + down * CELL + 30

    def svg(self) -> str:
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.y}" '
            f'width="{WIDTH}" height="{self.y}" role="img" aria-label="{escape(self.about)}">\n'
            f"{STYLE}\n" + "\n".join(self.parts) + "\n</svg>\n"
        )


def per_tensor() -> Picture:
    made = Picture("FP8 with one scale per tensor: from earlier steps, or from the tensor itself")
    down = 6
    for title, current in (("DelayedScaling", False), ("Float8CurrentScaling", True)):
        y = made.y + 24
        middle = y + down * CELL / 2
        made.text(8, y - 10, title, "title")
        made.box(8, y, 16 * CELL, down * CELL, "a")
        x = 8 + 16 * CELL + 56
        made.arrow(x - 48, middle, x - 8)
        made.text(x - 46, middle - 6, "amax")
        if not current:
            for i in range(8):
                made.box(x + i * CELL, middle - CELL / 2, CELL, CELL, "b")
            made.text(x, middle + 24, "history, the newest first")
            x += 8 * CELL + 56
            made.arrow(x - 48, middle, x - 8)
            made.text(x - 42, middle - 6, "max")
        made.box(x, middle - CELL / 2, CELL, CELL, "s")
        words = "this step's scale" if current else "the next step's scale"
        made.text(x + 20, middle + 4, f"{words}, float32")
        made.text(8, y + down * CELL + 16, "1 byte per value, E4M3 or E5M2")
        made.y = int(y + down * CELL + 28)
    return made


def blocks() -> Picture:
    made = Picture("FP8 in blocks of 1x128 and of 128x128, with a float scale for each")
    floats = "a float32 scale per block"
    made.panel("Activations and gradients: 1x128", (1, 8), ("1 byte per value", floats))
    made.panel("Weights: 128x128", (4, 8), ("1 byte per value", floats))
    return made


def mxfp8() -> Picture:
    made = Picture("MXFP8: a power of two per 32 values, in both orientations")
    powers = "a power of two per block, E8M0, 1 byte"
    made.panel("Row-wise: for products over K", (1, 4), ("[M, K], 1 byte per value", powers))
    made.panel(
        "Column-wise: the transposed matrix, for products over M",
        (1, 4),
        ("[K, M], 1 byte", powers),
        size=(16, 8),
    )
    return made


def nvfp4() -> Picture:
    made = Picture("NVFP4: an E4M3 scale per 16 values and a float scale above them")
    scales = "an E4M3 scale per block, 1 byte"
    above = "amax, float32"
    made.panel("Activations and gradients: 1x16", (1, 4), ("2 values per byte", scales), above)
    made.panel("Weights: 16x16", (4, 4), ("2 values per byte", scales), above)
    return made


def pictures() -> dict[str, str]:
    """The text of every picture, by the name of its file."""
    made = {"tensor": per_tensor(), "block": blocks(), "mxfp8": mxfp8(), "nvfp4": nvfp4()}
    return {f"low_precision_{name}.svg": picture.svg() for name, picture in made.items()}


if __name__ == "__main__":
    for file, svg in pictures().items():
        (FOLDER / file).write_text(svg, encoding="utf-8")
