"""The embedded data: scikit-learn's 8x8 handwritten digits, nothing to download."""

from __future__ import annotations

import numpy as np
import torch

from .base import Dataset, Sources

TRAINING_SAMPLES = 1400


def digits(sources: Sources) -> Dataset:
    """1400 training and 397 test images, float32 in [0, 1], split the same way on every machine."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    # The writers come in order, so an unshuffled split would test on other hands than it trains on.
    order = np.random.RandomState(0).permutation(len(images))
    x = torch.from_numpy(images[order] / 16.0).float()
    y = torch.from_numpy(labels[order]).long()
    cut = TRAINING_SAMPLES
    return Dataset(x[:cut], y[:cut], x[cut:], y[cut:], classes=10)
