"""The configuration of a run: TOML in, validated frozen dataclasses out; unknown keys and wrong types are refused."""

from __future__ import annotations

import dataclasses
import json
import os
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from . import disk, shapes
from .errors import LabError, unknown
from .structure import checked

PRESETS = ("", "paper")
FILE = "config.json"  # the configuration in a run folder
REMEDY = "repair it, or delete the run folder and run again"
LONGEST_LABEL = 200


@dataclass(frozen=True)
class OptimizerConfig:
    """Which optimizer, and the keywords of its constructor."""

    name: str = "rs-kfac"
    preset: str = ""  # "paper": start from rkfac.paper_defaults() or seng_defaults(), not from the workload's
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RunConfig:
    """Everything that decides what a run computes; None means the workload's own value."""

    workload: str = "digits-mlp"
    model: str | None = None  # module:NAME of a function that makes one of the data, in the place of the workload's
    data: str | None = None  # likewise of the data
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: dict[str, dict[int, float]] = field(default_factory=dict)  # hyper-parameter -> first epoch -> value
    lr_shape: str | None = None  # of the learning rate over the run; a schedule of lr goes instead of it
    label: str = ""  # name in tables and plots; the optimizer's name if empty
    epochs: int | None = None
    max_steps: int | None = None
    time_budget: float | None = None  # seconds of training, evaluation not counted
    batch_size: int | None = None
    seed: int = 0
    threads: int | None = None
    device: str = "auto"
    evaluate_every: int = 1  # epochs
    evaluate_steps: int | None = None  # also inside epochs, every so many steps of the run; 0: never
    validation_share: float = 0.0  # of the training data, kept apart and measured in place of the test set
    checkpoint_seconds: float = 300.0  # also inside an epoch; an epoch's end has one where it is worth the time
    data_dir: str | None = None
    text_file: str | None = None
    tensorboard: bool = False

    @property
    def name(self) -> str:
        """What tables call this run."""
        return self.label or self.optimizer.name

    @property
    def problem(self) -> str:
        """What tables call that which it is a run of: other models and other data are other problems."""
        own = {"model": self.model, "data": self.data}
        return ", ".join([self.workload, *(f"{key} {place}" for key, place in own.items() if place is not None)])

    def to_dict(self) -> dict[str, Any]:
        """Plain values that JSON and `from_dict` understand."""
        plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self)))
        return plain


def from_dict(values: Mapping[str, Any]) -> RunConfig:
    """A checked RunConfig; says which key is wrong and what would be right."""
    config: RunConfig = checked(dict(values), RunConfig)
    _check_ranges(config)
    return config


def read_folder(folder: Path) -> dict[str, Any]:
    """The configuration kept in a run folder as it was written, checked; FileNotFoundError where there is none."""
    path = folder / FILE
    values = disk.read_json(path, REMEDY)
    try:
        from_dict(checked(values, dict[str, Any]))
    except LabError as error:
        raise disk.damaged(path, str(error), REMEDY) from error
    plain: dict[str, Any] = values
    return plain


def load(target: str, overrides: Iterable[str] = (), workload: str | None = None) -> RunConfig:
    """The configuration of a TOML file, a shipped configuration's name, a run folder or a workload's name or place.

    `workload`: of a file that names none.
    """
    from .workloads import WORKLOADS

    path = Path(target)
    if is_folder(path):
        values = read_folder(path)
    elif path.suffix == ".toml" or os.path.isfile(path):
        values = _read_toml(path)
    elif target in shipped():
        values = tomllib.loads(shipped()[target])
    elif target in WORKLOADS or ":" in target:
        values = {"workload": target}
    else:
        raise unknown("run file, run folder, shipped configuration or workload", target, [*shipped(), *WORKLOADS])
    if workload is not None:
        values.setdefault("workload", workload)
    for text in overrides:
        override(values, text)
    return from_dict(values)


def is_folder(path: Path) -> bool:
    """Whether a run has begun in this folder; what lies there instead of its configuration is for `read_folder` to say."""
    return os.path.lexists(path / FILE)


def shipped() -> dict[str, str]:
    """Contents of the configurations that come with the package, by name."""
    folder = resources.files("rkfac_lab") / "configs"
    return {
        file.name.removesuffix(".toml"): file.read_text() for file in folder.iterdir() if file.name.endswith(".toml")
    }


def override(values: dict[str, Any], text: str) -> None:
    """Apply one `--set dotted.key=value` in place; the value is read as TOML, else as a bare word."""
    key, equals, raw = text.partition("=")
    if not equals or not key.strip():
        raise LabError(f"--set {text!r} is not of the form key=value, such as optimizer.arguments.lr=0.1.")
    try:
        value = tomllib.loads(f"value = {raw}")["value"]
    except tomllib.TOMLDecodeError:
        value = raw.strip()
    *parents, last = key.strip().split(".")
    table = values
    for parent in parents:
        table = table.setdefault(parent, {})
        if not isinstance(table, dict):
            raise LabError(f"--set {text!r}: {parent!r} is a single value and has no keys inside.")
    table[last] = value


def resolve(config: RunConfig) -> RunConfig:
    """Fill in what the workload or the preset decides; resolving twice changes nothing."""
    from .optimizers import grafted, kin
    from .workloads import find

    workload = find(config.workload, config.model, config.data)
    chosen = config.optimizer
    if chosen.preset == "paper":
        import rkfac

        if grafted(chosen.name)[1] is not None:
            raise LabError(f"{chosen.name} takes another's settings and no preset; leave optimizer.preset away.")

        paper = rkfac.seng_defaults() if kin(chosen.name) == "seng" else rkfac.paper_defaults()
        defaults: Mapping[str, Any] = {**workload.kfac_needs, **paper}
    else:
        defaults = workload.arguments(chosen.name)
    arguments = {**defaults, **chosen.arguments}
    shape = config.lr_shape or ("constant" if chosen.preset else workload.lr_shape)
    return dataclasses.replace(
        config,
        optimizer=dataclasses.replace(chosen, arguments=arguments),
        lr_shape="constant" if "lr" in config.schedule else shape,
        epochs=config.epochs or workload.epochs,
        batch_size=config.batch_size or workload.batch_size,
        evaluate_steps=(workload.evaluate_steps or 0) if config.evaluate_steps is None else config.evaluate_steps,
        threads=config.threads or workload.threads or torch.get_num_threads(),  # decides the last bits of every sum
    )


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        values = tomllib.loads(disk.read(path).decode("utf-8"))
        from_dict(values)
    except FileNotFoundError as error:
        raise LabError(f"The run file {path} cannot be read ({error.strerror}); name another one.") from error
    except RecursionError as error:
        raise LabError(f"The run file {path} is not valid TOML: nested without end; repair it.") from error
    except ValueError as error:  # also texts that are not UTF-8, and numbers of thousands of digits
        raise LabError(f"The run file {path} is not valid TOML: {str(error).rstrip('.')}; repair it.") from error
    except LabError as error:
        raise LabError(f"The run file {path} has to be mended: {error}") from error
    return values


def most_threads() -> int:
    """More threads than this can only fail or crawl; a run from a larger machine may still be repeated on a small one."""
    return max(64, 4 * (os.cpu_count() or 1))


def _check_ranges(config: RunConfig) -> None:
    if config.optimizer.preset not in PRESETS:
        raise unknown("optimizer.preset", config.optimizer.preset, PRESETS)
    for name in ("epochs", "max_steps", "time_budget", "batch_size", "threads", "evaluate_every"):
        value = getattr(config, name)
        if value is not None and not value > 0:
            raise LabError(f"{name} must be greater than zero, not {value!r}.")
    if config.threads is not None and config.threads > most_threads():
        raise LabError(f"threads must be at most {most_threads()} on this machine, not {config.threads}.")
    for name in ("checkpoint_seconds", "evaluate_steps"):
        if (getattr(config, name) or 0) < 0:
            raise LabError(f"{name} must not be negative, not {getattr(config, name)!r}.")
    if config.lr_shape is not None:
        shapes.find(config.lr_shape)
    if not 0 <= config.validation_share <= 0.5:
        raise LabError(f"validation_share must lie between 0 and 0.5, not {config.validation_share!r}.")
    if len(config.label) > LONGEST_LABEL:
        raise LabError(f"label must have at most {LONGEST_LABEL} characters, not {len(config.label)}.")
