"""The recorder against an optimizer whose spectra are known."""

from __future__ import annotations

import json
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from rkfac_lab import spectrum
from rkfac_lab.config import from_dict
from rkfac_lab.errors import LabError


@dataclass(frozen=True)
class Layer:
    name: str
    covered: bool = True
    rank_input: int | None = 3
    rank_output: int | None = 2


class KnownSpectra(torch.optim.Optimizer):
    """Does nothing, and claims two preconditioned layers, whose k-th spectrum is k+1 times a fixed one."""

    def __init__(self, params, factor_decay=0.5):
        super().__init__(params, {})
        self.taken = 0
        self.asked = []

    def step(self, closure=None):
        self.taken += 1

    def report(self):
        return [Layer("first"), Layer("norm", rank_input=None), Layer("left out", covered=False), Layer("second")]

    def spectrum(self, name):
        self.asked.append((self.taken - 1, name))
        return SimpleNamespace(input=self.taken * torch.tensor([1.0, 0.5, 0.01]), output=torch.tensor([2.0, 0.001]))


def stepped(recorder, steps):
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = KnownSpectra([parameter])
    parameter.grad = torch.zeros(2)
    handle = register_optimizer_step_post_hook(recorder)
    try:
        for _ in range(steps):
            optimizer.step()
    finally:
        handle.remove()
    return optimizer


def test_the_papers_recording_steps():
    due = [step for step in range(1000) if spectrum.Recording().due(step)]
    assert due == [0, 30, 60, 90, 120, 150, 180, 210, 240, 270, 300, 600, 900]


def test_recorder_looks_at_the_due_steps_and_at_the_end():
    recorder = spectrum.Recorder(spectrum.Recording(2, 5, 4), ["second"], {"second": 3}, decay=0.5)
    optimizer = stepped(recorder, 8)  # steps 0..7; due are 0, 2 and 5
    recorder.finish()
    history = recorder.chosen["second", "input"]
    assert history.steps == [0, 2, 5, 7]
    assert history.eigenvalues[1] == pytest.approx([3.0, 1.5, 0.03])
    assert history.modes() == [2, 2, 2, 2]
    assert recorder.chosen["second", "output"].modes() == [1, 1, 1, 1]
    # the layer that was not drawn is looked at once, at the end; the uncovered one never
    assert [entry for entry in optimizer.asked if entry[1] == "first"] == [(7, "first")]
    assert list(recorder.final) == [
        ("second", "input"),
        ("second", "output"),
        ("first", "input"),
        ("first", "output"),
    ]
    assert recorder.final["second", "input"].steps == [7]


def test_bound_is_proposition_3_1_for_the_layers_rows():
    recorder = spectrum.Recorder(spectrum.Recording(), None, {"first": 1, "second": 256}, decay=0.001)
    stepped(recorder, 1)
    # log(0.1 / 33) / log(0.001) = 0.84, so one update's rows: 1, or more than the three there are
    assert recorder.chosen["first", "input"].bound == 1
    assert recorder.chosen["second", "input"].bound == 3


def test_layers_are_chosen_or_refused_by_name():
    names = [f"layer{i}" for i in range(1, 16)]
    assert spectrum.choose(names, None) == ["layer7", "layer11"]  # the paper's, of VGG16_bn's fifteen
    assert spectrum.choose(names[:3], None) == names[:3]
    assert spectrum.choose(names, ["layer2"]) == ["layer2"]
    with pytest.raises(LabError, match="'layer99'"):
        spectrum.choose(names, ["layer99"])


def test_without_a_step_there_is_nothing_to_show():
    with pytest.raises(LabError, match="No step"):
        spectrum.Recorder(spectrum.Recording(), None, {}, decay=0.95).finish()


def test_rows_are_samples_times_positions():
    model = nn.Sequential(nn.Conv2d(1, 3, 2), nn.Flatten(), nn.Linear(27, 5), nn.Dropout(0.5))
    model.train()
    assert spectrum.rows_per_step(model, torch.zeros(2, 1, 4, 4)) == {"0": 2 * 9, "2": 2}
    assert model.training
    assert all(not module._forward_hooks for module in model.modules())
    sequence = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 6))
    assert spectrum.rows_per_step(sequence, torch.zeros(2, 10, dtype=torch.long)) == {"0": 20, "1": 20}


def test_a_run_is_recorded_drawn_and_written(tmp_path):
    config = from_dict(
        {
            "optimizer": {"name": f"{__name__}:KnownSpectra", "arguments": {"factor_decay": 0.5}},
            "max_steps": 8,
            "batch_size": 64,
        }
    )
    recorder = spectrum.run(config, tmp_path / "run", spectrum.Recording(2, 5, 4), ["second"])
    assert recorder.chosen["second", "input"].steps == [0, 2, 5, 7]
    paths = spectrum.write(recorder, config, tmp_path)
    assert sorted(path.name for path in paths) == [
        "modes-against-width.png",
        "modes-against-width.svg",
        "spectrum.json",
        "spectrum.png",
        "spectrum.svg",
    ]
    written = json.loads((tmp_path / "spectrum.json").read_text())
    assert written["rho"] == 0.5
    drawn, _ = written["spectra"]
    assert (drawn["layer"], drawn["side"], drawn["width"], drawn["modes"]) == ("second", "input", 3, [2, 2, 2, 2])
    assert drawn["eigenvalues"][-1] == pytest.approx([8.0, 4.0, 0.08])
    assert [(entry["layer"], entry["side"], entry["modes"]) for entry in written["widths"]] == [
        ("second", "input", [2]),
        ("second", "output", [1]),
        ("first", "input", [2]),
        ("first", "output", [1]),
    ]
    # nobody listens any more
    before = recorder.step
    KnownSpectra([nn.Parameter(torch.ones(1))]).step()
    assert recorder.step == before


class Interrupting(KnownSpectra):
    """Stops as Ctrl-C does, after its second step."""

    def step(self, closure=None):
        if self.taken == 2:
            raise KeyboardInterrupt
        self.taken += 1


def test_an_interrupted_run_shows_what_it_has_seen(tmp_path):
    config = from_dict({"optimizer": {"name": f"{__name__}:Interrupting"}, "max_steps": 8})
    recorder = spectrum.run(config, tmp_path, spectrum.Recording(1, 1, 1), ["second"])
    assert recorder.chosen["second", "input"].steps == [0, 1]


def test_short_runs_update_the_factors_more_often_than_the_papers_thirty():
    assert [spectrum.statistics_period(steps) for steps in (1, 1350, 13720)] == [1, 3, 30]


def test_the_papers_settings_with_statistics_more_often():
    config = spectrum.paper_config("digits-mlp", 100, 2, ["optimizer.arguments.damping=0.2"], seed=4, data_dir=None)
    assert (config.optimizer.name, config.optimizer.preset, config.seed) == ("k-fac", "paper", 4)
    arguments = config.optimizer.arguments
    assert (arguments["factor_every"], arguments["inverse_every"], arguments["damping"]) == (2, 30, 0.2)
    # 1400 samples in batches of 128 are 11 steps an epoch, so a hundred steps need ten epochs
    assert (config.max_steps, config.batch_size, config.epochs) == (100, 128, 10)


def test_kfacs_own_spectra_start_at_the_identity_and_leave_it_as_the_average_says(tmp_path):
    steps = 4
    config = spectrum.paper_config("digits-mlp", steps, 1)
    recorder = spectrum.run(config, tmp_path / "run", spectrum.Recording(early_every=1), None)
    assert len(recorder.chosen) == 6  # three layers, two factors each
    history = next(iter(recorder.chosen.values()))
    assert (history.side, history.width, history.steps) == ("input", 65, [0, 1, 2, 3])
    for number, values in enumerate(history.eigenvalues, start=1):
        # some pixels are blank in every digit: there nothing is ever added and the identity fades as 0.95^n
        assert values[-1] == pytest.approx(0.95**number, rel=1e-4)
        # 64 pixels in [0, 1] and the bias: the trace of a batch's statistics lies between 1 and 65
        identity = 65 * 0.95**number
        assert identity + (1 - 0.95**number) <= sum(values) <= identity + 65 * (1 - 0.95**number)
        assert values == sorted(values, reverse=True)
    outputs = recorder.final[history.layer, "output"]
    assert outputs.bound == outputs.width  # 114 updates' rows are more than it is wide
