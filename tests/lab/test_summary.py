"""Several comparisons in two tables, and the page of results that holds them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rkfac_lab import summary
from rkfac_lab.cli import app
from rkfac_lab.errors import LabError

DOCS = Path(__file__).parents[2] / "docs"
BEGIN, END = "<!-- summary -->", "<!-- end of summary -->"


def spread(mean: float, std: float | None = None) -> dict[str, Any]:
    return {"mean": mean, "std": std, "count": 2}


def reached(hits: int, steps: float, seconds: float) -> dict[str, Any]:
    return {
        "hits": hits,
        "runs": 2,
        "steps": spread(steps) if hits else None,
        "cpu_seconds": spread(seconds) if hits else None,
    }


def row(label: str, baseline: bool, best: float, *targets: dict[str, Any]) -> dict[str, Any]:
    return {"label": label, "baseline": baseline, "best": spread(best), "targets": list(targets)}


def comparison(**other: Any) -> dict[str, Any]:
    promise = {
        "label": "rs-kfac+sgd",
        "baseline": "sgd",
        "arrivals": [{"kfac": {"steps": 3}}, {"kfac": None}],
        "steps": spread(0.5, 0.125),
        "cpu_seconds": spread(0.75),
    }
    return {
        "workload": "toy",
        "metric": "test_accuracy",
        "targets": [{"metric": "test_accuracy", "value": v, "mode": "max"} for v in (0.5, 0.7, 0.9)],
        "rows": [
            row("sgd", True, 0.7, reached(2, 100, 10.0), reached(1, 300, 20.0), reached(0, 0, 0)),
            row("soap", True, 0.75, reached(2, 80, 12.0), reached(2, 200, 30.0), reached(0, 0, 0)),
            row("rs-kfac+sgd", False, 0.8, reached(2, 50, 8.0), reached(1, 150, 24.0), reached(2, 9, 9.0)),
        ],
        "promises": [promise],
        **other,
    }


def test_the_promise_and_the_targets() -> None:
    text = summary.summary([comparison(), comparison(workload="other", promises=[])])
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    assert ["toy", "sgd", "1 of 2", "0.50 ± 0.12", "0.75", "70%", "80%"] in lines
    # Of those that reached a target as often, the one with the fewest CPU seconds; of others the one that reached it more often.
    assert ["toy", "acc ≥ 50%", "sgd (2 of 2)", "0.50 (0.80)"] in lines
    assert ["toy", "acc ≥ 70%", "soap (2 of 2)", "- (1 of 2)"] in lines
    assert not [line for line in lines if line[1] == "acc ≥ 90%"], "no baseline reached it"
    assert len([line for line in lines if line[0] == "other"]) == 2


def test_the_command_prints_it_or_puts_it_into_its_place_on_a_page(tmp_path: Path) -> None:
    (tmp_path / "table.json").write_text(json.dumps(comparison()))
    printed = CliRunner().invoke(app, ["summary", str(tmp_path)])
    assert printed.exit_code == 0
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    for _ in range(2):
        assert CliRunner().invoke(app, ["summary", str(tmp_path), "--into", str(page)]).exit_code == 0
        assert page.read_text() == f"before\n{BEGIN}\n{printed.output.rstrip()}\n{END}\nafter\n"


@pytest.mark.parametrize("text", ["", f"{BEGIN}", f"{BEGIN}{BEGIN}{END}"])
def test_a_page_without_a_place_is_refused_and_stays_as_it_is(text: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    with pytest.raises(LabError, match="no place for a summary"):
        summary.put_into(page, "new")
    assert page.read_text() == text


@pytest.mark.parametrize("content", ["[]", "{}", '{"workload": 1}', "no json"])
def test_what_no_comparison_wrote_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "table.json").write_text(content)
    with pytest.raises(LabError, match=r"table\.json"):
        summary.read(tmp_path)


def test_a_folder_or_a_page_that_is_not_there_is_one_sentence(tmp_path: Path, rkfac: Callable[..., Any]) -> None:
    code, said = rkfac("summary", tmp_path)
    assert (code, len(said)) == (2, 1)
    assert said[0].endswith("holds no table.json; give a folder that `rkfac compare` wrote.")
    (tmp_path / "table.json").write_text(json.dumps(comparison()))
    code, said = rkfac("summary", tmp_path, "--into", tmp_path / "page.md")
    assert (code, len(said)) == (2, 1)
    assert "There is no page" in said[0]


def test_the_page_of_results_is_made_of_the_numbers_beside_it() -> None:
    """The command is on the page; what it makes must be what stands there."""
    page = (DOCS / "results" / "README.md").read_text()
    command = re.search(r"rkfac summary ((?:\S+ )+)--into docs/results/README\.md", page)
    assert command, "the page does not say how it is made"
    folders = [DOCS.parent / name for name in command[1].split()]
    assert len(folders) >= 5
    text = summary.summary([summary.read(folder) for folder in folders])
    assert f"{BEGIN}\n{text}\n{END}" in page
