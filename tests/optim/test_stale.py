"""stale=: statistics and inverses of each layer at intervals of its own."""

from __future__ import annotations

import copy
import warnings
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import rkfac
from optim import enrolled, stated
from optim.problems import average, mlp, reader, rows, same, sentences, step, train, twin
from optim.promises.test_loading_damage import assert_all_refused
from optim.test_trajectory import assert_follows, batches, in_numpys_words, network, weights_and_biases
from oracles import numpy_stale
from rkfac.curvature.block import KroneckerBlock
from rkfac.layers import KroneckerAdapter


def counted(optimizer: rkfac.KFAC) -> dict[str, tuple[int, int]]:
    """Statistics and refreshes of each layer."""
    blocks = optimizer.state_dict()["curvature"]["blocks"].items()
    return {name: (next(iter(b["factors"].values()))["updates"], b["version"]) for name, b in blocks}


@pytest.mark.parametrize("make", [stated.KFAC, stated.RSKFAC, stated.KLDWRM])
@pytest.mark.parametrize("kind, draw", [(mlp, rows), (reader, sentences)])
def test_a_model_that_stands_still_is_looked_at_ever_more_seldom(make: Any, kind: Any, draw: Any) -> None:
    """Always the same batch, and no step: looked at after 1, 1, 2, 3, 5, 8... steps, statistics and inverses alike."""
    model, batch = kind(), draw()
    optimizer = make(model, lr=0.0, stale=0.1, factor_every=1)
    for k in range(40):
        step(model, optimizer, batch)
        looks = sum(at <= k for at in (0, 1, 2, 4, 7, 12, 20, 33))
        assert set(counted(optimizer).values()) == {(looks, looks)}
    covered = [record for record in optimizer.report() if record.covered]
    assert {record.interval for record in covered} == {21}
    assert all(record.bytes["snapshots"] >= record.bytes["basis"] > 0 for record in covered)
    assert all(record.interval is None for record in stated.KFAC(twin(model)).report())


def test_independent_statistics_are_looked_at_every_step() -> None:
    model = nn.Sequential(nn.Linear(6, 4)).double()
    optimizer = stated.KFAC(model, lr=0.0, stale=0.1, factor_decay=0.0, sides="input")
    for k in range(12):
        x, y = rows(3)
        step(model, optimizer, (x * 2.0 ** (3 * (-1) ** k), y))
        assert counted(optimizer) == {"0": (k + 1, k + 1)}


def test_layers_have_intervals_of_their_own() -> None:
    """The inputs of the first layer change wildly, those of the second hardly: a saturated layer is between them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Sigmoid(), nn.Linear(5, 4)).double()
    with torch.no_grad():
        model[0].weight.mul_(1e-3)
    optimizer = stated.KFAC(model, lr=0.0, stale=0.3, factor_decay=0.0, sides="input")
    for k in range(30):
        x, y = rows(200)
        step(model, optimizer, (x * 2.0 ** (3 * (-1) ** k), y))
    first, second = (record.interval for record in optimizer.report())
    assert first == 1
    assert second is not None
    assert second > 5


def test_the_average_forgets_by_steps_and_not_by_looks() -> None:
    """X <- rho^(age / factor_every) X + (1 - ...) X_k, from the identity, at the steps at which it is looked at."""
    model = nn.Linear(6, 4).double()
    optimizer = stated.KFAC(
        model, lr=0.0, stale=0.5, factor_decay=0.8, factor_every=3, factor_start="identity", sides="input"
    )
    expected, last, looks = torch.eye(7, dtype=torch.float64), -1, []
    for k in range(25):
        wanted = optimizer._blocks[""].wanted
        x, y = rows(40)
        step(model, optimizer, (x, y))
        if wanted:
            a = torch.cat([x, torch.ones(40, 1, dtype=torch.float64)], 1)
            keep = 0.8 ** ((k - last) / 3)
            expected, last = keep * expected + (1 - keep) * a.mT @ a / 40, k
            looks.append(k)
        state = optimizer.state_dict()["curvature"]["blocks"][""]["factors"]["input"]
        torch.testing.assert_close(average(state), expected)
    assert 4 < len(looks) < 25, looks


PACED: dict[str, dict[str, Any]] = {
    "exact": {},
    "exact, unbiased, mean": {"factor_start": "unbiased", "relative_to": "mean"},
    "rsvd, unbiased": {"factor_start": "unbiased"},
    "rsvd, unbiased, trace": {"factor_start": "unbiased", "tail": "trace"},
}


@pytest.mark.parametrize("case", PACED)
def test_thirty_steps_agree_with_numpy(case: str) -> None:
    """Layers go their own ways: the twin counts every layer's intervals itself."""
    model, data, method = network(), batches(), case.split(",")[0]
    keywords = {**rkfac.paper_defaults(), "lr": 0.05, "weight_decay": 0.0, "factor_every": 2}
    keywords |= {"factor_decay": 0.9, "rank": 5, "oversampling": 2, **PACED[case]}
    kind = rkfac.KFAC if method == "exact" else rkfac.RSKFAC
    optimizer = kind(model, stale=0.1, **keywords, generator=torch.Generator().manual_seed(5))
    source = torch.Generator().manual_seed(5)
    history, losses, intervals = numpy_stale.train(
        weights_and_biases(model),
        data,
        threshold=0.1,
        method=method,
        draw=lambda d, p: torch.randn(d, p, dtype=torch.float64, generator=source).numpy(),
        measure=keywords["relative_to"],
        tail=keywords["tail"],
        from_identity=keywords["factor_start"] == "paper",
        **in_numpys_words(keywords, "oversampling", "power_iterations"),
    )
    assert_follows(model, optimizer, data, history, losses)
    assert [record.interval for record in optimizer.report()] == [of[-1] for of in intervals]
    assert len({tuple(of) for of in intervals}) > 1
    assert max(map(max, intervals)) > 1, "all layers were looked at in every step"


def test_a_failed_decomposition_waits_for_the_next_statistics() -> None:
    model, batch = mlp(), rows()
    optimizer = stated.KFAC(model, lr=0.0, stale=0.1, factor_every=1)
    train(model, optimizer, [batch] * 5)
    block = optimizer._blocks["2"]
    assert block.pace is not None
    interval = block.pace.interval
    refused = rkfac.linalg.DecompositionError("not today")

    def fail(*_: Any) -> None:
        raise refused

    block.decompose = fail  # type: ignore[method-assign]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(interval):
            step(model, optimizer, batch)
    assert block.failures == 1
    del block.decompose
    for _ in range(interval):
        step(model, optimizer, batch)
    assert block.failures == 0
    assert counted(optimizer)["2"][0] == counted(optimizer)["2"][1] + 1


def test_every_damage_to_the_intervals_is_refused_and_changes_nothing() -> None:
    def not_the_pace(path: Any, kind: str) -> bool:
        if "pace" not in path:
            return True
        # None at all, one of two, or those of another look are what an honest run may have.
        return (path[-1] == "seen" and kind == "emptied") or (path[-2] == "seen" and kind == "deleted")

    model = reader()
    optimizer = stated.RSKFAC(model, rank=2, oversampling=1, stale=0.1)
    train(model, optimizer, [sentences() for _ in range(4)])
    saved = copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, [sentences() for _ in range(2)])
    assert_all_refused(optimizer, saved, ["curvature"], not_the_pace, 100)


def test_fixed_periods_and_intervals_do_not_load_each_other() -> None:
    model = mlp()
    fixed, paced = stated.KFAC(model), stated.KFAC(twin(model), stale=0.1)
    for mine, theirs in ((fixed, paced), (paced, fixed)):
        before = copy.deepcopy(mine.state_dict())
        with pytest.raises(ValueError, match="stale"):
            mine.load_state_dict(theirs.state_dict())
        assert same(mine.state_dict(), before)


def test_it_is_refused_beside_stagger_and_by_blocks_that_cannot_be_compared() -> None:
    with pytest.raises(ValueError, match=r"stagger.*stale"):
        rkfac.KFAC(mlp(), stale=0.1, stagger=True)

    class Opaque(KroneckerBlock):
        comparable = False

    class Other(rkfac.KFAC):
        block_types: ClassVar[Any] = {**rkfac.KFAC.block_types, KroneckerAdapter: Opaque}

    Other(mlp())
    with pytest.raises(ValueError, match=r"stale.*Other"):
        Other(mlp(), stale=0.1)


def test_it_is_among_the_enrolled() -> None:
    assert enrolled.MEMBERS["stale"](mlp())._settings.stale == 0.1


MEMBERS = {name: record for name, record in enrolled.MEMBERS.items() if "stale" not in record.lacks}


@pytest.mark.parametrize("name", MEMBERS)
def test_every_member_with_factors_has_intervals_of_its_own_and_resumes(name: str) -> None:
    model = mlp()
    keywords = {} if name == "stale" else {"stale": 0.3}
    optimizer = MEMBERS[name](model, lr=0.01, **keywords)
    batches = [rows() for _ in range(9)]
    train(model, optimizer, batches[:6])
    other = twin(model)
    resumed = MEMBERS[name](other, lr=0.01, **keywords)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for net, each in ((model, optimizer), (other, resumed)):
        train(net, each, batches[6:])
    assert same(dict(model.named_parameters()), dict(other.named_parameters()))
    assert all(record.interval >= 1 for record in optimizer.report() if record.covered)


def test_seng_says_why_it_has_none() -> None:
    with pytest.raises(ValueError, match="one batch"):
        rkfac.SENG(mlp(), stale=0.1)
