"""Comparisons on the embedded digits with torch's optimizers: the plan, the runs, continuing, tuning, failures."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from rkfac_lab import cli, compare, jobs, models, origin, record, search, table_text, tables, tuning, workloads
from rkfac_lab.comparison import Comparison, slug
from rkfac_lab.errors import LabError

from .handmade import make_run

SHORT = {"epochs": 2}


class Exploding(torch.optim.SGD):
    """Fails in the third step of every run."""

    def step(self, closure=None):
        self.taken = getattr(self, "taken", 0) + 1
        if self.taken == 3:
            raise RuntimeError("the sketch\nran out of rows")


EXPLODING = f"{__name__}:Exploding"


def quiet() -> Console:
    return Console(file=io.StringIO(), width=200)


def silent_display() -> jobs.Display:
    return jobs.Display(quiet())


@pytest.fixture
def trained(monkeypatch):
    """Names of the runs that were really trained, in their order."""
    names = []
    real = jobs.train.run

    def counting(config, folder, **keywords):
        before = (folder / record.METRICS).exists()
        run = real(config, folder, **keywords)
        if not before:
            names.append(folder.name)
        return run

    monkeypatch.setattr(jobs.train, "run", counting)
    monkeypatch.setattr(compare, "warm_up", lambda comparison: None)
    return names


# --- the plan


def test_the_paper_s_workload_compares_the_four_rows_of_its_table(tmp_path, monkeypatch):
    """By itself, with the paper's settings: every row starts, on a narrower net and a few pictures."""
    g = torch.Generator().manual_seed(0)
    x = torch.randint(256, (24, 3, 32, 32), dtype=torch.uint8, generator=g)
    data = workloads.Dataset(x, torch.arange(24) % 10, x[:8], torch.arange(8), classes=10)
    small = dataclasses.replace(
        workloads.find("cifar10-vgg16bn"),
        model=lambda found: models.build("vgg16bn", width=1 / 16, classes=10),
        data=lambda sources: data,
    )
    monkeypatch.setitem(workloads.WORKLOADS, small.name, small)
    monkeypatch.setattr(compare, "warm_up", lambda comparison: None)
    arguments = ["compare", "cifar10-vgg16bn", "--seeds", "1", "--epochs", "1", "--out", str(tmp_path / "c")]
    said = CliRunner().invoke(cli.app, [*arguments, "--set", "batch_size=12"])
    assert said.exit_code == 0, said.output
    rows = json.loads((tmp_path / "c" / "table.json").read_text())["rows"]
    assert [row["label"] for row in rows] == ["paper-k-fac", "paper-rs-kfac", "paper-sre-kfac", "paper-seng"]
    for row in rows:
        run = record.load_run(tmp_path / "c" / "runs" / f"{row['label']}-seed0")
        assert run.summary["status"] == "finished", row["label"]


def test_seeds_go_round_robin_over_the_optimizers(tmp_path):
    plan = Comparison(contenders=("sgd", "adamw"), seeds=2).jobs(tmp_path)
    assert [job.folder.name for job in plan] == ["sgd-seed0", "adamw-seed0", "sgd-seed1", "adamw-seed1"]
    assert [(job.config.optimizer.name, job.config.seed) for job in plan] == [
        ("sgd", 0),
        ("adamw", 0),
        ("sgd", 1),
        ("adamw", 1),
    ]


def test_settings_reach_all_runs_or_the_one_they_name():
    comparison = Comparison(
        contenders=("sgd", "torch.optim:SGD"),
        settings=("batch_size=64", "sgd.lr=0.5", "torch.optim:SGD.momentum=0.3"),
        common={"epochs": 4, "time_budget": None},
    )
    named, dotted = (comparison.config(name, 7) for name in comparison.contenders)
    assert (named.batch_size, dotted.batch_size, named.epochs, named.seed) == (64, 64, 4, 7)
    assert named.optimizer.arguments == {"lr": 0.5}
    assert dotted.optimizer.arguments == {"momentum": 0.3}
    assert comparison.config("sgd", 7, {"lr": 0.25}).optimizer.arguments == {"lr": 0.25}


def test_the_papers_configurations_are_contenders_on_their_workload():
    comparison = Comparison("cifar10-vgg16bn", ("paper-rs-kfac",), common={"epochs": 3})
    config = comparison.config("paper-rs-kfac", 1)
    assert (config.optimizer.name, config.name, config.epochs) == ("rs-kfac", "paper-rs-kfac", 3)
    assert config.schedule["rank"] == {1: 220, 15: 230}
    with pytest.raises(LabError, match="cifar10-vgg16bn, not for digits-mlp"):
        Comparison(contenders=("paper-rs-kfac",)).config("paper-rs-kfac", 1)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"contenders": ()}, "nothing to compare"),
        ({"contenders": ("sgd", "sgd")}, "sgd is named twice"),
        ({"seeds": 0}, "at least 1"),
    ],
)
def test_senseless_comparisons_are_refused(arguments, said):
    with pytest.raises(LabError, match=said):
        Comparison(**arguments)


def test_folder_names_hold_no_path():
    assert slug("torch.optim:SGD") == "torch.optim_SGD"
    assert slug("../mine/run.toml") == "run"


def test_mistakes_are_said_before_the_first_run(tmp_path, trained):
    for bad, said in (("adamx", "adamx"), ("torch.optim:SGDD", "SGDD")):
        with pytest.raises(LabError, match=said):
            compare.run(Comparison(contenders=("sgd", bad), common=SHORT), tmp_path, console=quiet())
    with pytest.raises(LabError, match="'foo'"):
        compare.run(Comparison(contenders=("sgd", "adamw"), settings=("adamw.foo=1",)), tmp_path, console=quiet())
    with pytest.raises(LabError, match="'muon'"):
        compare.run(Comparison(contenders=("sgd",)), tmp_path, reference="muon", console=quiet())
    assert trained == []


# --- the runs


def test_a_comparison_writes_table_curves_and_page_of_its_runs(tmp_path, trained):
    console = quiet()
    two = Comparison(contenders=("sgd", "adamw"), seeds=2, common=SHORT, settings=("adamw.lr=0.003",))
    results = compare.run(two, tmp_path, console=console)
    assert trained == ["sgd-seed0", "adamw-seed0", "sgd-seed1", "adamw-seed1"]
    folders = [record.load_run(tmp_path / "runs" / name) for name in trained]
    assert table_text.to_csv(tables.table1(folders)) == (tmp_path / "table.csv").read_text()
    rows = list(csv.DictReader(io.StringIO((tmp_path / "table.csv").read_text())))
    best = [max(e["test_accuracy"] for e in run.epochs) for run in results.runs if run.summary["optimizer"] == "sgd"]
    assert float(rows[0]["best_test_accuracy_mean"]) == pytest.approx(sum(best) / 2)
    written, told = json.loads((tmp_path / "table.json").read_text()), (tmp_path / "table.md").read_text()
    assert written["reference"] == "sgd"
    assert written["made_by"]["optimizers"]["adamw"]["seeds"] == [0, 1]
    assert written["made_by"]["optimizers"]["sgd"]["settings"] == folders[0].config["optimizer"]["arguments"]
    assert written["made_by"]["commands"] == [origin.kept(tmp_path).command]
    assert written["made_by"]["machines"][0]["name"] == folders[0].environment["processor"]
    assert told.count("| adamw |") == 3
    assert f"    {origin.kept(tmp_path).command}" in told
    assert "- adamw: lr 0.003 (seeds 0, 1)" in told
    assert folders[0].environment["processor"].split()[0] in told
    assert "<svg" in (tmp_path / "curves.svg").read_text()
    assert "adamw" in (tmp_path / "report.html").read_text()
    said = console.file.getvalue()
    for name in ("table.md", "table.csv", "table.json", "curves.png", "curves.svg", "report.html"):
        assert str(tmp_path / name) in said


@pytest.mark.usefixtures("unadorned")
def test_an_interrupted_comparison_continues_without_repeating_finished_runs(tmp_path, trained, monkeypatch):
    comparison = Comparison(contenders=("sgd", "adamw"), seeds=2, common=SHORT)
    counting = jobs.train.run

    def interrupted(config, folder, **keywords):
        if folder.name == "sgd-seed1":
            raise KeyboardInterrupt
        return counting(config, folder, **keywords)

    monkeypatch.setattr(jobs.train, "run", interrupted)
    console = quiet()
    first = compare.run(comparison, tmp_path, console=console)
    assert first.interrupted
    assert len(first.runs) == 2
    assert "--resume" in console.file.getvalue()
    monkeypatch.setattr(jobs.train, "run", counting)
    second = compare.run(comparison, tmp_path, console=quiet())
    assert not second.interrupted
    assert len(second.runs) == 4
    assert trained == ["sgd-seed0", "adamw-seed0", "sgd-seed1", "adamw-seed1"]  # each once
    assert second.runs[0].epochs == first.runs[0].epochs


def test_a_run_of_other_settings_is_not_taken_for_one_of_ours(tmp_path, trained):
    compare.run(Comparison(contenders=("sgd",), seeds=1, common=SHORT), tmp_path, console=quiet())
    other = Comparison(contenders=("sgd",), seeds=1, settings=("sgd.lr=0.7",), common=SHORT)
    with pytest.raises(LabError, match=r"different: --set sgd\.lr=0\.7, not none"):
        compare.run(other, tmp_path, console=quiet())
    (tmp_path / "comparison.json").unlink()  # then the runs speak for themselves
    with pytest.raises(LabError, match=r"optimizer\.arguments\.lr"):
        compare.run(other, tmp_path, console=quiet())


@pytest.mark.usefixtures("unadorned")
def test_a_failing_optimizer_is_a_row_and_stops_nobody(tmp_path, trained):
    comparison = Comparison(contenders=(EXPLODING, "sgd"), seeds=2, settings=(f"{EXPLODING}.lr=0.1",), common=SHORT)
    console = quiet()
    results = compare.run(comparison, tmp_path, console=console)
    assert [run.summary["status"] for run in results.runs] == ["finished", "finished"]
    assert [failure.message for failure in results.failures] == ["RuntimeError: the sketch ran out of rows"] * 2
    assert "2 failed: RuntimeError: the sketch ran out of rows" in (tmp_path / "table.md").read_text()
    assert f"{EXPLODING}: 2 failed" in console.file.getvalue()


@pytest.mark.usefixtures("unadorned")
def test_a_diverging_optimizer_is_a_row(tmp_path, trained):
    comparison = Comparison(contenders=("sgd", "adamw"), seeds=1, settings=("sgd.lr=1e30",), common=SHORT)
    compare.run(comparison, tmp_path, console=quiet())
    rows = csv.DictReader(io.StringIO((tmp_path / "table.csv").read_text()))
    assert {row["optimizer"]: row["notes"] for row in rows} == {"sgd": "1 diverged", "adamw": ""}


def test_where_nothing_could_run_the_reason_is_raised(tmp_path, trained):
    comparison = Comparison(contenders=(EXPLODING,), seeds=2, settings=(f"{EXPLODING}.lr=0.1",), common=SHORT)
    with pytest.raises(LabError, match="Not one of the 2 runs could be done: RuntimeError: the sketch"):
        compare.run(comparison, tmp_path, console=quiet())


def test_folders_of_comparisons(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LabError, match="no `rkfac compare` of digits-mlp"):
        compare.choose_folder(None, "digits-mlp", resume=True)
    for name in ("../../elsewhere", "**"):
        with pytest.raises(LabError, match="no workload"):
            compare.choose_folder(None, name, resume=True)
    fresh = compare.choose_folder(None, "digits-mlp", resume=False)
    for name in ("compare-digits-mlp-20200101-000000", "compare-digits-mlp-20210101-000000"):
        (tmp_path / "runs" / name / "runs" / "sgd-seed0").mkdir(parents=True)
        (tmp_path / "runs" / name / "runs" / "sgd-seed0" / "config.json").touch()
    latest = compare.choose_folder(None, "digits-mlp", resume=True)
    assert latest.name == "compare-digits-mlp-20210101-000000"
    assert fresh.name > latest.name
    with pytest.raises(LabError, match="already holds a comparison"):
        compare.choose_folder(latest, "digits-mlp", resume=False)
    assert compare.choose_folder(latest, "digits-mlp", resume=True) == latest


def test_time_left_uses_an_optimizers_own_times_once_it_has_some():
    assert jobs.seconds_left([], ["sgd"]) is None
    taken = [("sgd", 1.0), ("k-fac", 9.0), ("sgd", 3.0)]
    assert jobs.seconds_left(taken, ["sgd", "k-fac"]) == pytest.approx(2 + 9)
    assert jobs.seconds_left(taken, ["new"]) == pytest.approx(13 / 3)


# --- tuning


def trials(mode, **values):
    rates = (0.01, 0.1, 1.0)
    made = [
        search.Trial(name, lr, v, "finished", arguments={"lr": lr})
        for name, vs in values.items()
        for lr, v in zip(rates, vs, strict=True)
    ]
    return search.Tuned("digits-mlp", "metric", mode, 1, 0.2, tuple(made))


def test_the_best_rate_is_chosen_in_the_metrics_direction():
    found = trials("max", sgd=(0.2, 0.9, 0.5), adamw=(0.8, 0.8, None), muon=(None, None, None))
    assert found.chosen() == {
        "sgd": {"lr": 0.1},
        "adamw": {"lr": 0.01},
    }  # of equals the smaller; nothing where nothing was measured
    assert found.at_edge() == ["adamw"]
    assert trials("min", sgd=(0.2, 0.9, 0.5)).chosen() == {"sgd": {"lr": 0.01}}


@pytest.mark.usefixtures("unadorned")
def test_tuning_tries_the_same_rates_with_its_own_seed_and_the_comparison_uses_the_best(tmp_path, trained):
    comparison = Comparison(contenders=("sgd", "adamw"), seeds=1, common=SHORT)
    short = tuning.in_passing(comparison, tuning.rates("0.2,0.00001"), epochs=1)
    compare.run(comparison, tmp_path, search=short, console=quiet())
    written = json.loads((tmp_path / "tuning.json").read_text())
    assert [(t["contender"], t["lr"]) for t in written["trials"]] == [
        ("sgd", 1e-5),
        ("sgd", 0.2),
        ("adamw", 1e-5),
        ("adamw", 0.2),
    ]
    for trial in written["trials"]:
        run = record.load_run(tmp_path / "tuning" / f"{trial['contender']}-lr{trial['lr']:g}")
        assert (run.config["seed"], run.config["epochs"]) == (tuning.SEED, 1)
        assert run.epochs[-1]["validation_accuracy"] == trial["value"]
    assert written["chosen"]["sgd"] == {"lr": 0.2}  # a hundred-thousandth cannot learn anything in one epoch
    for name, chosen in written["chosen"].items():
        config = record.load_run(tmp_path / "runs" / f"{name}-seed0").config
        assert config["optimizer"]["arguments"]["lr"] == chosen["lr"]
        assert config["seed"] != tuning.SEED


def test_a_learning_rate_schedule_and_tuning_exclude_each_other(tmp_path):
    comparison = Comparison("cifar10-vgg16bn", ("paper-k-fac",))
    with pytest.raises(LabError, match="schedule"):
        tuning.tune(comparison, tuning.Search(1, (0.1,)), tmp_path, silent_display())


@pytest.mark.parametrize("text", ["1,b", "0", "-1", "nan"])
def test_impossible_grids_are_refused(text):
    with pytest.raises(LabError, match="--grid"):
        tuning.Search(1, tuning.rates(text))


# --- the command


@pytest.mark.usefixtures("unadorned")
def test_command_compares_and_continues(tmp_path):
    arguments = ["compare", "--optimizers", "sgd, adamw", "--seeds", "1", "--epochs", "1", "--out", str(tmp_path / "c")]
    runner = CliRunner()
    result = runner.invoke(cli.app, arguments)
    assert result.exit_code == 0, result.output
    assert "adamw" in result.stdout
    assert str(tmp_path / "c" / "report.html") in result.stdout.replace("\n", "")
    again = runner.invoke(cli.app, arguments)
    assert isinstance(again.exception, LabError)
    resumed = runner.invoke(cli.app, [*arguments, "--resume"])
    assert resumed.exit_code == 0
    assert "(from an earlier run)" in resumed.stderr


def test_display_says_each_ended_run_in_one_line():
    display = silent_display()
    plan = Comparison(contenders=("sgd",), seeds=2).jobs(Path("nowhere"))
    display.start(plan)
    display.job(0)
    display.done(0, make_run("sgd", accuracies=[0.5, 0.9125]), known=False)
    display.job(1)
    display.failed(1, "no [memory]")
    display.stop()
    assert display.console.file.getvalue().splitlines() == [
        "[1/2] sgd, seed 0: finished, test accuracy 91.25% after 2.00 s of training",
        "[2/2] sgd, seed 1: failed: no [memory]",
    ]


def test_a_run_file_that_names_no_workload_is_for_any(tmp_path):
    own, any_ = tmp_path / "own.toml", tmp_path / "any.toml"
    any_.write_text('label = "plain"\n\n[optimizer]\nname = "sgd"\n')
    own.write_text('workload = "digits-mlp"\n' + any_.read_text())
    for workload in ("digits-mlp", "digits-autoencoder"):
        config = Comparison(workload=workload, contenders=(str(any_),)).config(str(any_), 0)
        assert (config.workload, config.name, config.optimizer.name) == (workload, "plain", "sgd")
    with pytest.raises(LabError, match="is for the workload digits-mlp, not for digits-autoencoder"):
        Comparison(workload="digits-autoencoder", contenders=(str(own),)).config(str(own), 0)
