"""Truncated steps against the library's own, which rank is enough, and the rules of the verdict."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rkfac import linalg
from rkfac_lab.claims import pages, truncation
from rkfac_lab.claims.captured import OLD, YOUNG, Captured, Subject, apart, step_of
from rkfac_lab.claims.claim import FAILS, HOLDS, PARTLY
from rkfac_lab.claims.desk import Desk
from rkfac_lab.claims.rank import PAPERS, Rank
from rkfac_lab.claims.truncation import TAILS


def falling(d, remnant, seed):
    basis = torch.linalg.qr(torch.randn(d, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64))[0]
    values = 2.0 ** -torch.arange(d, dtype=torch.float64)
    return (basis * (values + remnant)) @ basis.mT


def layer(remnant=0.0):
    J = torch.randn(12, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    return Captured("w", "l", 1, falling(20, remnant, 0), falling(12, remnant, 1), J, remnant)


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("rank", [3, 12, 20])
def test_a_truncated_step_is_the_librarys(tail, rank):
    one = layer(0.01)
    full = truncation.modes(one)
    G, A = (linalg.eigh(X, tail=tail) for X in (one.G, one.A))
    whole = step_of(G, A, one.J, 0.1)
    expected = apart(step_of(G.truncate(rank), A.truncate(rank), one.J, 0.1), whole)
    assert truncation.errors(full, rank, tail, PAPERS) == pytest.approx(expected, abs=1e-9)


def test_nothing_is_lost_with_all_modes_and_less_with_more():
    full = truncation.modes(layer(0.01))
    for tail in TAILS:
        found = [truncation.errors(full, rank, tail, PAPERS)[0] for rank in (2, 6, 20)]
        assert found[0] > found[1] > found[2] == 0


def test_taking_the_identity_out_changes_eigenvalues_alone():
    free = truncation.without_identity(truncation.modes(layer(0.3)), 0.3)
    plain = truncation.modes(layer())
    assert torch.allclose(free.g, plain.g, atol=1e-12)
    assert torch.allclose(free.J.abs(), plain.J.abs(), atol=1e-5)


def test_a_trace_tail_makes_up_for_an_identity_and_a_zero_tail_does_not():
    full = truncation.modes(layer(0.5))
    assert truncation.errors(full, 10, "trace", PAPERS)[0] < 0.01
    assert truncation.errors(full, 10, "zero", PAPERS)[0] > 0.5


def test_the_rank_that_is_enough_is_and_the_one_below_is_not():
    full = truncation.modes(layer())
    found = truncation.enough(full, "zero", PAPERS)
    assert 1 < found < 20
    assert truncation.is_enough(*truncation.errors(full, found, "zero", PAPERS))
    assert not truncation.is_enough(*truncation.errors(full, int(found / truncation.FINER) - 1, "zero", PAPERS))


def test_the_automatic_rule_counts_what_the_damping_leaves_visible():
    values = torch.tensor([1.0, 0.5, 0.012, 0.011, 0.010], dtype=torch.float64)
    assert truncation.automatic(values, "zero", PAPERS) == 3  # a ninth of the damping is 0.0111
    assert truncation.automatic(values, "trace", PAPERS) == 2  # the rest is nearly flat


def small():
    return replace(Rank().small(), seeds=2)


def found_by(error=0.01, losses=(1.0, 1.01)):
    """Errors of the step in every case, and the losses with all modes and at any rank."""
    claim = small()
    rows = []
    for average in (YOUNG, OLD):
        for damping in claim.dampings:
            for tail in TAILS:
                case = {"workload": "digits-autoencoder", "layer": "3", "step": 20, "widths": [257, 128]}
                auto = {"ranks": [8, 4], "relative": 0.04, "cosine": 0.999}
                relative = [error * 2 / (1 + 2 * position) for position in range(len(claim.fractions))]
                rows.append(
                    {
                        **case,
                        "average": average,
                        "damping": list(damping),
                        "tail": tail,
                        "relative": relative,
                        "cosine": [1 - value for value in relative],
                        "enough": 23,
                        "auto": auto,
                    }
                )
    found = [
        {"workload": subject.workload, "variant": variant.title(subject), "seed": seed, "loss": loss, "test_loss": loss}
        for subject in (Subject(*values) for values in claim.subjects)
        for variant in claim.variants
        for seed, loss in enumerate([losses[variant.tail is not None]] * 2)
    ]
    return {"rows": rows, "kept": {"digits-autoencoder": {"3": [9, 4]}}, "losses": found}


@pytest.mark.parametrize(
    ("found", "word"),
    [
        (found_by(), HOLDS),
        (found_by(losses=(1.0, 0.5)), HOLDS),
        (found_by(error=1.0), PARTLY),
        (found_by(losses=(1.0, 1.2)), PARTLY),
        (found_by(error=1.0, losses=(1.0, 1.2)), FAILS),
        ({**found_by(error=1.0), "losses": []}, FAILS),
    ],
)
def test_the_verdict(found, word):
    assert small().verdict(found).word == word


def test_a_step_that_is_kept_without_the_identity_alone_or_at_220_itself_is_a_part():
    bad = found_by(error=1.0, losses=(1.0, 1.2))
    for row in bad["rows"]:
        if row["average"] == OLD:
            row["relative"] = [0.01] * 6
    assert small().verdict(bad).word == PARTLY
    bad = found_by(error=1.0, losses=(1.0, 1.2))
    for row in bad["rows"]:
        if row["average"] == OLD:
            row["relative"][4] = 0.04  # rank 2 x 110, proportional to a width of 256
    verdict = small().verdict(bad)
    assert verdict.word == PARTLY
    assert (
        "averages without the identity, 0 of 1 at the proportional rank and 1 of 1 at 220 or next to it" in verdict.why
    )


def test_a_loss_within_the_spread_of_the_seeds_is_the_same():
    found = found_by(losses=(1.0, 1.1))
    assert small().verdict(found).word == PARTLY
    for row in found["losses"]:
        row["loss"] += 0.3 * row["seed"]
    assert small().verdict(found).word == HOLDS


def test_the_page_says_what_was_found():
    claim, found = small(), found_by()
    page = claim.page(found)
    assert (
        "| digits-autoencoder | 3 | with the identity | 257, 128 | 23, 23 | 8, 4: enough | 8, 4: enough | 9, 4 |"
        in page
    )
    assert "with the identity, 1 of 1 at the proportional rank" in claim.verdict(found).why
    assert "against that of all modes: +1.0 % on digits-autoencoder." in claim.verdict(found).why
    assert (
        "| digits-autoencoder | rank 110, zero tail, with the identity, damping 0.01 | 1.01 ± 0 | +1.0 % | 1.01 ± 0 |"
        in page
    )
    assert set(claim.pictures(found)) == {"steps"}


def test_measured_written_and_read_again(tmp_path):
    subject = Subject("digits-autoencoder", 256, 0.03, 1, ("5", "8"), (1, 4))
    claim = replace(small(), subjects=(subject,), steps=6, seeds=1)
    found = claim.measure(Desk(tmp_path / "work"))
    assert len(found["rows"]) == 2 * 2 * 2 * len(claim.dampings) * 2
    assert set(found["kept"]["digits-autoencoder"]) == {"5", "8"}
    assert all(row["loss"] > 0 for row in found["losses"])
    assert claim.measure(Desk(tmp_path / "work")) == found
    paths = pages.write(pages.Measured(claim, found, {}, "rkfac claims rank-220"), tmp_path / "pages")
    assert {path.name for path in paths} == {"rank-220.md", "rank-220-steps.png", "rank-220.json"}
    assert pages.read(tmp_path / "pages" / "rank-220.json", {claim.name: Rank()}).verdict == claim.verdict(found)
