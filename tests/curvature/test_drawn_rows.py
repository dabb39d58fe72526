"""`rows=`: factors from drawn rows are unbiased, and the same as ever where there is nothing to draw."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from curvature.brute import Mean, kfac, losses
from rkfac.curvature import moment as moment_module
from rkfac.curvature.block import base
from rkfac.curvature.moment import DiagonalMoment, Moment
from rkfac.curvature.randomness import subset
from rkfac.layers import conv
from rkfac.linalg.symmetric import mirrored

# Each model has one layer of its own, and its rows are few enough for all choices of two to be tried.
LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(3, 2), (6, 3)),
    "linear, more rows than columns": (lambda: nn.Linear(1, 2), (7, 1)),
    "linear on a sequence": (lambda: nn.Linear(3, 2, bias=False), (3, 2, 3)),
    "conv2d stride": (lambda: nn.Conv2d(2, 3, 3, stride=2, padding=1), (3, 2, 4, 3)),
    "conv2d groups": (lambda: nn.Conv2d(4, 6, 2, groups=2), (3, 4, 3, 2)),
    "embedding": (lambda: nn.Embedding(5, 3), (4, 2)),
    "embedding padded": (lambda: nn.Embedding(5, 3, padding_idx=1), (4, 2)),
    "layernorm": (lambda: nn.LayerNorm(3), (4, 2, 3)),
    "batchnorm": (lambda: nn.BatchNorm2d(3), (6, 3, 2, 2)),
    "groupnorm": (lambda: nn.GroupNorm(1, 3), (6, 3, 2)),
}
each_layer = pytest.mark.parametrize("name", LAYERS)
each_sharing = pytest.mark.parametrize("sharing", ["expand", "reduce"])


def positions(name: str, sharing: str) -> int:
    """Rows of a sample where samples are drawn as a whole: norms' gradients are sums over their positions."""
    return {"batchnorm": 4, "groupnorm": 2, "layernorm": 2 if sharing == "reduce" else 1}.get(name, 1)


def factors(name: str, **keywords: Any) -> dict[str, Tensor]:
    """The layer's factors after one step."""
    build, shape = LAYERS[name]
    torch.manual_seed(3)
    model = nn.Sequential(build()).double()
    with torch.no_grad():
        for p in model.parameters():
            p.normal_()
    tokens = torch.arange(shape[0] * shape[1]).reshape(shape[:2]) % 5
    x = tokens if "embedding" in name else torch.randn(shape, dtype=torch.float64)
    optimizer = kfac(model, **keywords)
    losses(model(x)).mean().backward()
    optimizer.step()
    return {side: factor.dense() for side, factor in optimizer._blocks["0"].factors.items()}


@pytest.fixture
def drawings(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, list[int]]]:
    """Every draw: out of how many, and what."""
    seen: list[tuple[int, list[int]]] = []

    def watched(n: int, m: int, generator: torch.Generator) -> Tensor:
        drawn = subset(n, m, generator)
        seen.append((n, drawn.tolist()))
        return drawn

    monkeypatch.setattr(base, "subset", watched)
    monkeypatch.setattr(base, "LEAST_SAMPLES", 1)
    return seen


@each_layer
@each_sharing
def test_the_mean_over_all_choices_of_rows_is_the_factor_of_all(
    name: str, sharing: str, monkeypatch: pytest.MonkeyPatch, drawings: list[tuple[int, list[int]]]
) -> None:
    expected = factors(name, weight_sharing=sharing)
    two = 2 * positions(name, sharing)
    factors(name, weight_sharing=sharing, rows=two)
    ((n, _),) = drawings
    sums = {side: torch.zeros_like(t) for side, t in expected.items()}
    choices = list(combinations(range(n), 2))
    differ = Counter[str]()
    for choice in choices:
        monkeypatch.setattr(base, "subset", lambda *_, choice=choice: torch.tensor(choice))
        for side, t in factors(name, weight_sharing=sharing, rows=two).items():
            sums[side] += t
            differ[side] += not torch.allclose(t, expected[side])
    for side, total in sums.items():
        torch.testing.assert_close(total / len(choices), expected[side])
        exact = "embedding" in name and side == "input"  # counted, not drawn
        assert (differ[side] == 0) if exact else (differ[side] > len(choices) // 2), side


@pytest.mark.parametrize("name", ["linear", "conv2d groups"])
def test_the_mean_over_many_seeds_tends_to_the_factor_of_all(name: str) -> None:
    expected = factors(name)
    found = [factors(name, rows=2, seed=seed) for seed in range(100)]
    for side, t in expected.items():
        draws = torch.stack([f[side] for f in found])
        error = (draws.mean(0) - t).abs() / (draws.std(0) / len(draws) ** 0.5 + 1e-12)
        assert error.max() < 4.5, side
        assert draws.std(0).max() > 0.1 * t.abs().max()


@each_layer
@each_sharing
def test_with_no_more_rows_than_allowed_nothing_changes_and_nothing_is_drawn(
    name: str, sharing: str, drawings: list[tuple[int, list[int]]]
) -> None:
    factors(name, weight_sharing=sharing, rows=1)
    ((n, _),) = drawings
    drawings.clear()
    plain = factors(name, weight_sharing=sharing, generator=torch.Generator().manual_seed(1))
    generator = torch.Generator().manual_seed(1)
    before = generator.get_state()
    allowed = factors(name, weight_sharing=sharing, rows=n * positions(name, sharing), generator=generator)
    assert all(torch.equal(allowed[side], t) for side, t in plain.items())
    assert not drawings
    assert torch.equal(generator.get_state(), before)
    factors(name, weight_sharing=sharing, rows=(n - 1) * positions(name, sharing))
    assert [m for m, _ in drawings] == [n]


class Repeated(nn.Module):
    """Two equal layers, one of them called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(torch.tanh(self.first(x)))))


def test_calls_layers_steps_and_seeds_draw_differently_and_repeatably(drawings: list[tuple[int, list[int]]]) -> None:
    def run(**keywords: Any) -> list[list[int]]:
        torch.manual_seed(0)
        model, x = Repeated().double(), torch.randn(40, 3, dtype=torch.float64)
        optimizer = kfac(model, rows=10, **keywords)
        for _ in range(3):
            optimizer.zero_grad()
            losses(model(x)).mean().backward()
            optimizer.step()
        found = [drawn for _, drawn in drawings]
        drawings.clear()
        return found

    first = run()
    assert len(first) == 9
    assert len({tuple(drawn) for drawn in first}) == 9
    assert run() == first
    assert all(mine != theirs for mine, theirs in zip(run(seed=1), first, strict=True))
    without = run(exclude="second")
    assert [drawn for drawn in first if drawn in without] == without
    assert len(without) == 6


@pytest.mark.parametrize("fisher", ["empirical", "mc"])
@each_sharing
def test_the_true_number_of_rows_enters_the_scale(
    fisher: str, sharing: str, drawings: list[tuple[int, list[int]]]
) -> None:
    """The bias's own entry of the input factor counts rows: it is the same whatever is drawn."""

    def corners(rows: int | None) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv1d(2, 3, 2), nn.Tanh(), Mean(2), nn.Linear(3, 4)).double()
        optimizer = kfac(model, rows=rows, fisher=fisher, weight_sharing=sharing)
        for n in (3, 9, 20):  # accumulated: some calls draw and some do not
            losses(model(torch.randn(n, 2, 5, dtype=torch.float64))).mean().backward()
        optimizer.step()
        return [block.factors["input"].dense()[-1, -1] for block in optimizer._blocks.values()]

    assert not drawings
    torch.testing.assert_close(corners(4), corners(None))
    linear = [9, 20]
    assert sorted(n for n, _ in drawings) == sorted(linear + ([9, 20] if sharing == "reduce" else [12, 36, 80]))


def test_no_convolution_is_unfolded_on_a_step_that_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.Tanh(), nn.Conv2d(3, 4, 2, stride=2))
    optimizer = kfac(model, rows=5)
    x = torch.randn(4, 2, 6, 6)
    for number in range(2):
        optimizer.zero_grad()
        losses(model(x)).mean().backward()
        optimizer.step()
        if number == 0:  # the first one compares the gradient with what the calls explain, once and for all

            def unfolded(*_: Any) -> Tensor:
                raise AssertionError("unfolded")

            monkeypatch.setattr(conv, "_patches", unfolded)
    assert {f.updates for b in optimizer._blocks.values() for f in b.factors.values()} == {2}
    with pytest.raises(AssertionError, match="unfolded"):
        losses(model(torch.randn(1, 2, 2, 2))).mean().backward()  # as few rows as allowed


@pytest.mark.parametrize("n, m", [(5, 2), (5, 4), (9, 2), (9, 1), (3, 3)])
def test_every_subset_is_as_likely_as_another(n: int, m: int) -> None:
    generator, draws = torch.Generator().manual_seed(0), 3000
    seen = Counter(tuple(subset(n, m, generator).tolist()) for _ in range(draws))
    choices = list(combinations(range(n), m))
    assert seen.keys() <= set(choices)  # ascending, without replacement
    chance = 1 / len(choices)
    for choice in choices:
        assert abs(seen[choice] / draws - chance) <= 4.5 * (chance * (1 - chance) / draws) ** 0.5


KEPT, THEN_SUMMED, SUMMED = [(2, 3.0), (1, 1.0)], [(2, 3.0), (6, 2.5), (3, 1.0)], [(9, 4.0)]


@pytest.mark.parametrize("parts", [KEPT, THEN_SUMMED, SUMMED], ids=["kept", "kept, then summed", "summed"])
@pytest.mark.parametrize("small", [0, moment_module.SMALL], ids=["little room", "room for all"])
def test_a_moment_weighs_rows(parts: list[tuple[int, float]], small: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moment_module, "SMALL", small)
    moment, expected = Moment(), torch.zeros(4, 4, dtype=torch.float64)
    for n, weight in parts:
        rows = torch.randn(n, 4, dtype=torch.float64) * 1e-20
        moment.add(rows, weight)
        expected += weight * rows.mT @ rows
    assert moment.settle([float(t) for t in moment.readings()])
    value = torch.zeros(4, 4, dtype=torch.float64)
    moment.blend_into([value], 0.0, 1.0, 0)
    torch.testing.assert_close(mirrored(value.flatten(), 4), expected, rtol=1e-12, atol=0)


def test_a_diagonal_moment_weighs_its_counts() -> None:
    moment = DiagonalMoment()
    moment.add(torch.tensor([1.0, 2.0]), 3.0)
    moment.add(torch.tensor([1.0, 0.0]))
    assert moment.settle([float(t) for t in moment.readings()])
    value = torch.zeros(2)
    moment.blend_into([value], 0.0, 1.0, 0)
    assert value.tolist() == [4.0, 6.0]


def test_of_samples_with_many_positions_a_few_are_drawn_however_many_rows_they_are(
    drawings: list[tuple[int, list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "LEAST_SAMPLES", 3)
    factors("batchnorm", rows=1)
    assert [(n, len(drawn)) for n, drawn in drawings] == [(6, 3)]
