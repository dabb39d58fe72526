"""The learning rate over a run: the same factor for everybody, from where the run stands and from nothing else."""

from __future__ import annotations

import pytest
import torch

from rkfac_lab import config, shapes, train
from rkfac_lab.errors import LabError
from rkfac_lab.shapes import Moment, ShapedRate


def factors(name, steps, epoch=1):
    return [shapes.find(name)(Moment(step, steps, epoch)) for step in range(1, steps + 1)]


def test_linear_rises_over_a_twentieth_and_falls_towards_zero():
    found = factors("linear", 100)
    assert found[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert found[5:] == pytest.approx([left / 96 for left in range(95, 0, -1)])


@pytest.mark.parametrize("steps", [1, 2, 3, 19, 440])
def test_linear_reaches_one_once_and_no_step_is_idle(steps):
    found = factors("linear", steps)
    assert found.count(1.0) == 1
    assert min(found) > 0


def test_epochs_of_the_papers_workload():
    wanted = {1: 1.0, 12: 1.0, 13: 0.3, 17: 0.3, 18: 0.1, 27: 0.03, 39: 0.03, 40: 0.01, 50: 0.01}
    assert {e: shapes.find("steps-of-50-epochs")(Moment(7, 9, e)) for e in wanted} == wanted


def two_groups():
    first, second = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    return torch.optim.SGD([{"params": [first], "lr": 0.5}, {"params": [second]}], lr=0.1)


def test_every_group_keeps_its_own_base():
    optimizer = two_groups()
    rate = ShapedRate("linear", optimizer)
    for step, factor in ((1, 0.2), (5, 1.0), (100, 1 / 96)):
        rate.apply(Moment(step, 100, 1))
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.5 * factor, 0.1 * factor])


def test_constant_leaves_to_schedules_what_they_set():
    optimizer = two_groups()
    rate = ShapedRate("constant", optimizer)
    optimizer.param_groups[0]["lr"] = 7.0
    rate.apply(Moment(3, 9, 1))
    assert [group["lr"] for group in optimizer.param_groups] == [7.0, 0.1]


def test_an_unknown_shape_is_refused_with_the_nearest():
    with pytest.raises(LabError, match=r"lr_shape.*did you mean 'linear'"):
        config.load("digits-mlp", ["lr_shape=linar"])


def test_max_steps_is_the_end_if_it_comes_first(tmp_path, tiny):
    settings = ["optimizer.name=sgd", "lr_shape=linear", "evaluate_steps=1"]
    short = train.run(config.load(tiny, [*settings, "max_steps=7"]), tmp_path / "short")
    whole = train.run(config.load(tiny, [*settings, "max_steps=700"]), tmp_path / "whole")
    assert [line["lr"] for line in short.epochs] == pytest.approx([0.1 * factor for factor in factors("linear", 7)])
    assert [line["lr"] for line in whole.epochs] == pytest.approx([0.1 * factor for factor in factors("linear", 12)])
