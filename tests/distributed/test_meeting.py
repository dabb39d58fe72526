"""Processes that meet: who is refused, what one of them alone has seen, who dies."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from distributed.crew import Crew
from distributed.meeting import (
    by_itself,
    channels,
    counted,
    died,
    died_early,
    differing,
    drawn_rows,
    early,
    frozen_bias,
    held,
    joined,
    later,
    not_finite,
    other_weights,
    refused,
    resumed,
    resumed_owned,
    retired_in_one,
    sampled,
    saved,
    saved_owned,
    shrinking,
    stalled,
    tensor_parallel,
    with_a_group_of_one,
)
from distributed.together import batches, build, flat, made
from optim.problems import train


@pytest.mark.parametrize(
    "what, named",
    [
        ("shapes", "the model"),
        ("frozen", "what is trained"),
        ("lr", "its groups"),
        ("damping_rule", "damping"),
        ("class", "the optimizer"),
        ("exclude", "layers it covers"),
        ("eager_start", "eager_start"),
        ("seed", "randomness"),
        ("adaptive", "adaptive_damping"),
        ("groups", "parameters in its groups"),
    ],
)
def test_processes_that_differ_are_refused_by_name_in_all_of_them(pair: Crew, what: str, named: str) -> None:
    for said in pair.run(differing, what):
        assert "do not train the same thing" in said
        assert f"{named}:" in said
        assert "in process 0" in said
        assert "in process 1" in said


@pytest.mark.parametrize(
    "optimizer, keywords",
    [("BKFAC", {}), ("SKFAC", {}), ("SENG", {}), ("KLDWRM-qe", {}), ("RSKFAC", {"generator": True})],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_knows_of_one_process_alone_says_so(pair: Crew, optimizer: str, keywords: dict[str, Any]) -> None:
    for first, second in pair.run(refused, optimizer, keywords):
        assert "2 processes" in first
        assert "generator=" in first if keywords else "process_group=False" in first
        assert second == "nothing"


def test_a_process_may_train_by_itself(pair: Crew) -> None:
    assert [equal for equal, _ in pair.run(by_itself)] == [False, False]


@pytest.mark.parametrize("where", ["input", "gradient"])
def test_what_is_not_finite_in_one_process_is_left_out_in_all(pair: Crew, where: str) -> None:
    for messages, finite, equal, left_out in pair.run(not_finite, where):
        assert any("statistics with NaN or Inf were left out" in message for message in messages)
        assert finite
        assert equal
        assert left_out


def test_a_layer_that_one_process_cannot_describe_is_left_alone_by_all(pair: Crew) -> None:
    for names, equal in pair.run(retired_in_one):
        assert names == ["0"]
        assert equal


def test_sampled_targets_and_rows_are_each_process_s_own(pair: Crew) -> None:
    for equal, drawn_alike in pair.run(sampled):
        assert equal
        assert not drawn_alike
    assert pair.run(drawn_rows) == [True, True]


def test_the_optimizer_may_be_there_before_the_others_and_notices_when_they_are_gone(pair: Crew) -> None:
    for alone, trained, gone in pair.run(later):
        assert alone == "1"
        assert trained
        assert "is gone" in gone


@pytest.mark.parametrize("optimizer", ["RSKFAC", "EKFAC", "recommended", "graft-adamw", "stale"])
def test_a_state_saved_by_two_goes_on_in_two_in_four_and_alone(pair: Crew, crew: Crew, optimizer: str) -> None:
    before, after = 7, 8
    (state, kept, end), other = pair.run(saved, optimizer, "convnet", before, after)
    assert torch.equal(end, other[2])
    for got, equal in crew.run(resumed, optimizer, "convnet", state, kept, before, after):
        assert equal
        torch.testing.assert_close(got, end, rtol=0, atol=0.0 if crew.size == 2 else 1e-10)
    if crew.size == 2:
        alone = build("convnet")
        alone.load_state_dict(state)
        own = made(optimizer, alone)
        own.load_state_dict(kept)
        train(alone, own, batches("convnet", before + after, 12)[before:])
        torch.testing.assert_close(flat(alone), end, rtol=0, atol=1e-10)


@pytest.mark.parametrize("when", ["agreement", "statistics", "refresh"])
def test_a_process_that_is_killed_stops_the_others_with_an_error_and_moves_nothing(when: str) -> None:
    crew = Crew(2, timeout=20)
    try:
        began = time.monotonic()
        crew.begin(died, when)
        good, said = crew.outcome(0, 40)
        assert good, said
        assert time.monotonic() - began < 35
        assert "could not exchange" in said
        assert {
            "agreement": "a look at their parameters",
            "statistics": "statistics of '0'",
            "refresh": "decompositions",
        }[when] in said
        crew.processes[1].join(5)
        assert crew.processes[1].exitcode == -9
    finally:
        crew.dismiss()


def test_an_optimizer_that_is_gone_leaves_no_channel_behind(pair: Crew) -> None:
    for first, last in pair.run(channels, 5):
        assert last <= first


def test_a_process_that_is_killed_while_sums_leave_early_stops_the_others_too() -> None:
    crew = Crew(2, timeout=20)
    try:
        crew.begin(died_early)
        good, answer = crew.outcome(0, 60)
        assert good, answer
        said, seconds = answer
        assert "could not exchange statistics of" in said
        assert said.endswith("| 20")  # the group's own patience, and not torch's half hour
        assert seconds < 25
    finally:
        crew.dismiss()


def test_a_process_that_stays_away_is_an_error_after_the_timeout() -> None:
    crew = Crew(2)
    try:
        crew.begin(stalled, 4.0)
        good, said = crew.outcome(0, 60)
        assert good, said
        assert "could not exchange" in said
        assert "timeout" in said
    finally:
        crew.processes[1].kill()  # nobody waits for it any more
        crew.dismiss()


def test_eigenpairs_and_halves_are_what_is_sent(pair: Crew) -> None:
    d, rank = 4609, 220
    for sent in pair.run(counted, d, rank):
        assert 0 < sent["statistics"] <= 4 * (d * (d + 1) / 2 + 8 * 9 / 2)
    assert 0 < sum(sent["decompositions"] for sent in pair.run(counted, d, rank)) <= 0.1 * 4 * d**2


def test_tensor_parallel_is_refused_by_name(pair: Crew) -> None:
    for said in pair.run(tensor_parallel):
        assert "tensor parallel" in said


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(torch.equal(one, other)) if isinstance(one, torch.Tensor) else bool(one == other)


@pytest.mark.parametrize("memory", ["owned", "replicated"])
def test_a_state_whose_parts_are_in_several_processes_is_saved_whole(pair: Crew, crew: Crew, memory: str) -> None:
    (state, kept, end), (_, other, _) = pair.run(saved_owned, 7, 8)
    assert _same(other, kept)
    for got, equal in crew.run(resumed_owned, state, kept, 7, 8, memory):
        assert equal
        torch.testing.assert_close(got, end, rtol=0, atol=1e-10)


def test_owned_averages_are_in_one_process_alone(pair: Crew) -> None:
    (everything, first, said), (also, second, also_said) = pair.run(held)
    assert everything == also
    assert first + second == everything
    assert max(first, second) < 0.7 * everything
    assert "another process keeps" in said
    assert "another process keeps" in also_said


def test_a_join_in_which_processes_may_stay_away_is_refused_by_name(pair: Crew) -> None:
    for said in pair.run(joined):
        assert "model.join()" in said


@pytest.mark.parametrize("how", ["plain", "dropped", "growing", "twice"])
def test_sums_leave_during_the_backward_pass_and_are_believed_only_where_nothing_came_later(
    pair: Crew, how: str
) -> None:
    for equal, believed, again, difference in pair.run(early, how):
        assert equal
        assert difference < 1e-10
        most = 3 * 5  # three layers in six steps that collect, the first of which has no units yet
        assert {"plain": believed == most, "growing": 0 < believed < most}.get(how, believed == 0)
        assert (again > 1) == (how != "plain")


def test_replicas_with_other_weights_are_refused_at_their_first_step(pair: Crew) -> None:
    for plain, wrapped in pair.run(other_weights):
        assert "other values in other processes" in plain
        assert wrapped == "nothing"


@pytest.mark.parametrize("when", ["before zero_grad", "after zero_grad"])
def test_a_bias_may_be_frozen_and_thawed_in_the_middle(pair: Crew, when: str) -> None:
    for difference, equal in pair.run(frozen_bias, when):
        assert equal
        assert difference < 1e-10


def test_groups_of_some_processes_do_no_harm(pair: Crew) -> None:
    assert pair.run(with_a_group_of_one) == [True, True]


def test_early_sums_that_vanish_in_their_units_are_not_believed(pair: Crew) -> None:
    for difference in pair.run(shrinking):
        assert difference < 1e-4
