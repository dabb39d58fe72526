"""Every piece of Python on every page is run as it stands there, one page after the other in a scope of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from .pages import PAGES, ROOT, code_of, name_of, run

WITH_CODE = [page for page in PAGES if any(code_of(page.read_text()))]


@pytest.mark.parametrize("page", [page for page in WITH_CODE if page != ROOT / "README.md"], ids=name_of)
def test_the_code_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run(page)


@pytest.mark.parametrize("page", WITH_CODE, ids=name_of)
def test_every_block_is_found_and_says_why_if_it_is_not_run(page: Path) -> None:
    text = page.read_text()
    found = list(code_of(text))
    assert text.count("```python") + text.count("<!-- run:\n") == len(found), "a block is written in another way"
    for code in found:
        compile(code.in_its_place, str(page), "exec")
        assert code.reason is None or len(code.reason.split()) >= 3, f"line {code.line}: say why it is not run"


def test_what_is_hidden_is_run_and_what_is_not_run_is_not() -> None:
    text = "a\n<!-- run:\nx = 1\n-->\n```python\ny = x\n```\n<!-- not run: needs two GPUs -->\n```python\nz = y\n```\n"
    hidden, shown, left = code_of(text)
    assert (hidden.text, hidden.line, hidden.reason) == ("x = 1\n", 3, None)
    assert (shown.text, shown.line, shown.reason) == ("y = x\n", 6, None)
    assert (left.text, left.line, left.reason) == ("z = y\n", 10, "needs two GPUs")
