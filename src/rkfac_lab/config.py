"""The configuration of a run: TOML in, validated frozen dataclasses out; unknown keys and wrong types are refused."""

from __future__ import annotations

import dataclasses
import json
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from .errors import LabError, unknown

PRESETS = ("", "paper")


@dataclass(frozen=True)
class OptimizerConfig:
    """Which optimizer, and the keywords of its constructor."""

    name: str = "rs-kfac"
    preset: str = ""  # "paper": start from rkfac.paper_defaults() instead of the workload's defaults
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RunConfig:
    """Everything that decides what a run computes; None means the workload's own value."""

    workload: str = "digits-mlp"
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: dict[str, dict[int, float]] = field(default_factory=dict)  # hyper-parameter -> first epoch -> value
    label: str = ""  # name in tables and plots; the optimizer's name if empty
    epochs: int | None = None
    max_steps: int | None = None
    time_budget: float | None = None  # seconds of training, evaluation not counted
    batch_size: int | None = None
    seed: int = 0
    threads: int | None = None
    device: str = "auto"
    evaluate_every: int = 1  # epochs
    checkpoint_seconds: float = 300.0  # also inside an epoch; every epoch's end has one anyway
    data_dir: str | None = None
    text_file: str | None = None
    tensorboard: bool = False

    @property
    def name(self) -> str:
        """What tables call this run."""
        return self.label or self.optimizer.name

    def to_dict(self) -> dict[str, Any]:
        """Plain values that JSON and `from_dict` understand."""
        plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self)))
        return plain


def from_dict(values: Mapping[str, Any]) -> RunConfig:
    """A checked RunConfig; says which key is wrong and what would be right."""
    config: RunConfig = _checked(dict(values), RunConfig, "")
    _check_ranges(config)
    return config


def load(target: str, overrides: Iterable[str] = ()) -> RunConfig:
    """The configuration of a TOML file, a shipped configuration's name, a run folder or a workload's name."""
    from .workloads import WORKLOADS

    path = Path(target)
    if (path / "config.json").is_file():
        values = json.loads((path / "config.json").read_text())
    elif path.suffix == ".toml" or path.is_file():
        values = _read_toml(path)
    elif target in shipped():
        values = tomllib.loads(shipped()[target])
    elif target in WORKLOADS:
        values = {"workload": target}
    else:
        raise unknown("run file, run folder, shipped configuration or workload", target, [*shipped(), *WORKLOADS])
    for text in overrides:
        override(values, text)
    return from_dict(values)


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
    from .workloads import find

    workload = find(config.workload)
    chosen = config.optimizer
    if chosen.preset == "paper":
        import rkfac

        defaults: Mapping[str, Any] = rkfac.paper_defaults()
    else:
        defaults = workload.defaults.get(chosen.name, {})
    arguments = {**defaults, **chosen.arguments}
    schedule = dict(config.schedule)
    if workload.lr_decay and "lr" in arguments and "lr" not in schedule and not chosen.preset:
        factors = {1: 1.0, **workload.lr_decay}
        schedule["lr"] = {epoch: arguments["lr"] * factor for epoch, factor in factors.items()}
    return dataclasses.replace(
        config,
        optimizer=dataclasses.replace(chosen, arguments=arguments),
        schedule=schedule,
        epochs=config.epochs or workload.epochs,
        batch_size=config.batch_size or workload.batch_size,
        threads=config.threads or workload.threads,
    )


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise LabError(f"The run file {path} cannot be read ({error.strerror}); name another one.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise LabError(f"The run file {path} is not valid TOML: {error}.") from error


def _checked(value: Any, hint: Any, where: str) -> Any:
    """`value` as the type `hint`, or a LabError that names the key `where`."""
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        inner = next(choice for choice in typing.get_args(hint) if choice is not type(None))
        return None if value is None else _checked(value, inner, where)
    if hint is Any:
        return value
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return _checked_table(value, hint, where)
    if origin is dict:
        _require(isinstance(value, dict), "a table", value, where)
        key_hint, value_hint = typing.get_args(hint)
        return {_key(k, key_hint, where): _checked(v, value_hint, _join(where, k)) for k, v in value.items()}
    if hint is float:
        _require(isinstance(value, int | float) and not isinstance(value, bool), "a number", value, where)
        return value  # an integer stays one: a scheduled rank must not become 220.0
    names = {int: "a whole number", str: "a text", bool: "true or false"}
    _require(isinstance(value, hint) and (hint is bool or not isinstance(value, bool)), names[hint], value, where)
    return value


def _checked_table(value: Any, kind: type, where: str) -> Any:
    _require(isinstance(value, dict), "a table", value, where)
    hints = typing.get_type_hints(kind)
    for key in value:
        if key not in hints:
            raise unknown("configuration key", _join(where, key), [_join(where, name) for name in hints])
    return kind(**{key: _checked(inner, hints[key], _join(where, key)) for key, inner in value.items()})


def _key(key: Any, hint: type, where: str) -> Any:
    if hint is str:
        return key
    if not str(key).isdecimal() or int(key) < 1:
        raise LabError(f"{where} has the key {key!r} where the number of an epoch, from 1, belongs.")
    return int(key)


def _require(condition: bool, wanted: str, value: Any, where: str) -> None:
    if not condition:
        raise LabError(f"{where or 'The configuration'} must be {wanted}, not {value!r}.")


def _join(where: str, key: Any) -> str:
    return f"{where}.{key}" if where else str(key)


def _check_ranges(config: RunConfig) -> None:
    if config.optimizer.preset not in PRESETS:
        raise unknown("optimizer.preset", config.optimizer.preset, PRESETS)
    for name in ("epochs", "max_steps", "time_budget", "batch_size", "threads", "evaluate_every"):
        value = getattr(config, name)
        if value is not None and not value > 0:
            raise LabError(f"{name} must be greater than zero, not {value!r}.")
    if config.checkpoint_seconds < 0:
        raise LabError(f"checkpoint_seconds must not be negative, not {config.checkpoint_seconds!r}.")
