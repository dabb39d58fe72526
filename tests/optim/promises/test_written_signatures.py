"""Every keyword is written out: people and type checkers see a misspelt one before the first step."""

from __future__ import annotations

import inspect
from typing import get_type_hints

import pytest

import rkfac
from rkfac.optim.keywords import Keywords


@pytest.mark.parametrize("optimizer", [rkfac.KFAC, rkfac.RSKFAC, rkfac.SREKFAC])
def test_the_signature_shows_every_keyword(optimizer: type[rkfac.KFAC]) -> None:
    parameters = inspect.signature(optimizer).parameters
    kinds = {p.kind for p in parameters.values()}
    assert inspect.Parameter.VAR_KEYWORD not in kinds
    assert inspect.Parameter.VAR_POSITIONAL not in kinds
    promised = {"lr", "momentum", "weight_decay", "damping", "damping_rule", "factor_decay", "factor_every", "rank"}
    promised |= {"inverse_every", "oversampling", "power_iterations", "tail", "warm_start", "update_clip", "kl_clip"}
    promised |= {"fisher", "weight_sharing", "fallback", "include", "exclude", "decomposition", "generator", "seed"}
    assert promised <= parameters.keys()
    assert all(p.annotation is not inspect.Parameter.empty for p in parameters.values())


def test_a_wrong_keyword_is_a_type_error_at_once() -> None:
    from optim.problems import mlp

    with pytest.raises(TypeError, match="dampingg"):
        rkfac.RSKFAC(mlp(), dampingg=1)  # type: ignore[call-arg]


def test_keywords_that_are_passed_on_are_those_of_the_constructor() -> None:
    promised = get_type_hints(rkfac.KFAC.__init__)
    own = {name: kind for name, kind in promised.items() if name not in ("model", "lr", "return")}
    assert get_type_hints(Keywords) == own
