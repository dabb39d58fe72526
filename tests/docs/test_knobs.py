"""The page of all knobs is compared with the constructors: names, defaults, and the edges of every range."""

from __future__ import annotations

import ast
import inspect
import math
import re
from dataclasses import dataclass
from typing import Any

import pytest
from torch import nn

import rkfac

from .pages import DOCS

ROW = re.compile(r"^\| `(\w+)`( \*)? \| `([^`]+)` \| ([^|]+) \|", re.MULTILINE)
INTERVAL = re.compile(r"([\[(])([-\w.]+), ([-\w.]+)([\])])")
OPTIMIZERS = {kind.__name__: kind for kind in (rkfac.EKFAC, rkfac.BKFAC, rkfac.SKFAC, rkfac.KLDWRM, rkfac.SENG)}
# What is not a range: tried by other tests of the arguments.
WORDS = {
    "parameter groups",
    "a strategy",
    "patterns",
    "a GradScaler",
    "a process group",
    "a torch.Generator",
    "an integer",
    "an rkfac likelihood",
    "an rkfac.LevenbergMarquardt",
    "an rkfac.InnerSteps",
}
# What a value needs beside it to have a meaning.
BESIDE: dict[str, dict[str, Any]] = {
    "betas": {"graft": "adamw"},
    "eps": {"graft": "adamw"},
    "nesterov": {"momentum": 0.9},
    "weight_decay": {"lr": 0.0},  # their product is bounded
    "moment_decay": {"moments": "running"},
    "overwrite_every": {"variant": "b-r"},
    "correct_every": {"variant": "b-r-c"},
    "correct_share": {"variant": "b-r-c"},
    "norms": {"relative_to": None},
}


@dataclass(frozen=True)
class Knob:
    """A row of the page."""

    name: str
    scheduled: bool
    default: Any
    takes: str

    def values(self) -> tuple[list[Any], list[Any]]:
        """What the row says is taken, and what it says is not."""
        taken: list[Any] = []
        refused: list[Any] = []
        for way in self.takes.split(" or "):
            word = way.removeprefix("two of ").strip("`")
            if way in WORDS:
                continue
            if interval := INTERVAL.fullmatch(word):
                inside, outside = edges(*interval.groups())
                pair = way.startswith("two of ")
                taken += [(value, value) for value in inside] if pair else inside
                refused += [(value, 0.5) for value in outside] if pair else outside
            elif word.startswith("int >= "):
                least = int(word.removeprefix("int >= "))
                taken += [least, least + 7]
                refused += [least - 1, least + 0.5]
            else:
                taken.append(ast.literal_eval(word))
        if not WORDS & set(self.takes.split(" or ")):
            refused += ["nonsense"] if None in taken else ["nonsense", None]
        return taken, refused


def edges(opened: str, low: str, high: str, closed: str) -> tuple[list[float], list[float]]:
    """Numbers at both ends of an interval that lie in it, and numbers that do not."""
    least, most = float(low), float(high)
    above, below = math.nextafter(least, math.inf), math.nextafter(most, -math.inf)
    inside = [least if opened == "[" else max(above, 1e-300), most if closed == "]" else min(below, 1e30)]
    outside = [math.nextafter(least, -math.inf) if opened == "[" else least, math.nan]
    outside.append(math.inf if math.isinf(most) else (most * 2 if most > 0 else 1.0) if closed == "]" else most)
    return inside, outside


def knobs(heading: str) -> dict[str, Knob]:
    """The rows below a heading of the second level."""
    section = (DOCS / "knobs.md").read_text().split(f"\n## {heading}", 1)[1].split("\n## ", 1)[0]
    rows = ROW.findall(section)
    found = {n: Knob(n, bool(mark), ast.literal_eval(default), takes) for n, mark, default, takes in rows}
    assert len(found) == len(rows) == len(re.findall(r"^\| `", section, re.MULTILINE)), "a row is written another way"
    return found


GENERAL = knobs("`KFAC`, `RSKFAC`, `SREKFAC`")


ROWS = [(rkfac.KFAC, knob) for knob in GENERAL.values()]
ROWS += [(kind, knob) for name, kind in OPTIMIZERS.items() for knob in knobs(f"`{name}`").values()]


def keywords(kind: type) -> dict[str, inspect.Parameter]:
    """What a constructor takes beside the model."""
    return {name: p for name, p in inspect.signature(kind).parameters.items() if name != "model"}


@pytest.mark.parametrize("kind", [rkfac.KFAC, rkfac.RSKFAC, rkfac.SREKFAC])
def test_the_page_has_every_keyword_of_the_general_constructor(kind: type[rkfac.KFAC]) -> None:
    shown = {name: knob.default for name, knob in GENERAL.items()}
    assert shown == {name: p.default for name, p in keywords(kind).items()}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_page_has_what_differs_in_the_rest_of_the_family(name: str) -> None:
    own, page = keywords(OPTIMIZERS[name]), knobs(f"`{name}`")
    shown = {**{n: knob.default for n, knob in GENERAL.items()}, **{n: knob.default for n, knob in page.items()}}
    lacking = OPTIMIZERS[name].lacks.keys()
    section = (DOCS / "knobs.md").read_text().split(f"\n## `{name}`", 1)[1].split("\n## ", 1)[0]
    assert all(f"`{word}`" in section for word in lacking)
    assert {n: default for n, default in shown.items() if n not in lacking} == {n: p.default for n, p in own.items()}


@pytest.mark.filterwarnings("ignore:only 0 of 34 trained parameters")  # max_factor_dim=1
@pytest.mark.parametrize(("kind", "knob"), ROWS, ids=lambda value: getattr(value, "name", None) or value.__name__)
def test_what_a_row_takes_is_taken_and_nothing_else(kind: type[rkfac.KFAC], knob: Knob) -> None:
    taken, refused = knob.values()
    assert taken or refused or set(knob.takes.split(" or ")) <= WORDS
    beside = BESIDE.get(knob.name, {})
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    for value in taken:
        optimizer = kind(model, **beside, **{knob.name: value})
        held = optimizer.param_groups[0].get(knob.name, value)
        assert not knob.scheduled or value is None or held == value
        optimizer.close()
    for value in refused:
        with pytest.raises(ValueError, match=knob.name):
            kind(model, **beside, **{knob.name: value})


@pytest.mark.parametrize("kind", [rkfac.KFAC, *OPTIMIZERS.values()])
def test_the_star_marks_what_groups_hold(kind: type[rkfac.KFAC]) -> None:
    own = keywords(kind)
    grafts = {own["graft"].default, own["graft"].default and "adamw"}  # KLD-WRM has no other than its own
    held = set().union(*(kind(nn.Linear(3, 2), graft=graft).param_groups[0] for graft in grafts))
    assert all(knob.scheduled == (knob.name in held) for whose, knob in ROWS if whose is kind and knob.name != "params")
