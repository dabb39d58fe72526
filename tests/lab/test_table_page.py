"""The pages of comparisons hold nothing that is not in the numbers beside them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rkfac_lab import compare, table_page
from rkfac_lab.errors import LabError
from rkfac_lab.jobs import Results
from rkfac_lab.tables import Failure

from .handmade import make_run

RESULTS = Path(__file__).parents[2] / "docs" / "results"
KEPT = sorted(path.parent for path in RESULTS.rglob("table.json"))


@pytest.mark.parametrize("folder", KEPT, ids=lambda folder: str(folder.relative_to(RESULTS)))
def test_a_page_of_results_is_made_of_the_numbers_beside_it(folder: Path) -> None:
    numbers = json.loads((folder / "table.json").read_text())
    assert (folder / "table.md").read_text() == table_page.text(numbers)


def test_there_are_pages() -> None:
    assert len(KEPT) >= 14


def written(tmp_path: Path) -> Path:
    runs = [make_run(name, seed=seed, targets=(0.9,)) for name in ("sgd", "rs-kfac+sgd") for seed in (0, 1)]
    compare.write(Results(runs, [Failure("adamw", 0, "out | of rows")]), tmp_path)
    return tmp_path / "table.md"


def test_what_a_comparison_writes_is_made_again(tmp_path: Path, rkfac: Callable[..., Any]) -> None:
    page = written(tmp_path)
    text = page.read_text()
    assert "In another's place" in text
    assert "out \\| of rows" in text
    page.write_text("gone")
    code, _ = rkfac("summary", tmp_path, "--rebuild")
    assert code == 0
    assert page.read_text() == text


def test_the_page_follows_the_numbers(tmp_path: Path) -> None:
    page = written(tmp_path)
    path = tmp_path / "table.json"
    numbers = json.loads(path.read_text())
    numbers["rows"][0]["targets"][0]["steps"] = {"mean": 12345.0, "std": None, "count": 1}
    path.write_text(json.dumps(numbers))
    table_page.rebuild(tmp_path)
    assert "12345" in page.read_text()


@pytest.mark.parametrize("spoil", [{"rows": [{}]}, {"promises": 3}, {"targets": None}, {"made_by": {}}])
def test_damaged_numbers_are_refused_and_the_page_stays(tmp_path: Path, spoil: dict[str, object]) -> None:
    page = written(tmp_path)
    text, path = page.read_text(), tmp_path / "table.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | spoil))
    with pytest.raises(LabError, match=r"table\.json"):
        table_page.rebuild(tmp_path)
    assert page.read_text() == text
