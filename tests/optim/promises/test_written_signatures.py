"""Every keyword is written out: people and type checkers see a misspelt one before the first step."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

import rkfac

ROOT = Path(rkfac.__file__).resolve().parents[1]

RIGHT = """
import rkfac
from torch import nn

def build(model: nn.Module) -> rkfac.RSKFAC:
    return rkfac.RSKFAC(model, lr=0.1, damping=0.1, damping_rule="pi", rank="auto", exclude=("*Norm*",), fisher="mc")
"""
WRONG = {
    "dampingg=1": "dampingg",
    'damping_rule="oops"': "damping_rule",
    'fisher="mcmc"': "fisher",
    'rank="all"': "rank",
    'lr="0.1"': "lr",
}


@pytest.mark.parametrize("optimizer", [rkfac.KFAC, rkfac.RSKFAC, rkfac.SREKFAC])
def test_the_signature_shows_every_keyword(optimizer: type[rkfac.KFAC]) -> None:
    parameters = inspect.signature(optimizer).parameters
    kinds = {p.kind for p in parameters.values()}
    assert inspect.Parameter.VAR_KEYWORD not in kinds
    assert inspect.Parameter.VAR_POSITIONAL not in kinds
    promised = {"lr", "momentum", "weight_decay", "damping", "damping_rule", "factor_decay", "factor_every", "rank"}
    promised |= {"inverse_every", "oversampling", "power_iterations", "tail", "warm_start", "update_clip", "kl_clip"}
    promised |= {"fisher", "weight_sharing", "fallback", "include", "exclude", "decomposition", "generator", "seed"}
    assert promised <= parameters.keys()
    assert all(p.annotation is not inspect.Parameter.empty for p in parameters.values())


def test_a_user_s_strict_mypy_catches_misspelt_keywords_and_choices(tmp_path: Path) -> None:
    lines = [RIGHT]
    expected = {}
    for number, (wrong, word) in enumerate(WRONG.items()):
        lines.append(f"def wrong{number}(model: nn.Module) -> rkfac.RSKFAC:\n    return rkfac.RSKFAC(model, {wrong})\n")
        expected["\n".join(lines).count("\n")] = word
    (tmp_path / "user.py").write_text("\n".join(lines))
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "--no-error-summary"]
    (tmp_path / "mypy.ini").write_text("[mypy]\n[mypy-torch.*]\nfollow_imports = skip\n")  # torch alone takes 20 s
    command += ["--config-file=mypy.ini", f"--cache-dir={tmp_path}/cache", "user.py"]
    environment = {**os.environ, "MYPYPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    errors = [line for line in done.stdout.splitlines() if ": error:" in line]
    found = {int(line.split(":")[1]): line for line in errors}
    assert found.keys() == expected.keys(), done.stdout + done.stderr
    for line, word in expected.items():
        assert word in found[line]


def test_a_wrong_keyword_is_a_type_error_at_once() -> None:
    from optim.problems import mlp

    with pytest.raises(TypeError, match="dampingg"):
        rkfac.RSKFAC(mlp(), dampingg=1)  # type: ignore[call-arg]
