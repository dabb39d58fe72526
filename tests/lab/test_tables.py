"""Table 1 against numbers worked out by hand and by numpy."""

from __future__ import annotations

import csv
import io
import json

import numpy as np
import pytest
from rich.console import Console

from rkfac_lab import table_text, tables
from rkfac_lab.errors import LabError

from .handmade import make_run


def two_optimizers():
    return [
        make_run("k-fac", 1, accuracies=[0.80, 0.91, 0.96], epoch_seconds=[4.0, 5.0, 6.0], targets=[0.95, 0.9]),
        make_run("rs-kfac", 1, accuracies=[0.92, 0.97, 0.94], epoch_seconds=[1.0, 2.0, 1.5], targets=[0.95, 0.9]),
        make_run("k-fac", 2, accuracies=[0.80, 0.85, 0.93], epoch_seconds=[4.5, 5.5, 6.5], targets=[0.95, 0.9]),
        make_run("rs-kfac", 2, accuracies=[0.85, 0.93, 0.98], epoch_seconds=[1.1, 2.1, 1.6], targets=[0.95, 0.9]),
    ]


def test_times_hits_epochs_and_best_are_those_of_the_runs():
    table = tables.table1(two_optimizers())
    assert [target.value for target in table.targets] == [0.9, 0.95]  # easiest first, whatever order was given
    exact, randomized = table.rows
    assert (exact.label, randomized.label) == ("k-fac", "rs-kfac")
    easy, hard = exact.targets
    assert (easy.hits, easy.runs, hard.hits, hard.runs) == (2, 2, 1, 2)
    # k-fac reaches 0.9 after 4+5 s (epoch 2) and 4.5+5.5+6.5 s (epoch 3): means 12.75 and 2.5
    assert easy.seconds.mean == pytest.approx(12.75)
    assert easy.seconds.std == pytest.approx(np.std([9.0, 16.5], ddof=1))
    assert easy.epochs.mean == pytest.approx(2.5)
    # one hit: its own time, and no standard deviation
    assert hard.seconds == tables.Spread(15.0, None, 1)
    pool = [4.0, 5.0, 6.0, 4.5, 5.5, 6.5]
    assert exact.epoch_seconds == tables.Spread(pytest.approx(np.mean(pool)), pytest.approx(np.std(pool, ddof=1)), 6)
    # the best of a run may be in its middle
    assert randomized.best.mean == pytest.approx((0.97 + 0.98) / 2)


def test_ratios_divide_by_the_reference_row():
    table = tables.table1(two_optimizers())
    exact, randomized = tables.ratios(table)  # without a baseline exact K-FAC is the reference
    assert exact.targets == exact.steps == exact.cpu_seconds == (1.0, 1.0)
    assert exact.epoch_seconds == 1.0
    # rs-kfac: 0.9 after 1 s and 3.2 s, mean 2.1, against 12.75; 0.95 after 3 s and 4.8 s, mean 3.9, against 15
    assert randomized.targets == (pytest.approx(2.1 / 12.75), pytest.approx(3.9 / 15.0))
    assert randomized.epoch_seconds == pytest.approx(9.3 / 31.5)
    # 0.9 after epochs 1 and 2 against 2 and 3, 0.95 after 2 and 3 against 3; six steps an epoch
    assert randomized.steps == (pytest.approx(9 / 15), pytest.approx(15 / 18))
    assert randomized.cpu_seconds == pytest.approx(randomized.targets)
    assert tables.ratios(table, "rs-kfac")[0].targets[0] == pytest.approx(12.75 / 2.1)
    with pytest.raises(LabError, match="no row 'adam'"):
        tables.ratios(table, "adam")


def test_ratio_is_missing_where_the_reference_never_hit():
    runs = [
        make_run("k-fac", accuracies=[0.1], targets=[0.9]),
        make_run("sgd", accuracies=[0.95], targets=[0.9]),
    ]
    assert tables.ratios(tables.table1(runs), "k-fac")[1].targets == (None,)


def best_of(**accuracies):
    """Who is the reference among runs of two seeds with these accuracies by epoch."""
    runs = [
        make_run(name.replace("_", "-"), seed, accuracies=values, targets=[0.8, 0.9])
        for name, seeds in accuracies.items()
        for seed, values in enumerate(seeds)
    ]
    return tables.reference_label(tables.table1(runs))


def test_the_best_baseline_is_the_reference():
    slow, fast, never, once = [0.5, 0.5, 0.9], [0.5, 0.9, 0.9], [0.8, 0.8, 0.8], [0.9, 0.9, 0.9]
    assert best_of(k_fac=[once, once], sgd=[slow, slow], adamw=[fast, fast]) == "adamw"
    assert (
        best_of(rs_kfac=[once, once], muon=[slow, slow], soap=[once, never]) == "muon"
    )  # reliably comes before luckily
    assert best_of(sgd=[[0.5, 0.5, 0.8]] * 2, shampoo=[never, never]) == "shampoo"  # the easier target decides
    assert best_of(rs_kfac=[once, once], k_fac=[never, never]) == "k-fac"


def test_nobody_is_divided_by_who_never_arrived():
    slow, fast, never = [0.5, 0.5, 0.9], [0.5, 0.9, 0.9], [0.1, 0.2, 0.3]
    assert best_of(sgd=[never, never], rs_kfac=[slow, slow], sre_kfac=[fast, fast]) == "sre-kfac"
    assert best_of(sgd=[never, never], adamw=[[0.8] * 3] * 2, rs_kfac=[fast, fast]) == "adamw"
    assert best_of(rs_kfac=[never, never], sgd=[never, never]) == "sgd"


def test_a_grafted_k_fac_is_no_baseline():
    runs = [make_run(name, accuracies=[0.95], targets=[0.9]) for name in ("rs-kfac+sgd", "k-fac", "sgd")]
    assert [row.baseline for row in tables.table1(runs).rows] == [False, False, True]


def test_runs_that_did_not_record_steps_have_none():
    run = make_run("sgd", accuracies=[0.95], targets=[0.9])
    for target in run.summary["targets"]:
        del target["step"], target["cpu_seconds"]
    table = tables.table1([run, make_run("adamw", accuracies=[0.95], targets=[0.9])])
    assert (table.rows[0].targets[0].steps, table.rows[0].targets[0].cpu_seconds) == (None, None)
    assert "| sgd | - | - |" in table_text.to_markdown(table)


def test_smaller_is_better_for_error_targets():
    def run(label, values):
        return make_run(label, accuracies=values, targets=[12.0, 8.0], metric="test_error", mode="min")

    table = tables.table1([run("sgd", [20.0, 11.0, 9.0]), run("k-fac", [13.0, 7.5, 7.9])])
    assert [target.value for target in table.targets] == [12.0, 8.0]
    assert (table.metric, table.mode) == ("test_error", "min")
    assert [row.best.mean for row in table.rows] == [9.0, 7.5]
    assert [row.targets[1].hits for row in table.rows] == [0, 1]
    assert "t(test error ≤ 8)" in table_text.to_markdown(table)


def test_diverged_and_failed_runs_count_as_runs_and_are_said():
    runs = [
        make_run("sgd", 1, accuracies=[0.95], targets=[0.9]),
        make_run("sgd", 2, accuracies=[0.1, float("nan")], targets=[0.9], status="diverged"),
    ]
    table = tables.table1(runs, [tables.Failure("sgd", 3, "out of memory"), tables.Failure("muon", 1, "no | such")])
    sgd, muon = table.rows
    assert (sgd.runs, sgd.targets[0].hits, sgd.targets[0].runs) == (3, 1, 3)
    assert sgd.notes == "1 diverged; 1 failed: out of memory"
    assert sgd.best.mean == pytest.approx((0.95 + 0.1) / 2)  # the nan epoch is no value
    assert (muon.runs, muon.best, muon.epoch_seconds) == (1, None, None)
    text = table_text.to_markdown(table)
    assert "1 of 3" in text
    assert "no \\| such" in text
    assert {line.count("|") - line.count("\\|") for line in text.splitlines()[:4]} == {7}


def test_runs_of_two_workloads_are_refused():
    with pytest.raises(LabError, match="cifar, digits-mlp"):
        tables.table1([make_run("sgd"), make_run("sgd", workload="cifar")])


def test_without_targets_accuracy_is_the_metric_and_loss_without_accuracy():
    assert tables.main_metric([make_run("sgd")]) == ("test_accuracy", "max")
    assert tables.main_metric([make_run("sgd", metric="test_loss", mode="min")]) == ("test_loss", "min")


def test_markdown_reads_as_the_papers_table():
    lines = table_text.to_markdown(tables.table1(two_optimizers())).splitlines()
    assert lines[0] == ("| optimizer | t(acc ≥ 90%) | t(acc ≥ 95%) | t(epoch) | hit 90% | hit 95% | best acc |")
    assert lines[2] == "| k-fac | 12.8 ± 5.3 | 15.0 | 5.25 ± 0.94 | 2 of 2 | 1 of 2 | 94.50 ± 2.12% |"
    assert lines[7] == "| optimizer | steps(acc ≥ 90%) | steps(acc ≥ 95%) | CPU(acc ≥ 90%) | CPU(acc ≥ 95%) |"
    assert lines[9] == "| k-fac | 15 ± 4 | 18 | 19.1 ± 8.0 | 22.5 |"
    assert lines[-1] == "| rs-kfac | 0.16 | 0.26 | 0.30 | 0.60 | 0.83 | 0.16 | 0.26 |"


def test_csv_holds_raw_numbers_and_json_survives_a_round_trip():
    table = tables.table1(two_optimizers())
    first, second = csv.DictReader(io.StringIO(table_text.to_csv(table)))
    assert float(first["test_accuracy_0.9_seconds_std"]) == pytest.approx(np.std([9.0, 16.5], ddof=1), rel=1e-12)
    assert first["test_accuracy_0.95_seconds_std"] == ""
    assert second["test_accuracy_0.95_hits"] == "2"
    plain = json.loads(json.dumps(table_text.to_json(table)))
    assert plain["reference"] == "k-fac"
    assert plain["rows"][1]["targets"][0]["seconds"]["mean"] == pytest.approx(2.1)
    assert plain["ratios"][1]["targets"][1] == pytest.approx(3.9 / 15)


def test_terminal_table_shows_labels_as_they_are():
    run = make_run("[red]odd[/red]", accuracies=[0.95], targets=[0.9])
    console = Console(width=140, record=True, file=io.StringIO())
    for table in table_text.to_rich(tables.table1([run, make_run("sgd", accuracies=[0.5], targets=[0.9])])):
        console.print(table)
    text = console.export_text()
    assert "[red]odd[/red]" in text
    assert "1 of 1" in text
    assert "0 of 1" in text
