"""The search by hand-made trials, by a fake engine, and with real trials that take milliseconds."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from rich.console import Console

from forked import forked
from rkfac_lab import jobs, optimizers, plots, record, search, tune, tuning, tuning_text, workers, workloads
from rkfac_lab.comparison import Comparison
from rkfac_lab.errors import LabError
from rkfac_lab.search import Setting, Space, Trial, Tuned
from rkfac_lab.workloads import Target

from .handmade import make_run

SPACE = Space((0.01, 0.03, 0.1, 0.3, 1.0), (1e-4, 1e-3, 3e-4), 0.0)


EXPLODING, DYING = "lab.failing:Exploding", "lab.failing:Dying"


def quiet() -> Console:
    return Console(file=io.StringIO(), width=200)


def searched(value, count=8, mode="max", space=SPACE):
    """All trials of a search in which `value(lr, decay)` is the result, and its batches."""
    done, batches = [], []
    while batch := search.next_settings(space, count, mode, done):
        batches.append(batch)
        for setting in batch:
            result = value(setting.lr, setting.decay)
            done.append(Trial("x", setting.lr, result, "finished" if result else "diverged", setting.decay))
    return done, batches


def peak(best, decays=None):
    """Better the nearer the rate is to `best` in decades; a decay adds what `decays` says."""
    return lambda lr, decay: 0.9 - 0.1 * abs(math.log10(lr / best)) + (decays or {}).get(decay, 0.0)


# --- the search


@pytest.mark.parametrize(
    ("lr", "count", "expected"),
    [
        (0.1, 8, (0.01, 0.03, 0.1, 0.3, 1.0)),
        (0.003, 5, (0.0003, 0.001, 0.003, 0.01, 0.03)),
        (0.05, 8, (0.003, 0.01, 0.03, 0.1, 0.3)),  # nearest to 0.03 in decades
        (0.1, 4, (0.01, 0.03, 0.1, 0.3)),
        (0.1, 1, (0.1,)),
    ],
)
def test_the_first_rates_lie_around_the_optimizers_own(lr, count, expected):
    assert search.rates_around(lr, count) == expected


def test_a_best_inside_is_followed_by_weight_decays_at_its_rate():
    done, batches = searched(peak(0.1))
    assert [len(batch) for batch in batches] == [5, 3]
    assert batches[1] == [Setting(0.1, 1e-4), Setting(0.1, 1e-3), Setting(0.1, 3e-4)]
    assert search.winner(done, "max").decay is None


@pytest.mark.parametrize(("best", "added"), [(30.0, [3.0, 10.0, 30.0]), (1e-4, [3e-3, 1e-3, 3e-4])])
def test_while_the_best_lies_at_an_edge_a_rate_is_added_beyond_it(best, added):
    done, batches = searched(peak(best))
    assert batches[1:] == [[Setting(rate)] for rate in added]
    assert len(done) == 8


def test_an_edge_that_is_left_behind_frees_the_rest_for_decays():
    _, batches = searched(peak(1.0))
    assert batches[1:] == [[Setting(3.0)], [Setting(1.0, 1e-4), Setting(1.0, 1e-3)]]


def test_a_smaller_loss_is_better_where_it_is_said_so():
    done, _ = searched(lambda lr, decay: 1 - peak(0.03)(lr, decay), mode="min")
    assert search.winner(done, "min").lr == 0.03


def test_where_everything_diverges_smaller_rates_are_tried():
    _, batches = searched(lambda lr, decay: None if lr > 0.002 else 0.5, count=9)
    assert batches[1:] == [[Setting(rate)] for rate in (3e-3, 1e-3, 3e-4, 1e-4)]  # of equals the smaller is best
    done, _ = searched(lambda lr, decay: None)
    assert len(done) == 8
    assert search.winner(done, "max") is None


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 13, 30])
@pytest.mark.parametrize("best", [1e-6, 0.1, 0.3, 100.0])
@pytest.mark.parametrize("decays", [(), (1e-4, 1e-3)])
def test_everybody_gets_as_many_trials_and_none_twice(count, best, decays):
    space = Space(search.rates_around(0.1, count), decays, 0.0)
    done, _ = searched(peak(best, {1e-3: 0.01}), count, space=space)
    assert len(done) == count
    assert len({(trial.lr, trial.decay) for trial in done}) == count


def test_what_is_left_after_the_decays_goes_between_the_best_rate_and_its_neighbours():
    done, batches = searched(peak(0.12, {1e-3: 0.05}), count=10)
    assert batches[2:] == [[Setting(0.055, 1e-3)], [Setting(0.17, 1e-3)]]
    assert search.winner(done, "max") == done[6]


@pytest.mark.parametrize(
    ("optimizer", "own", "expected"),
    [
        ("sgd", 0.0, (1e-4, 1e-3, 3e-4, 5e-3)),
        ("sgd", 5e-4, (5e-5, 1.5e-3, 1.5e-4, 5e-3)),
        ("rs-kfac", 7e-4, (7e-5, 2.1e-3, 2.1e-4, 5e-3)),
        ("muon", 0.0, (0.01, 0.1, 0.03, 0.3)),
        ("adamw", 0.05, (0.005, 0.15, 0.015, 0.3)),
        ("rs-kfac+adamw", 0.0, (0.01, 0.1, 0.03, 0.3)),
        ("pkg:Own", 0.01, (0.001, 0.03, 0.003, 0.1)),
    ],
)
def test_decays_to_try_are_of_the_optimizers_size(optimizer, own, expected):
    assert tuning.other_decays(optimizer, own) == expected


def test_an_optimizers_own_settings_are_its_constructors_where_nobody_says_more():
    model = torch.nn.Linear(2, 2)
    assert optimizers.own_settings("adamw", model, {"lr": 0.3})["weight_decay"] == 0.01
    assert optimizers.own_settings("rs-kfac", model, {"weight_decay": 0.5})["weight_decay"] == 0.5


# --- what was found


def tuned(metric, mode, values, decays=()):
    made = [Trial("x", lr, value, "finished" if value else "diverged") for lr, value in values.items()]
    made += [Trial("x", lr, value, "finished", decay) for lr, decay, value in decays]
    return Tuned("digits-mlp", metric, mode, 3, 0.1, tuple(made), {"x": 0.0})


def test_the_good_region_of_accuracies_is_one_point_wide_in_height():
    found = tuned("validation_accuracy", "max", {0.01: 0.9, 0.03: 0.971, 0.1: 0.98, 0.3: 0.97, 1.0: 0.9})
    region = found.good_region("x")
    assert (region.low, region.high, region.open) == (0.03, 0.3, False)
    assert region.decades == pytest.approx(1.0)


def test_the_good_region_of_losses_is_five_per_cent_high_and_open_at_an_edge():
    found = tuned("validation_loss", "min", {0.01: 2.1, 0.03: 2.0, 0.1: 2.11, 0.3: 2.05})
    region = found.good_region("x")
    assert (region.low, region.high, region.open) == (0.01, 0.03, True)  # 0.3 is good, but not beside the best
    assert found.at_edge() == []


def test_the_good_region_is_one_of_rates_alone():
    """Another decay's winner does not move it, a failed rate ends it, and nothing measured has none."""
    values = {0.01: 0.95, 0.03: 0.96, 0.1: None, 0.3: 0.96}
    region = tuned("validation_accuracy", "max", values, [(0.03, 1e-3, 0.99)]).good_region("x")
    assert (region.low, region.high) == (0.01, 0.03)
    assert tuned("validation_accuracy", "max", {0.1: None}).good_region("x") is None


def test_a_diverged_trial_cannot_win():
    found = tuned("validation_loss", "min", {0.01: 3.0, 0.03: None, 0.1: math.nan})
    assert found.best("x").lr == 0.01


def test_the_table_has_every_trial_and_the_choice():
    values = {0.01: 0.9, 0.03: 0.95, 0.1: None}
    found = tuned("validation_accuracy", "max", values, [(0.03, 1e-3, 0.97)])
    console = quiet()
    tuning_text.show(found, console)
    rows = [line.replace("│", " ").split() for line in console.file.getvalue().splitlines() if "│" in line]
    assert rows == [
        ["x", "0.01", "0", "90%"],
        ["0.03", "0", "95%"],
        ["0.1", "0", "diverged"],
        ["0.03", "0.001", "97%*"],
        ["x", "4", "0.03", "0.001", "97%", "no", "0.03", "to", "0.03", "0.0"],
    ]
    assert "within 1 point of the best" in console.file.getvalue()


def test_the_picture_shows_every_trial(tmp_path):
    values = {0.01: 2.0, 0.03: 1.5, 0.1: None, 0.3: 1e6}
    figure = plots.tuning(tuned("validation_loss", "min", values, [(0.03, 1e-3, 1.4)]))
    lines = [line for line in figure.axes[0].get_lines() if len(line.get_xdata())]
    drawn = [(line.get_marker(), list(line.get_xdata()), list(line.get_ydata())) for line in lines]
    assert drawn[0] == ("o", [0.01, 0.03], [2.0, 1.5])
    assert drawn[1] == ("o", [0.03], [1.4])
    assert drawn[2] == ("o", [0.03], [1.4])  # the ring
    assert drawn[3] == ("x", [0.1, 0.3], [0.98, 0.98])
    assert [text.get_text() for text in figure.legends[0].get_texts()][:2] == ["x", "chosen"]
    assert all(path.stat().st_size > 1000 for path in plots.save(figure, tmp_path / "p"))


# --- finals


def test_finalists_have_different_rates_and_each_its_best_decay():
    values = {0.01: 0.9, 0.03: 0.95, 0.1: None, 0.3: 0.95}
    trials = tuned("validation_accuracy", "max", values, [(0.03, 1e-3, 0.97), (0.01, 1e-3, math.inf)]).trials
    assert search.finalists(trials, "max", 2) == [Setting(0.03, 1e-3), Setting(0.3)]
    assert search.finalists(trials, "max", 9) == [Setting(0.03, 1e-3), Setting(0.3), Setting(0.01)]
    assert search.finalists(trials, "min", 1) == [Setting(0.01)]
    assert search.finalists(trials, "max", 0) == search.finalists([], "max", 2) == []


def with_finals(finals):
    short = tuned("validation_accuracy", "max", {0.01: 0.9, 0.03: 0.95, 0.1: 0.97})
    made = [Trial("x", lr, value, "finished" if value else "diverged") for lr, value in finals.items()]
    return dataclasses.replace(short, finals=tuple(made), final_epochs=9)


def test_what_ends_best_is_chosen_and_not_what_was_ahead():
    found = with_finals({0.1: 0.5, 0.03: 0.98})
    assert found.best("x").lr == 0.03
    assert found.at_edge() == []
    assert found.good_region("x").high == 0.1  # of the short trials, which have all rates
    assert with_finals({0.1: None, 0.03: 0.98}).best("x").lr == 0.03
    assert with_finals({0.1: None, 0.03: None}).best("x") is None  # ahead and then broken is no choice
    assert with_finals({}).best("x").lr == 0.1


def test_finals_have_a_column_a_sentence_and_the_ring(tmp_path):
    found = with_finals({0.1: 0.5, 0.03: 0.98})
    console = quiet()
    tuning_text.show(found, console)
    text = console.file.getvalue()
    rows = [line.replace("│", " ").split() for line in text.splitlines() if "│" in line]
    assert rows[:3] == [["x", "0.01", "0", "90%"], ["0.03", "0", "95%", "98%*"], ["0.1", "0", "97%", "50%"]]
    assert "after 9 epochs" in text
    said = tuning_text.sentences({**tuning.to_json(found), "chosen": {"x": {"lr": 0.03}}})["x"]
    assert "It decided between 0.03 and 0.1 after 9 epochs." in said
    figure = plots.tuning(found)
    assert "chosen by its result\nafter 9 epochs" in [text.get_text() for text in figure.legends[0].get_texts()]
    lines = [line for line in figure.axes[0].get_lines() if len(line.get_xdata())]
    assert (list(lines[1].get_xdata()), list(lines[1].get_ydata())) == ([0.03], [0.95])
    steps = dataclasses.replace(found, metric="steps_to_validation_accuracy_0.9")
    assert (steps.judged(), steps.judged_again()) == ("within 3 epochs", "within 9 epochs")


# --- with a fake engine


class Engine:
    """Stands for `attempt`: results by formula, written nowhere; stops at the batch with the number `stop`."""

    def __init__(self, value, stop=None):
        self.value, self.stop, self.asked = value, stop, []

    def __call__(self, planned, display, workers=1, **counts):
        self.asked.append([job.folder.name for job in planned])
        if len(self.asked) == self.stop:
            return jobs.Results(interrupted=True)
        results = jobs.Results()
        for job in planned:
            given = job.config.optimizer.arguments
            value = self.value(given["lr"], given.get("weight_decay"))
            if value == "failed":
                results.failures.append(record_failure(job))
                continue
            status = "finished" if value else "diverged"
            run = make_run("x", accuracies=[value or 0.0], metric="validation_accuracy", status=status)
            results.runs.append(dataclasses.replace(run, path=job.folder))
        return results


def record_failure(job):
    return jobs.Failure(job.config.name, job.config.seed, "too large")


def test_trials_are_fair_and_failures_are_results(tmp_path, monkeypatch):
    engine = Engine(lambda lr, decay: "failed" if lr > 0.5 else None if lr > 0.2 else peak(0.01)(lr, decay))
    monkeypatch.setattr(tuning, "attempt", engine)
    comparison = Comparison(contenders=("sgd", "adamw", "rs-kfac"), settings=("rs-kfac.damping=0.1",))
    found = tuning.tune(comparison, tuning.Search(8), tmp_path, jobs.Display(quiet()))
    assert {name: len(found.of(name)) for name in found.contenders()} == {"sgd": 8, "adamw": 8, "rs-kfac": 8}
    assert engine.asked[0][:4] == ["sgd-lr0.03", "adamw-lr0.001", "rs-kfac-lr0.03", "sgd-lr0.1"]
    statuses = {trial.lr: trial.status for trial in found.of("sgd")}
    assert (statuses[0.3], statuses[1.0], statuses[0.01]) == ("diverged", "failed", "finished")
    assert {name: found.best(name).lr for name in found.contenders()} == {"sgd": 0.01, "adamw": 0.01, "rs-kfac": 0.01}
    written = json.loads((tmp_path / "tuning.json").read_text())
    assert written["chosen"]["rs-kfac"] == {"damping": 0.1, "lr": 0.01}  # what it was tuned with belongs to the choice
    assert {trial["message"] for trial in written["trials"] if trial["status"] == "failed"} == {"too large"}
    assert written["trials"][0]["decay"] == 0.0


def test_finals_are_asked_for_after_all_trials_with_the_whole_budget(tmp_path, monkeypatch):
    engine = Engine(peak(0.1))
    monkeypatch.setattr(tuning, "attempt", engine)
    comparison = Comparison(contenders=("sgd", "adamw"), settings=("max_steps=7",))
    found = tuning.tune(comparison, tuning.Search(5, epochs=1, finalists=2), tmp_path, jobs.Display(quiet()))
    assert engine.asked[-1] == [
        "sgd-lr0.1-final15",
        "adamw-lr0.1-final15",
        "sgd-lr0.3-final15",
        "adamw-lr0.03-final15",
    ]
    assert (len(found.of("sgd")), len(found.finals_of("sgd")), found.final_epochs) == (5, 2, 15)
    written = json.loads((tmp_path / "tuning.json").read_text())
    assert [final["lr"] for final in written["finals"]] == [0.1, 0.1, 0.3, 0.03]


def test_finals_as_short_as_the_trials_are_refused(tmp_path):
    comparison = Comparison(contenders=("sgd",))
    with pytest.raises(LabError, match="both have 15 epochs"):
        tuning.tune(comparison, tuning.Search(5, finalists=2), tmp_path, jobs.Display(quiet()))


def test_a_stopped_search_leaves_no_choice_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "attempt", Engine(peak(0.1), stop=2))
    with pytest.raises(KeyboardInterrupt):
        tuning.tune(Comparison(contenders=("sgd",)), tuning.Search(8), tmp_path, jobs.Display(quiet()))
    assert not (tmp_path / "tuning.json").exists()


def test_where_no_first_trial_can_run_the_reason_is_raised(tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "attempt", Engine(lambda lr, decay: "failed"))
    with pytest.raises(LabError, match="Not one of the 5 trials could be done: too large"):
        tuning.tune(Comparison(contenders=("sgd",)), tuning.Search(8), tmp_path, jobs.Display(quiet()))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"trials": 0}, "--trials must be at least 1"),
        ({"trials": 2, "rates": (0.1, 0.2, 0.3)}, "3 rates of --grid"),
        ({"rates": (0.0,)}, "--grid"),
        ({"validation_share": 0.0}, "nothing is chosen on the test set"),
        ({"validation_share": 0.9}, "at most 0.5"),
        ({"by": "luck"}, "--by must be end or target"),
        ({"finalists": -1}, "--finalists is how many"),
        ({"final_epochs": 3}, "--finalists is how many"),
        ({"finalists": 1, "final_epochs": 0}, "--final-epochs must be at least 1"),
    ],
)
def test_senseless_searches_are_refused(arguments, said):
    with pytest.raises(LabError, match=said):
        tuning.Search(**arguments)


# --- with real trials


@pytest.fixture
def trained(monkeypatch):
    """Names of the trials that were really trained; a second set of names that interrupt instead."""
    names, interrupting = [], set()
    real = jobs.train._train

    def counting(config, target, *others):
        if target.path.name in interrupting:
            raise KeyboardInterrupt
        names.append(target.path.name)
        real(config, target, *others)

    monkeypatch.setattr(jobs.train, "_train", counting)
    return names, interrupting


def contest(tiny, *contenders, **keywords):
    return Comparison(tiny, contenders or ("sgd", "adamw"), common={"epochs": 2, "threads": 1}, **keywords)


def results(folder):
    written = json.loads((folder / "tuning.json").read_text())
    for trial in (*written["trials"], *written["finals"]):
        trial.pop("cpu_seconds")  # the machine's, not the trial's
    return written


def test_a_search_within_so_many_steps_says_so(tmp_path, tiny):
    short = Comparison(tiny, ("sgd",), common={"epochs": 2, "threads": 1, "max_steps": 3})
    found = tune.run(short, tuning.Search(1), tmp_path, console=quiet(), display=jobs.Display(quiet()))
    assert found.judged() == "after 2 epochs, at most 3 steps"
    assert results(tmp_path)["max_steps"] == 3


def test_finals_are_runs_of_the_whole_budget_and_are_not_done_again(tmp_path, tiny, trained):
    short = Comparison(tiny, ("sgd",), common={"epochs": 1, "threads": 1, "max_steps": 2})
    settings = tuning.Search(3, finalists=2, final_epochs=2)
    found = tune.run(short, settings, tmp_path, console=quiet(), display=jobs.Display(quiet()))
    assert len(found.finals) == 2
    for final in found.finals:
        run = record.load_run(tmp_path / "tuning" / f"sgd-lr{final.lr:g}-final2")
        assert (run.config["epochs"], run.config.get("max_steps"), run.config["seed"]) == (2, None, 1000)
        assert run.config["validation_share"] == 0.1
        assert run.epochs[-1]["validation_accuracy"] == final.value
        assert run.summary["steps"] == final.steps > 2
    before, names = results(tmp_path), list(trained[0])
    tune.run(short, settings, tmp_path, console=quiet(), display=jobs.Display(quiet()))
    assert results(tmp_path) == before
    assert trained[0] == names


def test_a_search_writes_its_trials_choice_and_picture(tmp_path, tiny):
    console = quiet()
    found = tune.run(contest(tiny), tuning.Search(6), tmp_path, console=console, display=jobs.Display(quiet()))
    written = results(tmp_path)
    assert written["metric"] == "validation_accuracy"
    for trial in found.trials:
        decay = "" if trial.decay is None else f"-wd{trial.decay:g}"
        run = record.load_run(tmp_path / "tuning" / f"{trial.contender}-lr{trial.lr:g}{decay}")
        assert run.epochs[-1]["validation_accuracy"] == trial.value
        assert (run.config["seed"], run.config["validation_share"], run.config["epochs"]) == (1000, 0.1, 2)
        assert run.summary["steps"] == trial.steps > 0
        assert not [name for name in run.epochs[-1] if name.startswith("test_")]
    assert written["chosen"]["sgd"]["lr"] == found.best("sgd").lr
    for name in ("tuning.json", "tuning.png", "tuning.svg"):
        assert (tmp_path / name).is_file()
        assert str(tmp_path / name) in console.file.getvalue()


@pytest.mark.parametrize(
    ("values", "at_the_end", "soonest"),
    [([0.3, 0.8, 0.7], 0.7, 20.0), ([0.1, None, 0.2], 0.2, None), ([0.9, 0.9, None], None, 10.0), ([], None, None)],
)
def test_a_judge_looks_at_the_end_or_at_the_first_crossing(values, at_the_end, soonest):
    evaluations = [{"step": 10 * (i + 1), "validation_accuracy": value} for i, value in enumerate(values)]
    target = Target("validation_accuracy", 0.75, "max")
    assert tuning.Judge("validation_accuracy", "max").value(evaluations) == at_the_end
    assert tuning.Judge("validation_accuracy", "min", target).value(evaluations) == soonest


def test_a_search_for_the_soonest_counts_steps_to_the_hardest_target(tmp_path, tiny):
    console = quiet()
    found = tune.run(
        contest(tiny, "sgd"),
        tuning.Search(5, by="target", validation_share=0.5),
        tmp_path,
        console=console,
        display=jobs.Display(quiet()),
    )
    assert found.mode == "min"
    assert found.metric.startswith("steps_to_validation_accuracy_")
    bar = float(found.metric.rpartition("_")[2])
    for trial in found.trials:
        run = record.load_run(tmp_path / "tuning" / f"sgd-lr{trial.lr:g}")
        steps = [e["step"] for e in run.epochs if e["validation_accuracy"] >= bar]
        assert (trial.value, trial.status) == ((steps[0], "finished") if steps else (None, "not reached"))
    assert {trial.status for trial in found.trials} == {"finished", "not reached"}  # or the case tells nothing
    assert "not reached" in console.file.getvalue()
    assert found.judged() == "within 2 epochs"
    assert found.best("sgd").value == min(trial.value for trial in found.trials if trial.value)


def test_the_test_set_changes_nothing(tmp_path, tiny, monkeypatch):
    real = workloads.find(tiny)
    tuning.tune(contest(tiny), tuning.Search(6), tmp_path / "a", jobs.Display(quiet()))

    def other_test_set(sources):
        data = real.data(sources)
        return dataclasses.replace(data, test_x=1e3 * torch.ones_like(data.test_x), test_y=1 - data.test_y.clamp(max=1))

    monkeypatch.setitem(workloads.WORKLOADS, tiny, dataclasses.replace(real, data=other_test_set))
    tuning.tune(contest(tiny), tuning.Search(6), tmp_path / "b", jobs.Display(quiet()))
    assert results(tmp_path / "a") == results(tmp_path / "b")


def test_an_interrupted_search_does_only_what_is_missing_and_ends_alike(tmp_path, tiny, trained):
    names, interrupting = trained
    whole = tuning.tune(contest(tiny), tuning.Search(8), tmp_path / "whole", jobs.Display(quiet()))
    everything = list(names)
    assert len(everything) == len(whole.trials) == 16
    names.clear()
    interrupting.add(everything[12])
    console = quiet()
    arguments = contest(tiny), tuning.Search(8), tmp_path / "cut"
    assert tune.run(*arguments, console=console, display=jobs.Display(quiet())) is None
    assert f"--out {tmp_path / 'cut'}" in console.file.getvalue()
    assert names == everything[:12]
    interrupting.clear()
    tune.run(*arguments, console=quiet(), display=jobs.Display(quiet()))
    assert names == everything
    assert results(tmp_path / "cut") == results(tmp_path / "whole")


def test_more_trials_go_on_from_fewer(tmp_path, tiny, trained):
    names, _ = trained
    tuning.tune(contest(tiny, "sgd"), tuning.Search(5), tmp_path, jobs.Display(quiet()))
    tuning.tune(contest(tiny, "sgd"), tuning.Search(7), tmp_path, jobs.Display(quiet()))
    assert len(names) == len(set(names)) == 7


def test_trials_of_other_settings_are_refused(tmp_path, tiny, trained):
    names, _ = trained
    tuning.tune(contest(tiny), tuning.Search(5), tmp_path, jobs.Display(quiet()))
    other = contest(tiny, settings=("sgd.momentum=0.5",))
    with pytest.raises(LabError, match="momentum"):
        tuning.tune(other, tuning.Search(5), tmp_path, jobs.Display(quiet()))
    assert len(names) == 10


def test_rates_by_hand_come_first(tmp_path, tiny):
    found = tuning.tune(contest(tiny, "sgd"), tuning.Search(3, (0.02, 0.2)), tmp_path, jobs.Display(quiet()))
    assert [trial.lr for trial in found.trials[:2]] == [0.02, 0.2]
    assert len(found.trials) == 3


# --- side by side: on the embedded digits, since other processes know only the shipped workloads


def few_steps(*contenders, **settings):
    given = [f"{key}={value}" for key, value in {"max_steps": 4, "batch_size": 64, **settings}.items()]
    return Comparison("digits-mlp", contenders, settings=tuple(given), common={"epochs": 1, "threads": 1})


def test_side_by_side_is_one_by_one(tmp_path):
    comparison = few_steps("sgd", EXPLODING, **{f"{EXPLODING}.lr": 0.1})
    for place, workers_count in (("one", 1), ("two", 2)):
        with forked():
            tuning.tune(comparison, tuning.Search(4), tmp_path / place, jobs.Display(quiet()), workers_count)
    assert results(tmp_path / "one") == results(tmp_path / "two")
    trials = [trial for trial in results(tmp_path / "two")["trials"] if trial["contender"] == EXPLODING]
    assert {trial["lr"]: trial["status"] for trial in trials}[0.1] == "failed"
    assert {trial["message"] for trial in trials if trial["status"] == "failed"} == {"RuntimeError: too large"}
    assert results(tmp_path / "two")["chosen"][EXPLODING]["lr"] < 0.05


def test_a_process_that_dies_is_a_failure_and_the_next_run_gets_another(tmp_path):
    plan = [
        jobs.Job(few_steps(name).config(name, 0, {"lr": 0.1}), tmp_path / str(number))
        for number, name in enumerate((DYING, DYING, DYING, "sgd"))
    ]
    with forked():
        found = jobs.attempt(plan, jobs.Display(quiet()), workers=2)
    assert [failure.message for failure in found.failures] == ["its process ended without a word (exit code 7)"] * 3
    assert [run.path.name for run in found.runs] == ["3"]


def test_ctrl_c_stops_all_and_each_writes_down_how_far_it_came(tmp_path):
    command = [sys.executable, "-m", "rkfac_lab.cli", "tune", "digits-mlp", "--optimizers", "sgd", "--trials", "2"]
    command += ["--jobs", "2", "--out", str(tmp_path), "--set", "max_steps=100000", "--epochs", "100000"]
    paths = os.pathsep.join([str(Path(tune.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": paths},
        # A suite in the background of a shell ignores Ctrl-C, and so would whatever it starts.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    folders = [tmp_path / "tuning" / name for name in ("sgd-lr0.1", "sgd-lr0.3")]
    try:
        while not all((folder / record.CHECKPOINT).exists() for folder in folders):
            assert process.poll() is None
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: everybody hears it
        said, _ = process.communicate(timeout=120)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 130
    assert f"--out {tmp_path}" in said
    for folder in folders:
        run = record.load_run(folder)
        assert run.summary["status"] == "interrupted"
        assert run.summary["steps"] > 0
        assert not (folder / ".lock").exists()


def test_a_worker_whose_starter_is_gone_stops(tmp_path):
    ours, theirs = workers.multiprocessing.get_context("spawn").Pipe()
    ours.close()
    with pytest.raises(KeyboardInterrupt):
        workers._Voice(theirs).evaluated({"epoch": 1})


# --- the choice in a comparison


def test_a_comparison_takes_the_choice(tmp_path, tiny, rkfac):
    choice = {"workload": tiny, "chosen": {"sgd": {"lr": 0.02, "weight_decay": 0.01}, "muon": {"lr": 1.0}}}
    path = tmp_path / "tuning.json"
    path.write_text(json.dumps(choice))
    arguments = ["compare", tiny, "--optimizers", "sgd,adamw", "--seeds", 1, "--epochs", 1, "--tuned", path]
    code, lines = rkfac(*arguments, "--out", tmp_path / "c")
    assert code == 0, lines
    given = {
        name: record.load_run(tmp_path / "c" / "runs" / f"{name}-seed0").config["optimizer"]["arguments"]
        for name in ("sgd", "adamw")
    }
    assert given == {"sgd": {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.01}, "adamw": {"lr": 0.01}}
    for extra, said in (
        (["--set", "sgd.lr=0.5"], "both decide lr of sgd"),
        (["--tune"], "leave one of the two away"),
    ):
        code, lines = rkfac(*arguments, *extra, "--out", tmp_path / "d")
        assert code == 2
        assert said in lines[-1]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"workload": "cifar10-vgg16bn", "chosen": {}}', "tuned on cifar10-vgg16bn"),
        ('{"workload": "digits-mlp", "chosen": {"muon": {"lr": 1}}}', "chose nothing for sgd"),
        ('{"workload": "digits-mlp", "chosen": {"sgd": 0.1}}', "not what `rkfac tune` writes"),
        ("[]", "not what `rkfac tune` writes"),
        ("{", "damaged"),
        (None, "There is no"),
    ],
)
def test_a_choice_that_does_not_fit_is_refused(tmp_path, content, said):
    if content is not None:
        (tmp_path / "t.json").write_text(content)
    with pytest.raises(LabError, match=said):
        tuning.read(tmp_path / "t.json", Comparison(contenders=("sgd",)))


# --- the command


def test_the_command_tunes_and_goes_on(tmp_path, tiny, rkfac):
    arguments = ["tune", tiny, "--optimizers", "sgd,adamw", "--epochs", 1, "--out", tmp_path / "t"]
    code, lines = rkfac(*arguments, "--trials", 2, "--set", "sgd.momentum=0.5", "--validation-share", 0.25)
    assert code == 0, lines
    run = record.load_run(tmp_path / "t" / "tuning" / "sgd-lr0.1")
    assert run.config["optimizer"]["arguments"]["momentum"] == 0.5
    assert (run.config["validation_share"], run.config["epochs"]) == (0.25, 1)
    code, lines = rkfac(*arguments, "--trials", 2, "--set", "sgd.momentum=0.5", "--validation-share", 0.25)
    assert code == 0
    assert all("(from an earlier run)" in line for line in lines)
    code, lines = rkfac(*arguments, "--trials", 1, "--finalists", 1, "--final-epochs", 2, "--set", "sgd.momentum=0.7")
    assert code == 2
    assert "sgd" in lines[-1]  # another momentum is another tuning
    other = [*arguments[:-1], tmp_path / "u"]
    code, lines = rkfac(*other, "--trials", 1, "--finalists", 1, "--final-epochs", 2)
    assert code == 0, lines
    assert record.load_run(tmp_path / "u" / "tuning" / "sgd-lr0.1-final2").config["epochs"] == 2
    code, lines = rkfac(*other, "--trials", 1, "--finalists", 1, "--final-epochs", 1)
    assert code == 2
    assert "both have 1 epoch;" in lines[-1]
    code, lines = rkfac(*arguments, "--jobs", 0)
    assert code == 2
    assert "--jobs" in lines[-1]
