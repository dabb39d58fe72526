"""Plain values from files against the types they should have: the wrong key is named, with what would be right."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from typing import Any

from torch import Tensor

from .errors import LabError, unknown

DEEPEST = 20  # tables inside tables; more is no configuration but an attempt on Python's stack
LARGEST_WHOLE = 2**53  # beyond it JSON's numbers are no longer exact, and torch's sizes not far from their end
NAMES = {int: "a whole number", str: "a text", bool: "true or false", Tensor: "a tensor"}


def checked(value: Any, hint: Any, where: str = "") -> Any:
    """`value` as the type `hint`, or a LabError that names the key `where`.

    A dataclass takes exactly its own keys; a TypedDict needs its keys and leaves others alone.
    """
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        inner = next(choice for choice in typing.get_args(hint) if choice is not type(None))
        return None if value is None else checked(value, inner, where)
    if origin is typing.Literal:
        choices = typing.get_args(hint)
        _require(isinstance(value, str) and value in choices, " or ".join(map(repr, choices)), value, where)
        return value
    if origin is dict:
        _require(isinstance(value, dict), "a table", value, where)
        key_hint, value_hint = typing.get_args(hint)
        return {_key(k, key_hint, where): checked(v, value_hint, joined(where, k)) for k, v in value.items()}
    if origin is list:
        _require(isinstance(value, list), "a list", value, where)
        (item,) = typing.get_args(hint)
        return [checked(inner, item, joined(where, number)) for number, inner in enumerate(value, start=1)]
    if hint is Any:
        return _plain(value, where)
    if hint is object:
        return value  # somebody else's to judge
    if typing.is_typeddict(hint):
        return _checked_keys(value, hint, where)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return _checked_table(value, hint, where)
    return _single(value, hint, where)


def joined(where: str, key: Any) -> str:
    """The dotted name of a key inside `where`."""
    return f"{where}.{key}" if where else str(key)


def is_number(value: Any) -> bool:
    """Whether it is a number that can be computed with."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value) if isinstance(value, float) else abs(value) <= LARGEST_WHOLE


def _single(value: Any, hint: Any, where: str) -> Any:
    if hint is float:
        _require(is_number(value), "a number", value, where)
        return value  # an integer stays one: a scheduled rank must not become 220.0
    _require(isinstance(value, hint) and (hint is bool or not isinstance(value, bool)), NAMES[hint], value, where)
    if hint is int:
        _require(abs(value) <= LARGEST_WHOLE, f"a whole number of at most {LARGEST_WHOLE}", value, where)
    return value


def _plain(value: Any, where: str, depth: int = 0) -> Any:
    """A value that JSON can keep, so that the run folder repeats it."""
    if depth > DEEPEST:
        raise LabError(f"{where.split('.')[0]} has more than {DEEPEST} tables or lists inside each other.")
    if isinstance(value, dict):
        return {str(key): _plain(inner, joined(where, key), depth + 1) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner, joined(where, number), depth + 1) for number, inner in enumerate(value, start=1)]
    plain = value is None or isinstance(value, str | bool) or is_number(value)
    _require(plain, "a finite number, a text, true, false, a list or a table", value, where)
    return value


def _checked_table(value: Any, kind: type, where: str) -> Any:
    _require(isinstance(value, dict), "a table", value, where)
    hints = typing.get_type_hints(kind)
    for key in value:
        if key not in hints:
            raise unknown("configuration key", joined(where, key), [joined(where, name) for name in hints])
    return kind(**{key: checked(inner, hints[key], joined(where, key)) for key, inner in value.items()})


def _checked_keys(value: Any, kind: Any, where: str) -> Any:
    _require(isinstance(value, dict), "a table", value, where)
    for key, hint in typing.get_type_hints(kind).items():
        if key in value:
            checked(value[key], hint, joined(where, key))
        elif key in kind.__required_keys__:
            raise LabError(f"{joined(where, key)} is missing.")
    return value


def _key(key: Any, hint: type, where: str) -> Any:
    if hint is str:
        _require(isinstance(key, str), "a text", key, where)
        return key
    if not str(key).isdecimal() or len(str(key)) > 15 or int(key) < 1:
        raise LabError(f"{where} has the key {key!r} where the number of an epoch, from 1, belongs.")
    return int(key)


def _require(condition: bool, wanted: str, value: Any, where: str) -> None:
    if not condition:
        raise LabError(f"{where or 'It'} must be {wanted}, not {_brief(value)}.")


def _brief(value: Any) -> str:
    try:
        said = " ".join(repr(value).split())
    except (ValueError, RecursionError):  # Python refuses to write out numbers of thousands of digits
        said = f"a {type(value).__name__} too large to show"
    return said if len(said) <= 80 else f"{said[:77]}..."
