"""What became of "replace one line, keep your numbers, arrive sooner", against runs whose every number is known."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from rkfac_lab import compare, plots, promise_text, report
from rkfac_lab.jobs import Results
from rkfac_lab.optimizers import takes_place_of
from rkfac_lab.promise import promises
from rkfac_lab.tables import Failure

from .handmade import make_run


def sgd(seed, *errors, **more):
    return make_run("sgd", seed, accuracies=errors, metric="test_error", mode="min", targets=[1.0], **more)


def kfac(seed, *errors, label="rs-kfac+sgd", **more):
    return make_run(label, seed, accuracies=errors, metric="test_error", mode="min", targets=[1.0], **more)


def said(*runs, failures=()):
    [pair] = promises(runs, failures)
    return promise_text.sentence(pair)


def configured(run, arguments, **settings):
    return replace(run, config={"optimizer": {"arguments": arguments}, **settings})


def test_the_first_evaluation_as_good_as_the_baselines_best_of_the_same_seed_counts():
    runs = [
        sgd(1, 5.0, 3.0, 2.0, 2.5),  # best at epoch 3: 18 steps, 3 s, 4.5 CPU s
        kfac(1, 4.0, 2.0, 1.0, epoch_seconds=[2.0, 2.0, 2.0]),  # equal is as good: epoch 2, 12 steps, 4 s, 6 CPU s
        sgd(2, 4.0, 3.0, 1.0, 1.0),  # of equals the first: epoch 3
        kfac(2, 1.0, 0.5, epoch_seconds=[1.5, 1.5]),  # epoch 1: 6 steps, 1.5 s
    ]
    [pair] = promises(runs)
    first, second = pair.arrivals
    assert (first.seed, first.best, first.baseline.steps, first.kfac.steps) == (1, 2.0, 18, 12)
    assert (first.baseline.seconds, first.baseline.cpu_seconds) == (3.0, 4.5)
    assert (first.kfac.seconds, first.kfac.cpu_seconds) == (4.0, 6.0)
    assert (second.best, second.baseline.steps, second.kfac.steps) == (1.0, 18, 6)
    assert pair.steps.mean == pytest.approx((12 / 18 + 6 / 18) / 2)
    assert pair.seconds.mean == pytest.approx((4 / 3 + 1.5 / 3) / 2)
    assert pair.seconds.std == pytest.approx(np.std([4 / 3, 0.5], ddof=1))
    assert pair.cpu_seconds.mean == pytest.approx(pair.seconds.mean)
    assert pair.reached == 2
    assert promise_text.sentence(pair) == (
        "With sgd's own numbers rs-kfac reached sgd's best test error (1.5) after 0.50 of its steps "
        "and 0.92 of its seconds (2 of 2 seeds)."
    )


def test_larger_is_better_where_it_is():
    runs = [make_run("adamw", accuracies=[0.5, 0.9]), make_run("k-fac+adamw", accuracies=[0.7, 0.89, 0.95])]
    assert said(*runs) == (
        "With adamw's own numbers k-fac reached adamw's best test accuracy (90%) but needed 1.50 times its steps "
        "and 1.50 times its seconds (1 of 1 seed)."
    )


def test_more_is_said_to_be_more_and_as_much_is_not_sooner():
    slow = kfac(1, 3.0, 2.0, epoch_seconds=[4.0, 4.0])
    assert said(sgd(1, 5.0, 4.0, 2.0), slow) == (
        "With sgd's own numbers rs-kfac reached sgd's best test error (2) after 0.67 of its steps "
        "but needed 2.67 times its seconds (1 of 1 seed)."
    )
    [even] = promises([sgd(1, 5.0, 2.0), kfac(1, 5.0, 2.0, epoch_seconds=[0.9, 1.098])])  # 0.999 of the seconds
    assert "needed 1.00 times its steps and 1.00 times its seconds" in promise_text.sentence(even)
    assert not even.sooner("steps")
    assert not even.sooner("seconds")


def test_seeds_that_never_arrive_are_said_and_are_no_ratio():
    runs = [sgd(seed, 5.0, 4.0, 2.0) for seed in (1, 2, 3)]
    runs += [
        kfac(1, 1.0, 1.0, 1.0),
        kfac(2, 5.0, 2.01, 2.01),
        kfac(3, 4.0, float("nan"), status="diverged"),
    ]
    [pair] = promises(runs)
    assert (pair.reached, len(pair.arrivals), pair.steps.count) == (1, 3, 1)
    assert pair.steps.mean == pytest.approx(1 / 3)
    assert not pair.sooner("steps")
    assert promise_text.sentence(pair) == (
        "With sgd's own numbers rs-kfac never reached sgd's best test error (2) in 2 of 3 seeds; "
        "in the other it was there after 0.33 of its steps and 0.33 of its seconds."
    )
    [never] = promises([runs[1], runs[4]])
    assert never.steps is None
    assert not never.sooner("steps")
    assert promise_text.sentence(never) == (
        "With sgd's own numbers rs-kfac never reached sgd's best test error (2) (0 of 1 seed)."
    )
    assert promise_text.to_markdown([never]).count("not reached") == 6


def test_a_run_that_failed_never_arrived_and_one_that_has_not_ended_says_nothing():
    baseline = [sgd(seed, 5.0, 2.0) for seed in (1, 2)]
    mine, failed = kfac(1, 1.0), Failure("rs-kfac+sgd", 2, "out of memory")
    assert "in 1 of 2 seeds; in the other it was there after 0.50" in said(*baseline, mine, failures=[failed])
    all_failed = [Failure("rs-kfac+sgd", seed, "no memory") for seed in (1, 2)]
    assert "never reached sgd's best test error (2) (0 of 2 seeds)" in said(*baseline, failures=all_failed)
    unfinished = kfac(2, 5.0, status="interrupted")
    assert "(1 of 1 seed)" in said(*baseline, mine, unfinished)
    assert promises([sgd(1, 5.0, status="running"), mine]) == ()
    assert promises([sgd(1, float("nan"), status="diverged"), mine]) == ()


def test_pairs_are_of_a_k_fac_and_whom_it_replaces_and_nobody_else():
    assert promises([sgd(1, 2.0), kfac(1, 1.0, label="rs-kfac"), kfac(1, 1.0, label="rs-kfac+adamw")]) == ()
    assert promises([kfac(1, 1.0)]) == ()
    assert promises([sgd(2, 2.0), kfac(1, 1.0)]) == ()  # no seed in common
    pairs = promises([sgd(1, 2.0), kfac(1, 1.0), kfac(1, 3.0, label="k-fac+sgd")])
    assert [(pair.label, pair.name, pair.baseline) for pair in pairs] == [
        ("rs-kfac+sgd", "rs-kfac", "sgd"),
        ("k-fac+sgd", "k-fac", "sgd"),
    ]
    assert [takes_place_of(name) for name in ("rs-kfac+adamw", "rs-kfac", "sgd", "muon+sgd", "rs-kfac+muon", "+")] == [
        "adamw",
        *[None] * 5,
    ]


def test_numbers_that_were_not_kept_are_named():
    given = {"lr": 0.1, "momentum": 0.9}
    baseline = configured(sgd(1, 2.0), given, batch_size=64)

    def against(arguments, batch_size=64):
        return said(baseline, configured(kfac(1, 1.0), arguments, batch_size=batch_size))

    assert against({**given, "graft": "sgd"}).startswith("With sgd's own numbers rs-kfac reached")
    assert against({"lr": 0.3, "momentum": 0.9}).startswith("With sgd's own numbers except lr rs-kfac reached")
    assert against({"lr": 0.3, "momentum": 0.9}, 32).startswith("With sgd's own numbers except lr and batch_size rs-")
    assert against({**given, "loss_average": "tokens"}).startswith(
        "With sgd's own numbers and loss_average beside them rs-kfac reached"
    )


def test_what_was_in_force_counts_also_where_nobody_gave_it():
    """AdamW decays weights unless told otherwise, K-FAC does not: neither configuration says so."""
    baseline, mine = make_run("adamw", accuracies=[0.9]), make_run("rs-kfac+adamw", accuracies=[0.9])
    baseline.epochs[0]["weight_decay"], mine.epochs[0]["weight_decay"] = 0.01, 0.0
    assert said(baseline, mine).startswith("With adamw's own numbers except weight_decay rs-kfac")
    mine.epochs[0]["weight_decay"] = 0.01
    assert said(baseline, mine).startswith("With adamw's own numbers rs-kfac")


def test_runs_that_did_not_record_their_cpu_seconds_have_no_ratio_of_them():
    baseline, mine = sgd(1, 2.0), kfac(1, 1.0)
    del mine.epochs[0]["cpu_seconds"]
    [pair] = promises([baseline, mine])
    assert pair.cpu_seconds is None
    assert "| - / 1.5 |" in promise_text.to_markdown([pair])


def test_tables_terminal_and_page_say_it(tmp_path):
    results = Results([sgd(1, 5.0, 2.0), kfac(1, 1.0, 1.0), sgd(2, 5.0, 2.0), kfac(2, 5.0, 5.0)])
    console = Console(file=io.StringIO(), width=200)
    compare.show(results, console)
    compare.write(results, tmp_path)
    [pair] = json.loads((tmp_path / "table.json").read_text())["promises"]
    assert (pair["label"], pair["baseline"], pair["reached"], pair["seeds"]) == ("rs-kfac+sgd", "sgd", 1, 2)
    assert pair["arrivals"][0]["kfac"] == {"steps": 6, "cpu_seconds": 1.5, "seconds": 1.0}
    assert pair["arrivals"][1]["kfac"] is None
    assert pair["steps"] == {"mean": 0.5, "std": None, "count": 1}
    text = (tmp_path / "table.md").read_text()
    assert pair["sentence"] in text
    assert "| rs-kfac+sgd | 1 | test error 2 | 6 / 12 = 0.50 | 1.5 / 3 = 0.50 | 1 / 2 = 0.50 |" in text
    assert "| rs-kfac+sgd | 2 | test error 2 | not reached / 12 |" in text
    assert "| rs-kfac+sgd | mean | 1 of 2 | 0.50 | 0.50 | 0.50 |" in text
    assert pair["sentence"] in console.file.getvalue()
    assert "not reached / 12" in console.file.getvalue()
    [group] = report.contents(results.runs)["groups"]
    assert [found["sentence"] for found in group["promises"]] == [pair["sentence"]]


def test_without_a_pair_nothing_is_added(tmp_path):
    results = Results([sgd(1, 5.0, 2.0)])
    compare.write(results, tmp_path)
    assert json.loads((tmp_path / "table.json").read_text())["promises"] == []
    assert "place" not in (tmp_path / "table.md").read_text()
    assert promise_text.to_rich(()) == []


def test_text_from_runs_is_only_read():
    odd = replace(kfac(1, 1.0), summary={**kfac(1, 1.0).summary, "label": "a|b\x1b[31m"})
    [pair] = promises([sgd(1, 2.0), odd])
    assert "\x1b" not in promise_text.sentence(pair)
    assert "a\\|b\\\\x1b\\[31m" in promise_text.to_markdown([pair])


def test_the_picture_has_an_arrow_for_every_pair_of_which_all_seeds_arrived():
    runs = [sgd(1, 5.0, 3.0, 2.0), kfac(1, 2.0, 1.0), sgd(2, 5.0, 3.0, 2.0), kfac(2, 3.0, 1.0)]
    steps, seconds, *losses = plots.curves(runs).axes
    [arrow] = steps.texts
    assert (arrow.xyann, arrow.xy) == ((18.0, 2.0), (9.0, 2.0))
    [arrow] = seconds.texts
    assert (arrow.xyann, arrow.xy) == ((3.0, 2.0), (1.5, 2.0))
    assert not any(len(axes.texts) for axes in losses)
    assert steps.get_lines()[0].get_xdata().tolist() == [6, 12, 18]
    once = plots.curves([*runs, sgd(3, 0.5, 0.5, 0.5), kfac(3, 3.0, 3.0)])
    assert len(once.axes[0].texts) == 0
    assert "arrows" not in once.get_suptitle()
