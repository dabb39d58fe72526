"""skorch: the class takes the place of torch's. `python examples/with_skorch.py`"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from skorch import NeuralNetClassifier
from skorch.callbacks import Checkpoint, LRScheduler

import rkfac
from digits import BATCH, accuracy, decay, network, tensors


def train(folder: Path, epochs: int) -> NeuralNetClassifier:
    """Train, from skorch's checkpoint in the folder on if there is one."""
    saving = Checkpoint(monitor=None, dirname=str(folder))
    schedule = LRScheduler(torch.optim.lr_scheduler.LambdaLR, lr_lambda=decay)
    net = NeuralNetClassifier(
        network,
        criterion=torch.nn.CrossEntropyLoss,
        optimizer=rkfac.RSKFAC,
        optimizer__momentum=0.9,
        lr=0.1,
        batch_size=BATCH,
        train_split=None,
        callbacks=[schedule, saving],
        verbose=0,
    ).initialize()
    if (folder / "params.pt").exists():
        net.load_params(checkpoint=saving)
    x, y, _, _ = tensors()
    return net.partial_fit(x, y, epochs=epochs - len(net.history))


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        train(Path(folder), epochs=2)
        net = train(Path(folder), epochs=7)  # goes on where the first one ended
    print(net.optimizer_.report())
    print(f"skorch: {accuracy(net.module_):.1%} of the test images are recognised")
