from __future__ import annotations

import sys

import pytest

from rkfac_lab import entry


def test_a_missing_laboratory_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "rkfac_lab.cli", raising=False)
    monkeypatch.delattr("rkfac_lab.cli", raising=False)
    monkeypatch.setitem(sys.modules, "typer", None)
    with pytest.raises(SystemExit) as stopped:
        entry.main()
    assert "'typer'" in str(stopped.value)
    assert "pip install 'rkfac[lab]'" in str(stopped.value)


def test_otherwise_it_is_the_command_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["rkfac", "--help"])
    with pytest.raises(SystemExit) as stopped:
        entry.main()
    assert not stopped.value.code
    assert "compare" in capsys.readouterr().out
