"""When a layer's curvature is looked at again: seldom while it stays what it was (SP-NGD's stale statistics).

Osawa, Tsuji, Ueno, Naruse, Foo, Yokota: "Scalable and Practical Natural Gradient for Large-Scale Deep Learning" (2020).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Snapshot = Any  # what a block calls its curvature as it was; only the block can compare two of them


class Pace:
    """The interval between two looks at one layer, in steps: 1, 1, 2, 3, 5, 8... while nothing changes.

    With X the new curvature and X_1, X_2 the last two: where X is `threshold` or more away from X_1 the interval halves;
    where it is that far from X_2 alone it stays; else it becomes the sum of the last two intervals.
    """

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold
        self.interval, self.before = 1, 1
        self.age = 1  # steps since the last statistics; the first are due
        self.taken = False  # whether statistics came in that no step was taken with yet
        self.news = False  # whether statistics came in that nothing was made of yet
        self.seen: tuple[Snapshot, ...] = ()  # the last two, the younger one first

    @property
    def due(self) -> bool:
        """Whether statistics are wanted of the coming step."""
        return self.age >= self.interval

    def tick(self) -> None:
        """One more step was taken. Only now do its statistics count: after an error the same step is planned again."""
        self.age = 1 if self.taken else self.age + 1
        self.taken = False

    def decay(self, decay: float, every: int) -> float:
        """What is left of the average when a statistic comes after `age` steps, if `decay` is left after `every`."""
        return float(decay ** (self.age / every))

    def took(self) -> None:
        """Statistics came in."""
        self.taken = self.news = True

    def looked(self, now: Snapshot, distance: Callable[[Snapshot, Snapshot], float]) -> None:
        """A new decomposition was made of them: say when the next one is due."""
        self.news = False
        changed = [not distance(now, then) < self.threshold for then in self.seen]  # NaN counts as a change
        if changed and changed[0]:
            following = max(1, self.interval // 2)
        elif len(changed) < 2 or changed[1]:
            following = self.interval
        else:
            following = self.interval + self.before
        self.interval, self.before = following, self.interval
        self.seen = (now, *self.seen[:1])

    def state_dict(self, packed: Callable[[Snapshot], Any]) -> dict[str, Any]:
        """Numbers, and snapshots as the block packs them."""
        return {
            "interval": self.interval,
            "before": self.before,
            "age": self.age,
            "taken": self.taken,
            "news": self.news,
            "seen": [packed(snapshot) for snapshot in self.seen],
        }

    def load_state_dict(self, state: Mapping[str, Any], unpacked: Callable[[Any], Snapshot]) -> None:
        """Restore what `state_dict` saved; refuses senseless numbers."""
        numbers = {key: state[key] for key in ("interval", "before", "age")}
        if any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in numbers.values()):
            raise ValueError(f"the saved intervals are {numbers}")
        if not all(isinstance(state[key], bool) for key in ("taken", "news")):
            raise ValueError(f"the saved state has news {state['news']!r} and statistics {state['taken']!r}")
        if not isinstance(state["seen"], list) or len(state["seen"]) > 2:
            raise ValueError("the saved snapshots of a layer are not two at most")
        seen = tuple(unpacked(saved) for saved in state["seen"])
        self.interval, self.before, self.age = numbers["interval"], numbers["before"], numbers["age"]
        self.taken, self.news, self.seen = state["taken"], state["news"], seen
