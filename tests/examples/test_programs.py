"""Every program runs, and ends where the plain loop does that nobody interrupted: each of them stops and goes on once."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rkfac
from examples.programs import FOLDER, imported, run, values

EPOCHS = 7  # eleven steps each: statistics at every one of the first fifty, at every tenth afterwards
PATIENCE = 240  # seconds


@pytest.fixture(autouse=True, scope="module")
def _offline(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("HF_HOME", str(tmp_path_factory.mktemp("home")))
        yield


def by_hand(step: Callable[[nn.Module, Any, Tensor, Tensor], None]) -> tuple[nn.Module, rkfac.RSKFAC]:
    """A loop of the test's own."""
    task = imported("digits")
    model = task["network"]()
    optimizer = rkfac.RSKFAC(model, lr=0.1, momentum=0.9)
    for epoch in range(EPOCHS):
        optimizer.param_groups[0]["lr"] = 0.1 * 0.8**epoch
        for x, y in task["loader"]():
            step(model, optimizer, x, y)
    return model, optimizer


def plain_step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


@pytest.fixture(scope="module")
def expected() -> list[Tensor]:
    return values(by_hand(plain_step)[0])


def assert_equal(model: nn.Module, expected: list[Tensor]) -> None:
    for p, q in zip(values(model), expected, strict=True):
        assert torch.equal(p, q), f"differs by {float((p - q).abs().max())}"


def said(capsys: pytest.CaptureFixture[str], name: str) -> None:
    """A table and a result that is worth the name."""
    out = capsys.readouterr().out
    assert "100.0% of 17,226 trained parameters in 3 of 3 layers preconditioned" in out
    last = out.strip().splitlines()[-1]
    assert last.startswith(name)
    assert float(last.split(": ")[1].split("%")[0]) > 94.0


WITHOUT_FRAMEWORK: dict[str, tuple[str, tuple[str, ...]]] = {
    "plain": ("plain loop", ()),
    "with_compile": ("torch.compile", ("aot_eager",)),  # inductor rounds otherwise, and takes long
}


@pytest.mark.parametrize("program", WITHOUT_FRAMEWORK)
def test_a_program_of_torch_alone(program: str, expected: list[Tensor], capsys: pytest.CaptureFixture[str]) -> None:
    name, arguments = WITHOUT_FRAMEWORK[program]
    assert_equal(run(program, *arguments)["model"], expected)
    said(capsys, name)


def test_accelerate(expected: list[Tensor], capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("accelerate")
    ended = run("with_accelerate")
    assert_equal(ended["model"], expected)
    assert not hasattr(ended["prepared"], "report")
    said(capsys, "Accelerate")


@pytest.mark.filterwarnings("ignore")  # Lightning's of its own dependencies
def test_lightning(expected: list[Tensor], capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("lightning")
    assert_equal(run("with_lightning")["module"], expected)
    said(capsys, "Lightning")


def test_skorch(expected: list[Tensor], capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("skorch")
    assert_equal(run("with_skorch")["net"].module_, expected)
    said(capsys, "skorch")


@pytest.mark.skipif(torch.cuda.is_available(), reason="compared with the CPU's rounding")
def test_mixed_precision(capsys: pytest.CaptureFixture[str]) -> None:
    """The steps without a scaler: its factor is a power of two, which rounds nothing."""

    def step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    ended, (model, optimizer) = run("with_amp"), by_hand(step)
    assert_equal(ended["model"], values(model))
    for layer in ("0", "2", "4"):  # damping relative to a factor's mean would hide a factor's scale from the steps
        for found, expected in zip(ended["optimizer"].spectrum(layer), optimizer.spectrum(layer), strict=True):
            assert torch.equal(found, expected)
    said(capsys, "mixed precision")


def test_two_processes(tmp_path: Path, expected: list[Tensor]) -> None:
    """Sums over two halves of a batch round otherwise than one sum; the distributed tests compare in double precision."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    elsewhere = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT")}
    done = subprocess.run(
        [sys.executable, *launcher, str(FOLDER / "with_ddp.py"), str(tmp_path)],
        env=elsewhere | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "2 processes: 9" in done.stdout
    found = torch.load(tmp_path / "checkpoint.pt", weights_only=True)["model"].values()
    for p, q in zip(found, expected, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-4)


# --- the Trainer of transformers


def trained_plainly(program: dict[str, Any], which: str, epochs: int) -> list[Tensor]:
    """A loop of torch's own over the same batches, with the Trainer's seed, clip and two groups."""
    from transformers import default_data_collator, set_seed

    torch.manual_seed(0)
    model, data = program["MODELS"][which]()
    set_seed(42)
    decaying = program["trainers"][which].get_decay_parameter_names(model)
    named = list(model.named_parameters())
    groups = [{"params": [p for name, p in named if (name in decaying) is decays]} for decays in (True, False)]
    optimizer = rkfac.RSKFAC(model, params=groups, lr=5e-3, graft="adamw", weight_decay=0.0)
    model.train()
    for _ in range(epochs):
        for batch in torch.utils.data.DataLoader(data, 64, collate_fn=default_data_collator):
            optimizer.zero_grad()
            tokens = {"num_items_in_batch": batch["labels"].numel()} if which == "GPT-2" else {}  # what it divides by
            model(**batch, **tokens).loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    return values(model)


@pytest.mark.filterwarnings("ignore")
def test_the_trainer_of_transformers(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    program = run("with_trainer")
    out = capsys.readouterr().out
    for which, trainer in program["trainers"].items():
        assert f"{which}: loss" in out
        assert_equal(trainer.model, trained_plainly(program, which, 5))
        assert len(trainer.optimizer.param_groups) == 2  # its own: what decays and what does not
