"""Each parameter as this process has it: whole, or some rows of it where it is sharded, with gradient and buffers alike.

A step works on these rows as on any parameter; what it makes of them, new buffers included, is the sharded tensors' own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import Any

from torch import Tensor, nn

from rkfac import compat


class OwnRows:
    """For one step, as long as nobody replaces a parameter."""

    def __init__(self, parameters: Iterable[nn.Parameter], state: MutableMapping[Any, Any]) -> None:
        self._rows = {id(p): compat.own_rows(p) for p in parameters if compat.is_sharded(p)}
        self.state: MutableMapping[Any, Any] = state
        if self._rows:
            sharded = {id(self._rows[id(p)]): p for p in parameters if id(p) in self._rows}
            self.state = _States(state, sharded)

    def __bool__(self) -> bool:
        """Whether anything is sharded."""
        return bool(self._rows)

    def of(self, p: nn.Parameter) -> Tensor:
        """A parameter's, in which a step is taken by changing them in place."""
        rows = self._rows.get(id(p), p)
        return compat.own_rows(p) if rows is p and compat.is_sharded(p) else rows  # one that no group holds

    def gradient(self, p: nn.Parameter) -> Tensor | None:
        """Of the loss of all processes."""
        return p.grad if p.grad is None or id(p) not in self._rows else compat.own_rows(p.grad)


class _States(MutableMapping[Any, Any]):
    """An optimizer's state, which is asked for by the rows that a step works on."""

    def __init__(self, state: MutableMapping[Any, Any], sharded: Mapping[int, nn.Parameter]) -> None:
        self._state, self._sharded = state, sharded

    def __getitem__(self, key: Any) -> Any:
        whole = self._sharded.get(id(key))
        return self._state[key] if whole is None else _Buffers(self._state[whole], whole)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._state[self._sharded.get(id(key), key)] = value

    def __delitem__(self, key: Any) -> None:
        del self._state[self._sharded.get(id(key), key)]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._state)

    def __len__(self) -> int:
        return len(self._state)


class _Buffers(MutableMapping[str, Any]):
    """What is kept of one sharded parameter, by its own rows; its tensors are sharded as it is."""

    def __init__(self, kept: MutableMapping[str, Any], like: nn.Parameter) -> None:
        self._kept, self._like = kept, like

    def __getitem__(self, key: str) -> Any:
        value = self._kept[key]
        return compat.own_rows(value) if isinstance(value, Tensor) and compat.is_sharded(value) else value

    def __setitem__(self, key: str, value: Any) -> None:
        self._kept[key] = compat.sharded_like(self._like, value) if isinstance(value, Tensor) else value

    def __delitem__(self, key: str) -> None:
        del self._kept[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._kept)

    def __len__(self) -> int:
        return len(self._kept)
