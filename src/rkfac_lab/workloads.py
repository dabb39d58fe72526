"""Workloads: model, data, loss, targets, budget and each optimizer's default settings, under one name."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import rkfac

from . import models
from .data import Dataset as Dataset
from .data import Sources as Sources
from .data.augment import crop_and_flip
from .data.cifar import cifar10, halved_cifar10
from .data.digits import digits
from .data.idx import fashion_mnist
from .data.text import CONTEXT, text
from .errors import LabError, unknown
from .imports import named
from .optimizers import CLASSES, is_kfac
from .problem import Target as Target
from .problem import Workload as Workload
from .problem import own_part

WORKLOADS: dict[str, Workload] = {}


def register(workload: Workload) -> Workload:
    """Make a workload known by its name."""
    WORKLOADS[workload.name] = workload
    return workload


def find(name: str, model: str | None = None, data: str | None = None) -> Workload:
    """The workload called `name`, or the one that `module:NAME` leads to; with a model or data of somebody's own."""
    found = _found(name)
    if model is not None:
        found = dataclasses.replace(found, model=own_part("model", model, nn.Module))
    if data is not None:
        found = dataclasses.replace(found, data=own_part("data", data, Dataset))
    return found


def _found(name: str) -> Workload:
    if name in WORKLOADS:
        return WORKLOADS[name]
    if ":" not in name:
        raise unknown("workload", name, WORKLOADS)
    found = named("workload", name, name)
    if not isinstance(found, Workload):
        raise LabError(f"{name} is a {type(found).__name__} and no rkfac_lab.workloads.Workload; name one that is.")
    return found


# --- losses, metrics and batch preparation ---------------------------------------------------------------------------


def accuracy(logits: Tensor, labels: Tensor) -> Tensor:
    """Share of samples whose largest logit is the label's."""
    return (logits.argmax(1) == labels).float().mean()


def pixel_likelihood(logits: Tensor, pixels: Tensor) -> Tensor:
    """Bernoulli negative log-likelihood, summed over pixels, mean over samples."""
    return F.binary_cross_entropy_with_logits(logits, pixels, reduction="none").sum(1).mean()


def reconstruction_error(logits: Tensor, pixels: Tensor) -> Tensor:
    """Squared error of the reconstructed pixels, summed over pixels, mean over samples."""
    return (logits.sigmoid() - pixels).square().sum(1).mean()


def next_character_loss(logits: Tensor, symbols: Tensor) -> Tensor:
    """Cross entropy in nats, mean over samples and positions."""
    return F.cross_entropy(logits.flatten(0, 1), symbols.flatten())


def _unit_pixels(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return images.flatten(1).float() / 255, labels


def _pixels_as_target(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    pixels, _ = _unit_pixels(images, labels)
    return pixels, pixels


def _images_as_target(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return images, images


CIFAR_MEAN = (0.4914, 0.4822, 0.4465)
CIFAR_STD = (0.2023, 0.1994, 0.2010)


def _normalised(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    mean = torch.tensor(CIFAR_MEAN, device=images.device).view(3, 1, 1)
    std = torch.tensor(CIFAR_STD, device=images.device).view(3, 1, 1)
    return (images.float() / 255 - mean) / std, labels


def _accuracy_targets(*values: float) -> tuple[Target, ...]:
    return tuple(Target("test_accuracy", value, "max") for value in values)


# --- the workloads ---------------------------------------------------------------------------------------------------


def _settings(own: str | dict[str, Any], **baselines: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Tuned baselines, and every K-FAC with the numbers of one of them and nothing else, or with their own.

    Numbers come from `rkfac tune` (validation data, docs/results) where a comment does not say otherwise.
    """
    numbers = {"graft": own, **baselines[own]} if isinstance(own, str) else own
    # A recipe of the K-FACs' own may hold what means nothing to SENG, which has AdamW's numbers there; KLD-WRM's steps have
    # the length that its own model asks for.
    seng = numbers if isinstance(own, str) else {"graft": "adamw", **baselines["adamw"]}
    return {**dict.fromkeys(filter(is_kfac, CLASSES), numbers), "seng": seng, "kld-wrm": {"lr": 0.03}, **baselines}


EVALUATED = 2000  # test samples, where all of them would cost more than about a twentieth of the training

register(
    Workload(
        name="digits-mlp",
        about="8x8 handwritten digits (embedded), 64-1024-1024-10: wide enough for exact K-FAC to hurt",
        model=lambda data: models.build("mlp", sizes=(64, 1024, 1024, data.classes)),
        data=digits,
        batch_size=128,
        epochs=15,
        loss=F.cross_entropy,
        metrics={"test_accuracy": accuracy},
        targets=_accuracy_targets(0.95, 0.97, 0.98),
        defaults=_settings(
            "sgd",
            sgd={"lr": 0.3, "momentum": 0.9, "nesterov": True},
            adamw={"lr": 1e-2},
            muon={"lr": 0.3},
            soap={"lr": 1e-2},
            shampoo={"lr": 0.3},
        ),
    )
)

register(
    Workload(
        name="digits-autoencoder",
        about="8x8 handwritten digits (embedded), deep autoencoder 64-256-128-64-12 and back",
        model=lambda data: models.build("autoencoder", encoder=(64, 256, 128, 64, 12)),
        data=digits,
        batch_size=100,
        epochs=40,
        evaluate_steps=7,
        loss=pixel_likelihood,
        prepare=_images_as_target,
        metrics={"test_error": reconstruction_error},
        targets=tuple(Target("test_error", value, "min") for value in (1.0, 0.7, 0.6)),
        defaults=_settings(
            "sgd",
            sgd={"lr": 0.03, "momentum": 0.9, "nesterov": True, "weight_decay": 3e-4},
            adamw={"lr": 3e-3},
            muon={"lr": 3e-3},
            soap={"lr": 3e-3, "weight_decay": 1e-3},
            shampoo={"lr": 0.1},  # never tuned
        ),
    )
)

register(
    Workload(
        name="fashion-autoencoder",
        about="Fashion-MNIST, deep autoencoder 784-1000-500-250-30 and back",
        model=lambda data: models.build("autoencoder"),
        data=fashion_mnist,
        batch_size=500,
        epochs=5,
        evaluate_steps=15,
        evaluation_size=EVALUATED,
        loss=pixel_likelihood,
        prepare=_pixels_as_target,
        metrics={"test_error": reconstruction_error},
        targets=tuple(Target("test_error", value, "min") for value in (35.0, 20.0, 10.0)),
        defaults=_settings(
            {"graft": "adamw", "lr": 1e-2},  # RS-KFAC's, tuned as Muon's and SOAP's
            sgd={"lr": 3e-3, "momentum": 0.9, "nesterov": True},
            adamw={"lr": 1e-3},
            muon={"lr": 1e-2},
            soap={"lr": 1e-2},
            shampoo={"lr": 0.1},  # never tuned
        ),
    )
)

register(
    Workload(
        name="fashion-widemlp",
        about="Fashion-MNIST, 784-4096-4096-10, where exact K-FAC hurts",
        model=lambda data: models.build("mlp", sizes=(784, 4096, 4096, data.classes)),
        data=fashion_mnist,
        batch_size=256,
        epochs=4,
        evaluate_steps=24,
        evaluation_size=EVALUATED,
        loss=F.cross_entropy,
        prepare=_unit_pixels,
        metrics={"test_accuracy": accuracy},
        targets=_accuracy_targets(0.85, 0.88, 0.89),
        defaults=_settings(
            "sgd",
            sgd={"lr": 0.1, "momentum": 0.9, "nesterov": True},  # 0.2 is as good within the noise of the trials
            adamw={"lr": 1e-2},
            muon={"lr": 1e-3},  # never tuned: a step of its takes fifty of the others here
            soap={"lr": 1e-2, "max_precondition_dim": 1024},
            shampoo={"lr": 0.1},
        ),
    )
)

_CIFAR_DEFAULTS = _settings(  # usual ones, none tuned: a run at full size needs a GPU
    "sgd",
    sgd={"lr": 0.05, "momentum": 0.9, "weight_decay": 5e-4, "nesterov": True},
    adamw={"lr": 1e-3, "weight_decay": 0.05},
    muon={"lr": 1e-3, "weight_decay": 0.05},
    soap={"lr": 1e-3, "weight_decay": 0.05},
    shampoo={"lr": 0.1},
)

_SMALL_CIFAR_DEFAULTS = _settings(  # tuned on cifar10-mini
    "sgd",
    sgd={"lr": 0.3, "momentum": 0.9, "weight_decay": 5e-4, "nesterov": True},
    adamw={"lr": 3e-2, "weight_decay": 0.05},
    muon={"lr": 0.1, "weight_decay": 0.05},
    soap={"lr": 3e-2, "weight_decay": 0.05},
    shampoo={"lr": 0.1},  # never tuned
)

_VGG_DEFAULTS = (
    _settings(  # rates tuned with 1 of the 4 epochs (a K-FAC's: half of one, then two), decays those of cifar10-mini
        {"graft": "sgd", "lr": 0.3, "momentum": 0.9, "weight_decay": 5e-4, "nesterov": True},
        sgd={"lr": 0.1, "momentum": 0.9, "weight_decay": 5e-4, "nesterov": True},
        adamw={"lr": 3e-3, "weight_decay": 0.05},
        muon={"lr": 0.01, "weight_decay": 0.05},
        soap={"lr": 0.01, "weight_decay": 0.05},
        shampoo={"lr": 0.1},  # never tuned
    )
)

_RESNET_DEFAULTS = _settings(  # tuned with 2 of the 5 epochs
    "sgd",
    sgd={"lr": 0.1, "momentum": 0.9, "weight_decay": 5e-4, "nesterov": True},
    adamw={"lr": 3e-3, "weight_decay": 5e-3},
    muon={"lr": 0.1, "weight_decay": 0.05},
    soap={"lr": 0.01, "weight_decay": 0.05},  # with all 5 epochs: 0.1 with 0.15, best after 2 of them, ends worse
    shampoo={"lr": 0.1},  # never tuned
)

register(
    Workload(
        name="cifar10-vgg16bn",
        about="CIFAR-10, VGG16_bn with 14,990,922 parameters: the paper's experiment",
        model=lambda data: models.build("vgg16bn", classes=data.classes),
        data=cifar10,
        batch_size=256,
        epochs=50,
        loss=F.cross_entropy,
        prepare=_normalised,
        metrics={"test_accuracy": accuracy},
        targets=_accuracy_targets(0.90, 0.915, 0.92),
        augment=crop_and_flip,
        defaults=_CIFAR_DEFAULTS,
        lr_shape="steps-of-50-epochs",
        compared=("paper-k-fac", "paper-rs-kfac", "paper-sre-kfac", "paper-seng"),  # Table 1
    )
)

register(
    Workload(
        name="cifar10-vgg-small",
        about="CIFAR-10, VGG16_bn at a quarter of the width",
        model=lambda data: models.build("vgg16bn", width=0.25, classes=data.classes),
        data=cifar10,
        batch_size=256,
        epochs=4,
        evaluate_steps=28,
        evaluation_size=EVALUATED,
        loss=F.cross_entropy,
        prepare=_normalised,
        metrics={"test_accuracy": accuracy},
        targets=_accuracy_targets(0.65, 0.70, 0.75),
        augment=crop_and_flip,
        channels_last=True,
        defaults=_VGG_DEFAULTS,
    )
)

register(
    Workload(
        name="cifar10-mini",
        about="CIFAR-10 at 16x16, six convolutions with BatchNorm, 16 to 64 wide",
        model=lambda data: models.build(
            "convnet", widths=(16, 16, 32, 32, 64, 64), pool_after=(2, 4), classes=data.classes
        ),
        data=halved_cifar10,
        batch_size=256,
        epochs=4,
        evaluate_steps=28,
        evaluation_size=EVALUATED,
        loss=F.cross_entropy,
        prepare=_normalised,
        metrics={"test_accuracy": accuracy},
        targets=_accuracy_targets(0.60, 0.65, 0.70),
        augment=partial(crop_and_flip, padding=2),
        channels_last=True,
        defaults=_SMALL_CIFAR_DEFAULTS,
    )
)

register(
    Workload(
        name="cifar10-resnet-small",
        about="CIFAR-10 at 16x16, ResNet-20: basic blocks 3-3-3 of widths 16, 32, 64",
        model=lambda data: models.build("resnet", classes=data.classes),
        data=halved_cifar10,
        batch_size=256,
        epochs=5,
        evaluate_steps=28,
        evaluation_size=EVALUATED,
        loss=F.cross_entropy,
        prepare=_normalised,
        metrics={"test_accuracy": accuracy},
        targets=_accuracy_targets(0.60, 0.65, 0.70),
        augment=partial(crop_and_flip, padding=2),
        channels_last=True,
        defaults=_RESNET_DEFAULTS,
    )
)

register(
    Workload(
        name="text-transformer",
        about="next character of Python's own source, or of --set text_file=PATH; 2 blocks of width 128",
        model=lambda data: models.build("transformer", vocabulary=data.classes, context=CONTEXT),
        data=text,
        batch_size=64,
        epochs=1,
        evaluate_steps=10,
        evaluation_size=500,
        loss=next_character_loss,
        targets=tuple(Target("test_loss", value, "min") for value in (1.95, 1.8, 1.7)),
        kfac_needs={"loss_average": "tokens"},
        defaults=_settings(
            {**rkfac.recipe("transformer"), "lr": 1e-2},
            sgd={"lr": 0.1, "momentum": 0.9, "nesterov": True},
            adamw={"lr": 3e-3},
            muon={"lr": 1e-2},
            soap={"lr": 1e-2},
            shampoo={"lr": 0.1},
        ),
    )
)
