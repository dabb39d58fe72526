"""How a gradient becomes a step: torch's SGD, torch's AdamW, or the preconditioner's own length."""

from rkfac.optim.rules.adamw import AdamW
from rkfac.optim.rules.base import Course, Curved, Group, Rule, State, decay_of, longest, square_of
from rkfac.optim.rules.own import Coupled, Own
from rkfac.optim.rules.sgd import SGD

GRAFTS: dict[str | None, Rule] = {None: Own(), "sgd": SGD(), "adamw": AdamW()}

__all__ = [
    "GRAFTS",
    "SGD",
    "AdamW",
    "Coupled",
    "Course",
    "Curved",
    "Group",
    "Own",
    "Rule",
    "State",
    "decay_of",
    "longest",
    "square_of",
]
