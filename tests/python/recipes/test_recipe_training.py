"""A small language model trained for a short while in every recipe ends near bfloat16.

The long comparison, 300 steps and three seeds, is tools/train_recipes.py; its table stands in
docs/low_precision.md.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator
from xml.etree import ElementTree

import pytest
import torch
import train_recipes
from train_recipes import BOUNDS, NAMES, Outcome

STEPS, LAST = 40, 10
#: How far from BF16 the training loss of the last steps and the validation loss may be.
SHORT_BOUNDS = {"delayed": 0.02, "current": 0.02, "block": 0.02, "mxfp8": 0.02, "nvfp4": 0.05}


@pytest.fixture(params=["cpu"], autouse=True)
def device() -> Iterator[str]:
    """Low precision is computed there."""
    with torch.device("cpu"):
        yield "cpu"


@pytest.fixture(scope="module")
def base() -> Outcome:
    with torch.device("cpu"):
        return train_recipes.train("none", STEPS, seed=0)


def test_bfloat16_learns(base: Outcome) -> None:
    assert statistics.fmean(base.losses[-LAST:]) < base.losses[0] - 1.5


@pytest.mark.parametrize("recipe", SHORT_BOUNDS)
def test_a_recipe_ends_near_bfloat16(base: Outcome, recipe: str) -> None:
    got = train_recipes.train(recipe, STEPS, seed=0)
    ends = [statistics.fmean(run.losses[-LAST:]) for run in (got, base)]
    assert ends[0] < got.losses[0] - 1.5
    assert abs(ends[0] - ends[1]) <= SHORT_BOUNDS[recipe]
    assert abs(got.validation - base.validation) <= SHORT_BOUNDS[recipe]
    assert got.losses != base.losses  # it is another computation


# -- the table and the pictures


def outcomes(distance: float) -> list[Outcome]:
    """Of two seeds."""
    return [Outcome([3.0] * 10 + [end + distance] * 30, 2.0, 1.0) for end in (1.0, 1.5)]


def test_table() -> None:
    results = {"none": outcomes(0.0), "delayed": outcomes(0.01), "nvfp4": outcomes(-0.2)}
    rows = [
        [cell.strip() for cell in line.split("|")]
        for line in train_recipes.table(results).split("\n")
    ]
    assert rows[2][1:-1] == ["BF16", "1.250", "", "2.000", "", ""]
    assert rows[3][1:5] == ["DelayedScaling", "1.260", "+0.010", "2.000"]
    assert rows[4][1:5] == ["NVFP4BlockScaling", "1.050", "-0.200", "2.000"]
    assert train_recipes.spread(results) == pytest.approx(0.5)
    assert train_recipes.too_far(results) == ["nvfp4"]
    results["nvfp4"][1].validation = float("nan")
    results["nvfp4"][0].losses = results["nvfp4"][1].losses = results["none"][0].losses
    assert train_recipes.too_far(results) == ["nvfp4"]


def test_pictures_show_every_recipe() -> None:
    results = {recipe: outcomes(0.01 * i) for i, recipe in enumerate(NAMES)}
    for svg in train_recipes.pictures(results).values():
        picture = ElementTree.fromstring(svg)
        kinds = [node.get("class", "") for node in picture.iter() if "path" in node.tag]
        assert {kind.removeprefix("line ") for kind in kinds if "line" in kind} == set(NAMES)
        words = {text.text for text in picture.iter() if text.tag.endswith("text")}
        assert {"bf16", "mxfp8", "step"} <= words
        assert "prefers-color-scheme:dark" in svg


def test_the_page_keeps_its_bounds() -> None:
    page = train_recipes.PAGE.read_text(encoding="utf-8")
    found = re.search(r"<!-- table of training -->\n(.*)<!-- end of table -->", page, re.S)
    assert found is not None
    rows = {}
    for line in found[1].splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if cells and cells[0] in NAMES.values():
            rows[cells[0]] = cells[1:]
    assert list(rows) == list(NAMES.values())
    for recipe, bound in BOUNDS.items():
        _, training, _, validation, stated = rows[NAMES[recipe]]
        assert float(stated) == bound
        assert abs(float(training)) <= bound
        assert abs(float(validation)) <= bound
