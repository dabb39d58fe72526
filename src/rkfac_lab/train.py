"""The only training loop: one run from a configuration to its folder, resumable bit for bit."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import random
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from . import (
    averaging,
    board,
    checkpoint,
    disk,
    identity,
    machine,
    metrics,
    optimizers,
    ranks,
    record,
    schedules,
    shapes,
)
from .config import RunConfig, resolve
from .data import Sources
from .data.batches import Batches
from .errors import AbandonedError, CrashError, LabError, one_line
from .lock import locked
from .progress import ProgressReporter, Silent
from .ranks import Ranks
from .record import Elsewhere, Run, RunFolder
from .validation import held_out
from .workloads import find

EVALUATION_BATCH = 1000
QUICK_SAVE = 0.25  # seconds


def run(config: RunConfig, folder: Path, *, resume: bool = False, progress: ProgressReporter | None = None) -> Run:
    """Train as `config` says, write the run folder and return it as read back.

    With `resume` a run that already ended is returned as it is, and one cut short continues from its checkpoint.
    Ctrl-C writes the summary with status "interrupted" and raises KeyboardInterrupt again. Whatever goes wrong
    otherwise ends in a LabError of one sentence; a traceback there is to show lies in the folder.
    Of several processes (`ranks.here()`) each takes its share of every batch, and the first one has the folder.
    """
    together = ranks.here()
    target = RunFolder(Path(folder)) if together.first else Elsewhere(Path(folder))
    with contextlib.ExitStack() as held:
        try:
            whole = together.from_first(lambda: _whole(config))
            together.by_first(lambda: held.enter_context(locked(target.path)))
            held.enter_context(machine.threads(whole.threads))
            if not together.from_first(lambda: _has_ended(target, whole, resume)):
                _train(whole, target, progress or Silent(), together)
            return together.from_first(lambda: record.load_run(target.path))
        except Exception as error:
            alike, foreseen = together.failed_alike(error), isinstance(error, LabError)
            if alike and foreseen:
                raise
            kept = None if foreseen or (alike and not together.first) else target.keep_traceback()
            raise (CrashError(error, kept) if alike else AbandonedError(str(together), error, kept)) from error


def _whole(config: RunConfig) -> RunConfig:
    """With everything filled in; what cannot be done here is refused now."""
    board.require(config)
    whole = resolve(config)
    optimizers.understood(whole.optimizer.name, whole.optimizer.arguments)  # before the folder is asked whose it is
    return whole


def _has_ended(target: RunFolder, config: RunConfig, resume: bool) -> bool:
    """Whether the folder holds this very run and nothing is left to do; refuses a folder of another run."""
    if not target.exists():
        return False
    before = identity.recorded(target)
    identity.require_same_run(target, before, config, resume)
    status = record.load_run(target.path).summary.get("status")
    return status == "diverged" or (status == "finished" and not identity.limits_grew(before, config))


def _train(config: RunConfig, target: RunFolder, progress: ProgressReporter, together: Ranks) -> None:
    trainer = _Trainer(config, target, progress, together)
    trainer.open()
    try:
        trainer.train()
    except KeyboardInterrupt:
        trainer.status = "interrupted"
        raise
    finally:
        trainer.close()


class _Trainer:
    """The state of one run; everything that `_state` saves decides the numbers to come."""

    def __init__(self, config: RunConfig, folder: RunFolder, progress: ProgressReporter, together: Ranks) -> None:
        assert config.epochs is not None
        assert config.batch_size is not None
        assert config.lr_shape is not None  # `resolve` has filled them in
        self.config, self.folder, self.progress, self.together = config, folder, progress, together
        self.workload = held_out(find(config.workload, config.model, config.data), config.validation_share)
        self.device = machine.device(config.device, together)
        data = self.workload.data(Sources(config.data_dir, config.text_file))
        random.seed(config.seed)
        np.random.seed(config.seed % 2**32)
        torch.manual_seed(config.seed)
        self.model: nn.Module = self.workload.model(data).to(self.device)
        if self.workload.channels_last:
            self.model = self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        averaging.same_start(self.model, together)
        chosen = config.optimizer
        self.optimizer = optimizers.build(chosen.name, self.model, chosen.arguments, seed=config.seed)
        schedules.check(config.schedule, self.optimizer, chosen, self.model)
        self.rate = shapes.ShapedRate(config.lr_shape, self.optimizer)
        train_x, train_y = data.train_x.to(self.device), data.train_y.to(self.device)
        self.batches = Batches(train_x, train_y, config.batch_size, config.seed, self.workload.augment)
        measured_on = self._evaluated_samples(len(data.test_x))
        self.test_x, self.test_y = data.test_x[measured_on].to(self.device), data.test_y[measured_on].to(self.device)
        self.epochs = config.epochs
        self.total_steps = min(self.epochs * len(self.batches), config.max_steps or sys.maxsize)
        self.epoch, self.step = 1, 0  # the epoch under way, counted from 1; steps taken
        self.train_seconds = self.cpu_seconds = self.epoch_seconds = 0.0  # steps alone; the last in the epoch under way
        self.loss_sum, self.samples = 0.0, 0  # since the last evaluation that was due, or the epoch's beginning
        self.lines: list[dict[str, Any]] = []
        self.status = "running"
        self.saved_at, self.saving_takes = time.monotonic(), 0.0
        self.board: Any = None

    # --- the run folder

    def open(self) -> None:
        """Continue from the folder's checkpoint or begin; what cannot be continued is refused before anything is written."""
        self.folder.sweep()
        state = self.together.from_first(self.folder.load_checkpoint)
        if state is not None:
            self._restore(state)
        again = not self._budget_spent()  # then what was measured only because the budget ended there is dropped
        found = self.together.from_first(self.folder.lines)
        kept = [line for line in found if line["kind"] == "epoch" and line["step"] <= self.step]
        self.lines = [ln for ln in kept if not (again and ln.get("partial") and not self._due_inside(ln["step"]))]
        self._require_lines()
        self.folder.write(record.CONFIG, self.config.to_dict())
        self.folder.write(record.ENVIRONMENT, record.environment(self.device, self.together.size))
        self._write_summary()  # before lines are dropped: a summary never knows more than the metrics
        self.folder.keep({line["step"] for line in self.lines})
        if self.config.tensorboard and self.together.first:
            self.board = board.opened(self.folder.path, self.step)
        self.progress.begin(self.config.name, self.total_steps, self.step)

    def _require_lines(self) -> None:
        """Whatever was due before the checkpoint was measured before it was saved."""
        every, length = self.config.evaluate_every, len(self.batches)
        due = {epoch * length for epoch in range(every, self.epoch, every)}
        due |= {step for step in range(1, self.step + 1) if self._due_inside(step)}
        missing = due - {line["step"] for line in self.lines}
        if missing:
            epoch = -(-min(missing) // length)
            why = f"it lacks step {min(missing)} of epoch {epoch}, which {record.CHECKPOINT} has behind it"
            raise disk.damaged(self.folder.path / record.METRICS, why, metrics.REMEDY)

    def close(self) -> None:
        """Write the summary and let go of hooks and files; "running" is what a crash leaves behind."""
        try:
            self._write_summary()
            if self.status == "finished":
                self.folder.forget_traceback()
        finally:
            self.progress.end(self.status)
            if self.board is not None:
                self.board.close()
            if hasattr(self.optimizer, "close"):
                self.optimizer.close()

    def _write_summary(self) -> None:
        facts = {
            "workload": self.config.problem,
            "optimizer": self.config.optimizer.name,
            "kfac": optimizers.derives(type(self.optimizer)),  # a name of somebody's own does not say it
            "label": self.config.name,
            "seed": self.config.seed,
            "status": self.status,
            "epochs": self.epoch - 1,
            "steps": self.step,
            "train_seconds": self.train_seconds,
            "cpu_seconds": self.cpu_seconds,
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
            "cpu_seconds": self.cpu_seconds,
            "epoch_seconds": self.epoch_seconds,
            "loss_sum": self.loss_sum,
            "samples": self.samples,
        }

    def _restore(self, state: dict[str, Any]) -> None:
        try:
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.batches.load_state_dict(state["batches"])
            torch.set_rng_state(state["random"])
            if state["cuda_random"] and self.together.alone:
                torch.cuda.set_rng_state_all(state["cuda_random"])
            elif state["cuda_random"]:  # what optimizers draw must be the same on every device
                torch.cuda.set_rng_state(state["cuda_random"][0], self.device)
        except Exception as error:  # whose state it is decides how it fails
            path = self.folder.path / record.CHECKPOINT
            raise disk.damaged(path, f"it does not fit this run: {one_line(error)[:200]}", checkpoint.REMEDY) from error
        for name in ("epoch", "step", "train_seconds", "cpu_seconds", "epoch_seconds", "loss_sum", "samples"):
            setattr(self, name, state[name])

    def _checkpoint(self) -> None:
        begun = time.monotonic()
        self.folder.save_checkpoint(self._state())  # in all processes: each may have a part of the optimizer's
        self.saved_at = time.monotonic()
        self.saving_takes = self.saved_at - begun

    def _worth_saving(self) -> bool:
        """Whether a checkpoint at an epoch's end is quick, or takes no more than a twentieth of the time since the last."""
        return self.together.from_first(
            lambda: self.saving_takes < QUICK_SAVE or time.monotonic() - self.saved_at >= 20 * self.saving_takes
        )

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
        self.status = "finished" if self._measure_rest() else "diverged"

    def _budget_spent(self) -> bool:
        limit, seconds = self.config.max_steps, self.config.time_budget
        return (limit is not None and self.step >= limit) or (seconds is not None and self.train_seconds >= seconds)

    def _rest_of_epoch(self) -> bool:
        """Steps until the epoch or the budget ends; False if the loss, or one that is measured, is not finite."""
        while not self.batches.exhausted and not self._budget_spent():
            self.rate.apply(
                shapes.Moment(self.step + 1, self.total_steps, self.epoch, (self.step + 1) / len(self.batches))
            )
            started, cpu_started = time.perf_counter(), time.process_time()
            loss, size = self._take_step()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            seconds, cpu, save = self._agreed(time.perf_counter() - started, time.process_time() - cpu_started)
            self.train_seconds += seconds
            self.epoch_seconds += seconds
            self.cpu_seconds += cpu
            if not math.isfinite(loss):
                return False
            self.step += 1
            self.loss_sum += loss * size
            self.samples += size
            self.progress.step(self.epoch, self.step, loss)
            if self._due_inside(self.step) and not self.batches.exhausted:
                if not self._measure(partial=True):
                    return False
                self.loss_sum, self.samples = 0.0, 0
            if save and not self.batches.exhausted:
                self._checkpoint()
        return True

    def _take_step(self) -> tuple[float, int]:
        """The loss and the size of the batch, of which every process takes its share.

        The gradient is that of the mean over the batch: gradients are averaged over the processes, so each one's loss, the
        mean over its share, counts in proportion to the share. A process without samples has no pass at all.
        """
        x, y = self.batches.take()
        mine, weight = self.together.share(len(x))
        averaging.same_buffers(self.model, self.together)
        self.optimizer.zero_grad()
        with averaging.own_randomness(self.together, self.device, self.config.seed, self.step):
            loss = self._loss(x[mine], y[mine]) if weight else None
            (value,) = self.together.sums(0.0 if loss is None else weight * loss.item())
            if loss is not None and math.isfinite(value):
                (loss if self.together.alone else loss * (weight * self.together.size)).backward()
        if math.isfinite(value):
            averaging.average_gradients(self.model, self.together)
            self.optimizer.step()
        return value, len(x)

    def _agreed(self, seconds: float, cpu: float) -> tuple[float, float, bool]:
        """Of a step: seconds, and whether a checkpoint is due, by the first process's clock; seconds of computing in all."""
        due = time.monotonic() - self.saved_at >= self.config.checkpoint_seconds
        seconds, save, cpu = self.together.sums(*((seconds, float(due)) if self.together.first else (0.0, 0.0)), cpu)
        return seconds, cpu, bool(save)

    def _loss(self, x: Tensor, y: Tensor) -> Tensor:
        inputs, targets = self._prepared(x, y)
        return self.workload.loss(self.model(inputs), targets)

    def _prepared(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        inputs, targets = self.workload.prepare(x, y)
        if self.workload.channels_last:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        return inputs, targets

    def _end_epoch(self) -> bool:
        """Evaluate when due, write the lines, save the checkpoint; False if what was measured is not finite."""
        if not self.batches.exhausted:  # cut by the budget: a larger one continues from here
            self._checkpoint()
            return True
        last = self.epoch == self.epochs or self._budget_spent()
        due = last or self.epoch % self.config.evaluate_every == 0 or self._due_inside(self.step)
        if due and not self._measure(partial=False):
            return False
        self.epoch += 1
        self.epoch_seconds, self.loss_sum, self.samples = 0.0, 0.0, 0
        if last or self._worth_saving():
            self._checkpoint()
        self._write_summary()
        return True

    def _measure_rest(self) -> bool:
        """Evaluate inside an epoch that the budget cut, also when the run was killed before it came to that."""
        measured = self.lines[-1]["step"] if self.lines else 0
        return measured == self.step or self._measure(partial=True)

    # --- measuring

    def _due_inside(self, step: int) -> bool:
        """Whether a step is followed by an evaluation wherever in its epoch it lies."""
        every = self.config.evaluate_steps
        return bool(every and step % every == 0)

    def _evaluated_samples(self, available: int) -> Tensor:
        """The same test samples at every evaluation: all, or as many as the workload says, spread evenly."""
        count = min(available, self.workload.evaluation_size or available)
        return torch.arange(count) * available // count

    def _measure(self, *, partial: bool) -> bool:
        """Evaluate and write it down; False, and nothing written, if the loss is not finite."""
        started = time.perf_counter()
        measured = self._evaluate()
        if not math.isfinite(measured[f"{self.workload.measured_on}_loss"]):
            return False
        line = {
            "kind": "epoch",
            "epoch": self.epoch,
            "epochs_done": self.step / len(self.batches),
            "step": self.step,
            "train_seconds": self.train_seconds,
            "cpu_seconds": self.cpu_seconds,
            "epoch_seconds": self.epoch_seconds,
            "eval_seconds": time.perf_counter() - started,
            "partial": partial,
            "train_loss": self.loss_sum / self.samples,
            f"{self.workload.measured_on}_accuracy": None,
            **measured,
        }
        # An optimizer's own "step" or the like must not overwrite the run's.
        self._write_lines({**line, **{k: v for k, v in self._hyper_parameters().items() if k not in line}})
        return True

    @torch.no_grad()
    def _evaluate(self) -> dict[str, float]:
        """Means over the test samples, whose batches go round the processes; added up in one order, whoever had which."""
        measures = {f"{self.workload.measured_on}_loss": self.workload.loss, **self.workload.metrics}
        batches = list(zip(self.test_x.split(EVALUATION_BATCH), self.test_y.split(EVALUATION_BATCH), strict=True))
        found = torch.zeros(len(batches), len(measures), dtype=torch.float64)
        averaging.same_buffers(self.model, self.together)
        self.model.eval()
        for number in range(self.together.rank, len(batches), self.together.size):
            x, y = batches[number]
            inputs, targets = self._prepared(x, y)
            outputs = self.model(inputs)
            for at, measure in enumerate(measures.values()):
                found[number, at] = measure(outputs, targets).item() * len(x)
        self.model.train()
        self.together.add_up(found, "measurements")
        return {name: sum(own) / len(self.test_x) for name, own in zip(measures, found.T.tolist(), strict=True)}

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
            where = {key: line[key] for key in ("epoch", "epochs_done", "step", "train_seconds")}
            lines.append({"kind": "layers", **where, "layers": layers})
        self.folder.append(lines)
        self.lines.append(line)
        self.progress.evaluated(line)
        if self.board is not None:
            for name, value in line.items():
                if isinstance(value, float):
                    self.board.add_scalar(name, value, self.step)
