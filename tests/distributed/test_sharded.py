"""fully_shard: W processes with some rows of every parameter and a share of the batch take the steps of one with all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

from distributed.crew import Crew
from distributed.sharded import (
    accumulated,
    after_a_look,
    buffers,
    chosen,
    compared,
    died,
    foreign_state,
    frozen_saved,
    in_bfloat16,
    language,
    not_finite,
    refused,
    resumed,
    saved,
    sent,
    spoilt_buffer,
)
from distributed.together import STEPS, batches, build, flat, made
from optim.problems import train
from rkfac.distributed.shards import Shards, Spread, share
from rkfac.distributed.world import ALONE

MEMBERS = ["KFAC", "RSKFAC", "SREKFAC", "recommended", "graft-adamw", "EKFAC", "stale", "input-side", "output-side"]
CLOSE = 1e-10


def check(crew: Crew, *args: Any) -> None:
    for difference, moved, equal in crew.run(compared, *args):
        assert equal, "the processes drifted apart"
        assert moved > 1e-3
        assert difference < CLOSE


@pytest.mark.parametrize("optimizer", MEMBERS)
def test_every_member_takes_the_steps_of_one_process(pair: Crew, optimizer: str) -> None:
    """Grouped convolutions, norms, and layers with fewer rows than processes."""
    check(pair, optimizer, "convnet")


@pytest.mark.parametrize("optimizer", ["RSKFAC", "recommended", "graft-adamw", "EKFAC"])
def test_attention_tied_weights_and_norms_of_others(pair: Crew, optimizer: str) -> None:
    """torch wants tied weights in one group, so that the model is sharded as one."""
    check(pair, optimizer, "speaker", 12, 1, False)


@pytest.mark.parametrize("model", ["mlp", "convnet", "reader", "wide"])
def test_four_processes_take_the_steps_of_one(four: Crew, model: str) -> None:
    check(four, "RSKFAC", model)


@pytest.mark.parametrize("each", [True, False], ids=["layer by layer", "as one"])
def test_passes_whose_gradients_are_shared_out_at_the_last_one(pair: Crew, each: bool) -> None:
    check(pair, "RSKFAC", "mlp", 12, 3, each)


@pytest.mark.parametrize("keep", [True, False], ids=["resharded after forward", "whole until the backward pass ends"])
def test_when_weights_are_cut_again(pair: Crew, keep: bool) -> None:
    check(pair, "RSKFAC", "reader", 12, 1, True, None, STEPS, {"reshard_after_forward": keep})


@pytest.mark.parametrize(
    "keywords",
    [
        {"graft": None, "lr": 1e-3, "momentum": 0.9, "kl_clip": 1e-3},
        {"update_clip": 1e-3},
        {"nesterov": True, "weight_decay": 0.01},
        {"graft": "adamw", "lr": 1e-2, "weight_decay": 0.1},
        {"damping_rule": "product"},
        {"damping_rule": "pi", "relative_to": None},
        {"exclude": ("Embedding", "hidden")},
        {"fallback": "adamw", "exclude": ("head", "*Norm*")},
    ],
    ids=str,
)
def test_lengths_clips_decay_and_what_is_left_out(pair: Crew, keywords: dict[str, Any]) -> None:
    check(pair, "RSKFAC", "reader", 12, 1, True, keywords)


def test_averages_that_one_process_keeps(pair: Crew) -> None:
    check(pair, "RSKFAC", "wide", 12, 1, True, {"memory": "owned"})


@pytest.mark.parametrize("who", [0, 1])
def test_a_nan_of_one_process_is_nobodys_step(pair: Crew, who: int) -> None:
    for said, still, moved, equal in pair.run(not_finite, who):
        assert any("left out" in text for text in said)
        assert still
        assert moved
        assert equal


@pytest.mark.parametrize("optimizer", ["RSKFAC", "graft-adamw"])
def test_saved_by_two_and_resumed_by_two_four_and_one(pair: Crew, four: Crew, optimizer: str, tmp_path: Path) -> None:
    end, _ = pair.run(saved, optimizer, str(tmp_path), 7, 6)
    for crew in (pair, four):
        for got, equal in crew.run(resumed, optimizer, str(tmp_path), 7, 6):
            assert equal
            torch.testing.assert_close(got, end, rtol=0, atol=0.0 if crew is pair else 1e-10)
    weights, state = torch.load(tmp_path / "whole.pt", weights_only=True)
    alone = build("convnet")
    own = made(optimizer, alone)
    alone.load_state_dict(weights)
    set_optimizer_state_dict(alone, own, state)
    train(alone, own, batches("convnet", 13, 12)[7:])
    torch.testing.assert_close(flat(alone), end, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    "how, words",
    [
        ("after", ["'0.weight' was sharded after the optimizer was built", "call fully_shard first"]),
        ("left out", ["'0.weight' was sharded after the optimizer was built"]),
        ("divided", ["set_gradient_divide_factor"]),
        ("columns", ["'0.weight' is cut as", "shard_placement_fn"]),
        ("alone", ["process_group=False", "sharded"]),
        ("scaler", ["GradScaler", "bfloat16"]),
        ("backward", ['apply="backward"', "sharded"]),
        ("mc", ['fisher="mc"', "sharded"]),
        ("adaptive", ["adaptive_damping", "sharded"]),
        ("gradients", ["EKFAC", "every step's gradients"]),
        ("past", ["KLDWRM", "remembers its steps"]),
    ],
)
def test_what_is_not_supported_is_refused_by_name(pair: Crew, how: str, words: list[str]) -> None:
    for said in pair.run(refused, how):
        for word in words:
            assert word in said


def test_copies_of_shards_are_refused_by_name(four: Crew) -> None:
    for said in four.run(refused, "hybrid"):
        assert "HSDP" in said
        assert "2 dimensions" in said


def test_a_process_that_is_killed_while_rows_come_together_stops_the_others_and_moves_nothing() -> None:
    crew = Crew(2, timeout=20)
    try:
        crew.begin(died)
        good, said = crew.outcome(0, 40)
        assert good, said
        assert "could not exchange rows of 3 layers, among them '0'" in said
        crew.processes[1].join(5)
        assert crew.processes[1].exitcode == -9
    finally:
        crew.dismiss()


@pytest.mark.parametrize("recomputed", [False, True], ids=["activations kept", "activations recomputed"])
def test_a_language_model_whose_blocks_are_sharded(pair: Crew, recomputed: bool) -> None:
    for difference, moved, equal in pair.run(language, recomputed):
        assert equal
        assert moved > 1e-2
        assert difference < CLOSE


@pytest.mark.parametrize("which", ["no group", "groups", "frozen bias", "frozen layer", "thawed"])
def test_some_parameters_are_elsewhere_or_frozen(pair: Crew, which: str) -> None:
    for difference, moved, equal in pair.run(chosen, which):
        assert equal
        assert moved > 1e-3
        assert difference < CLOSE


@pytest.mark.parametrize(
    "parameters_in, added_up_in, apart",
    [("float32", "float64", 1e-4), ("float32", "bfloat16", 0.1), ("bfloat16", "float32", 0.1)],
)
def test_gradients_that_are_kept_in_another_precision_until_the_last_pass(
    pair: Crew, parameters_in: str, added_up_in: str, apart: float
) -> None:
    for rows, difference in pair.run(accumulated, parameters_in, added_up_in):
        assert rows == {24}
        assert difference < apart


@pytest.mark.parametrize("exclude", [(), ("0",)], ids=["preconditioned", "by the fallback rule"])
def test_a_buffer_that_is_spoilt_in_one_process_is_cleared_in_all(pair: Crew, exclude: tuple[str, ...]) -> None:
    for finite, alike, difference in pair.run(spoilt_buffer, exclude):
        assert finite
        assert alike
        assert difference < CLOSE


def test_a_layer_that_is_frozen_from_the_start_is_saved_and_loaded(pair: Crew, tmp_path: Path) -> None:
    assert pair.run(frozen_saved, str(tmp_path)) == [0.0, 0.0]


@pytest.mark.parametrize("sharded", [True, False])
def test_buffers_that_are_not_cut_as_their_parameters_are_refused(pair: Crew, sharded: bool) -> None:
    for said in pair.run(foreign_state, sharded):
        assert "the saved state does not fit this optimizer" in said
        assert "set_optimizer_state_dict" in said


def test_whole_weights_that_an_evaluation_has_left_in_their_places(pair: Crew) -> None:
    for moved, said in pair.run(after_a_look):
        assert moved
        assert "stand in the place of sharded ones" in said


@pytest.mark.parametrize("optimizer, kinds", [("RSKFAC", 1), ("graft-adamw", 2)])
def test_buffers_are_sharded_as_their_parameters(pair: Crew, optimizer: str, kinds: int) -> None:
    found = pair.run(buffers, optimizer)
    assert sum(mine for _, mine, _ in found) == found[0][0]
    for _, mine, kept in found:
        assert kept == kinds * mine


def test_a_step_hands_over_each_row_once_and_its_direction_once(pair: Crew) -> None:
    taken = 4
    found = pair.run(sent, taken)
    everything = sum(mine for mine, _, _ in found)
    for mine, handed, most in found:
        # Rows go to the owner, the owner's layers come back: nobody hands over more than its rows and its layers.
        assert 0 < handed <= taken * (mine + most)
        assert most < everything  # no process ever has all layers whole
    assert sum(handed for _, handed, _ in found) == taken * 2 * everything


def test_passes_in_sixteen_bits(pair: Crew) -> None:
    for apart, equal, covered, rows in pair.run(in_bfloat16, 10):
        assert equal
        assert covered == {"0", "2", "4"}
        assert rows == {2 * 64}
        assert 0 < apart < 0.1


@pytest.mark.parametrize("length, size", [(1, 4), (4, 4), (5, 4), (9, 4), (12, 5), (0, 2), (7, 1)])
def test_rows_are_cut_as_torch_cuts_them(length: int, size: int) -> None:
    chunks = [len(chunk) for chunk in torch.arange(length).chunk(size)] if length else []
    assert share(length, size) == chunks + [0] * (size - len(chunks))


def test_one_process_brings_together_what_it_has() -> None:
    shards, tensors = Shards(ALONE), [torch.randn(3, 2, dtype=torch.float64), torch.randn(3, dtype=torch.float64)]
    layer = Spread("layer", 0, tuple(t.shape for t in tensors), torch.float64)
    (found,) = shards.brought([layer], [tensors]).values()
    (back,) = shards.returned([layer], {0: found})
    for a, b, c in zip(tensors, found, back, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)
