"""What is captured of a training, sketches against plain formulas, and the rules of the verdict."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import rkfac
from rkfac import linalg
from rkfac_lab.claims import captured as capturing
from rkfac_lab.claims import pages, sketching
from rkfac_lab.claims.captured import OLD, YOUNG, Captured, Subject
from rkfac_lab.claims.claim import FAILS, HOLDS, PARTLY
from rkfac_lab.claims.desk import Desk
from rkfac_lab.claims.sketches import Sketches
from rkfac_lab.claims.sketching import NYSTROM, RSVD, SREVD, U_SIDE
from rkfac_lab.errors import LabError


def falling(d=40, power=1.5, seed=0):
    """A positive matrix whose eigenvalues fall as a power."""
    basis = torch.linalg.qr(torch.randn(d, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64))[0]
    return (basis / torch.arange(1, d + 1, dtype=torch.float64) ** power) @ basis.mT


def layer(remnant=0.0):
    J = torch.randn(30, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    return Captured("w", "l", 1, falling(), falling(30, seed=1), J, remnant)


# --- capturing


@pytest.mark.parametrize("channels_last", [False, True])
def test_the_captured_gradient_is_autograds_as_a_matrix(channels_last):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(12, 4))
    model = model.to(memory_format=torch.channels_last) if channels_last else model
    optimizer = rkfac.RSKFAC(model, **{**rkfac.paper_defaults(), "rank": 3})
    F.cross_entropy(model(torch.randn(5, 2, 4, 4)), torch.arange(5) % 4).backward()
    before = {name: p.grad.clone() for name, p in model.named_parameters()}
    optimizer.step()
    found = capturing.look(optimizer, ["0", "2"])
    for name in ("0", "2"):
        weight, bias = before[f"{name}.weight"].flatten(1), before[f"{name}.bias"][:, None]
        assert torch.equal(found[name]["J"], torch.cat([weight, bias], 1).double())
        assert found[name]["J"].shape == (len(found[name]["G"]), len(found[name]["A"]))
        assert found[name]["remnant"] == pytest.approx(0.95)
    with pytest.raises(LabError, match="'nobody'"):
        capturing.look(optimizer, ["nobody"])


def test_columns_of_a_gradient_are_those_of_the_factor_in_any_memory_layout():
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten()).to(memory_format=torch.channels_last)
    optimizer = rkfac.RSKFAC(model, rank=2, factor_start="unbiased")
    F.cross_entropy(model(torch.randn(1, 2, 3, 3)), torch.tensor([1])).backward()
    optimizer.step()
    found = capturing.look(optimizer, ["0"])["0"]  # of one row: J = g a^T and A = a a^T
    top = linalg.eigh(found["A"], 1).U
    assert torch.linalg.vector_norm(found["J"] @ top) == pytest.approx(float(torch.linalg.vector_norm(found["J"])))


SHORT = Subject("digits-autoencoder", 256, 0.03, 1, ("5", "7"), (1, 3))


def test_captured_layers_are_kept_and_read_again(tmp_path, monkeypatch):
    desk = Desk(tmp_path)
    found = capturing.captured(desk, SHORT)
    assert [(one.layer, one.step) for one in found] == [("5", 1), ("7", 1), ("5", 3), ("7", 3)]
    assert found[-1].remnant == pytest.approx(0.95**3)
    identity = torch.linalg.eigvalsh(found[-1].A).min()
    assert identity >= found[-1].remnant - 1e-6
    assert torch.linalg.eigvalsh(found[-1].free().A).min() == pytest.approx(
        float(identity) - found[-1].remnant, abs=1e-6
    )
    monkeypatch.setattr(capturing.train, "run", None)  # nothing is trained again
    again = capturing.captured(desk, SHORT)
    assert all(
        torch.equal(one.A, other.A) and torch.equal(one.J, other.J) for one, other in zip(found, again, strict=True)
    )


def test_a_stopped_capture_goes_on(tmp_path, monkeypatch):
    whole = capturing.captured(Desk(tmp_path / "whole"), SHORT)
    look = capturing.look

    def stopped(optimizer, layers):
        if optimizer.report().steps == 3:
            raise KeyboardInterrupt
        return look(optimizer, layers)

    monkeypatch.setattr(capturing, "look", stopped)
    with pytest.raises(KeyboardInterrupt):
        capturing.captured(Desk(tmp_path / "cut"), SHORT)
    monkeypatch.setattr(capturing, "look", look)
    again = capturing.captured(Desk(tmp_path / "cut"), SHORT)
    assert all(torch.equal(one.A, other.A) for one, other in zip(whole, again, strict=True))


def test_steps_before_a_checkpoint_are_counted(tmp_path):
    model = nn.Linear(3, 2)
    optimizer = rkfac.RSKFAC(model, **{**rkfac.paper_defaults(), "rank": 1})
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(5, 3)).square().mean().backward()
        optimizer.step()
    watcher = capturing.Watcher(tmp_path, ("",), (4, 5))
    watcher(optimizer, (), {})
    watcher(optimizer, (), {})
    assert watcher.step == 5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-4.pt", "step-5.pt"]


# --- sketches


def test_the_u_side_is_q_k_to_the_half_q():
    X = falling()
    low = sketching.u_side(X, 15, 0, 3, torch.Generator().manual_seed(5))
    Q = sketching.basis(X, 15, 2, torch.Generator().manual_seed(5))
    k, W = torch.linalg.eigh(Q.mT @ X @ X @ Q)
    assert torch.allclose(low.dense(), Q @ (W * k.clamp_min(0).sqrt()) @ W.mT @ Q.mT, atol=1e-10)


def test_without_orthonormalisation_the_span_is_the_same_where_rounding_allows():
    X = falling(power=0.5)
    one, other = (
        sketching.basis(X, 6, 3, torch.Generator().manual_seed(1), orthonormalised=each) for each in (True, False)
    )
    assert torch.allclose(one @ one.mT, other @ other.mT, atol=1e-9)


def test_eigenvalues_are_ordered_at_equal_products():
    X = falling()
    values = {
        name: method(X, 12, 3, 2, generator=torch.Generator().manual_seed(2)).s
        for name, method in sketching.METHODS.items()
    }
    order = [values[SREVD], values[RSVD], values[NYSTROM], linalg.eigh(X, 12).s]
    assert all((small <= large + 1e-12).all() for small, large in pairwise(order))
    assert torch.allclose(values[U_SIDE], values[RSVD], rtol=0.2)  # another draw, the same formula


def test_nothing_is_wrong_at_full_rank_and_all_is_measured_below():
    rows = list(sketching.measured(layer(), 40, 10, (2,), 1))
    assert all(not row["factors"] and row["exact"]["relative"] < 1e-9 for row in rows)
    rows = list(sketching.measured(layer(), 8, 2, (2, 4), 2))
    assert len(rows) == 4 * 2 + 2
    by = {(row["method"], row["products"]): row for row in rows}
    for side in ("A", "G"):
        errors = {name: by[name, 2]["factors"][side] for name in (SREVD, RSVD, NYSTROM)}
        assert errors[NYSTROM]["values"] < errors[RSVD]["values"] < errors[SREVD]["values"]
        assert errors[RSVD]["lost"] < errors[SREVD]["lost"]
        assert by[RSVD, 4]["factors"][side]["lost"] < errors[RSVD]["lost"]
    assert by[RSVD, 4]["truncated"]["relative"] < by[RSVD, 2]["truncated"]["relative"] < 1
    assert by[RSVD, 4]["truncated"]["cosine"] > 0.99


def test_a_step_is_two_damped_inverses():
    one = layer()
    G, A = linalg.eigh(one.G), linalg.eigh(one.A)
    eye = [torch.eye(d, dtype=torch.float64) for d in (30, 40)]
    plain = torch.linalg.inv(one.G + 0.1 * G.s[0] * eye[0]) @ one.J @ torch.linalg.inv(one.A + 0.1 * A.s[0] * eye[1])
    assert capturing.apart(capturing.step_of(G, A, one.J, 0.1), plain)[0] < 1e-10
    assert capturing.apart(2 * plain, plain) == pytest.approx((1.0, 1.0))
    assert capturing.apart(0 * plain, 0 * plain) == (0.0, 1.0)


# --- the claim


def found_by(values=(0.1, 0.2), ends=((0.70, 0.71), (0.60, 0.61)), steps=(200, 300)):
    """Errors of RSVD and SREVD in every case, and what the trainings came to."""
    claim = small()
    rows = []
    for method in (*sketching.METHODS, *sketching.PUBLISHED):
        for average in (YOUNG, OLD):
            for products in claim.products:
                error = values[method == SREVD]
                errors = {"values": error, "lost": error, "angle": 1.0}
                step = {"relative": error, "cosine": 1 - error}
                row = {"workload": "digits-autoencoder", "layer": "3", "step": 3, "average": average, "method": method}
                rows.append({**row, "products": products, "factors": {"A": errors}, "truncated": step, "exact": step})
    trained = []
    for title, (optimizer, _) in claim.variants.items():
        which = optimizer == "sre-kfac"
        for seed, end in enumerate(ends[which]):
            curve = [[100, 0.3], [400, end]]
            trained.append({"variant": title, "seed": seed, "steps": steps[which], "end": end, "curve": curve})
    return {"rows": rows, "trained": trained}


def small():
    return replace(Sketches().small(), seeds=2)


@pytest.mark.parametrize(
    ("found", "word"),
    [
        (found_by(), HOLDS),
        (found_by(ends=((0.7, 0.6), (0.6, 0.7)), steps=(200, 200)), PARTLY),
        (found_by(ends=((0.6, 0.61), (0.7, 0.71)), steps=(300, 200)), PARTLY),
        (found_by(values=(0.2, 0.1)), FAILS),
        (found_by(values=(1e-7, 1e-6)), FAILS),
    ],
)
def test_the_verdict(found, word):
    verdict = small().verdict(found)
    assert verdict.word == word
    assert "digits-autoencoder (rank 110)" in verdict.measured


def test_the_why_counts_what_was_found():
    why = small().verdict(found_by()).why
    assert "100 % of 4 (eigenvalues; of 4), 100 % of 4 (trace lost; of 4), 100 % of" in why
    assert "with 2 products each, RS-KFAC needs" in why


def test_cases_of_rounding_are_counted_apart_and_the_rule_says_what_the_guess_would_have_said():
    claim, found = small(), found_by(values=(1e-6, 2e-6))
    assert "- of 0 (eigenvalues; of 4)" in claim.verdict({**found, "rows": found_by(values=(1e-7, 1e-6))["rows"]}).why
    assert "is smaller in - of 0 cases of eigenvalues, by which the word would be *does not hold*" in claim.rule(found)
    assert "smaller in 100 % of 4 cases of eigenvalues, which does not change the word" in claim.rule(found_by())


def test_trainings_that_did_not_end_are_no_evidence():
    found = found_by()
    found["trained"] = [{**row, "end": None, "steps": None} for row in found["trained"]]
    assert small().verdict(found).word == PARTLY
    assert "no pair came to its target and its end in every seed" in small().verdict(found).why
    assert "| RS-KFAC, 2 products | 2 | - | - |" in small().page(found)


def test_measured_written_and_read_again(tmp_path):
    claim = replace(
        small(), subjects=(SHORT._replace(layers=("3",), steps=(2,)),), products=(2,), epochs=1, seeds=1, equal=(2,)
    )
    found = claim.measure(Desk(tmp_path / "work"))
    assert {row["average"] for row in found["rows"]} == {YOUNG, OLD}
    assert len(found["trained"]) == 4
    assert claim.measure(Desk(tmp_path / "work")) == found
    paths = pages.write(pages.Measured(claim, found, {}, "rkfac claims rsvd-srevd"), tmp_path / "pages")
    assert {path.name for path in paths} >= {"rsvd-srevd.md", "rsvd-srevd-errors.png", "rsvd-srevd-training.png"}
    assert pages.read(tmp_path / "pages" / "rsvd-srevd.json", {claim.name: Sketches()}).verdict == claim.verdict(found)
