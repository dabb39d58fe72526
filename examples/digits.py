"""What the other programs here train: handwritten digits (embedded in scikit-learn) and a small network for them."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

BATCH = 128


def tensors() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images and labels to train with, in an order of their own, and others to test with."""
    data = load_digits()
    x, y = torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    training, test = order[: 11 * BATCH], order[11 * BATCH :]
    return x[training], y[training], x[test], y[test]


def loader(batch: int = BATCH) -> DataLoader[tuple[Tensor, Tensor]]:
    """The same batches in every program and every epoch, so that all of them can be compared."""
    x, y, _, _ = tensors()
    return DataLoader(TensorDataset(x, y), batch_size=batch)  # type: ignore[arg-type]


def network() -> nn.Module:
    """The same start every time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))


def decay(epoch: int) -> float:
    """What the learning rate is multiplied by."""
    return 0.8**epoch


@torch.no_grad()
def accuracy(model: nn.Module) -> float:
    """Share of the test images that are recognised."""
    _, _, x, y = tensors()
    return (model(x).argmax(1) == y).float().mean().item()
