"""The demonstration: what it compares, and that its last lines are true of good and of bad runs."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from typer.testing import CliRunner

from rkfac_lab import cli, compare, demo
from rkfac_lab.jobs import Results
from rkfac_lab.promise import promises

from .handmade import make_run

GOOD, BAD, SLOW = [0.95, 0.96, 0.97], [0.5, 0.6, 0.7], [0.6, 0.7, 0.95]


def pairs(*contenders, seeds=2, seconds=1.0):
    """What became of rs-kfac with these accuracies, in the place of an sgd that has 0.9 after three epochs of a second."""
    found = []
    for accuracies in contenders:
        runs = [make_run("sgd", seed, accuracies=[0.5, 0.8, 0.9]) for seed in range(seeds)]
        times = [seconds] * len(accuracies)
        runs += [make_run("rs-kfac+sgd", seed, accuracies=accuracies, epoch_seconds=times) for seed in range(seeds)]
        found += promises(runs)
    return found


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        (pairs(GOOD, GOOD), "sooner in steps in 2 of 2 pairs, in seconds in 2 of 2 pairs."),
        (pairs(GOOD, GOOD, seconds=9.0), "sooner in steps in 2 of 2 pairs, in seconds in 0 of 2 pairs."),
        (pairs(SLOW, SLOW), "sooner in steps in 0 of 2 pairs, in seconds in 0 of 2 pairs."),
        (
            pairs(GOOD, BAD, GOOD),
            "sooner in steps in 2 of 3 pairs, in seconds in 2 of 3 pairs; in 1 of 3 pairs at least one seed never arrived.",
        ),
        (
            pairs(BAD),
            "sooner in steps in 0 of 1 pair, in seconds in 0 of 1 pair; in 1 of 1 pair at least one seed never arrived.",
        ),
    ],
)
def test_the_last_line_counts_what_the_runs_say(found, verdict):
    assert demo.verdict(found) == f"One line replaced, the numbers kept: rs-kfac arrived {verdict}"


def test_one_lucky_seed_is_not_sooner():
    runs = [make_run("sgd", seed, accuracies=[0.5, 0.9]) for seed in (1, 2)]
    runs += [make_run("rs-kfac+sgd", 1, accuracies=GOOD), make_run("rs-kfac+sgd", 2, accuracies=BAD)]
    assert "in steps in 0 of 1 pair" in demo.verdict(promises(runs))


def test_nothing_to_be_measured_against_is_said():
    assert demo.verdict([]) == "No baseline has a result that rs-kfac could be measured against."


def test_numbers_that_were_not_kept_are_not_called_kept():
    [pair] = pairs(GOOD, seeds=1)
    runs = [make_run("sgd", accuracies=[0.5]), make_run("rs-kfac+sgd", accuracies=GOOD)]
    runs[0].epochs[0]["weight_decay"], runs[1].epochs[0]["weight_decay"] = 0.1, 0.0
    assert "the numbers kept but for those named above:" in demo.verdict([pair, *promises(runs)])


def test_every_workload_is_compared_and_every_pair_said(tmp_path, monkeypatch):
    asked = []

    def made(comparison, folder, *, console, continued_by):
        asked.append((comparison, folder, continued_by))
        good = comparison.workload == "digits-mlp"
        kinds = [("sgd", [0.5, 0.8, 0.9]), ("rs-kfac+sgd", GOOD if good else BAD)]
        return Results([make_run(name, accuracies=values, workload=comparison.workload) for name, values in kinds])

    monkeypatch.setattr(compare, "run", made)
    console = Console(file=io.StringIO(), width=200)
    found = demo.run(tmp_path, seeds=2, console=console)
    assert found is not None
    assert list(found) == ["digits-autoencoder", "digits-mlp"]
    for comparison, folder, again in asked:
        assert comparison.contenders == ("sgd", "rs-kfac+sgd", "adamw", "rs-kfac+adamw")
        assert (comparison.seeds, folder, again) == (2, tmp_path / comparison.workload, f"--out {tmp_path}")
    *_, bad, good, verdict, where = console.file.getvalue().splitlines()
    assert where == f"The curves and the pages are in {tmp_path}."
    assert bad == (
        "digits-autoencoder: With sgd's own numbers rs-kfac never reached sgd's best test accuracy (90%) (0 of 1 seed)."
    )
    assert good.startswith(
        "digits-mlp: With sgd's own numbers rs-kfac reached sgd's best test accuracy (90%) after 0.33"
    )
    assert verdict.endswith(
        "in steps in 1 of 2 pairs, in seconds in 1 of 2 pairs; in 1 of 2 pairs at least one seed never arrived."
    )


def test_an_interrupted_demonstration_draws_no_conclusion(tmp_path, monkeypatch):
    monkeypatch.setattr(compare, "run", lambda *given, **named: Results(interrupted=True))
    console = Console(file=io.StringIO())
    assert demo.run(tmp_path, console=console) is None
    assert console.file.getvalue() == ""
    assert CliRunner().invoke(cli.app, ["demo", "--out", str(tmp_path)]).exit_code == 130


def test_it_is_told_how_to_go_on(tmp_path, monkeypatch, tiny):
    def stopped(plan, display):
        raise KeyboardInterrupt

    monkeypatch.setattr(compare, "run_all", stopped)
    monkeypatch.setattr(compare, "warm_up", lambda comparison: None)
    console = Console(file=io.StringIO(), width=400)
    assert demo.run(tmp_path, epochs={tiny: 1}, console=console) is None
    assert f"the same command with --out {tmp_path} continues" in console.file.getvalue()


def test_real_runs_end_in_the_verdict_and_leave_pictures(tmp_path, monkeypatch, tiny):
    monkeypatch.setattr(compare, "warm_up", lambda comparison: None)
    console = Console(file=io.StringIO(), width=400)
    found = demo.run(tmp_path, seeds=2, epochs={tiny: 2}, console=console)
    assert found is not None
    assert [(pair.label, len(pair.arrivals)) for pair in found[tiny]] == [("rs-kfac+sgd", 2), ("rs-kfac+adamw", 2)]
    said = console.file.getvalue()
    assert str(tmp_path / "tiny" / "report.html") in said
    assert (tmp_path / "tiny" / "curves.png").stat().st_size > 0
    assert said.splitlines()[-2] == demo.verdict(found[tiny])


def test_folders_have_dates(tmp_path):
    assert demo.choose_folder(tmp_path) == tmp_path
    assert demo.choose_folder(None).parent.name == "runs"
    assert demo.choose_folder(None).name.startswith("demo-20")
