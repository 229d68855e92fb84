"""Trains one small language model in every recipe and says how far each ends from bfloat16.

The model is that of the demo with its Ligature blocks, the text examples/data/joined_letters.txt,
of which the last tenth is kept for validation. Every recipe starts from the same parameters and
sees the same batches; some such runs differ in their seed. Writes the table and the two pictures
of docs/low_precision.md.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples" / "python"))

from charts import Line, draw, in_bins  # noqa: E402
from transformer import RECIPES, Model, low_precision, make_pair  # noqa: E402

TEXT = ROOT / "examples" / "data" / "joined_letters.txt"
PAGE = ROOT / "docs" / "low_precision.md"
CONTEXT, WIDTH, HEADS, LAYERS, BATCH = 64, 128, 4, 2, 8
LEARNING_RATE = 2e-3
STEPS, SEEDS, LAST = 300, 3, 30
NAMES = {
    "none": "BF16",
    "delayed": "DelayedScaling",
    "current": "Float8CurrentScaling",
    "block": "Float8BlockScaling",
    "mxfp8": "MXFP8BlockScaling",
    "nvfp4": "NVFP4BlockScaling",
}
#: How far from BF16 a recipe may end, training and validation loss, mean of all seeds.
BOUNDS = {"delayed": 0.02, "current": 0.02, "block": 0.02, "mxfp8": 0.02, "nvfp4": 0.06}


@dataclass
class Outcome:
    """Of one run."""

    losses: list[float]
    validation: float
    seconds: float

    @property
    def final(self) -> float:
        return statistics.fmean(self.losses[-LAST:])


def read_text() -> tuple[torch.Tensor, torch.Tensor, int]:
    """Letters to train with, letters to validate with, and how many different ones there are."""
    text = TEXT.read_text(encoding="utf-8")
    letters = sorted(set(text))
    data = torch.tensor([letters.index(letter) for letter in text])
    cut = len(data) * 9 // 10
    return data[:cut], data[cut:], len(letters)


def loss_of(model: Model, tokens: torch.Tensor, recipe: str) -> torch.Tensor:
    with torch.autocast(tokens.device.type, torch.bfloat16), low_precision(recipe):
        logits = model(tokens[:, :-1])
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def train(recipe: str, steps: int, seed: int) -> Outcome:
    """A whole run; recipe and seed determine it."""
    data, kept, letters = read_text()
    torch.manual_seed(seed)
    starts = torch.randint(len(data) - CONTEXT, (steps, BATCH))
    model = make_pair(letters, CONTEXT, WIDTH, HEADS, LAYERS, "none")[1]
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, eps=1e-6, fused=True)
    window = torch.arange(CONTEXT + 1)
    losses = []
    begin = time.perf_counter()
    for step, places in enumerate(starts):
        done = step / steps
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, 0.05 + 20 * done) * (1 - 0.9 * done)
        optimizer.zero_grad()
        loss = loss_of(model, data[places[:, None] + window], recipe)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    seconds = time.perf_counter() - begin
    with torch.no_grad():
        validation = loss_of(model, kept.unfold(0, CONTEXT + 1, CONTEXT), recipe).item()
    return Outcome(losses, validation, seconds)


# -- telling


def means(outcomes: list[Outcome]) -> tuple[float, float]:
    final = statistics.fmean(outcome.final for outcome in outcomes)
    return final, statistics.fmean(outcome.validation for outcome in outcomes)


def table(results: dict[str, list[Outcome]]) -> str:
    lines = [
        "| recipe | training loss | distance | validation loss | distance | bound |",
        "|---|---|---|---|---|---|",
    ]
    base = means(results["none"])
    for recipe, outcomes in results.items():
        final, validation = means(outcomes)
        cells = [NAMES[recipe], f"{final:.3f}", "", f"{validation:.3f}", "", ""]
        if recipe != "none":
            cells[2], cells[4] = f"{final - base[0]:+.3f}", f"{validation - base[1]:+.3f}"
            cells[5] = f"{BOUNDS[recipe]:.2f}"
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def spread(results: dict[str, list[Outcome]]) -> float:
    """What the seed alone makes of BF16's training loss: largest minus smallest."""
    finals = [outcome.final for outcome in results["none"]]
    return max(finals) - min(finals)


def too_far(results: dict[str, list[Outcome]]) -> list[str]:
    base = means(results["none"])
    return [
        recipe
        for recipe, bound in BOUNDS.items()
        if recipe in results
        and not all(abs(a - b) <= bound for a, b in zip(means(results[recipe]), base, strict=True))
    ]


STYLE = """<style>
text{fill:#5b6475;font:13px system-ui,sans-serif}
.grid{stroke:#dedbd2}.axis{stroke:#5b6475}.line{fill:none;stroke-width:2;stroke-linejoin:round}
.none{stroke:#1d2330;stroke-width:5;stroke-opacity:.35}.delayed{stroke:#c2410c}
.current{stroke:#1b4fc4}.block{stroke:#1d7a43}.mxfp8{stroke:#7c3aed}.nvfp4{stroke:#be185d}
@media (prefers-color-scheme:dark){text{fill:#9aa3b5}.grid{stroke:#343a46}.axis{stroke:#9aa3b5}
.none{stroke:#e6e9f0}.delayed{stroke:#fb923c}.current{stroke:#7aa7ff}.block{stroke:#6fd398}
.mxfp8{stroke:#b794ff}.nvfp4{stroke:#f472b6}}
</style>"""


def picture(lines: list[Line], about: str) -> str:
    svg = draw(lines, (760, 300), "", log=False, from_zero=False)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" aria-label="{about}" '
    return re.sub(r"^<svg ([^>]*)>", rf"{head}\1>{STYLE}", svg) + "\n"


def pictures(results: dict[str, list[Outcome]]) -> dict[str, str]:
    """The mean loss of all seeds, and how far it is from that of BF16, by the files' names."""
    curves = {
        recipe: [statistics.fmean(step) for step in zip(*(o.losses for o in runs), strict=True)]
        for recipe, runs in results.items()
    }
    name = {**{recipe: recipe for recipe in curves}, "none": "bf16"}
    losses = [
        Line(name[recipe], recipe, in_bins(curve, statistics.fmean))
        for recipe, curve in curves.items()
    ]
    distances = []
    for recipe, curve in curves.items():
        apart = [a - b for a, b in zip(curve, curves["none"], strict=True)]
        smooth = [statistics.fmean(apart[max(0, i - 14) : i + 15]) for i in range(len(apart))]
        distances.append(Line(name[recipe], recipe, in_bins(smooth, statistics.fmean)))
    return {
        "low_precision_loss.svg": picture(losses, "Training loss of every recipe"),
        "low_precision_distance.svg": picture(distances, "Distance of every recipe to BF16"),
    }


def put_into_page(text: str) -> None:
    """Replaces the table of the page, which stands between two marks."""
    page = PAGE.read_text(encoding="utf-8")
    marked = re.compile(r"(<!-- table of training -->\n).*?(<!-- end of table -->)", re.S)
    if not marked.search(page):
        raise ValueError(f"{PAGE} has no marks for the table of training")
    PAGE.write_text(marked.sub(lambda m: f"{m[1]}\n{text}\n\n{m[2]}", page), encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--recipes", nargs="*", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--write", action="store_true", help="the table and pictures of the page")
    args = parser.parse_args()
    recipes = [recipe for recipe in RECIPES if recipe == "none" or recipe in args.recipes]
    results: dict[str, list[Outcome]] = {recipe: [] for recipe in recipes}
    for seed in range(args.seeds):
        for recipe, outcomes in results.items():
            outcomes.append(train(recipe, args.steps, seed))
            o = outcomes[-1]
            print(
                f"seed {seed} {NAMES[recipe]:<22} {o.final:.4f} {o.validation:.4f} "
                f"{1e3 * o.seconds / args.steps:.1f} ms/step",
                flush=True,
            )
    text = table(results)
    print(f"\n{text}\n\nBF16 from seed to seed: {spread(results):.3f}")
    if args.write:
        put_into_page(text)
        for file, svg in pictures(results).items():
            (PAGE.parent / file).write_text(svg, encoding="utf-8")
    far = too_far(results)
    for recipe in far:
        print(f"{NAMES[recipe]} ends farther from BF16 than {BOUNDS[recipe]}")
    return 1 if far else 0


if __name__ == "__main__":
    sys.exit(main())
