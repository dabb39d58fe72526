"""What is expected against what random rows do.

Error bars. The number of eigenvalues above a fixed x hardly varies from draw to draw, as they repel each other: by about half
a mode, so that a mean of four draws has to be within 1.5 modes or 1 % of what is expected. One eigenvalue by itself varies like
a sample's variance: by a share sqrt(2 / effective samples), and lambda_max with it, which moves epsilon * lambda_max.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from rkfac import theory

from .averages import Rows, eigenvalues, gaussian, power_law, weights

DRAWS = 4
COVARIANCES = {
    "flat": torch.ones(200, dtype=torch.float64),
    "power 0.5": power_law(250, 0.5),
    "power 1": power_law(250, 1),
    "power 2": power_law(250, 2),
    "spiked": torch.cat([torch.tensor([50.0, 20.0, 5.0]), torch.ones(197)]).double(),
    "low rank": torch.cat([torch.linspace(1, 2, 30), torch.zeros(150)]).double(),
}
AVERAGES = [(0.5, 64), (0.9, 4), (0.95, 8), (0.99, 2)]


def check(found: Tensor, spectrum: Tensor, samples: float) -> None:
    """Counts above fixed numbers, and eigenvalues one by one."""
    for share in (0.8, 0.3, 0.1, 0.03, 0.01, 1e-3, 1e-5):
        x = share * spectrum[0]
        # an eigenvalue exactly at x counts half
        expected = float((spectrum > x).sum() + (spectrum >= x).sum()) / 2
        counted = float((found > x).sum(dim=1).double().mean())
        assert abs(counted - expected) <= max(1.5, 0.01 * expected), (share, counted, expected)
    mean = found.mean(dim=0)
    told = mean > 1e-6 * mean[0]
    off = ((spectrum - mean).abs() / mean)[told]
    # four draws, four sigma, and 5 % for the last and smallest, whose relative spread is larger
    assert float(off.max()) <= 4 * math.sqrt(2 / samples / DRAWS) + 0.05
    assert float(off.median()) <= 0.02


@pytest.mark.parametrize("rho, n", AVERAGES)
@pytest.mark.parametrize("name", COVARIANCES)
def test_eigenvalues_of_gaussian_rows(name: str, rho: float, n: int) -> None:
    c, samples = COVARIANCES[name], theory.effective_samples(rho, n)
    found = eigenvalues(gaussian(c), weights(rho, n), DRAWS)
    check(found, theory.expected_spectrum(c, rho, n), samples)
    wobble = 4 * math.sqrt(2 / samples / DRAWS)
    epsilon = 0.03
    counted = float((found > epsilon * found[:, :1]).sum(dim=1).double().mean())
    most = theory.expected_modes(c, rho, n, epsilon * (1 - wobble))
    least = theory.expected_modes(c, rho, n, epsilon * (1 + wobble))
    assert least - 1.5 <= counted <= most + 1.5


def relu_rows(d: int, inputs: int) -> Rows:
    """Activations of a random layer, a column of ones for the bias: neither Gaussian nor centred."""
    generator = torch.Generator().manual_seed(7)
    weight = torch.randn(inputs, d - 1, generator=generator, dtype=torch.float64) / math.sqrt(inputs)

    def rows(many: int, generator: torch.Generator) -> Tensor:
        x = torch.randn(many, inputs, generator=generator, dtype=torch.float64)
        return torch.cat([(x @ weight).relu(), torch.ones(many, 1, dtype=torch.float64)], dim=1)

    return rows


def test_activations_of_a_relu_layer() -> None:
    rows, rho, n = relu_rows(d=200, inputs=60), 0.95, 16
    many = rows(40_000, torch.Generator().manual_seed(99))
    c = torch.linalg.eigvalsh(many.mT @ many / len(many))
    found = eigenvalues(rows, weights(rho, n), DRAWS)
    check(found, theory.expected_spectrum(c, rho, n), theory.effective_samples(rho, n))
    modes = float((found > 0.01 * found[:, :1]).sum(dim=1).double().mean())
    assert theory.expected_modes(c, rho, n, 0.01) == pytest.approx(modes, abs=3)


@pytest.mark.parametrize("rho", [0.0, 0.5, 0.95])
@pytest.mark.parametrize("updates", [1, 7, 40])
@pytest.mark.parametrize("start", ["unbiased", "identity"])
def test_averages_that_have_seen_few_batches(rho: float, updates: int, start: theory.spectrum.Start) -> None:
    c, n = power_law(200, 0.7), 10
    scale, shift = (1 - rho**updates, 0.0) if start == "unbiased" else (1.0, rho**updates)
    found = eigenvalues(gaussian(c), weights(rho, n, updates) / scale, DRAWS, shift)
    spectrum = theory.expected_spectrum(c, rho, n, updates, start)
    tau = weights(rho, n, updates)
    check(found - shift, spectrum - shift, float(tau.sum() ** 2 / tau.square().sum()))
    rank = min(200, n * updates)
    assert torch.equal(spectrum[rank:], torch.full((200 - rank,), shift, dtype=torch.float64))
    modes = float((found > 0.05 * spectrum[0]).sum(dim=1).double().mean())
    assert theory.expected_modes(c, rho, n, 0.05, updates, start) == pytest.approx(modes, abs=1.5)


def test_many_updates_are_as_good_as_infinitely_many_whatever_the_start() -> None:
    c = power_law(100, 1)
    forever = theory.expected_spectrum(c, 0.9, 8)
    for start in ("unbiased", "identity"):
        torch.testing.assert_close(theory.expected_spectrum(c, 0.9, 8, 400, start), forever, rtol=1e-6, atol=1e-12)
        assert theory.expected_modes(c, 0.9, 8, updates=400, start=start) == pytest.approx(
            theory.expected_modes(c, 0.9, 8), rel=1e-6
        )


def test_a_fresh_average_is_the_identity() -> None:
    assert theory.expected_modes(power_law(300, 1), 0.999, 4, updates=1, start="identity") == 300
