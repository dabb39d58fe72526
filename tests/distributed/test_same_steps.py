"""W processes with a share of the batch each take the steps of one process with all of it."""

from __future__ import annotations

from typing import Any

import pytest

from distributed import scaled
from distributed.crew import Crew
from distributed.together import compared

MEMBERS = [
    "KFAC",
    "RSKFAC",
    "SREKFAC",
    "recommended",
    "graft-adamw",
    "EKFAC",
    "EKFAC-running",
    "EKFAC-SOAP",
    "KLDWRM",
    "KLDWRM-so",
    "stale",
    "input-side",
    "output-side",
]
CLOSE = 1e-10


def check(crew: Crew, *args: Any) -> None:
    for difference, moved, equal in crew.run(compared, *args):
        assert equal, "the processes drifted apart"
        assert moved > 1e-3
        assert difference < CLOSE


@pytest.mark.parametrize("model", ["convnet", "speaker"])
@pytest.mark.parametrize("optimizer", MEMBERS)
def test_every_member_takes_the_steps_of_one_process(pair: Crew, optimizer: str, model: str) -> None:
    check(pair, optimizer, model)


@pytest.mark.parametrize("optimizer", ["KFAC", "RSKFAC", "SREKFAC", "recommended", "EKFAC", "KLDWRM"])
def test_four_processes_take_the_steps_of_one(four: Crew, optimizer: str) -> None:
    check(four, optimizer, "convnet")


@pytest.mark.parametrize("wrapping", ["before", "after", "none"])
@pytest.mark.parametrize("model", ["mlp", "reader"])
def test_it_does_not_matter_who_averages_the_gradients_or_when_the_model_was_wrapped(
    pair: Crew, model: str, wrapping: str
) -> None:
    check(pair, "RSKFAC", model, wrapping)


@pytest.mark.parametrize("optimizer", ["RSKFAC", "EKFAC", "recommended"])
@pytest.mark.parametrize("cuts", [[0, 3, 12], [0, 11, 12]])
def test_uneven_shares_are_passes_of_accumulation(pair: Crew, cuts: list[int], optimizer: str) -> None:
    check(pair, optimizer, "mlp", "before", 12, cuts)


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}, {"static_graph": True}], ids=str)
@pytest.mark.parametrize("passes", [1, 3])
def test_accumulation_and_the_options_of_ddp(pair: Crew, passes: int, options: dict[str, Any]) -> None:
    if options.get("static_graph") and passes > 1:
        pytest.skip("torch's static_graph knows no no_sync in its first iterations")
    check(pair, "RSKFAC", "mlp", "before", 12, None, passes, False, options)


@pytest.mark.parametrize("view", [False, True], ids=["gradients of their own", "bucket views"])
def test_accumulation_in_which_every_pass_is_averaged(pair: Crew, view: bool) -> None:
    options = {"gradient_as_bucket_view": view, "sync every pass": True}
    check(pair, "RSKFAC", "mlp", "before", 12, None, 3, False, options)


@pytest.mark.parametrize("wrapping", ["before", "none"])
def test_a_process_without_samples_for_a_layer(pair: Crew, wrapping: str) -> None:
    check(pair, "RSKFAC", "chooser", wrapping, 12, [0, 2, 12], 1, True, {"find_unused_parameters": True})


def test_natural_gradients_of_a_layer_that_one_process_did_not_call(pair: Crew) -> None:
    keywords, options = {"apply": "backward"}, {"find_unused_parameters": True}
    check(pair, "RSKFAC", "chooser", "before", 4, [0, 1, 4], 1, True, options, keywords)


@pytest.mark.parametrize("loss_average", ["batch", "sum", "tokens"])
def test_whatever_the_loss_averages_over(pair: Crew, loss_average: str) -> None:
    keywords = {"loss_average": loss_average, "graft": None, "lr": 1e-5 if loss_average == "sum" else 1e-3}
    check(pair, "KFAC", "reader", "before", 12, None, 1, False, None, keywords)


@pytest.mark.parametrize("rule", ["factored", "product", "pi"])
def test_every_damping_rule_at_its_own_length(pair: Crew, rule: str) -> None:
    keywords = {"damping_rule": rule, "graft": None, "lr": 1e-3, "relative_to": "mean", "damping": 1.0}
    check(pair, "KFAC", "convnet", "before", 12, None, 1, False, None, keywords)


def test_natural_gradients_of_the_backward_pass_are_averaged_by_ddp(crew: Crew) -> None:
    check(crew, "RSKFAC", "mlp", "before", 4, None, 1, False, None, {"apply": "backward"})


@pytest.mark.parametrize(
    "optimizer, model",
    [
        ("RSKFAC", "wide"),
        ("KFAC", "wide"),
        ("EKFAC", "wide"),
        ("graft-adamw", "wide"),
        ("stale", "wide"),
        ("RSKFAC", "speaker"),
    ],
)
def test_averages_that_one_process_keeps(crew: Crew, optimizer: str, model: str) -> None:
    check(crew, optimizer, model, "before", 12, None, 1, False, None, {"memory": "owned"})


@pytest.mark.parametrize("rule", ["product", "pi"])
def test_owned_averages_under_rules_that_ask_for_both_sides(pair: Crew, rule: str) -> None:
    keywords = {"damping_rule": rule, "relative_to": "mean", "damping": 1.0, "memory": "owned"}
    check(pair, "KFAC", "wide", "before", 12, None, 1, False, None, keywords)


@pytest.mark.parametrize("optimizer", ["RSKFAC", "EKFAC"])
def test_steps_that_a_gradient_scaler_takes_and_skips(pair: Crew, optimizer: str) -> None:
    for difference, moved, equal in pair.run(scaled.compared, optimizer):
        assert equal, "the processes drifted apart"
        assert moved > 1e-3
        assert difference < CLOSE
