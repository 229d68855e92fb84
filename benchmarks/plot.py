"""Draws what `bench.py --json` has measured, and prints its tables for the documentation.

    python benchmarks/plot.py bench.json docs/performance_gpu.svg

One panel per shape, one bar per way to run the block: what its matrix products alone would take
(the floor of the same run and format), and what comes on top of that.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

Row = dict[str, Any]
WIDTH, LABEL, VALUE = 760, 132, 116
BAR, GAP, PANEL = 16, 6, 34
STYLE = """<style>
text{font:12px system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif;fill:#1b1f24}
.title{font-weight:600;font-size:13px}.note{fill:#57606a}
.floor{fill:#93b4e8}.rest{fill:#f2c14e}
@media (prefers-color-scheme:dark){text{fill:#e6edf3}.note{fill:#9da7b3}
.floor{fill:#2f5597}.rest{fill:#a97b12}}
</style>"""


def by_shape(rows: list[Row]) -> dict[str, list[Row]]:
    shapes: dict[str, list[Row]] = {}
    for row in rows:
        shapes.setdefault(row["shape"], []).append(row)
    return shapes


def is_block(row: Row) -> bool:
    return not row["what"].startswith(("floor", "products"))


def panel(title: str, rows: list[Row], y: int) -> tuple[list[str], int]:
    parts = [f'<text class="title" x="8" y="{y + 16}">{title}</text>']
    y += PANEL - 8
    longest = max(row["ms"] for row in rows)
    room = WIDTH - LABEL - VALUE
    for row in rows:
        length = room * row["ms"] / longest
        floor = length / row["of_floor"] if row["of_floor"] else 0.0
        text = f"{row['ms']:.3g} ms"
        if row["of_floor"]:
            text += f", {row['of_floor']:.2f} x"
        parts += [
            f'<text x="{LABEL - 8}" y="{y + 12}" text-anchor="end">{row["what"]}</text>',
            f'<rect class="rest" x="{LABEL}" y="{y}" width="{length:.1f}" height="{BAR}"/>',
            f'<rect class="floor" x="{LABEL}" y="{y}" width="{min(floor, length):.1f}" '
            f'height="{BAR}"/>',
            f'<text class="note" x="{LABEL + length + 6:.1f}" y="{y + 12}">{text}</text>',
        ]
        y += BAR + GAP
    return parts, y + 12


def picture(result: Row) -> str:
    parts = []
    y = 30
    for title, rows in by_shape(result["blocks"]).items():
        drawn, y = panel(title, [row for row in rows if is_block(row)], y)
        parts += drawn
    key = [
        '<rect class="floor" x="8" y="8" width="12" height="12"/>',
        '<text class="note" x="26" y="18">its matrix products alone</text>',
        '<rect class="rest" x="190" y="8" width="12" height="12"/>',
        '<text class="note" x="208" y="18">everything else; numbers: forward and backward, and '
        "times the floor</text>",
    ]
    about = f"Time of the block on {result['machine']}, in every recipe, beside the floor"
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" width="{WIDTH}" '
        f'height="{y}" role="img" aria-label="{about}">'
    )
    return "\n".join([head, STYLE, *key, *parts, "</svg>"]) + "\n"


# -- tables


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def block_table(rows: list[Row]) -> str:
    shapes = by_shape(rows)
    found = {(row["shape"], row["what"]): row for row in rows}

    def cell(shape: str, name: str) -> str:
        row = found.get((shape, name))
        if row is None:
            return "-"
        ratio = f" ({row['of_floor']:.2f} x)" if is_block(row) and row["of_floor"] else ""
        return f"{row['ms']:.4g}{ratio}"

    names = list(dict.fromkeys(row["what"] for row in rows))
    return table(
        ["ms", *shapes], [[name, *(cell(shape, name) for shape in shapes)] for name in names]
    )


def memory_table(rows: list[Row]) -> str:
    parts = []
    for shape, of_shape in by_shape(rows).items():
        held = {row["what"]: row["peak_gib"] for row in of_shape if row.get("peak_gib")}
        unit, factor = ("MiB", 1024.0) if max(held.values(), default=0.0) < 0.1 else ("GiB", 1.0)
        lines = [[what, f"{factor * peak:.3g}"] for what, peak in held.items()]
        parts.append(table([f"{unit}, {shape}", "peak"], lines))
    return "\n\n".join(parts)


def ratio_table(rows: list[Row]) -> str:
    """Kernels on the CPU: a line for each, with its ratios at all sizes."""
    sizes = list(dict.fromkeys(row["size"] for row in rows))
    found = {(r["kernel"], r["dtype"], r["pass"], r["size"]): r for r in rows}
    lines = []
    for kernel, dtype, direction in dict.fromkeys(key[:3] for key in found):
        line = [kernel, dtype, direction]
        for other in ("eager", "compile"):
            cells = [found.get((kernel, dtype, direction, size), {}).get(other) for size in sizes]
            line.append(" ".join("-" if c is None else f"{c:.2f}" for c in cells))
        lines.append(line)
    return table(["kernel", "dtype", "pass", "to eager", "to torch.compile"], lines)


def tables(result: Row) -> str:
    parts = [block_table(result["blocks"]), memory_table(result["blocks"])]
    if result.get("kernels") and "size" in result["kernels"][0]:
        return "\n\n".join([*parts, ratio_table(result["kernels"])])
    if result.get("host"):
        rows = [
            [row["what"], f"{row['forward_us']:.0f}", f"{row['both_us']:.0f}"]
            for row in result["host"]
        ]
        parts.append(table(["host, µs", "forward", "forward+backward"], rows))
    for key, name in (("kernels", "kernel"), ("casts", "cast")):
        rows = []
        for r in result.get(key, []):
            what = f"{r[name]} {r.get('shape', '')}".strip()
            rows.append([what, f"{r['us']:.1f}", f"{r['tb_s']:.2f}", f"{r['of_copy']:.2f}"])
        if rows:
            parts.append(table([name, "µs", "TB/s", "of a copy"], rows))
    return "\n\n".join(parts)


def main() -> None:
    if len(sys.argv) != 3:
        raise SystemExit("usage: plot.py BENCH.json PICTURE.svg")
    result = json.loads(Path(sys.argv[1]).read_text())
    Path(sys.argv[2]).write_text(picture(result), encoding="utf-8")
    print("{date}, {machine}, torch {torch}, Ligature {ligature}\n".format(**result))
    print(tables(result))


if __name__ == "__main__":
    main()
