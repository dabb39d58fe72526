"""Arguments that are objects, written as tables: decomposition = {kind = "nystrom", power_iterations = 2}.

A run folder keeps the table, and the object is made anew whenever the optimizer is. A kind is one of ours or anybody's own
as `module:Class`, which must be derived from what the argument is.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .errors import LabError, unknown
from .imports import named


@dataclass(frozen=True)
class Kinds:
    """What an argument may be: where the class is that all of them derive from, and where each kind is."""

    base: str
    known: Mapping[str, str]


DECOMPOSITIONS = Kinds(
    "rkfac:Decomposition",
    {
        "exact": "rkfac:Exact",
        "rsvd": "rkfac:RSVD",
        "srevd": "rkfac:SREVD",
        "nystrom": "rkfac:Nystrom",
        "auto": "rkfac:Auto",
    },
)
OBJECTS = {
    "decomposition": DECOMPOSITIONS,
    "large": DECOMPOSITIONS,  # inside of auto
    "likelihood": Kinds(
        "rkfac:Likelihood",
        {"categorical": "rkfac:Categorical", "gaussian": "rkfac:Gaussian", "bernoulli": "rkfac:Bernoulli"},
    ),
    "inner": Kinds("rkfac:InnerSteps", {"inner-steps": "rkfac:InnerSteps"}),
}


def made(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of one of rkfac's optimizers with objects in the place of tables and of kinds that stand alone."""
    if arguments.get("adaptive_damping") is not None:
        raise LabError("adaptive_damping needs step(closure), and the laboratory calls step(); leave it away.")
    return {key: _object(key, value) if key in OBJECTS else value for key, value in arguments.items()}


def _object(argument: str, value: Any) -> Any:
    if isinstance(value, str):
        value = {"kind": value}
    if not isinstance(value, Mapping):
        return value
    kinds, given = OBJECTS[argument], dict(value)
    kind = given.pop("kind", None)
    if not isinstance(kind, str):
        raise LabError(
            f"{argument} needs a kind, as in {argument} = {{kind = {next(iter(kinds.known))!r}}}; choose from: "
            f"{', '.join(sorted(kinds.known))}."
        )
    made_of = _class(argument, kind, kinds)
    accepted = set(inspect.signature(made_of).parameters)
    for key in given:
        if key not in accepted:
            raise unknown(f"argument of the {argument} {kind}", key, accepted)
    try:
        return made_of(**{key: _object(key, inner) if key in OBJECTS else inner for key, inner in given.items()})
    except (TypeError, ValueError) as error:
        said = ", ".join(f"{key}={inner!r}" for key, inner in given.items()) or "no arguments"
        raise LabError(f"The {argument} {kind} does not accept {said}: {str(error).rstrip('.')}.") from error


def _class(argument: str, kind: str, kinds: Kinds) -> Any:
    if kind not in kinds.known and ":" not in kind:
        raise unknown(f"kind of {argument}", kind, kinds.known)
    found = named(argument, kind, kinds.known.get(kind, kind))
    base = named(argument, kind, kinds.base)
    if not (inspect.isclass(found) and issubclass(found, base)):
        raise LabError(f"The {argument} {kind} is not derived from {kinds.base.replace(':', '.')} and was not called.")
    return found
