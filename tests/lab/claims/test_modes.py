"""Predictions beside what is seen: simulated rows, a trained layer, and the rule that judges them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rkfac_lab.claims.claim import FAILS, HOLDS, PARTLY
from rkfac_lab.claims.desk import Desk
from rkfac_lab.claims.modes import Layer, Modes, averaged, foreseen, updates

TINY = replace(
    Modes().small(), dimensions=(24,), rows=(8,), decays=(0.5,), draws=2, width=24, steps=4, batch=32, layer_rows=(8,)
)


def test_an_average_of_one_batch_after_another():
    batches = iter([torch.eye(2) * 2, torch.tensor([[1.0, 0.0], [0.0, 0.0]])])
    found = averaged(lambda: next(batches), 0.5, 2)
    # (0.25 * 2 I + 0.5 * diag(1/2, 0)) / 0.75
    torch.testing.assert_close(found, torch.tensor([1.0, 2 / 3], dtype=torch.float64))


def test_updates_leave_a_hundredth():
    assert updates(0.5) == 7
    assert 0.95 ** updates(0.95) <= 0.01 < 0.95 ** (updates(0.95) - 1)


def test_simulated_modes_are_foreseen():
    claim = replace(Modes(), dimensions=(64,), rows=(16,), decays=(0.5, 0.9), draws=3)
    assert all(foreseen(case) for kind in ("flat", "k^-1") for case in claim._simulated(kind, 64))


def test_rows_of_a_layer_are_those_of_its_gradient():
    layer = Layer(TINY, None, 0.03)
    walk = layer._trained[0]
    a, g = layer.rows["input"], layer.rows["output"]
    walk.model.zero_grad()
    inputs, targets = walk.problem.prepare(walk.data.train_x, walk.data.train_y)
    walk.problem.loss(walk.model(inputs), targets).backward()
    module = walk.model.get_submodule(layer.name)
    gradient = torch.cat([module.weight.grad, module.bias.grad[:, None]], 1)
    torch.testing.assert_close(g.T @ a / len(a), gradient, rtol=1e-3, atol=1e-6)
    largest = torch.linalg.svdvals(a.double())[0] ** 2 / len(a)
    torch.testing.assert_close(layer.covariances["input"][0], largest, rtol=1e-6, atol=0)


def case(predicted, *seen, **more):
    known = {"covariance": "flat", "d": 100, "rho": 0.5, "n": 64, "updates": 7, "counts": 192.0, "bound": 100}
    drawn = {key: [[1, 1.0], [100, 0.01]] for key in ("measured", "expected", "true")}
    layer = {"side": "input", "unequal": 2.0, "covered": 50, "shorter": predicted, "lr": 0.03, "loss": 0.5}
    return {**known, **layer, **drawn, "predicted": predicted, "seen": list(seen), **more}


def test_right_is_within_a_tenth_or_three_modes():
    assert foreseen(case(12.9, 9, 11))
    assert not foreseen(case(13.1, 9, 11))
    assert foreseen(case(109.0, 100))
    assert not foreseen(case(89.0, 100))


@pytest.mark.parametrize(
    ("simulated", "fixed", "word"),
    [
        ((50, 51), (50, 52), HOLDS),
        ((50, 51), (50, 90), PARTLY),
        ((50, 90), (50, 90), FAILS),
        ((90, 10), (10, 90), FAILS),
    ],
)
def test_the_rules(simulated, fixed, word):
    other = {"side": "output"}
    found = {
        "simulated": [case(50.0, seen) for seen in simulated],
        "fixed": [case(50.0, fixed[0]), case(50.0, fixed[1], **other)],
        "moving": [case(50.0, 90), case(50.0, 90, **other)],  # not judged
    }
    verdict = Modes().verdict(found)
    assert verdict.word == word
    assert "of 4 cases" in verdict.why
    # The covariance of the simulated cases is flat, so that it has all 100 modes; that of the layer has 50.
    assert f"simulated 0 of 2, network {sum(abs(50 - seen) <= 3 for seen in fixed)} of 2." in verdict.why
    assert "| no |" in Modes().page(found)


def test_a_small_measurement_becomes_a_page(tmp_path):
    found = TINY.measure(Desk(tmp_path))
    assert found == TINY.measure(Desk(tmp_path))
    assert [len(found[part]) for part in ("simulated", "fixed", "moving")] == [4, 8, 4]
    page = TINY.page(found)
    assert "k^-1/2" in page
    assert all(f"{TINY.name}-{name}.png" in page for name in TINY.pictures(found))
