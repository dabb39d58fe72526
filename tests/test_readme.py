"""What the README promises is tried as it stands there."""

from __future__ import annotations

from docs.pages import ROOT, code_of, run

README = ROOT / "README.md"


def test_the_two_commands_stand_at_the_top() -> None:
    top = README.read_text().split("##")[0]
    assert "make demo" in top
    assert "make test" in top


def test_the_quickstart_runs_as_it_stands() -> None:
    (code,) = code_of(README.read_text().split("## Quickstart")[1])
    assert len(code.text.strip().splitlines()) <= 15
    report = run(README)["optimizer"].report()
    assert [record.covered for record in report] == [True, True]
    assert all(record.rank_input is not None and record.seconds["apply"] > 0 for record in report)
