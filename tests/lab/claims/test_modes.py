"""Predictions beside what is seen: simulated rows, a trained layer, and the rule that judges them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rkfac_lab.claims.claim import FAILS, HOLDS, PARTLY
from rkfac_lab.claims.desk import Desk
from rkfac_lab.claims.foresight import foreseen
from rkfac_lab.claims.modes import Modes
from rkfac_lab.claims.trained_rows import Network, Training, averaged, updates, worth

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
    (layer,) = Network(TINY._mlp(0.03), None).layers
    walk = layer.network.walk
    a, g = (layer.rows[side].squeeze(1) for side in ("input", "output"))
    walk.model.zero_grad()
    inputs, targets = walk.problem.prepare(walk.data.train_x, walk.data.train_y)
    walk.problem.loss(walk.model(inputs), targets).backward()
    module = walk.model.get_submodule(layer.name)
    gradient = torch.cat([module.weight.grad, module.bias.grad[:, None]], 1)
    torch.testing.assert_close(g.T @ a / len(a), gradient, rtol=1e-3, atol=1e-6)
    largest = torch.linalg.svdvals(a.double())[0] ** 2 / len(a)
    torch.testing.assert_close(layer.covariances["input"][0], largest, rtol=1e-6, atol=0)


def pictures(samples, positions, d, alike, generator):
    """Normal rows; `alike` of their squares is what all positions of a picture share."""
    shared, own = (torch.randn(samples, n, d, generator=generator, dtype=torch.float64) for n in (1, positions))
    return alike**0.5 * shared + (1 - alike) ** 0.5 * own


@pytest.mark.parametrize(
    ("positions", "alike", "expected"), [(1, 0.0, 1.0), (4, 0.0, 4.0), (4, 1.0, 1.0), (6, 1.0, 1.0)]
)
def test_a_picture_is_worth_its_independent_rows(positions, alike, expected):
    rows = pictures(20000, positions, 12, alike, torch.Generator().manual_seed(0))
    assert worth(rows, torch.ones(12, dtype=torch.float64)) == pytest.approx(expected, rel=0.03)


def test_rows_of_unequal_length_are_worth_less():
    rows = pictures(20000, 1, 12, 0.0, torch.Generator().manual_seed(0))
    rows[::2] *= 2**0.5
    rows[1::2] = 0  # half of them are all there is: E||x||^4 doubles
    d = 12
    expected = (d * d + d) / (2 * (d * d + 2 * d) - d)
    assert worth(rows, torch.ones(d, dtype=torch.float64)) == pytest.approx(expected, rel=0.03)


def test_whole_pictures_are_drawn_and_worth_says_how_many_modes_they_make():
    """Rows of a convolution: positions are alike, and so an average has fewer modes than as many independent rows."""
    generator = torch.Generator().manual_seed(0)
    network = Network(Training("digits", 8, 1, 8, 0.1, 0.5, ("3",)), None)
    (layer,) = network.layers
    rows = pictures(4000, 8, 96, 1.0, generator).float()
    layer.rows = {"input": rows, "output": rows}
    batch = layer.draw("input", 5, generator)()
    assert batch.shape == (40, 96)
    assert all((picture == picture[0]).all() for picture in batch.unflatten(0, (5, 8)))
    network.walk = type("Walk", (), {"loss": 0.5})()
    (found,) = replace(Modes(), draws=3)._fixed(layer, 0.5, (16,))[:1]
    assert (found["n"], found["positions"]) == (128, 8)
    assert not foreseen(found)
    assert found["predicted by worth"] == pytest.approx(sum(found["seen"]) / 3, rel=0.05)


def case(predicted, *seen, **more):
    known = {"covariance": "flat", "d": 100, "rho": 0.5, "n": 64, "updates": 7, "counts": 192.0, "bound": 100}
    drawn = {key: [[1, 1.0], [100, 0.01]] for key in ("measured", "expected", "corrected", "true")}
    layer = {"side": "input", "worth": 0.5, "covered": 50, "predicted by worth": 50.0, "lr": 0.03, "loss": 0.5}
    layer |= {"layer": "features.20", "positions": 4}
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
    found = cases(simulated, fixed)
    verdict = Modes().verdict(found)
    assert verdict.word == word
    assert "of 4 cases" in verdict.why
    # The covariance of the simulated cases is flat, so that it has all 100 modes; that of the layer has 50.
    assert f"(simulated 0 of 2, MLP {sum(abs(50 - seen) <= 3 for seen in fixed)} of 2);" in verdict.why
    assert "at weights that moved, in 0 of 2 (MLP)." in verdict.why
    assert "| no |" in Modes().page(found)
    assert "Convolutions" not in Modes().page(found)


def cases(simulated, fixed, convolved=()):
    other = {"side": "output"}
    return {
        "simulated": [case(50.0, seen) for seen in simulated],
        "fixed": [case(50.0, fixed[0]), case(50.0, fixed[1], **other)],
        "moving": [case(50.0, 90), case(50.0, 90, **other)],  # not judged
        "convolved": {"fixed": list(convolved), "moving": list(convolved[:1])},
    }


def test_convolutions_are_judged_as_independent_rows_and_told_by_worth():
    convolved = [case(50.0, 50), case(80.0, 50)]
    found = cases((50, 50), (50, 50), convolved)
    verdict = Modes().verdict(found)
    assert verdict.word == PARTLY
    assert "5 of 6 cases" in verdict.why
    assert "convolutions 1 of 2" in verdict.why
    assert "in 0 of 2 (MLP) and 1 of 1 (convolutions)." in verdict.why
    page = Modes().page(found)
    assert "As independent rows 1 of these 2 are right, by worth 2." in page
    assert (
        "| 7th convolution | input factor A | 100 | 4 | 0.5 | 16 | 50 | 80.0 | no | 2 | 50.0 | yes | 50 | 100 |" in page
    )
    assert "better-theory-convolutions.png" in page
    assert set(replace(Modes(), layer_rows=(64,)).pictures(found)) == {"cases", "spectra", "convolutions"}


def test_a_small_measurement_becomes_a_page(tmp_path):
    found = TINY.measure(Desk(tmp_path))
    assert found == TINY.measure(Desk(tmp_path))
    assert [len(found[part]) for part in ("simulated", "fixed", "moving")] == [4, 8, 4]
    page = TINY.page(found)
    assert "k^-1/2" in page
    assert all(f"{TINY.name}-{name}.png" in page for name in TINY.pictures(found))
