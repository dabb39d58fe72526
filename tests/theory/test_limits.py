"""Closed forms, invariances, a plain twin, and what is refused."""

from __future__ import annotations

import cmath
import math
from typing import Any

import pytest
import torch

from rkfac import theory

from .averages import power_law


def test_effective_samples_have_the_variance_of_the_average() -> None:
    assert theory.effective_samples(0.95, 256) == pytest.approx(9984)
    assert theory.effective_samples(0.0, 10) == 10
    tau = (0.1 * 0.9 ** torch.arange(1000, dtype=torch.float64) / 5).repeat_interleave(5)
    assert theory.effective_samples(0.9, 5) == pytest.approx(float(1 / tau.square().sum()))


@pytest.mark.parametrize("exponent", [0.1, 1.0, 3.0])
def test_infinitely_many_rows_show_the_covariance_itself(exponent: float) -> None:
    c = power_law(120, exponent)
    torch.testing.assert_close(
        theory.expected_spectrum(c, 0.5, 10**15), c, rtol=2e-3, atol=0
    )  # cells of C are 1/512 wide
    shuffled = c[torch.randperm(120, generator=torch.Generator().manual_seed(0))]
    assert torch.equal(theory.expected_spectrum(shuffled.tolist(), 0.9, 50), theory.expected_spectrum(c, 0.9, 50))


@pytest.mark.parametrize("d, n", [(400, 1600), (1600, 400), (1000, 1000)])
def test_even_weights_and_white_rows_are_marchenko_and_pastur(d: int, n: int) -> None:
    spectrum = theory.expected_spectrum(torch.ones(d), rho=0.0, n=n)
    ratio, rank = d / n, min(d, n)
    low, high = (1 - math.sqrt(ratio)) ** 2, (1 + math.sqrt(ratio)) ** 2
    x = torch.linspace(math.sqrt(low), math.sqrt(high), 200_001, dtype=torch.float64).square()
    density = ((high - x) * (x - low)).clamp(min=0).sqrt() / (2 * math.pi * ratio * x.clamp(min=1e-12))
    above = torch.trapezoid(density, x) - torch.cumulative_trapezoid(density, x)
    assert float(above[0]) * d == pytest.approx(rank, rel=1e-2)
    places = torch.searchsorted(-above, -(torch.arange(rank, dtype=torch.float64) + 0.5) / d).clamp(max=len(above) - 1)
    inner = slice(0, rank - 20)  # the last ones of a square matrix lie where the density has a pole
    torch.testing.assert_close(spectrum[inner], x[1:][places][inner], rtol=5e-3, atol=0)
    assert low * 0.999 <= float(spectrum[rank - 1])
    assert float(spectrum[0]) <= high * 1.001
    assert int(spectrum.count_nonzero()) == rank
    # even weights once more: an average that forgets next to nothing
    slow = theory.expected_spectrum(torch.ones(d), rho=1 - 1e-9, n=n // 100, updates=100)
    torch.testing.assert_close(slow[inner], spectrum[inner], rtol=2e-3, atol=0)


@pytest.mark.parametrize("rho, n, epsilon", [(0.5, 3, 0.03), (0.8, 2, 0.1), (0.9, 5, 0.3)])
def test_white_rows_in_a_wide_space_are_orthogonal_and_all_seen(rho: float, n: int, epsilon: float) -> None:
    expected = n * math.ceil(math.log(epsilon) / math.log(rho))
    assert theory.expected_modes(torch.ones(1_000_000), rho, n, epsilon) == pytest.approx(expected, abs=1e-3)
    assert expected <= theory.retained_modes(rho, n, alpha=0.999, epsilon=epsilon)
    spectrum = theory.expected_spectrum(torch.ones(1_000_000), rho, n)[:expected:n]
    lengths = 1_000_000 * (1 - rho) / n * rho ** torch.arange(len(spectrum), dtype=torch.float64)
    torch.testing.assert_close(spectrum, lengths, rtol=0.02, atol=0)


@pytest.mark.parametrize("exponent", [0.7, 1.0, 2.0])
def test_a_power_law_seen_often_has_as_many_modes_as_it_says_at_any_width(exponent: float) -> None:
    epsilon = 0.03
    for d in (1000, 3000):
        found = theory.expected_modes(power_law(d, exponent), 0.95, 10_000, epsilon)
        assert found == pytest.approx(epsilon ** (-1 / exponent), abs=1, rel=0.01)


def test_it_is_never_above_the_worst_case() -> None:
    for exponent in (0.0, 0.5, 1.0):
        c = power_law(500, exponent)
        for rho, n in ((0.5, 4), (0.9, 4)):
            spectrum = theory.expected_spectrum(c, rho, n)
            largest = (
                math.sqrt(float(c.sum()) / n) + math.sqrt(float(c[0]))
            ) ** 2  # of a batch's rows, squared, over n
            alpha = min(float(spectrum[0]) / largest, 0.999)
            assert theory.expected_modes(c, rho, n) <= theory.retained_modes(rho, n, 500, alpha, 0.03)


@pytest.mark.parametrize("factor", [1e-300, 1e-18, 1.0, 1e12, 1e300])
def test_units_do_not_matter(factor: float) -> None:
    c = power_law(60, 1.5)
    expected = theory.expected_spectrum(c, 0.9, 3) * factor
    torch.testing.assert_close(theory.expected_spectrum(c * factor, 0.9, 3), expected, rtol=1e-6, atol=0)
    assert theory.expected_modes(c * factor, 0.9, 3) == pytest.approx(theory.expected_modes(c, 0.9, 3), rel=1e-6)


@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("rho, n", [(0.9, 4), (0.95, 40), (0.995, 100)])
def test_the_trace_is_that_of_the_covariance(exponent: float, rho: float, n: int) -> None:
    c = power_law(300, exponent)
    assert float(theory.expected_spectrum(c, rho, n).sum()) == pytest.approx(float(c.sum()), rel=5e-3)


@pytest.mark.parametrize("rho, n", [(0.01, 256), (0.9, 1)])
def test_a_covariance_of_twenty_orders_of_magnitude(rho: float, n: int) -> None:
    c = 10 ** (-20 * torch.rand(300, generator=torch.Generator().manual_seed(2), dtype=torch.float64))
    spectrum = theory.expected_spectrum(c, rho, n)
    assert bool((spectrum.diff() <= 0).all())
    assert not spectrum[spectrum < 1e-16 * spectrum[0]].any()  # below float64's rounding: nothing
    assert float(spectrum.sum()) == pytest.approx(float(c.sum()), rel=0.05)


def test_modes_are_counted_in_the_spectrum_that_is_expected() -> None:
    c = power_law(400, 0.8)
    spectrum = theory.expected_spectrum(c, 0.95, 8)
    for epsilon in (0.3, 0.03, 0.003):
        counted = int((spectrum > epsilon * spectrum[0]).sum())
        assert theory.expected_modes(c, 0.95, 8, epsilon) == pytest.approx(counted, abs=0.6)


def test_zero_eigenvalues_change_nothing_but_the_length() -> None:
    c = power_law(50, 1)
    padded = torch.cat([torch.zeros(30), c.float(), torch.full((20,), -1e-9)]).double()
    assert torch.equal(theory.expected_spectrum(padded, 0.9, 4)[:50], theory.expected_spectrum(c.float(), 0.9, 4))
    assert not theory.expected_spectrum(padded, 0.9, 4)[50:].any()


def test_a_plain_twin_that_integrates_the_density() -> None:
    """Two equations iterated number by number at a small imaginary part, the density summed up on a fine grid."""
    c, rho, n = [k**-0.5 for k in range(1, 41)], 0.8, 5
    batches = [(1 - rho) * rho**j / n for j in range(120)]

    def density(x: float, e: complex) -> tuple[float, complex]:
        z = complex(x, 2e-3)
        for _ in range(3000):
            b = sum(n * tau / (1 + tau * e) for tau in batches)
            new = sum(value / (b * value - z) for value in c)
            if cmath.isclose(new, e, rel_tol=1e-7):
                break
            e = 0.5 * (new + e)
        return sum((1 / (b * value - z)).imag for value in c) / math.pi, e

    step, x, total, e = 0.01, 3.0, 0.0, 1j
    levels = {1.0: 0.0, 0.5: 0.0, 0.2: 0.0, 0.1: 0.0}
    while x > 0.1 - step / 2:
        for level in levels:
            if abs(x - level) < step / 2:
                levels[level] = total
        middle, e = density(x - step / 2, e)
        total += step * middle
        x -= step
    largest = float(theory.expected_spectrum(c, rho, n)[0])
    for level, counted in levels.items():
        # an imaginary part of 2e-3 adds up to 2e-3 / pi * d / level, of which most cancels
        assert theory.expected_modes(c, rho, n, level / largest) == pytest.approx(counted, abs=0.1), level


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"rho": 1.0}, "rho must be at least 0 and below 1, got 1.0"),
        ({"rho": -0.1}, "rho"),
        ({"rho": math.nan}, "rho"),
        ({"n": 0}, "n must be positive, got 0"),
        ({"updates": 0}, "updates must be positive, or None"),
        ({"start": "zero"}, "start must be .* got 'zero'"),
        ({"covariance": torch.eye(3)}, r"vector.*eigvalsh.*\(3, 3\)"),
        ({"covariance": []}, "at least one number"),
        ({"covariance": [1.0, math.inf]}, "finite"),
        ({"covariance": [1.0, -0.1]}, "negative"),
        ({"covariance": [0.0, 0.0]}, "not all zero"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(arguments: dict[str, Any], message: str) -> None:
    settled = {"covariance": [1.0, 0.5], **arguments}
    with pytest.raises(ValueError, match=message):
        theory.expected_spectrum(**settled)
    with pytest.raises(ValueError, match=message):
        theory.expected_modes(**settled)
    with pytest.raises(ValueError, match="epsilon must lie strictly between 0 and 1, got 1"):
        theory.expected_modes([1.0], epsilon=1.0)
    with pytest.raises(ValueError, match="rho"):
        theory.effective_samples(rho=1.5)
