"""The only training loop: one run from a configuration to its folder, resumable bit for bit."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from . import optimizers, record, schedules
from .config import RunConfig, resolve
from .data import Sources
from .data.batches import Batches
from .errors import LabError
from .progress import ProgressReporter, Silent
from .record import Run, RunFolder
from .workloads import find

EVALUATION_BATCH = 1000
# Keys in which a run may differ from the one it continues: limits may only grow, the others change no number.
LIMITS = ("epochs", "max_steps", "time_budget")
HARMLESS = ("label", "data_dir", "tensorboard", "checkpoint_seconds")


def run(config: RunConfig, folder: Path, *, resume: bool = False, progress: ProgressReporter | None = None) -> Run:
    """Train as `config` says, write the run folder and return it as read back.

    With `resume` a run that already ended is returned as it is, and one cut short continues from its checkpoint.
    Ctrl-C writes the summary with status "interrupted" and raises KeyboardInterrupt again.
    """
    config = resolve(config)
    target = RunFolder(Path(folder))
    if target.exists():
        before = target.read(record.CONFIG)
        _require_same_run(target, before, config, resume)
        status = target.read(record.SUMMARY).get("status")
        limits_grew = any(before.get(key) != config.to_dict()[key] for key in LIMITS)
        if status == "diverged" or (status == "finished" and not limits_grew):
            return record.load_run(target.path)
    with _threads(config.threads):
        trainer = _Trainer(config, target, progress or Silent())
        trainer.open()
        try:
            trainer.train()
        except KeyboardInterrupt:
            trainer.status = "interrupted"
            raise
        finally:
            trainer.close()
    return record.load_run(target.path)


def _require_same_run(target: RunFolder, before: dict[str, Any], config: RunConfig, resume: bool) -> None:
    changed = [key for key in _differences(before, config.to_dict()) if key.split(".")[0] not in HARMLESS]
    refused = [key for key in changed if key not in LIMITS or _shrinks(before.get(key), getattr(config, key))]
    if refused:
        raise LabError(
            f"{target.path} belongs to a run with another configuration (different: {', '.join(refused)}); "
            "choose another --folder, or repeat its configuration to continue it."
        )
    if not resume:
        raise LabError(f"{target.path} already holds this run; add --resume to continue it or choose another --folder.")


def _differences(old: Any, new: Any, where: str = "") -> list[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        keys = [*old, *(key for key in new if key not in old)]
        return [d for k in keys for d in _differences(old.get(k), new.get(k), f"{where}.{k}" if where else str(k))]
    return [] if old == new else [where]


def _shrinks(old: float | None, new: float | None) -> bool:
    return new is not None and (old is None or new < old)


@contextlib.contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise LabError(f"The device {name!r} cannot be used ({reason}); choose cpu, cuda or auto.") from error
    return torch.device(name)


class _Trainer:
    """The state of one run; everything that `_state` saves decides the numbers to come."""

    def __init__(self, config: RunConfig, folder: RunFolder, progress: ProgressReporter) -> None:
        assert config.epochs is not None
        assert config.batch_size is not None  # `resolve` has filled both in
        self.config, self.folder, self.progress = config, folder, progress
        self.workload = find(config.workload)
        self.device = _device(config.device)
        data = self.workload.data(Sources(config.data_dir, config.text_file))
        random.seed(config.seed)
        np.random.seed(config.seed % 2**32)
        torch.manual_seed(config.seed)
        self.model: nn.Module = self.workload.model(data).to(self.device)
        if self.workload.channels_last:
            self.model = self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        chosen = config.optimizer
        self.optimizer = optimizers.build(chosen.name, self.model, chosen.arguments, seed=config.seed)
        train_x, train_y = data.train_x.to(self.device), data.train_y.to(self.device)
        self.batches = Batches(train_x, train_y, config.batch_size, config.seed, self.workload.augment)
        self.test_x, self.test_y = data.test_x.to(self.device), data.test_y.to(self.device)
        self.epochs = config.epochs
        self.epoch, self.step = 1, 0  # the epoch under way, counted from 1; steps taken
        self.train_seconds = self.epoch_seconds = 0.0
        self.loss_sum, self.samples = 0.0, 0  # over the epoch under way
        self.lines: list[dict[str, Any]] = []
        self.status = "running"
        self.saved_at = time.monotonic()
        self.board: Any = None

    # --- the run folder

    def open(self) -> None:
        """Continue from the folder's checkpoint or begin; a configuration that cannot work leaves no folder behind."""
        schedules.apply(self.optimizer, self.config.schedule, epoch=1)
        self.folder.path.mkdir(parents=True, exist_ok=True)
        state = self.folder.load_checkpoint()
        if state is not None:
            self._restore(state)
        self.folder.forget_after(self.step)
        self.lines = [line for line in self.folder.lines() if line["kind"] == "epoch"]
        self.folder.write(record.CONFIG, self.config.to_dict())
        self.folder.write(record.ENVIRONMENT, record.environment(self.device))
        if self.config.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(str(self.folder.path / "tensorboard"), purge_step=self.step + 1)
        self._write_summary()
        total = self.epochs * len(self.batches)
        limit = self.config.max_steps
        self.progress.begin(self.config.name, min(total, limit) if limit else total, self.step)

    def close(self) -> None:
        """Write the summary and let go of hooks and files; "running" is what a crash leaves behind."""
        self._write_summary()
        self.progress.end(self.status)
        if self.board is not None:
            self.board.close()
        if hasattr(self.optimizer, "close"):
            self.optimizer.close()

    def _write_summary(self) -> None:
        facts = {
            "workload": self.config.workload,
            "optimizer": self.config.optimizer.name,
            "label": self.config.name,
            "seed": self.config.seed,
            "status": self.status,
            "epochs": self.epoch - 1,
            "steps": self.step,
            "train_seconds": self.train_seconds,
        }
        self.folder.write(record.SUMMARY, record.summarise(facts, self.lines, self.workload.targets))

    # --- checkpoints

    def _state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "batches": self.batches.state_dict(),
            "random": torch.get_rng_state(),
            "cuda_random": torch.cuda.get_rng_state_all() if self.device.type == "cuda" else [],
            "epoch": self.epoch,
            "step": self.step,
            "train_seconds": self.train_seconds,
            "epoch_seconds": self.epoch_seconds,
            "loss_sum": self.loss_sum,
            "samples": self.samples,
        }

    def _restore(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.batches.load_state_dict(state["batches"])
        torch.set_rng_state(state["random"])
        if state["cuda_random"]:
            torch.cuda.set_rng_state_all(state["cuda_random"])
        for name in ("epoch", "step", "train_seconds", "epoch_seconds", "loss_sum", "samples"):
            setattr(self, name, state[name])

    def _checkpoint(self) -> None:
        self.folder.save_checkpoint(self._state())
        self.saved_at = time.monotonic()

    # --- training

    def train(self) -> None:
        """Epochs until the budget is spent or the loss is no longer finite; sets the status."""
        self.model.train()
        while self.epoch <= self.epochs and not self._budget_spent():
            schedules.apply(self.optimizer, self.config.schedule, self.epoch)
            if self.batches.exhausted:
                self.batches.shuffle()
            if not self._rest_of_epoch() or not self._end_epoch():
                self.status = "diverged"
                return
        self.status = "finished"

    def _budget_spent(self) -> bool:
        limit, seconds = self.config.max_steps, self.config.time_budget
        return (limit is not None and self.step >= limit) or (seconds is not None and self.train_seconds >= seconds)

    def _rest_of_epoch(self) -> bool:
        """Steps until the epoch or the budget ends; False if the loss is not finite."""
        while not self.batches.exhausted and not self._budget_spent():
            started = time.perf_counter()
            loss, size = self._take_step()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            seconds = time.perf_counter() - started
            self.train_seconds += seconds
            self.epoch_seconds += seconds
            if not math.isfinite(loss):
                return False
            self.step += 1
            self.loss_sum += loss * size
            self.samples += size
            self.progress.step(self.epoch, self.step, loss)
            if time.monotonic() - self.saved_at >= self.config.checkpoint_seconds and not self.batches.exhausted:
                self._checkpoint()
        return True

    def _take_step(self) -> tuple[float, int]:
        x, y = self.batches.take()
        inputs, targets = self._prepared(x, y)
        self.optimizer.zero_grad()
        loss = self.workload.loss(self.model(inputs), targets)
        value = loss.item()
        if math.isfinite(value):
            loss.backward()
            self.optimizer.step()
        return value, len(x)

    def _prepared(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        inputs, targets = self.workload.prepare(x, y)
        if self.workload.channels_last:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        return inputs, targets

    def _end_epoch(self) -> bool:
        """Evaluate when due, write the lines, save the checkpoint; False if the test loss is not finite."""
        complete = self.batches.exhausted
        last = not complete or self.epoch == self.epochs or self._budget_spent()
        if last or self.epoch % self.config.evaluate_every == 0:
            line = self._measure(complete)
            if not math.isfinite(line["test_loss"]):
                return False
            self._write_lines(line)
        if complete:  # an epoch cut by the budget keeps its older checkpoint: continuing repeats it in full
            self.epoch += 1
            self.epoch_seconds, self.loss_sum, self.samples = 0.0, 0.0, 0
            self._checkpoint()
            self._write_summary()
        return True

    # --- measuring

    def _measure(self, complete: bool) -> dict[str, Any]:
        started = time.perf_counter()
        measured = self._evaluate()
        line = {
            "kind": "epoch",
            "epoch": self.epoch,
            "step": self.step,
            "train_seconds": self.train_seconds,
            "epoch_seconds": self.epoch_seconds,
            "eval_seconds": time.perf_counter() - started,
            "partial": not complete,
            "train_loss": self.loss_sum / self.samples,
            "test_accuracy": None,
            **measured,
        }
        # An optimizer's own "step" or the like must not overwrite the run's.
        return {**line, **{name: value for name, value in self._hyper_parameters().items() if name not in line}}

    @torch.no_grad()
    def _evaluate(self) -> dict[str, float]:
        measures = {"test_loss": self.workload.loss, **self.workload.metrics}
        sums = dict.fromkeys(measures, 0.0)
        self.model.eval()
        for x, y in zip(self.test_x.split(EVALUATION_BATCH), self.test_y.split(EVALUATION_BATCH), strict=True):
            inputs, targets = self._prepared(x, y)
            outputs = self.model(inputs)
            for name, measure in measures.items():
                sums[name] += measure(outputs, targets).item() * len(x)
        self.model.train()
        return {name: total / len(self.test_x) for name, total in sums.items()}

    def _hyper_parameters(self) -> dict[str, float]:
        group = self.optimizer.param_groups[0]
        return {
            name: value
            for name, value in group.items()
            if isinstance(value, int | float) and not isinstance(value, bool)
        }

    def _write_lines(self, line: dict[str, Any]) -> None:
        lines = [line]
        if hasattr(self.optimizer, "report"):
            layers = [dataclasses.asdict(layer) for layer in self.optimizer.report()]
            where = {key: line[key] for key in ("epoch", "step", "train_seconds")}
            lines.append({"kind": "layers", **where, "layers": layers})
        self.folder.append(lines)
        self.lines.append(line)
        self.progress.evaluated(line)
        if self.board is not None:
            for name, value in line.items():
                if isinstance(value, float):
                    self.board.add_scalar(name, value, self.step)
