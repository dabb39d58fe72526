"""The recommended recipe is what the constructor does, and what the page says."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest
from torch import nn

import rkfac
from rkfac.optim.presets import RECIPES

PAGE = Path(__file__).parents[1] / "docs" / "recipes.md"
ROW = re.compile(r"^\| `(\w+)` \| `([^`]+)` \|", re.MULTILINE)


def recommended() -> dict[str, object]:
    """The page's table of the recipe, keyword to value."""
    section = PAGE.read_text().split("## The recipe", 1)[1].split("\n## ", 1)[0]
    return {name: ast.literal_eval(value) for name, value in ROW.findall(section)}


@pytest.mark.parametrize("optimizer", [rkfac.KFAC, rkfac.RSKFAC, rkfac.SREKFAC])
def test_the_page_shows_the_constructors_defaults(optimizer: type) -> None:
    shown, signature = recommended(), inspect.signature(optimizer).parameters
    decisions = {
        "graft",
        "damping",
        "power",
        "relative_to",
        "damping_rule",
        "factor_decay",
        "factor_every",
        "inverse_every",
    }
    decisions |= {"factor_start", "eager_start", "rank", "tail", "rows", "fisher", "update_clip", "kl_clip", "nesterov"}
    assert shown.keys() >= decisions, "a decision is missing on the page"
    for name in shown.keys() - {"momentum", "lr"}:
        assert signature[name].default == shown[name], name


def test_the_page_shows_what_is_filled_in() -> None:
    shown = recommended()
    group = rkfac.RSKFAC(nn.Linear(3, 2)).param_groups[0]
    assert group["momentum"] == shown["momentum"]
    assert group["lr"] == shown["lr"]


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_a_named_recipe_builds_and_stands_on_the_page(name: str) -> None:
    settings = rkfac.recipe(name)
    optimizer = rkfac.RSKFAC(nn.Linear(3, 2), **settings)
    assert optimizer.param_groups[0]["damping"] == settings["damping"]
    settings["damping"] = 7.0
    assert rkfac.recipe(name)["damping"] != 7.0, "a recipe is nobody's to change"
    section = PAGE.read_text().split("## The recipe", 1)[1].split("\n## ", 1)[0]
    assert f'rkfac.recipe("{name}")' in section
    for keyword, value in rkfac.recipe(name).items():
        assert f"`{keyword}={value!r}`".replace("'", '"') in section, keyword


def test_an_unknown_recipe_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="transformer"):
        rkfac.recipe("soup")
