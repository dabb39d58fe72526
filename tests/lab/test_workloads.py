"""Workloads: what is measured means what its name says."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch.nn import functional as F

from rkfac_lab import config, optimizers, workloads
from rkfac_lab.data import Dataset, Sources
from rkfac_lab.errors import LabError
from rkfac_lab.optimizers import CLASSES
from rkfac_lab.workloads import WORKLOADS, Target, find

NAMES = [
    "digits-mlp",
    "digits-autoencoder",
    "fashion-autoencoder",
    "fashion-widemlp",
    "cifar10-vgg16bn",
    "cifar10-vgg-small",
    "cifar10-mini",
    "cifar10-resnet-small",
    "text-transformer",
]


def small_data(name):
    """A batch of four of the workload's stored form."""
    labels = torch.tensor([1, 0, 3, 2])
    if name in ("cifar10-mini", "cifar10-resnet-small"):
        x = torch.randint(256, (4, 3, 16, 16), dtype=torch.uint8)
    elif name.startswith("digits"):
        x = torch.rand(4, 64)
    elif name.startswith("fashion"):
        x = torch.randint(256, (4, 28, 28), dtype=torch.uint8)
    elif name.startswith("cifar10"):
        x = torch.randint(256, (4, 3, 32, 32), dtype=torch.uint8)
    else:
        x = torch.randint(20, (4, 64))
        return Dataset(x, x, x, x, classes=20)
    return Dataset(x, labels, x, labels, classes=10)


def test_all_of_them_exist():
    assert list(WORKLOADS) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_model_data_loss_and_metrics_fit_together(name):
    torch.manual_seed(0)
    workload, data = find(name), small_data(name)
    inputs, targets = workload.prepare(data.train_x, data.train_y)
    outputs = workload.model(data)(inputs)
    loss = workload.loss(outputs, targets)
    loss.backward()
    assert torch.isfinite(loss)
    measured = {"test_loss": loss, **{key: metric(outputs, targets) for key, metric in workload.metrics.items()}}
    assert {target.metric for target in workload.targets} <= set(measured)
    assert all(value.dim() == 0 for value in measured.values())


@pytest.mark.parametrize("name", NAMES)
def test_every_baseline_has_settings(name):
    assert set(find(name).defaults) == set(CLASSES)
    assert all("lr" in arguments for arguments in find(name).defaults.values())
    family = [find(name).defaults[k] for k in ("k-fac", "rs-kfac", "sre-kfac")]
    assert family[0] == family[1] == family[2]


def test_targets_get_harder():
    for workload in WORKLOADS.values():
        values = [target.value for target in workload.targets]
        assert values == sorted(values, reverse=workload.targets[0].mode == "min")


def test_target_modes():
    assert Target("test_accuracy", 0.9, "max").reached(0.9)
    assert not Target("test_accuracy", 0.9, "max").reached(0.89)
    assert Target("test_error", 8, "min").reached(7.9)
    assert not Target("test_error", 8, "min").reached(8.1)
    assert not Target("test_error", 8, "min").reached(None)


def test_cifar_normalisation_is_the_papers():
    image = torch.full((1, 3, 32, 32), 255, dtype=torch.uint8)
    inputs, _ = find("cifar10-vgg16bn").prepare(image, torch.tensor([0]))
    expected = [(1 - 0.4914) / 0.2023, (1 - 0.4822) / 0.1994, (1 - 0.4465) / 0.2010]
    assert inputs[0, :, 5, 7].tolist() == pytest.approx(expected)


def test_autoencoder_loss_and_error_sum_over_pixels():
    logits, pixels = torch.randn(6, 784), torch.rand(6, 784)
    p = logits.sigmoid().double()
    likelihood = -(pixels * p.log() + (1 - pixels) * (1 - p).log()).sum() / 6
    assert workloads.pixel_likelihood(logits, pixels).item() == pytest.approx(likelihood.item(), rel=1e-5)
    error = ((p - pixels) ** 2).sum() / 6
    assert workloads.reconstruction_error(logits, pixels).item() == pytest.approx(error.item(), rel=1e-5)


def test_text_loss_is_the_mean_over_positions():
    logits, symbols = torch.randn(3, 5, 7), torch.randint(7, (3, 5))
    by_hand = sum(F.cross_entropy(logits[:, t], symbols[:, t]) for t in range(5)) / 5
    assert workloads.next_character_loss(logits, symbols).item() == pytest.approx(by_hand.item(), rel=1e-6)


def test_paper_batch_size_targets_and_width():
    workload = find("cifar10-vgg16bn")
    assert (workload.batch_size, workload.epochs) == (256, 50)
    assert [target.value for target in workload.targets] == [0.90, 0.915, 0.92]
    assert sum(p.numel() for p in workload.model(small_data("cifar10-vgg16bn")).parameters()) == 14_990_922


def test_data_functions_take_sources():
    for workload in WORKLOADS.values():
        assert list(inspect.signature(workload.data).parameters) == ["sources"]
    assert len(find("digits-mlp").data(Sources()).train_x) == 1400


@pytest.mark.parametrize("name, graft", [("rs-kfac+sgd", "sgd"), ("k-fac+adamw", "adamw"), ("sre-kfac+sgd", "sgd")])
def test_k_fac_in_anothers_place_has_the_others_settings_and_nothing_else(name, graft):
    own = WORKLOADS["cifar10-mini"].defaults[graft]
    resolved = config.resolve(config.load("cifar10-mini", [f"optimizer.name={name}"]))
    assert resolved.optimizer.arguments == {**own, "graft": graft}
    assert optimizers.keywords(name) == optimizers.keywords(name.partition("+")[0])


def test_what_k_fac_needs_is_told_to_every_k_fac_and_to_nobody_else():
    text = find("text-transformer")
    assert text.arguments("sre-kfac+adamw") == {**text.defaults["adamw"], "graft": "adamw", "loss_average": "tokens"}
    assert text.arguments("k-fac")["loss_average"] == "tokens"
    assert text.arguments("adamw") == text.defaults["adamw"]
    assert text.arguments("torch.optim:SGD") == {}
    resolved = config.resolve(config.load("text-transformer", ["optimizer.name=k-fac", "optimizer.preset=paper"]))
    assert resolved.optimizer.arguments["loss_average"] == "tokens"


@pytest.mark.parametrize(
    "name, said",
    [
        ("sgd+adamw", r"no K-FAC to put in the place of adamw: 'sgd'"),
        ("rs-kfca+sgd", r"did you mean 'rs-kfac'"),
        ("rs-kfac+muon", r"no optimizer for rs-kfac to take the place of: 'muon'; choose from: adamw, sgd"),
        ("rs-kfac+adam", r"did you mean 'adamw'"),
    ],
)
def test_what_has_no_place_to_take_is_refused(name, said):
    with pytest.raises(LabError, match=said):
        config.resolve(config.load("digits-mlp", [f"optimizer.name={name}"]))


def test_a_preset_and_anothers_settings_exclude_each_other():
    with pytest.raises(LabError, match=r"rs-kfac\+sgd takes another's settings and no preset"):
        config.resolve(config.load("digits-mlp", ["optimizer.name=rs-kfac+sgd", "optimizer.preset=paper"]))


def test_budgets_and_evaluations():
    steps = {name: (find(name).epochs, find(name).evaluate_steps) for name in NAMES}
    assert steps == {
        "digits-mlp": (15, None),
        "digits-autoencoder": (40, 7),
        "fashion-autoencoder": (5, 15),
        "fashion-widemlp": (4, 24),
        "cifar10-vgg16bn": (50, None),
        "cifar10-vgg-small": (4, 28),
        "cifar10-mini": (4, 28),
        "cifar10-resnet-small": (5, 28),
        "text-transformer": (1, 10),
    }
    shapes = {workload.lr_shape for name, workload in WORKLOADS.items() if name != "cifar10-vgg16bn"}
    assert shapes == {"linear"}
    assert find("cifar10-vgg16bn").lr_shape == "steps-of-50-epochs"


def test_unknown_workload_names_the_nearest():
    with pytest.raises(LabError, match="did you mean 'digits-mlp'"):
        find("digits_mlp")
