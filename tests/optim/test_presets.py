"""Settings that belong together, and strategies that validate themselves."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn

import rkfac
from optim.problems import averages


@pytest.mark.parametrize("preset", [rkfac.paper_defaults, rkfac.classical_defaults])
def test_a_preset_is_a_fresh_dictionary_of_constructor_keywords(preset: Any) -> None:
    first = preset()
    assert set(first) <= set(inspect.signature(rkfac.KFAC).parameters)
    first["lr"] = -1.0
    assert preset()["lr"] > 0
    for optimizer in (rkfac.KFAC, rkfac.RSKFAC, rkfac.SREKFAC):
        built = optimizer(nn.Linear(4, 3), **preset())
        assert built.param_groups[0]["lr"] == preset()["lr"]


def test_the_paper_preset_says_what_section_5_and_its_experiments_say() -> None:
    paper = rkfac.paper_defaults()
    expected = {
        "momentum": 0.0,
        "weight_decay": 7e-4,
        "weight_decay_from": 200,
        "factor_every": 10,
        "inverse_every": 50,
        "factor_decay": 0.95,
        "damping": 0.1,
        "damping_rule": "factored",
        "relative_to": "largest",
        "factor_start": "paper",
        "rank": 220,
        "oversampling": 10,
        "power_iterations": 4,
        "update_clip": 0.07,
        "kl_clip": None,
        "tail": "zero",
        "warm_start": False,
        "fisher": "empirical",
    }
    assert {key: paper[key] for key in expected} == expected


def test_the_classical_recipe_draws_from_the_named_likelihood() -> None:
    model = nn.Linear(4, 3)
    optimizer = rkfac.RSKFAC(model, **rkfac.classical_defaults("bernoulli"))
    x, y = torch.randn(400, 4), torch.rand(400, 3)
    output = model(x)
    p = output.detach().sigmoid()
    loss = nn.functional.binary_cross_entropy_with_logits(output, y, reduction="sum") / 400
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    G = averages(optimizer)[".output"]
    # Drawn bits: the diagonal estimates the mean of p (1 - p), whatever the targets of the loss are.
    assert float(G.diagonal().mean()) == pytest.approx(float((p * (1 - p)).mean()), rel=0.1)
    assert float(optimizer.param_groups[0]["kl_clip"]) == 0.03


@pytest.mark.parametrize(
    "keywords, argument",
    [
        ({"rank": 0}, "rank"),
        ({"rank": True}, "rank"),
        ({"rank": "many"}, "rank"),
        ({"oversampling": -1}, "oversampling"),
        ({"power_iterations": 1.5}, "power_iterations"),
        ({"warm_start": "yes"}, "warm_start"),
        ({"share": 1.0}, "share"),
        ({"max_rank": 0}, "max_rank"),
    ],
)
def test_a_strategy_refuses_nonsense_by_name(keywords: dict[str, Any], argument: str) -> None:
    for strategy in (rkfac.RSVD, rkfac.SREVD, rkfac.Nystrom):
        with pytest.raises(ValueError, match=argument):
            strategy(**keywords)


def test_auto_refuses_nonsense_and_chooses_by_size() -> None:
    with pytest.raises(ValueError, match="exact_up_to"):
        rkfac.Auto(exact_up_to=-3)
    with pytest.raises(ValueError, match="large"):
        rkfac.Auto(large="x")  # type: ignore[arg-type]
    model = nn.Linear(30, 8)
    optimizer = rkfac.KFAC(model, decomposition=rkfac.Auto(exact_up_to=10), rank=5, oversampling=2)
    nn.functional.cross_entropy(model(torch.randn(64, 30)), torch.randint(0, 8, (64,))).backward()
    optimizer.step()
    (record,) = optimizer.report()
    assert (record.rank_input, record.rank_output) == (5, 8)


def test_an_include_pattern_that_matches_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"include='encoder\.\*' matches no module"):
        rkfac.KFAC(nn.Sequential(nn.Linear(3, 2)), include=("encoder.*",))


@pytest.mark.parametrize(("rank", "width", "exact"), [(8, 100, True), (8, 400, False), (220, 400, True)])
def test_auto_sketches_where_that_is_cheaper(
    rank: int, width: int, exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sketched = []
    genuine = rkfac.Nystrom.method

    def recorded(*args: Any, **keywords: Any) -> Any:
        sketched.append(keywords["name"])
        return genuine(*args, **keywords)

    monkeypatch.setattr(rkfac.Nystrom, "method", staticmethod(recorded))
    model = nn.Linear(width, 3, bias=False)
    optimizer = rkfac.KFAC(model, decomposition=rkfac.Auto(), rank=rank)
    model(torch.randn(50, width)).square().mean().backward()
    optimizer.step()
    assert (not sketched) == exact
