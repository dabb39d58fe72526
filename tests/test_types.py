"""A user's script under `mypy --strict` sees types for everything public."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import rkfac
from docs.test_links import names_of

ROOT = Path(__file__).parents[1]
STRICT = (
    "disallow_untyped_calls",
    "warn_return_any",
    "disallow_subclassing_any",
)  # which the project itself does not ask for

SCRIPT = """
import torch
from torch import Tensor, nn

import rkfac
from rkfac import linalg, theory
from rkfac.schedules import Scheduler, Steps


def train(model: nn.Module, x: Tensor, y: Tensor) -> list[str]:
    optimizer = rkfac.RSKFAC(model, lr=0.1, rank="auto", decomposition=rkfac.RSVD(max_rank=64), exclude="head")
    schedule = Scheduler(optimizer, damping=Steps({1: 1.0, 20: 0.3}))
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]  # torch's own
        optimizer.step()
        schedule.step()
    spectrum: rkfac.Spectra = optimizer.spectrum("0")
    whole: rkfac.Factors = optimizer.factors("0")
    kept: float = float(spectrum.input.sum() / whole.input.trace())
    records: list[rkfac.LayerReport] = list(optimizer.report())
    return [f"{record.name}: {record.rank_input} {kept}" for record in records]


def solve(X: Tensor, V: Tensor) -> Tensor:
    low: linalg.LowRank = linalg.nystrom(X, rank=8, generator=torch.Generator())
    return low.solve(V, damping=0.1)


bound: rkfac.RSKFAC = rkfac.for_model(nn.Linear(2, 3))(params=nn.Linear(2, 3).parameters(), lr=0.1)
modes: int = theory.retained_modes(rho=0.95, n=256)
"""
WRONG = {
    "rkfac.RSKFAC(nn.Linear(2, 3), dampingg=1.0)": "dampingg",
    'rkfac.RSKFAC(nn.Linear(2, 3), damping_rule="oops")': "damping_rule",
    'rkfac.RSKFAC(nn.Linear(2, 3), fisher="mcmc")': "fisher",
    'rkfac.RSKFAC(nn.Linear(2, 3), rank="all")': "rank",
    'rkfac.RSKFAC(nn.Linear(2, 3), lr="0.1")': "lr",
    "rkfac.EKFAC(nn.Linear(2, 3), dampingg=1.0)": "dampingg",
    'rkfac.EKFAC(nn.Linear(2, 3), moments="all")': "moments",
    'linalg.rsvd(torch.eye(3), rank="all")': "rank",
    'theory.retained_modes(n="all")': "n",
}


def test_a_user_s_script_sees_types(tmp_path: Path) -> None:
    public = sorted(names_of(rkfac, "rkfac"))
    revealed = [f"reveal_type({name})" for name in public]
    lines = [*SCRIPT.splitlines(), *WRONG, *revealed]
    (tmp_path / "script.py").write_text("\n".join(lines) + "\n")
    # The project's own options, so that what `make types` has read of torch need not be read again.
    own = (ROOT / "pyproject.toml").read_text().split("[tool.mypy]")[1].split("[tool.pytest")[0]
    users = ["[[tool.mypy.overrides]]", 'module = "script"', *(f"{name} = true" for name in STRICT)]
    (tmp_path / "pyproject.toml").write_text(
        "\n".join(["[tool.mypy]", re.sub("^packages.*", "", own, flags=re.M), *users])
    )
    command = [sys.executable, "-m", "mypy", "--no-error-summary", "--config-file", str(tmp_path / "pyproject.toml")]
    done = subprocess.run(
        [*command, str(tmp_path / "script.py")], cwd=ROOT, capture_output=True, text=True, check=False
    )
    said = re.findall(r"script\.py:(\d+): (error|note): (.*)", done.stdout)

    errors = {int(line): text for line, kind, text in said if kind == "error"}
    first = len(SCRIPT.splitlines()) + 1
    assert errors.keys() == set(range(first, first + len(WRONG))), done.stdout + done.stderr
    assert all(word in errors[first + number] for number, word in enumerate(WRONG.values())), errors
    shown = [text.removeprefix("Revealed type is ").strip('"') for _, kind, text in said if text.startswith("Revealed")]
    assert len(shown) == len(public)
    unknown = [name for name, kind in zip(public, shown, strict=True) if re.search(r"^Any$|\*\w+: Any|-> Any$", kind)]
    assert not unknown, "mypy does not know what these are"


@pytest.mark.parametrize("package", ["rkfac", "rkfac_lab"])
def test_the_packages_say_that_they_are_typed(package: str) -> None:
    assert (ROOT / "src" / package / "py.typed").exists()
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    assert "py.typed" in data[package]
