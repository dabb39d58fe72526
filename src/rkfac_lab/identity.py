"""Which run a folder belongs to: what must be equal to continue it, what may grow, what does not matter."""

from __future__ import annotations

from typing import Any

from . import config, shapes
from .config import RunConfig
from .errors import LabError
from .record import RunFolder

# Keys in which a run may differ from the one it continues: limits may only grow, the others change no number.
LIMITS = ("epochs", "max_steps", "time_budget")
TOTALS = ("epochs", "max_steps")  # the limits that a shape of the learning rate may depend on
HARMLESS = ("label", "data_dir", "tensorboard", "checkpoint_seconds")


def recorded(folder: RunFolder) -> RunConfig:
    """The configuration a folder was begun with; its threads are those it really had, also where none were asked for."""
    values = config.read_folder(folder.path)
    if values.get("threads") is None:
        values["threads"] = folder.environment().get("threads")
    return config.from_dict(values)


def require_same_run(folder: RunFolder, before: RunConfig, now: RunConfig, resume: bool) -> None:
    """Refuse to continue another run, or to continue at all unless asked to."""
    differences = _differences(before.to_dict(), now.to_dict())
    changed = [key for key in differences if key.split(".")[0] not in HARMLESS]
    refused = [key for key in changed if key not in LIMITS or _shrinks(getattr(before, key), getattr(now, key))]
    grown = [key for key in changed if key in TOTALS and key not in refused]
    if grown and not refused and now.lr_shape and shapes.find(now.lr_shape).needs_total:
        raise LabError(
            f"{folder.path} cannot go on with other {' and '.join(grown)}: its learning rate follows the shape "
            f"{now.lr_shape!r}, which ends with the run; choose another --folder, or give runs that are to grow "
            "lr_shape=constant from the start."
        )
    if refused:
        threads = f" (threads: --set threads={before.threads})" if "threads" in refused else ""
        raise LabError(
            f"{folder.path} belongs to a run with another configuration (different: {', '.join(refused)}); "
            f"choose another --folder, or repeat its configuration to continue it{threads}."
        )
    if not resume:
        raise LabError(f"{folder.path} already holds this run; add --resume to continue it or choose another --folder.")


def limits_grew(before: RunConfig, now: RunConfig) -> bool:
    """Whether a run that has ended has more to do."""
    return any(getattr(before, key) != getattr(now, key) for key in LIMITS)


def _differences(old: Any, new: Any, where: str = "") -> list[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        keys = [*old, *(key for key in new if key not in old)]
        return [d for k in keys for d in _differences(old.get(k), new.get(k), f"{where}.{k}" if where else str(k))]
    return [] if old == new else [where]


def _shrinks(old: float | None, new: float | None) -> bool:
    return new is not None and (old is None or new < old)
