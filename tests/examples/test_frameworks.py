"""What the examples leave out: modules that are built again, gradient scalers of frameworks, wrappers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import rkfac
from examples.programs import values

EVERY: dict[str, Any] = {"factor_every": 1, "inverse_every": 2}
SIZE, BATCHES = 12, 5


class Net(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(1)
        super().__init__(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


@pytest.fixture
def data() -> tuple[Tensor, Tensor]:
    torch.manual_seed(2)
    return torch.randn(BATCHES * SIZE, 6), torch.arange(BATCHES * SIZE) % 3


def plainly(data: tuple[Tensor, Tensor], lr: float = 0.1, clip: float = 1e9, half: bool = False) -> list[Tensor]:
    model = Net()
    optimizer = rkfac.RSKFAC(model, lr=lr, **EVERY)
    for x, y in zip(data[0].split(SIZE), data[1].split(SIZE), strict=True):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16, enabled=half):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return values(model)


def assert_equal(model: nn.Module, expected: list[Tensor]) -> None:
    assert all(torch.equal(p, q) for p, q in zip(values(model), expected, strict=True))


# --- skorch


def classifier(**keywords: Any) -> Any:
    skorch: Any = pytest.importorskip("skorch")
    own = {f"optimizer__{name}": value for name, value in EVERY.items()}
    fixed = {"criterion": nn.CrossEntropyLoss, "batch_size": SIZE, "max_epochs": 1, "train_split": None, "verbose": 0}
    chosen = {"module": Net, "optimizer": rkfac.RSKFAC, "lr": 0.1, **fixed, **own, **keywords}
    return skorch.NeuralNetClassifier(**chosen)


def test_skorch_builds_modules_and_optimizers_again(data: tuple[Tensor, Tensor]) -> None:
    net = classifier()
    for lr in (0.1, 0.1, 0.05):  # a fit is a new module with a new optimizer
        net.set_params(lr=lr)
        net.fit(*data)
        assert_equal(net.module_, plainly(data, lr))
        assert all(layer.covered and not layer.reason for layer in net.optimizer_.report())


def test_skorch_in_a_search_over_settings(data: tuple[Tensor, Tensor]) -> None:
    selection = pytest.importorskip("sklearn.model_selection")
    rates = [0.1, 0.05]
    search = selection.GridSearchCV(classifier(), {"lr": rates, "optimizer__damping": [1.0]}, cv=2, error_score="raise")
    search.fit(*data)
    best = search.best_params_["lr"]
    assert best in rates
    assert_equal(search.best_estimator_.module_, plainly(data, best))


def test_skorch_with_a_class_for_one_module(data: tuple[Tensor, Tensor]) -> None:
    module = Net()
    net = classifier(module=module, optimizer=rkfac.for_model(module))
    net.fit(*data)
    assert net.module_ is module
    assert_equal(module, plainly(data))
    other = classifier(optimizer=rkfac.for_model(module))
    with pytest.raises(ValueError, match="4 of 4 parameters are not those of the Net"):
        other.fit(*data)


# --- gradient scalers


def scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)


@pytest.mark.filterwarnings("ignore")
def test_lightning_s_scaler_and_clip(data: tuple[Tensor, Tensor]) -> None:
    """float16 rounds what a scaler has multiplied otherwise where it is subnormal: nearly the same."""
    L: Any = pytest.importorskip("lightning")
    from lightning.pytorch.plugins import MixedPrecision

    class Module(L.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: tuple[Tensor, Tensor], number: int) -> Tensor:
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return rkfac.RSKFAC(self, lr=0.1, **EVERY)

    module = Module()
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        plugins=[MixedPrecision("16-mixed", "cpu", scaler())],
        gradient_clip_val=0.2,
        enable_checkpointing=False,
        **quiet,
    )
    trainer.fit(module, DataLoader(TensorDataset(*data), batch_size=SIZE))
    expected = plainly(data, clip=0.2, half=True)
    for p, q, start in zip(values(module.net), expected, values(Net()), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-4)
        assert (q - start).abs().max() > 1e-2
    inside = rkfac.unwrap(module.optimizers())
    assert inside is trainer.optimizers[0]
    assert inside.report().steps == BATCHES


def test_accelerate_s_scaler_says_which_steps_were_skipped(data: tuple[Tensor, Tensor]) -> None:
    """Its own scalers need a GPU: this one is put into the same wrapper."""
    pytest.importorskip("accelerate")
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer

    Accelerator(cpu=True)
    model, scaling = Net(), scaler()
    prepared = AcceleratedOptimizer(rkfac.RSKFAC(model, lr=0.1, **EVERY), scaler=scaling)
    for x, y in zip(data[0].split(SIZE), data[1].split(SIZE), strict=True):
        for spoilt in (True, False):
            prepared.zero_grad()
            scaling.scale(F.cross_entropy(model(x), y)).backward()
            scaling.unscale_(prepared.optimizer)
            if spoilt:
                model[0].weight.grad[0, 0] = torch.inf
                scaling._found_inf_per_device(prepared.optimizer)[torch.device("cpu")].fill_(1.0)
            nn.utils.clip_grad_norm_(model.parameters(), 0.2)
            prepared.step()
            assert prepared.step_was_skipped is spoilt
    assert_equal(model, plainly(data, clip=0.2))
    assert rkfac.unwrap(prepared).report().steps == BATCHES
