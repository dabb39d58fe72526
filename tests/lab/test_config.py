"""Configuration: TOML and --set in, checked values out, and the paper's schedules at every epoch."""

from __future__ import annotations

import json
import sys
import types

import pytest
import torch

from rkfac_lab import config, optimizers, schedules, shapes, train
from rkfac_lab.errors import LabError
from rkfac_lab.workloads import WORKLOADS, find


def test_toml_becomes_a_checked_configuration(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(
        'workload = "digits-mlp"\nepochs = 4\ntime_budget = 3\n[optimizer]\nname = "sgd"\n'
        "[optimizer.arguments]\nlr = 0.5\nnesterov = true\n[schedule.lr]\n1 = 0.5\n3 = 0.1\n"
    )
    loaded = config.load(str(path), ["seed=7", "optimizer.arguments.momentum=0.9", "schedule.lr.4=0.01", "label=fast"])
    assert loaded.epochs == 4
    assert loaded.time_budget == 3
    assert loaded.seed == 7
    assert loaded.name == "fast"
    assert loaded.optimizer.arguments == {"lr": 0.5, "nesterov": True, "momentum": 0.9}
    assert loaded.schedule == {"lr": {1: 0.5, 3: 0.1, 4: 0.01}}


def test_dictionary_round_trip_through_json():
    original = config.load("digits-mlp", ["schedule.lr.2=0.1", "optimizer.name=sgd", "max_steps=5"])
    assert config.from_dict(json.loads(json.dumps(original.to_dict()))) == original


@pytest.mark.parametrize(
    "setting, message",
    [
        ("epoch=3", "no configuration key 'epoch'; did you mean 'epochs'"),
        ("optimizer.nam=sgd", r"'optimizer.nam'; did you mean 'optimizer.name'"),
        ("epochs=2.5", "epochs must be a whole number, not 2.5"),
        ("epochs=true", "epochs must be a whole number, not True"),
        ("epochs=0", "epochs must be greater than zero"),
        ("seed=abc", "seed must be a whole number, not 'abc'"),
        ("tensorboard=1", "tensorboard must be true or false, not 1"),
        ("time_budget=long", "time_budget must be a number"),
        ("optimizer=sgd", "optimizer must be a table"),
        ("workload.name=1", "has no keys inside"),
        ("schedule.lr.first=0.1", "schedule.lr has the key 'first'"),
        ("schedule.lr.0=0.1", "schedule.lr has the key '0'"),
        ("schedule.lr.2=fast", "schedule.lr.2 must be a number"),
        ("optimizer.preset=papers", "did you mean 'paper'"),
        ("nonsense", "not of the form key=value"),
    ],
)
def test_mistakes_are_refused_by_name(setting, message):
    with pytest.raises(LabError, match=message) as caught:
        config.from_dict(_with(setting))
    assert "\n" not in str(caught.value)


def _with(setting):
    values = {"workload": "digits-mlp"}
    config.override(values, setting)
    return values


def test_unknown_target_names_the_nearest():
    with pytest.raises(LabError, match="did you mean 'digits-mlp'"):
        config.load("digit-mlp")


def test_missing_and_broken_files(tmp_path):
    with pytest.raises(LabError, match="cannot be read"):
        config.load(str(tmp_path / "no.toml"))
    (tmp_path / "bad.toml").write_text("a = = 1")
    with pytest.raises(LabError, match="not valid TOML"):
        config.load(str(tmp_path / "bad.toml"))


def test_resolve_fills_in_the_workload_and_twice_is_once():
    loaded = config.load("cifar10-vgg-small", ["optimizer.name=sgd", "optimizer.arguments.lr=0.5"])
    resolved = config.resolve(loaded)
    workload = find("cifar10-vgg-small")
    assert resolved.epochs == workload.epochs
    assert resolved.batch_size == workload.batch_size
    assert resolved.optimizer.arguments == {**workload.defaults["sgd"], "lr": 0.5}
    assert (resolved.lr_shape, resolved.evaluate_steps) == ("linear", 28)
    assert config.resolve(resolved) == resolved


def test_own_schedule_replaces_the_workloads():
    loaded = config.load("cifar10-vgg-small", ["optimizer.name=sgd", "schedule.lr.1=0.25"])
    resolved = config.resolve(loaded)
    assert (resolved.schedule, resolved.lr_shape) == ({"lr": {1: 0.25}}, "constant")


# --- the paper's Section 5, as its indicator formulas


def paper(epoch):
    def indicator(first):
        return float(epoch >= first)

    lr = 0.3 - 0.1 * indicator(2) - 0.1 * indicator(3) - 0.07 * indicator(13) - 0.02 * indicator(18)
    return {
        "lr": lr - 0.007 * indicator(27) - 0.002 * indicator(40),
        "damping": 0.1 - 0.05 * indicator(25) - 0.04 * indicator(35),
        "inverse_every": 50 - 20 * indicator(20),
        "rank": 220 + 10 * indicator(15),
        "oversampling": 10 + indicator(22) + indicator(30),
    }


SKETCH = {"rank", "oversampling"}


@pytest.mark.parametrize("name", ["k-fac", "rs-kfac", "sre-kfac"])
def test_shipped_schedules_equal_the_papers_at_every_epoch(name):
    shipped = config.load(f"paper-{name}")
    scheduled = set(paper(1)) - (SKETCH if name == "k-fac" else set())
    assert set(shipped.schedule) == scheduled
    for epoch in range(1, 51):
        for key in scheduled:
            value = schedules.value_at(shipped.schedule[key], epoch)
            assert value == pytest.approx(paper(epoch)[key], abs=1e-12), (key, epoch)
            assert isinstance(value, int) == (key not in ("lr", "damping"))


@pytest.mark.parametrize("name", ["k-fac", "rs-kfac", "sre-kfac"])
def test_shipped_constants_equal_the_papers(name):
    shipped = config.load(f"paper-{name}")
    assert (shipped.workload, shipped.epochs, shipped.batch_size) == ("cifar10-vgg16bn", 50, 256)
    assert (shipped.optimizer.name, shipped.optimizer.preset) == (name, "paper")
    arguments = shipped.optimizer.arguments
    assert (arguments["momentum"], arguments["weight_decay"]) == (0, 7e-4)
    assert (arguments["factor_every"], arguments["factor_decay"]) == (10, 0.95)
    for key, steps in shipped.schedule.items():
        assert arguments[key] == steps[1]
    if name != "k-fac":
        assert arguments["power_iterations"] == 4


def test_paper_preset_starts_from_rkfacs_own_defaults(monkeypatch):
    stand_in = types.ModuleType("rkfac")
    stand_in.paper_defaults = lambda: {"damping_rule": "factored", "lr": 99.0}
    monkeypatch.setitem(sys.modules, "rkfac", stand_in)
    resolved = config.resolve(config.load("paper-rs-kfac"))
    assert resolved.optimizer.arguments["damping_rule"] == "factored"
    assert resolved.optimizer.arguments["lr"] == 0.3
    assert resolved.schedule == config.load("paper-rs-kfac").schedule
    assert resolved.lr_shape == "constant"


@pytest.mark.parametrize("name", ["k-fac", "rs-kfac", "sre-kfac"])
def test_shipped_configurations_build_their_optimizer(name):
    resolved = config.resolve(config.load(f"paper-{name}"))
    assert config.from_dict(resolved.to_dict()).to_dict() == resolved.to_dict()
    model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.ReLU(), torch.nn.Linear(4, 3))
    optimizer = optimizers.build(name, model, resolved.optimizer.arguments, seed=0)
    for epoch in range(1, 51):
        schedules.apply(optimizer, resolved.schedule, epoch)
        for key in resolved.schedule:
            assert optimizer.param_groups[0][key] == pytest.approx(paper(epoch)[key], abs=1e-12)


def test_seng_of_the_paper_has_its_numbers_and_its_rate_at_every_step():
    resolved = config.resolve(config.load("paper-seng"))
    assert (resolved.workload, resolved.epochs, resolved.batch_size) == ("cifar10-vgg16bn", 50, 256)
    arguments = resolved.optimizer.arguments
    wanted = {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-2, "damping": 2.0, "inverse_every": 200, "columns": 128}
    assert {key: arguments[key] for key in wanted} == wanted
    published = ("scaling", "product", "norms")
    assert {arguments[key] for key in published} == {"published"}
    assert (arguments["graft"], arguments["relative_to"], arguments["explicit_up_to"]) == (None, None, 700_000)
    model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3))
    optimizer = optimizers.build("seng", model, arguments, seed=0)
    rate = shapes.ShapedRate(resolved.lr_shape, optimizer)
    for epoch, batch in ((0, 0), (0, 195), (7, 12), (49, 195)):
        done = epoch * 196 + batch + 1
        rate.apply(shapes.Moment(done, 50 * 196, epoch + 1, done / 196))
        e = epoch + (batch + 1) / 196
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05 * (1 - e / 75) ** 6, rel=1e-12)


def test_every_workload_can_be_resolved():
    for name in WORKLOADS:
        assert config.resolve(config.load(name)).epochs == find(name).epochs


# --- schedules


def test_schedules_set_every_group_and_leave_it_before_the_first_step():
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    optimizer = torch.optim.SGD([{"params": [p], "lr": 1.0} for p in parameters])
    schedules.apply(optimizer, {"lr": {3: 0.5, 5: 0.25}}, epoch=2)
    assert [group["lr"] for group in optimizer.param_groups] == [1.0, 1.0]
    schedules.apply(optimizer, {"lr": {3: 0.5, 5: 0.25}}, epoch=4)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.5]
    schedules.apply(optimizer, {"lr": {5: 0.25, 3: 0.5}}, epoch=50)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25]


@pytest.mark.parametrize(
    "name, schedule, said",
    [
        ("sgd", {"momentm": {1: 0.5}}, "'momentm'; did you mean 'momentum'"),
        ("sgd", {"params": {9: 1}}, "'params'"),
        ("sgd", {"nesterov": {9: 1}}, "'nesterov'"),
        ("sgd", {"lr": {1: 0.1, 9: -0.1}}, r"schedule\.lr\.9 = -0\.1 cannot be used: .*Invalid learning rate"),
        ("adamw", {"weight_decay": {40: -1}}, r"schedule\.weight_decay\.40"),
        ("rs-kfac", {"rank": {2: 12.5}}, r"schedule\.rank\.2 = 12\.5 .*integer"),
        ("rs-kfac", {"inverse_every": {30: 0}}, r"schedule\.inverse_every\.30"),
        ("rs-kfac", {"damping": {30: 0.1, 31: -1}}, r"schedule\.damping\.31"),
    ],
)
def test_a_schedule_that_would_fail_later_is_refused_before_the_run(tmp_path, tiny, name, schedule, said):
    chosen = config.from_dict({"workload": tiny, "optimizer": {"name": name}, "schedule": schedule, "epochs": 1})
    with pytest.raises(LabError, match=said):
        train.run(chosen, tmp_path / "r")
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize("threads", [100000, 2**40])
def test_more_threads_than_a_machine_can_have_are_refused(threads):
    with pytest.raises(LabError, match=f"threads must be at most [0-9]+ on this machine, not {threads}"):
        config.load("digits-mlp", [f"threads={threads}"])


@pytest.mark.parametrize(
    "setting",
    [
        "optimizer.arguments.lr=nan",
        "optimizer.arguments.betas=[0.9, inf]",
        "optimizer.arguments.lr=2020-01-01",
        "checkpoint_seconds=nan",
        "checkpoint_seconds=inf",
        "time_budget=inf",
        "schedule.lr.2=nan",
        "seed=0x" + "f" * 40,
        "epochs=0x" + "f" * 6000,
        "validation_share=0.9",
        "label='" + "x" * 5000 + "'",
        "optimizer.arguments.x=" + "[" * 60 + "]" * 60,
    ],
)
def test_values_that_no_run_folder_could_repeat_are_refused(setting):
    with pytest.raises(LabError) as caught:
        config.load("digits-mlp", [setting])
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300
