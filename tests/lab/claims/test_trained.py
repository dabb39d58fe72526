"""The claims about trainings, on a problem of milliseconds and on numbers made by hand."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from rkfac_lab.bench.timing import Spread
from rkfac_lab.claims import paper, rates, table_one
from rkfac_lab.claims.claim import FAILS, HOLDS, PARTLY
from rkfac_lab.claims.desk import Desk
from rkfac_lab.claims.fewer_epochs import (
    FACTORED_UNBIASED,
    KEPT,
    LIKE,
    PUBLISHED,
    RANDOMIZED,
    VARIANTS,
    WAY,
    FewerEpochs,
)
from rkfac_lab.claims.table_one import K_FAC, OTHERS, PAPER, RS, SENG, TIMED, TableOne


def as_kept(value):
    return json.loads(json.dumps(value))


def test_ranks_are_the_papers_in_proportion():
    assert [paper.rank_at(width) for width in (512, 64, 128, 1)] == [220, 28, 55, 1]


@pytest.mark.parametrize(
    ("values", "chosen"),
    [
        ({"0.1": 0.5, "0.3": 0.6, "1": None}, 0.3),
        ({"0.1": 0.6, "0.3": 0.6}, 0.1),
        ({"0.3": None, "0.1": None}, 0.1),
    ],
)
def test_the_best_rate_is_the_smallest_of_equals_and_what_diverged_cannot_win(values, chosen):
    assert rates.best(values) == chosen


# --- fewer epochs


def fewer(tiny):
    sizes = {"epochs": 1, "tuning_epochs": 1, "rates": (0.1,), "seeds": 2, "others": 1, "target": 0.2}
    return FewerEpochs(workload=tiny, widest=512, **sizes)


def test_fewer_epochs_trains_everybody_at_one_rate_and_at_its_own(tiny, tmp_path):
    claim = fewer(tiny)
    found = as_kept(claim.measure(Desk(tmp_path)))
    for variant in VARIANTS:
        mine = {(row["lr"], row["seed"]) for row in found["rows"] if row["variant"] == variant}
        assert mine == {(lr, seed) for lr in (0.3, 0.1) for seed in range(2 if variant in WAY else 1)}
        assert set(found["trials"][variant]) == {"0.1"}
    curves = {row["variant"]: row["curve"] for row in found["rows"] if (row["lr"], row["seed"]) == (0.3, 0)}
    assert len(curves) == len(VARIANTS)
    # A sketch of all modes with the identity kept is exact K-FAC.
    assert curves[KEPT] == curves[LIKE]
    assert claim.page(found)
    assert list(claim.pictures(found)) == ["curves"]
    assert claim.verdict(found).word in (HOLDS, PARTLY, FAILS)


def made_by_hand(*steps, seeds=1):
    """Steps of the four from one method to the other at the common rate, and at own ones; the others' are nine."""
    ends = {PUBLISHED: 0.60, LIKE: 0.62, KEPT: 0.62, RANDOMIZED: 0.66, FACTORED_UNBIASED: 0.67}
    both = dict(zip(WAY, zip(steps[:4], steps[4:], strict=True), strict=True))
    rows = []
    for variant in VARIANTS:
        for lr, first in zip((0.3, 1.0), both.get(variant, (9, 9)), strict=True):
            row = {"variant": variant, "lr": lr, "end": ends.get(variant, 0.6), "curve": [[1, 0.5]]}
            for seed in range(seeds):  # two apart from each other
                rows.append({**row, "seed": seed, "steps": None if first is None else first + 2 * seed})
    trials = {variant: {"0.03": 0.4 if variant == RANDOMIZED else 0.3, "1": 0.2} for variant in VARIANTS}
    return {"trials": trials, "finals": {}, "best": dict.fromkeys(VARIANTS, 1.0), "rows": rows}


@pytest.mark.parametrize(
    ("steps", "word"),
    [
        ((20, 9, 9, 10, 20, 9, 9, 10), HOLDS),
        ((None, 9, 9, 10, 20, 9, 9, 10), HOLDS),
        ((20, 9, 9, 10, 10, 9, 9, 20), PARTLY),
        ((10, 9, 9, 20, 10, 9, 9, 10), FAILS),
        ((20, 9, 9, None, 20, 9, 9, None), FAILS),
        ((None, 9, 9, None, None, 9, 9, None), FAILS),
    ],
)
def test_fewer_epochs_holds_where_rs_kfac_is_sooner_at_both_rates(steps, word):
    assert FewerEpochs(seeds=1).verdict(made_by_hand(*steps)).word == word


@pytest.mark.parametrize(("sooner", "word"), [(2, FAILS), (3, HOLDS)])
def test_a_difference_within_two_standard_errors_is_none(sooner, word):
    """Two seeds, two apart: a mean has a standard error of one, a difference of two of them one of 1.41."""
    steps = (10 + sooner, 9, 9, 10)
    claim, found = FewerEpochs(seeds=2), made_by_hand(*steps, *steps, seeds=2)
    assert f"at lr 0.3 {sooner} ± 1 steps sooner" in claim.verdict(found).why
    assert claim.verdict(found).word == word


def test_own_rates_of_which_one_is_the_common_one_are_told_apart():
    claim, found = FewerEpochs(), made_by_hand(40, 39, 30, 10, 50, 39, 30, 10)
    assert "so much of the difference" not in claim.verdict(found).why  # both have moved
    found["best"] = {**found["best"], RANDOMIZED: 0.3}
    assert "60 % after 50 steps where 0.3 is after 40: so much of the difference" in claim.verdict(found).why


@pytest.mark.parametrize(("sooner", "word"), [(1, "hold.)"), (-1, "not hold in full.)")])
def test_the_rule_says_what_the_one_before_it_would(sooner, word):
    steps = (10 + sooner, 9, 9, 10)
    assert FewerEpochs().rule(made_by_hand(*steps, *steps, seeds=2)).endswith(f"by that rule it would {word}")


def test_fewer_epochs_says_what_the_difference_is_made_of():
    claim, found = FewerEpochs(), made_by_hand(40, 39, 30, 10, 20, 21, 20, None, seeds=2)
    why = claim.verdict(found).why
    assert (
        "at lr 0.3 30 ± 1 steps sooner (more than two standard errors: the sketch itself, with the identity kept, 9"
        in why
    )
    assert "are not kept, 20 ± 1); at own rates one of the two does not come there in every seed" in why
    page = claim.page(found)
    assert "| the damping rule (factored instead of product) | 1 ± 1 | +2.0 | -1 ± 1 | +2.0 |" in page
    assert "| dropping the identity from the modes that are not kept | 20 ± 1 | +4.0 | - | +4.0 |" in page
    assert "| all three together | 30 ± 1 | +6.0 | - | +6.0 |" in page
    assert "| averages without a start, K-FAC, product rule | 31 ± 1 | +0.0 | 11 ± 1 | +0.0 |" in page
    assert "| 41 ± 1 | 1 |" in page
    assert "it is at 40.0 % on validation data where the same sketch that keeps the identity is at 30.0 %" in page
    assert "It does not show here." in page  # the rates are the same
    found["best"] = {**found["best"], RANDOMIZED: 0.3}
    found["finals"] = {RANDOMIZED: {"1": 0.5}}
    page = claim.page(found)
    assert "That agrees with longer steps" in page
    assert "| RS-KFAC, as published | 40.0 % | 20.0 → 50.0 % |" in page


def test_the_best_rates_are_tried_again_with_all_epochs_which_decides(tmp_path, monkeypatch):
    def choose(desk, tried, config, of=""):
        asked.append({(lr, config(PUBLISHED, lr).epochs) for lr in tried[PUBLISHED]})
        trials = {who: {f"{lr:g}": lr if of else -lr for lr in mine} for who, mine in tried.items()}
        return rates.Rates(trials, {who: rates.best(values) for who, values in trials.items()})

    asked = []
    monkeypatch.setattr(rates, "choose", choose)
    found = FewerEpochs(seeds=0, others=0).measure(Desk(tmp_path))
    assert asked == [{(lr, 1) for lr in FewerEpochs().rates}, {(0.03, 4), (0.1, 4), (0.3, 4)}]
    assert set(found["best"].values()) == {0.3}


# --- Table 1


def test_table_1_has_all_rows_and_is_told_from_its_numbers(tiny, tmp_path, monkeypatch):
    one = Spread(1.0, 1.0, 1.0)
    monkeypatch.setattr(
        table_one.stepping,
        "run",
        lambda problem, taking_part, rounds: [
            SimpleNamespace(optimizer=name, amortised=one, ratio=one, seconds={"plain": one}) for name in taking_part
        ],
    )
    claim = TableOne(scales=((tiny, 512, 1, 1),), problem="small-mlp", full=(), full_threads=1)
    found = as_kept(claim.measure(Desk(tmp_path)))
    scale = found["scales"][tiny]
    assert list(scale["rows"]) == [*PAPER, *OTHERS]
    assert all(len(runs) == 1 for runs in scale["rows"].values())
    assert scale["rank"] == 220
    assert set(found["costs"]) == {"SGD", "RS-KFAC (default)", *TIMED.values()}
    page = claim.page(found)
    assert f"## {tiny}: to the end, 1 seed" in page
    assert all(f"| {row} |" in page for row in scale["rows"])
    assert list(claim.pictures(found)) == [tiny]
    assert claim.verdict(found).word in (HOLDS, PARTLY, FAILS)


def test_rates_of_short_trials_are_decided_by_the_whole_budget(tmp_path, monkeypatch):
    """The smallest rate is ahead after one epoch of four, and the second best ends better."""
    asked = []

    def choose(desk, tried, config, of=""):
        whole = of.endswith("final")
        asked.append({(row, lr, config(row, lr).epochs) for row, mine in tried.items() for lr in mine})
        trials = {row: {f"{lr:g}": lr if whole else -lr for lr in mine} for row, mine in tried.items()}
        return rates.Rates(trials, {row: rates.best(values) for row, values in trials.items()})

    monkeypatch.setattr(rates, "choose", choose)
    scale = TableOne()._scale(Desk(tmp_path), "cifar10-vgg-small", 128, 0, 1)
    first, second = asked
    assert {epochs for _, _, epochs in first} == {1}
    assert second == {(row, lr, 4) for row, (_, _, mine) in PAPER.items() for lr in sorted(mine)[:2]}
    assert scale["best"] == {row: sorted(mine)[1] for row, (_, _, mine) in PAPER.items()}
    asked.clear()
    assert TableOne()._scale(Desk(tmp_path), "cifar10-vgg-small", 128, 0, 4)["finals"] == {}
    assert len(asked) == 1


def costs_and_times(exact_step, sketched_step, exact, sketched):
    runs = {K_FAC: exact, RS: sketched}
    rows = {row: [{"seconds": seconds} for seconds in runs.get(row, [])] for row in (*PAPER, *OTHERS)}
    costs = {TIMED[K_FAC]: {"step": exact_step}, TIMED[RS]: {"step": sketched_step}, "SGD": {"step": 0.5}}
    return {"costs": costs, "scales": {"w": {"targets": [0.5, 0.6], "rows": rows}}, "full": {}}


@pytest.mark.parametrize(
    ("numbers", "word", "said"),
    [
        ((4, 1, [[10, 40], [10, 60]], [[5, 10], [5, 10]]), HOLDS, "5.00 ± 1.00 times as fast"),
        ((4, 1, [[10, 40], [10, None]], [[5, 10], [5, 10]]), HOLDS, "2.00 ± 0.00 times as fast"),
        ((4, 1, [[10, 12]], [[5, 10]]), PARTLY, "1.20 times as fast"),
        ((1, 1, [[10, 40]], [[5, 10]]), PARTLY, "4.00 times as fast"),
        ((1, 1, [[None, None]], [[5, 10]]), FAILS, "met no target both in every run"),
    ],
)
def test_table_1_holds_where_epochs_cost_half_and_targets_come_in_half_the_time(numbers, word, said):
    verdict = TableOne(scales=(("w", 64, 2, 1),)).verdict(costs_and_times(*numbers))
    assert verdict.word == word
    assert said in verdict.why


def test_targets_are_told_in_epochs_too_and_how_restless_the_machine_was():
    def run(epoch, *curve):
        accuracies = [point[1] for point in curve]
        seconds = [next((epoch * e for e, a in curve if a >= target), None) for target in (0.5, 0.6)]
        return {
            "epoch": epoch,
            "seconds": seconds,
            "end": accuracies[-1],
            "curve": [[e, epoch * e, a] for e, a in curve],
        }

    rows = {K_FAC: [run(10, (1, 0.5), (2, 0.6)), run(15, (1, 0.4), (3, 0.55))], SENG: [run(8, (1, 0.3))]}
    scale = {
        "targets": [0.5, 0.6],
        "rank": 28,
        "best": {K_FAC: 1.0},
        "finals": {},
        "trials": {K_FAC: {"0.3": 0.1, "1": 0.2}},
    }
    text = TableOne()._scale_text("w", 2, {**scale, "rows": rows})
    assert "| K-FAC | 1 | 27.5 ± 25 | 20 | 12.5 ± 3.5 | 2 ± 1.4 | 2 | 2 of 2 | 1 of 2 | 57.5 ± 3.5 % |" in text
    assert "| SENG | tuned | - | - | 8 | - | - | 0 of 1 | 0 of 1 | 30.0 % |" in text
    assert "(an epoch of K-FAC took up to 1.5 times as many in one run as in another)" in text
    alone = TableOne()._scale_text("w", 1, {**scale, "rows": {SENG: rows[SENG]}})
    assert "count some of it; epochs do not" in alone


def test_the_first_epochs_stand_beside_the_published_ones():
    claim = TableOne(scales=())
    step = {"step": 1.0, "kinds": {"plain": 0.75}}
    costs = dict.fromkeys(("SGD", "RS-KFAC (default)", *TIMED.values()), step)
    epoch = {"test_accuracy": 0.35, "cpu_seconds": 1500.0}
    page = claim.page({"costs": costs, "scales": {}, "full": {RS: [epoch], SENG: [epoch]}})
    assert "| RS-KFAC | 1 | 35.0 % | 33.3 % (26.9 to 39.2, 9 runs) | 1500 |" in page
    assert "| SENG | 1 | 35.0 % | no log was published | 1500 |" in page
    assert "| K-FAC | 1 | 196 | 1.00 | 2.32 | 0 | 0.75 | - | - |" in page
    assert "| SGD | 1 | 196 | 1.00 | - | - | 0.75 | - | - |" in page


def test_a_full_run_is_the_shipped_one_cut_short():
    config = table_one._full(RS, 2)
    assert (config.workload, config.max_steps, config.optimizer.arguments["rank"]) == ("cifar10-vgg16bn", 392, 220)
    assert config.schedule["lr"][2] == 0.2


def test_the_leading_rates_are_the_best_ones_first():
    values = {"0.1": 0.5, "0.3": 0.6, "1": None, "3": 0.6}
    assert rates.leading(values, 2) == (0.3, 3.0)
    assert rates.leading(values, 9) == (0.3, 3.0, 0.1)
    assert rates.leading({"1": None, "0.1": None}, 2) == (0.1,)


def test_trials_are_told_with_what_diverged():
    assert rates.told({"a": {"0.1": 0.5, "1": None}, "b": {"3": 0.25}}) == "a 0.1: 50.0 %, 1: diverged; b 3: 25.0 %"


def test_whose_best_rate_lies_at_an_edge_is_said():
    trials = {"a": {"0.1": 0.5, "0.3": 0.6, "1": None}, "b, c": {"0.1": 0.7, "0.3": 0.6}}
    told = rates.at_edge(trials, {"a": 0.3, "b, c": 0.1})
    assert told == "The best rate lies at an edge of those tried for 1 of 2: b, c. Others might serve them better."
    assert rates.at_edge(trials, {"a": 0.3, "b, c": 0.2}).endswith("for 0 of 2.")
