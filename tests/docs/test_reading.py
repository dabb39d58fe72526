"""The page on the report shows what the code on it prints, and knows every column and every kind of remark."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import rkfac
from rkfac.optim import advice

from .pages import DOCS, run

PAGE = DOCS / "reading-the-report.md"
NUMBERS = re.compile(r"[-\d.e%]*\d[-\d.e%]*")


@pytest.fixture(scope="module")
def printed() -> str:
    """The table and the remarks of the page's optimizer."""
    optimizer = run(PAGE)["optimizer"]
    return f"{optimizer.report()}\n{optimizer.advise()}"


def words(text: str) -> list[str]:
    """Without numbers, which are the machine's, and where lines end."""
    return NUMBERS.sub("#", text).split()


def test_the_example_is_what_the_code_prints(printed: str) -> None:
    (shown,) = re.findall(r"^```text\n(.*?)```$", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)
    assert words(shown) == words(printed)
    assert max(map(len, printed.splitlines())) <= 120
    rows = [[line.split()[:4] for line in text.splitlines()[1:4:2]] for text in (shown, printed)]
    assert rows[0] == rows[1], "shapes and ranks are no matter of the machine"


def test_every_column_and_every_field_is_explained(printed: str) -> None:
    text = PAGE.read_text()
    explained = {
        name.strip() for row in re.findall(r"^\| ([^|`]+) \| `", text, re.MULTILINE) for name in row.split(",")
    }
    assert set(printed.splitlines()[0].split()) <= explained
    fields = {re.sub("_(input|output)$", "_*", field) for field in rkfac.LayerReport.__dataclass_fields__}
    named = {re.sub("_(input|output)$", "_*", name) for name in re.findall(r"`(\w+\*?)`", text)}
    assert fields <= named, f"not on the page: {sorted(fields - named)}"


def test_every_kind_of_remark_is_explained() -> None:
    kinds = set(re.findall(r"Remark\(\s*f?\"([^\"]+)\"", Path(advice.__file__).read_text()))
    assert len(kinds) >= len(advice.RULES), "every rule makes a remark of a kind of its own"
    expected = {kind.format(phase=phase) for kind in kinds for phase in ("statistics", "refresh", "apply")}
    (section,) = re.findall(r"^## What a remark means$(.*?)^## ", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert set(re.findall(r"^\| (\w[^|]*) \|", section, re.MULTILINE)) - {"kind"} == expected
