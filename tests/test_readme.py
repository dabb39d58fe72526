"""What the README promises is tried as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_the_two_commands_stand_at_the_top() -> None:
    top = README.split("##")[0]
    assert "make demo" in top
    assert "make test" in top


def test_the_quickstart_runs_as_it_stands() -> None:
    (code,) = re.findall(r"## Quickstart\n+```python\n(.*?)```", README, flags=re.DOTALL)
    assert len(code.strip().splitlines()) <= 15
    scope: dict[str, object] = {}
    exec(code, scope)
    report = scope["optimizer"].report()  # type: ignore[attr-defined]
    assert [record.covered for record in report] == [True, True]
    assert all(record.rank_input is not None and record.seconds["apply"] > 0 for record in report)


def test_every_document_it_links_to_exists() -> None:
    root = Path(__file__).parent.parent
    pages = [root / "README.md", *(root / "docs").rglob("*.md")]
    for page in pages:
        for target in re.findall(r"\]\((?!http|#)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
