"""The page of a comparison, `table.md`, from the numbers in its `table.json` and from nothing else."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Union, cast, get_args, get_origin, get_type_hints

from rkfac_lab import disk, promise_text, provenance, summary, table_text
from rkfac_lab.harmless import markdown
from rkfac_lab.promise import Promise
from rkfac_lab.tables import Table1


def text(numbers: Mapping[str, Any]) -> str:
    """Tables, what became of the promise, and what made the runs, where that was recorded."""
    table = _revived(Table1, numbers)
    pairs = [_revived(Promise, pair) for pair in numbers["promises"]]
    made = provenance.to_markdown(numbers["made_by"]) if "made_by" in numbers else ""
    title = f"{markdown(table.workload)}: mean ± standard deviation over the runs, times in seconds.\n\n"
    return title + table_text.to_markdown(table, numbers["reference"]) + promise_text.to_markdown(pairs) + made


def rebuild(folder: Path) -> Path:
    """Write the page of a folder again."""
    numbers = summary.read(folder)
    try:
        page = text(numbers)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        remarks = f"it is not what a comparison writes: {error}"
        raise disk.damaged(folder / "table.json", remarks, summary.REMEDY) from error
    disk.write_text(folder / "table.md", page)
    return folder / "table.md"


def _revived(kind: Any, value: Any) -> Any:
    """Plain values as the dataclasses, tuples and numbers that they were written from; keys that came later are left out."""
    if get_origin(kind) in (Union, types.UnionType):
        (kind,) = (one for one in get_args(kind) if one is not type(None))
        return None if value is None else _revived(kind, value)
    if get_origin(kind) is tuple:
        return tuple(_revived(get_args(kind)[0], one) for one in value)
    if not is_dataclass(kind):
        return value
    hints, made = get_type_hints(kind), cast(Callable[..., Any], kind)
    return made(**{field.name: _revived(hints[field.name], value[field.name]) for field in fields(kind)})
