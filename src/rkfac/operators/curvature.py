"""The curvature of a whole model: an operator a layer, and products for all parameters at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from os import PathLike
from typing import Any, Literal, overload

from torch import Tensor

from rkfac.curvature.damping import RULES
from rkfac.operators import saving
from rkfac.operators.layer import Layer, damped
from rkfac.operators.operator import Operator

UNCHANGED: Any = object()


class Curvature(Mapping[str, Operator]):
    """Block-diagonal: `curvature[name]` is the operator of one layer, and layers know nothing of each other.

    `left_out` says of every parameter without a block why it has none; `shapes` are those of all parameters, in the model's
    order. Tensors for the whole model are given as a mapping by parameter name, of whole layers, or as a list with one entry
    (or None) a parameter, and come back as such.
    """

    def __init__(
        self, layers: Mapping[str, Layer], shapes: Mapping[str, tuple[int, ...]], left_out: Mapping[str, str]
    ) -> None:
        self.layers = dict(layers)
        self.shapes = dict(shapes)
        self.left_out = dict(left_out)
        self._made: dict[str, Operator] = {}

    # --- layers

    def __getitem__(self, name: str) -> Operator:
        """The operator of a layer, made once."""
        if name not in self.layers:
            raise KeyError(
                f"no layer with a curvature is called {name!r}; there are {', '.join(map(repr, self.layers))}"
            )
        if name not in self._made:
            self._made[name] = self.layers[name].operator()
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    def __repr__(self) -> str:
        covered = sum(layer.layout.size for layer in self.layers.values())
        rest = f", {len(self.left_out)} parameters left out" if self.left_out else ""
        return f"{type(self).__name__}({len(self)} layers with {covered:,} parameters{rest})"

    @property
    def samples(self) -> int | None:
        """Of how many samples it is the mean; None for the running averages of an optimizer."""
        known = [layer.samples for layer in self.layers.values() if layer.samples is not None]
        return max(known, default=None)

    def damped(
        self,
        damping: float,
        *,
        damping_rule: Literal["factored", "product", "pi"] | None = None,
        relative_to: Literal["mean", "largest"] | None = UNCHANGED,
    ) -> Curvature:
        """The same eigenpairs with another damping in all layers, and another rule or unit for it where these are given."""
        if not isinstance(damping, int | float) or isinstance(damping, bool) or not 0 <= damping < float("inf"):
            raise ValueError(f"damping must be a finite number >= 0, got {damping!r}")
        if damping_rule is not None and damping_rule not in RULES:
            raise ValueError(f"damping_rule must be one of {', '.join(map(repr, RULES))}, got {damping_rule!r}")
        if relative_to is not UNCHANGED and relative_to not in ("mean", "largest", None):
            raise ValueError(f"relative_to must be 'mean', 'largest' or None, got {relative_to!r}")
        layers = {}
        for name, layer in self.layers.items():
            if layer.kind == "moments" and damping_rule not in (None, "product"):
                raise ValueError(
                    f"damping_rule={damping_rule!r} damps factors, and layer {name!r} has second moments: say 'product'"
                )
            kind = type(layer.rule) if damping_rule is None else RULES[damping_rule]
            unit = layer.rule.relative_to if relative_to is UNCHANGED else relative_to
            layers[name] = damped(layer, float(damping), kind(unit))
        return Curvature(layers, self.shapes, self.left_out)

    # --- the whole model

    @overload
    def vector_product(self, tensors: Mapping[str, Tensor], uncovered: float | None = None) -> dict[str, Tensor]: ...
    @overload
    def vector_product(
        self, tensors: Sequence[Tensor | None], uncovered: float | None = None
    ) -> list[Tensor | None]: ...
    def vector_product(self, tensors: Any, uncovered: float | None = None) -> Any:
        """C v, layer by layer."""
        return self._applied(lambda operator, v: operator @ v, tensors, uncovered, 1.0)

    @overload
    def inverse_vector_product(
        self, tensors: Mapping[str, Tensor], uncovered: float | None = None
    ) -> dict[str, Tensor]: ...
    @overload
    def inverse_vector_product(
        self, tensors: Sequence[Tensor | None], uncovered: float | None = None
    ) -> list[Tensor | None]: ...
    def inverse_vector_product(self, tensors: Any, uncovered: float | None = None) -> Any:
        """C^-1 v, layer by layer: 4 (r_G + r_A) flops a parameter.

        Parameters without a block are refused, unless `uncovered` is given: then their curvature is that number times the
        identity.
        """
        return self._applied(lambda operator, v: operator.solve(v), tensors, uncovered, -1.0)

    @overload
    def inverse_sqrt_vector_product(
        self, tensors: Mapping[str, Tensor], uncovered: float | None = None
    ) -> dict[str, Tensor]: ...
    @overload
    def inverse_sqrt_vector_product(
        self, tensors: Sequence[Tensor | None], uncovered: float | None = None
    ) -> list[Tensor | None]: ...
    def inverse_sqrt_vector_product(self, tensors: Any, uncovered: float | None = None) -> Any:
        """C^-1/2 v: of white noise it makes samples of N(0, C^-1)."""
        return self._applied(lambda operator, v: operator.sqrt_solve(v), tensors, uncovered, -0.5)

    def logdet(self) -> float:
        """Of all layers together; parameters left out do not count."""
        return sum(operator.logdet() for operator in self.values())

    def trace(self) -> float:
        """Likewise."""
        return sum(operator.trace() for operator in self.values())

    def diagonal(self) -> dict[str, Tensor]:
        """diag(C) by parameter name, in the parameters' shapes and float64."""
        parts = ((operator, operator.unflatten(operator.diagonal())) for operator in self.values())
        return {name: t for operator, own in parts for name, t in zip(operator.parameters, own, strict=True)}

    def _applied(
        self, act: Callable[[Operator, Tensor], Tensor], tensors: Any, uncovered: float | None, power: float
    ) -> Any:
        if isinstance(tensors, Mapping):
            return self._by_name(act, tensors, uncovered, power)
        given = list(tensors)
        if len(given) != len(self.shapes):
            raise ValueError(
                f"{len(given)} tensors were given for {len(self.shapes)} parameters: one each, or a mapping"
            )
        named = {name: t for name, t in zip(self.shapes, given, strict=True) if t is not None}
        found = self._by_name(act, named, uncovered, power)
        return [found.get(name) for name in self.shapes]

    def _by_name(
        self,
        act: Callable[[Operator, Tensor], Tensor],
        tensors: Mapping[str, Tensor],
        uncovered: float | None,
        power: float,
    ) -> dict[str, Tensor]:
        if unknown := [name for name in tensors if name not in self.shapes]:
            raise ValueError(f"the model has no parameter called {unknown[0]!r}")
        found: dict[str, Tensor] = {}
        for name, layer in self.layers.items():
            own = [key for key in layer.parameters if key in tensors]
            if own and len(own) < len(layer.parameters):
                raise ValueError(f"layer {name!r} acts on {' and '.join(layer.parameters)} together: give all, or none")
            if own:
                operator = self[name]
                product = operator.unflatten(act(operator, operator.flatten([tensors[key] for key in own])))
                found |= dict(zip(own, product, strict=True))
        for name in tensors.keys() - found.keys():
            if uncovered is None:
                why = self.left_out.get(name, "no layer has it")
                raise ValueError(
                    f"{name!r} has no curvature ({why}): leave it out, or say uncovered=c for c times the identity"
                )
            if not uncovered > 0:
                raise ValueError(f"uncovered must be positive, got {uncovered!r}")
            found[name] = tensors[name] * uncovered**power
        return {name: found[name] for name in tensors}

    # --- memory

    def save(self, path: str | PathLike[str]) -> None:
        """Write eigenpairs, layouts and dampings as safetensors (needs `pip install safetensors`)."""
        saving.save(path, self.layers, self.shapes, self.left_out)


def load_curvature(path: str | PathLike[str], model: Any = None) -> Curvature:
    """What `Curvature.save` wrote; with a model its parameters must have the same names and shapes, and its device is used."""
    return Curvature(*saving.load(path, model))
