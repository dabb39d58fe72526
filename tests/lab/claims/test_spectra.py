"""Spectra along one walk: what starts from the identity is known from what is free of its start."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

import rkfac
from rkfac_lab.claims.claim import FAILS, HOLDS, PARTLY
from rkfac_lab.claims.desk import Desk
from rkfac_lab.claims.looks import curve, looked, modes, started_from_identity, widest
from rkfac_lab.claims.spectra import Spectra
from rkfac_lab.claims.widths import FAMILIES, FIGURE, LOOKING, Walk

TINY = replace(
    Spectra(),
    families=(("digits", (24, 32)),),
    batches=(16, 32),
    steps=(2, 5),
    fast=("digits", (24,)),
    later=(("digits", (24,)),),
    later_steps=(6, 9),
    settled=(("digits", (24,)),),
    settled_steps=(4, 31),
)


def test_the_identity_start_is_known_from_the_unbiased_one():
    walk = Walk("digits", 24, None, 32)
    free = walk.watch(["3"], 0.9)
    layer = list(walk.model.get_submodule("3").parameters())
    begun = rkfac.RSKFAC(walk.model, params=layer, **LOOKING, factor_every=1, factor_decay=0.9, factor_start="identity")
    walk.watchers.append(begun)
    for _ in range(6):
        walk.step()
    for side in ("input", "output"):
        known, derived = getattr(begun.spectrum("3"), side), getattr(free.spectrum("3"), side)
        torch.testing.assert_close(started_from_identity(derived, 0.9, 6), known, rtol=1e-5, atol=1e-7)
    walk.close()


def test_who_looks_changes_nothing():
    ends = []
    for watched in (False, True):
        walk = Walk("digits", 24, None, 32)
        if watched:
            walk.watch(["3"], 0.95)
        for _ in range(4):
            walk.step()
        ends.append([p.detach().clone() for p in walk.model.parameters()])
        walk.close()
    for alone, beside in zip(*ends, strict=True):
        assert torch.equal(alone, beside)


def test_the_short_memory_sees_enough_of_the_walk():
    claim = replace(
        TINY, families=(("digits", (24,)),), batches=(32,), steps=(30,), fast=("digits", ()), later=(), settled=()
    )
    (walked,) = claim.measure(_Nowhere())["walks"]
    found = {(f["rho"], f["side"]): f["curve"] for f in walked["factors"]}
    walk = Walk("digits", 24, None, 32)
    whole = walk.watch(["3"], 0.5)
    for _ in range(30):
        walk.step()
    expected = curve(whole.spectrum("3").output)
    walk.close()
    torch.testing.assert_close(torch.tensor(found[0.5, "output"]), torch.tensor(expected), rtol=2e-3, atol=1e-5)


class _Nowhere:
    """A desk that keeps nothing."""

    data_dir = None

    def part(self, name, make):
        return json.loads(json.dumps(make()))


def test_modes_are_above_a_33rd_of_the_largest():
    values = torch.tensor([33.0, 2.0, 1.001, 0.999, 0.0])
    assert modes(values) == 3
    assert looked(values, 0.5, 9, 1) == {"step": 9, "unbiased": 3, "identity": 4}  # 0.5 is below 17 / 33
    assert looked(values / 1000, 0.5, 9, 1) == {"step": 9, "unbiased": 3, "identity": 5}


def test_a_curve_keeps_both_ends():
    kept = curve(torch.arange(1000, 0, -1.0))
    assert kept[0] == [1, 1.0]
    assert kept[-1] == [1000, 0.001]
    assert len(kept) <= 60
    assert curve(torch.ones(1)) == [[1, 1.0]]


def test_the_layers_are_the_papers():
    model = FAMILIES["vgg"].build(64, 10)
    convolutions = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Conv2d)]
    assert list(FAMILIES["vgg"].layers) == [convolutions[4], convolutions[6], convolutions[10]]
    assert widest(model.get_submodule("features.34")) == 577
    assert isinstance(FAMILIES["mlp"].build(16, 10).get_submodule("3"), torch.nn.Linear)


EVEN, TWICE = {256: (20, 20), 512: (25, 25)}, {256: (20, 20), 512: (40, 40)}


def made(counts, fast=None, later=None, settled=None):
    """A measurement in which the factor of a side and width has so many modes; settled, the width makes no difference."""
    longer = {"later": walks(later or {}), "settled": walks(EVEN if settled is None else settled)}
    return {"walks": walks(counts), "fast": walks(fast or {}), **longer}


def walks(counts):

    def factor(side, width, count):
        looks = [{"step": step, "unbiased": count, "identity": width} for step in Spectra().steps]
        fixed = {
            "layer": "3",
            "rho": 0.95,
            "rows": 64,
            "bound": width,
            "largest": 1.0,
            "curve": [[1, 1.0], [width, 0.1]],
        }
        return {**fixed, "side": side, "d": width, "looks": looks}

    return [
        {
            "family": "mlp",
            "width": width,
            "batch": 64,
            "loss": 1.0,
            "factors": [factor("input", width + 1, inputs), factor("output", width, outputs)],
        }
        for width, (inputs, outputs) in counts.items()
    ]


FLAT = {512: (100, 90), 8192: (140, 120)}


@pytest.mark.parametrize(
    ("counts", "settled", "word"),
    [
        (FLAT, EVEN, HOLDS),
        ({256: (10, 10), **FLAT}, EVEN, HOLDS),  # narrow ones do not count for the growth in the first steps
        ({512: (100, 90), 8192: (160, 120)}, EVEN, PARTLY),  # grows, though there are few
        (FLAT, TWICE, PARTLY),  # grows once it has settled
        ({512: (100, 90), 8192: (110, 500)}, TWICE, PARTLY),  # one factor, in the first steps
        (
            {512: (300, 300), 8192: (300, 300)},
            {256: (20, 20), 512: (40, 25)},
            PARTLY,
        ),  # one factor, once it has settled
        ({512: (100, 90), 8192: (160, 500)}, TWICE, FAILS),
        ({512: (300, 300), 8192: (300, 300)}, TWICE, FAILS),
    ],
)
def test_the_rules(counts, settled, word):
    assert Spectra().verdict(made(counts, settled=settled)).word == word


def test_the_papers_learning_rate_is_judged_too():
    flat, growing = {512: (100, 90), 8192: (110, 100)}, {512: (100, 90), 2048: (110, 180)}
    assert Spectra().verdict(made(flat)).word == HOLDS
    assert Spectra().verdict(made(flat, growing)).word == PARTLY
    assert "| 180 |" in Spectra().page(made(flat, growing))


def test_trainings_that_diverged_are_shown_and_not_judged():
    found = made({512: (100, 90), 8192: (110, 100)}, {512: (100, 90), 2048: (110, 180)})
    for walk in found["fast"]:
        walk["loss"] = 35.4
    assert Spectra().verdict(found).word == HOLDS
    assert "| 35.4 |" in Spectra().page(found)


def test_what_came_later_is_shown_and_not_judged():
    found = made({512: (100, 90), 8192: (110, 100)}, later={512: (7, 399)})
    for walk in found["later"]:
        for factor in walk["factors"]:
            factor["looks"] = [{**factor["looks"][0], "step": step} for step in Spectra().later_steps]
    assert Spectra().verdict(found).word == HOLDS
    assert "| 399 | 399 | 399 |" in Spectra().page(found)


def test_what_has_settled_is_told_layer_by_layer():
    why = Spectra().verdict(made(FLAT, settled=TWICE)).why
    assert why.endswith(
        "after 5100 steps of the narrower networks, by which the paper saw an equilibrium: input factor A middle layer "
        "20 (257 from the identity) of 257 and 40 (513 from the identity) of 513, output factor Γ middle layer "
        "20 (256 from the identity) of 256 and 40 (512 from the identity) of 512."
    )


def test_the_rule_says_what_each_of_its_parts_came_to():
    rule = Spectra().rule(made(FLAT, settled=TWICE))
    assert "settled input factor A no (40 modes, 2.00 times), settled output factor Γ no (40 modes, 2.00 times)" in rule
    assert rule.count(" yes (") + rule.count(" no (") == 4


def test_where_every_training_diverged_nothing_is_told():
    found = made(FLAT, settled=TWICE)
    for walk in found["settled"]:
        walk["loss"] = 100.0
    assert "input factor A none, output factor Γ none" in Spectra().verdict(found).why


def test_the_pace_of_the_figure():
    """Statistics every 30 steps for training and watching, and the schedule of Section 5 by epochs."""
    walk = Walk("digits", 24, None, 256, pace=FIGURE)
    watcher = walk.watch(["3"], 0.95)
    per_epoch = len(walk.batches)
    assert per_epoch == 6
    rates = []
    for _ in range(31):
        walk.step()
        rates.append(walk.optimizer.param_groups[0]["lr"])
    assert rates == [0.3] * 6 + [0.2] * 6 + [0.1] * 19
    for optimizer in (walk.optimizer, watcher):
        record = next(record for record in optimizer.report() if record.name == "3")
        assert record.updates == 2
    walk.close()


def test_what_is_flat_at_every_width_is_named():
    assert "nearly flat" not in Spectra().verdict(made({512: (100, 500), 8192: (110, 500)})).why
    verdict = Spectra().verdict(made({512: (100, 500), 8192: (110, 8000)}))
    assert "1 of 2 factors are nearly flat at every width" in verdict.why
    assert "batch 64: 500 of 512, 8000 of 8192)" in verdict.why


def test_a_small_measurement_becomes_a_page(tmp_path):
    found = TINY.measure(Desk(tmp_path))
    assert found == TINY.measure(Desk(tmp_path))
    page = TINY.page(found)
    assert "rho 0.5" in page
    assert [len(walk["factors"]) for walk in found["walks"]] == [2, 4, 2, 4]  # rho 0.5 with the larger batch
    assert [look["step"] for look in found["walks"][0]["factors"][0]["looks"]] == [2, 5]
    assert [look["step"] for look in found["later"][0]["factors"][0]["looks"]] == [6, 9]
    (settled,) = found["settled"]
    assert [look["step"] for look in settled["factors"][0]["looks"]] == [4, 31]
    assert {factor["rho"] for factor in settled["factors"]} == {0.95}
    assert "After 31 steps the averages have had 2 updates" in page
    assert "## Later" in page
    assert "modes at step 9" in page
    pictures = TINY.pictures(found)
    assert all(f"{TINY.name}-{name}.png" in page for name in pictures)
    once = replace(TINY, once_above=10, batches=(16,), families=(("digits", (24,)),), later=(), settled=())
    factors = once.measure(_Nowhere())["walks"][0]["factors"]
    assert [[look["step"] for look in factor["looks"]] for factor in factors] == [[5], [5]]
    assert {factor["rho"] for factor in factors} == {0.95}
