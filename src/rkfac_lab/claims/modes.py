"""Can the number of modes be predicted from the covariance of a layer's rows (the paper's future work)?

`rkfac.theory.expected_modes` is compared with what is seen: on simulated rows of known covariance, on the rows of a trained
network at fixed weights, and while training moves the weights.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from matplotlib.figure import Figure
from torch import Tensor

from rkfac.theory import effective_samples, expected_modes, expected_spectrum, retained_modes
from rkfac_lab.claims import drawing
from rkfac_lab.claims.claim import FAILS, HOLDS, PARTLY, Claim, Found, Verdict
from rkfac_lab.claims.desk import Desk
from rkfac_lab.claims.spectra import curve, modes
from rkfac_lab.claims.text import around, plain, table
from rkfac_lab.claims.widths import FAMILIES, Walk
from rkfac_lab.plots import SIDES
from rkfac_lab.spectrum import ASSUMED_ALPHA, NEGLIGIBLE

LEFT = 0.01  # of an average, when it is looked at: so many updates that rho to their number is below
NEAR, FEW = 0.10, 3.0  # a prediction is right within this share of what was seen, or within so many modes
AT_ONCE = 4096  # samples whose rows are made together
SPECTRA: dict[str, Callable[[Tensor], Tensor]] = {
    "flat": torch.ones_like,
    "k^-1/2": lambda k: k**-0.5,
    "k^-1": lambda k: 1 / k,
    "k^-2": lambda k: k**-2,
}


@dataclass(frozen=True)
class Modes(Claim):
    """`dimensions`, `rows`, `decays`: of the simulation; `layer_rows`, `layer_decays`: of the network at fixed weights."""

    name: ClassVar[str] = "better-theory"
    title: ClassVar[str] = "How many modes are to be expected"
    says: ClassVar[str] = (
        "“Future work: developing probabilistic theory about eigenspectrum decay which better reconciles numerical results.”"
    )

    dimensions: tuple[int, ...] = (256, 1024)
    rows: tuple[int, ...] = (16, 64, 256)
    decays: tuple[float, ...] = (0.5, 0.95, 0.99)
    draws: int = 3
    family: str = "mlp"
    width: int = 1024
    steps: int = 235
    batch: int = 256
    layer_rows: tuple[int, ...] = (32, 64, 256)
    layer_decays: tuple[float, ...] = (0.5, 0.9, 0.95, 0.99)
    moving: float = 0.95
    rates: tuple[float, ...] = (0.03, 0.3)  # of the training; the second is the paper's

    def small(self) -> Modes:
        """Small matrices, and a narrow network on the embedded digits."""
        return replace(
            self,
            dimensions=(128,),
            rows=(16, 64),
            decays=(0.5, 0.95),
            family="digits",
            width=128,
            steps=30,
            batch=64,
            layer_rows=(32,),
            layer_decays=(0.5, 0.95),
        )

    def measure(self, desk: Desk) -> dict[str, Any]:
        """The simulation by covariance and size, the network by decay; it is trained again where a measurement goes on."""
        simulated: list[Any] = []
        for kind in SPECTRA:
            for d in self.dimensions:
                simulated += desk.part(f"simulated {kind} {d}", lambda k=kind, d=d: self._simulated(k, d))  # type: ignore[misc]
        fixed: list[Any] = []
        moving: list[Any] = []
        for lr in self.rates:
            layer = Layer(self, desk.data_dir, lr)
            for rho in self.layer_decays:
                name = f"fixed weights lr {lr:g} rho {rho:g}"
                fixed += desk.part(name, lambda l=layer, r=rho: self._fixed(l, r))  # type: ignore[misc]
            moving += desk.part(f"moving weights lr {lr:g}", lambda l=layer: self._moving(l))  # type: ignore[misc]
        return {"simulated": simulated, "fixed": fixed, "moving": moving}

    def _simulated(self, kind: str, d: int) -> list[dict[str, Any]]:
        """Normal rows of a known covariance; in its own basis, which changes no eigenvalue."""
        covariance = SPECTRA[kind](torch.arange(1, d + 1, dtype=torch.float64))
        root = covariance.sqrt().float()
        made = []
        for rho in self.decays:
            for n in self.rows:
                generator = torch.Generator().manual_seed(d * n)
                draw = lambda n=n, g=generator: torch.randn(n, d, generator=g) * root  # noqa: E731
                seen = [modes(averaged(draw, rho, updates(rho))) for _ in range(self.draws)]
                made.append({"covariance": kind, **_case(covariance, rho, n, updates(rho)), "seen": seen})
        return made

    def _fixed(self, layer: Layer, rho: float) -> list[dict[str, Any]]:
        """Rows drawn with replacement, so that they are independent and their covariance is C exactly."""
        made = []
        for side in SIDES:
            rows, covariance = layer.rows[side], layer.covariances[side]
            for n in self.layer_rows:
                generator = torch.Generator().manual_seed(n)
                draw = lambda n=n, g=generator: rows[torch.randint(len(rows), (n,), generator=g)]  # noqa: B023, E731
                spectra = [averaged(draw, rho, updates(rho)) for _ in range(self.draws)]
                case = {
                    "side": side,
                    "lr": layer.lr,
                    "loss": layer.loss,
                    **_case(covariance, rho, n, updates(rho)),
                    "unequal": layer.unequal[side],
                }
                made.append({**case, "seen": [modes(one) for one in spectra], **_curves(covariance, case, spectra[0])})
        return made

    def _moving(self, layer: Layer) -> list[dict[str, Any]]:
        """The average that training itself left behind, beside the covariance at the weights where it ended."""
        made = []
        for side in SIDES:
            covariance, values = layer.covariances[side], layer.averages[side]
            case = {
                "side": side,
                "lr": layer.lr,
                "loss": layer.loss,
                **_case(covariance, self.moving, self.batch, self.steps),
                "unequal": layer.unequal[side],
            }
            made.append({**case, "seen": [modes(values)], **_curves(covariance, case, values)})
        return made

    def verdict(self, found: Found) -> Verdict:
        """Holds: right within 10 % or 3 modes in all cases of the simulation and at fixed weights; partly: in most."""
        groups = {
            "simulated": found["simulated"],
            **{SIDES[side]: [case for case in found["fixed"] if case["side"] == side] for side in SIDES},
        }
        right = {name: sum(map(foreseen, cases)) for name, cases in groups.items()}
        cases, all_right = sum(map(len, groups.values())), sum(right.values())
        word = HOLDS if all_right == cases else PARTLY if 2 * all_right > cases else FAILS
        told = ", ".join(f"{name} {right[name]} of {len(groups[name])}" for name in groups)
        measured = (
            f"normal rows of known covariance (d to {max(self.dimensions)}) and the middle layer of {self.family} {self.width}, "
            f"{len(found['simulated'])} + {len(found['fixed'])} cases"
        )
        why = (
            f"The predicted number is within 10 % or 3 modes of the mean seen in {all_right} of {cases} cases: {told}."
        )
        return Verdict(word, measured, f"{why} {self._plainly(found)}")

    def _plainly(self, found: Found) -> str:
        """How far one comes without any theory, by counting the modes of the covariance itself."""
        simulated = [(case, _own_modes(case["covariance"], case["d"])) for case in found["simulated"]]
        groups = {"simulated": simulated, "network": [(case, case["covered"]) for case in found["fixed"]]}
        told = ", ".join(
            f"{name} {sum(near(number, case) for case, number in group)} of {len(group)}"
            for name, group in groups.items()
        )
        return (
            f"The number of modes of the covariance itself, without the theory, is as near in: {told}. A network whose rows have "
            f"few modes to begin with does not tell the two apart."
        )

    def page(self, found: Found) -> str:
        """Three tables, each with prediction, sight and the worst case."""
        kept = ["rho", "rows a batch", "rows that count", "updates", "predicted", "seen", "right", "Proposition 3.1"]
        simulated = [[case["covariance"], str(case["d"]), *_cells(case)] for case in found["simulated"]]
        fixed, moving = (
            [
                [
                    SIDES[case["side"]],
                    f"{case['lr']:g}",
                    plain(case["loss"]),
                    *_cells(case),
                    plain(case["unequal"]),
                    f"{case['shorter']:.0f}",
                ]
                for case in found[part]
            ]
            for part in ("fixed", "moving")
        )
        beside = [*kept, "inequality of rows", "predicted with fewer rows"]
        true = ", ".join(f"{SIDES[case['side']]} {case['covered']} (lr {case['lr']:g})" for case in found["moving"])
        return f"""
Proposition 3.1 bounds the number of eigenvalues above epsilon times the largest whatever the rows are. What is to be *expected*
follows from the covariance C of the rows, from rho and from the rows of a batch: `rkfac.theory.expected_modes` solves two
equations for it, which hold for many independent rows. Here epsilon is 1/33 throughout, averages are free of their start and are
looked at when {100 * LEFT:g} % of the first batch's weight is left (`updates` in the prediction). *Rows that count*: of an evenly
weighted mean of equal variance, n (1 + rho) / (1 - rho). *Seen*: mean and standard deviation over {self.draws} draws.
*Right*: within 10 % or 3 modes.

## Simulated rows

Normal rows whose covariance has the eigenvalues in the first column.

{table(["covariance", "d", *kept], simulated)}

![predicted and seen]({self.name}-cases.png)

## A network at fixed weights

{FAMILIES[self.family].about}: the middle layer at w = {self.width}, after {self.steps} steps of RS-KFAC with batches of
{self.batch}, at the learning rates {", ".join(f"{lr:g}" for lr in self.rates)} (the paper's is 0.3; in trials the loss of wide
MLPs went up with it at first). C is the second moment of the rows of all training samples, and batches are drawn from these with
replacement: so the rows are independent and C is theirs exactly, but they are not normal. *Inequality of rows*: the mean fourth
power of their lengths over the square of the mean square; 1 where all are equally long, and 1 + 2 tr(C^2) / tr(C)^2 for normal
ones. Where it is large, few rows make up an average. *Predicted with fewer rows*: the same prediction with n over that number.

{table(["factor", "lr", "last loss", *beside], fixed)}

![spectra]({self.name}-spectra.png)

## While training moves the weights

The average that the training itself left behind, every one of its {self.steps} steps in it, beside C at the weights where it
ended. The covariance itself, of infinitely many rows at those weights, has so many modes: {true}.

{table(["factor", "lr", "last loss", *beside], moving)}
"""

    def pictures(self, found: Found) -> dict[str, Figure]:
        """Predicted against seen, and the spectra of the layer."""
        return {"cases": _against(found), "spectra": self._spectra(found)}

    def _spectra(self, found: Found) -> Figure:
        """Two decays at the largest batch, both factors."""
        n, decays = max(self.layer_rows), sorted({min(self.layer_decays), self.moving} & set(self.layer_decays))
        fixed = [case for case in found["fixed"] if case["n"] == n and case["lr"] == self.rates[0]]
        cases = [case for rho in decays for case in fixed if case["rho"] == rho]
        figure, panels = drawing.panels(len(cases), across="mode", up="eigenvalue / largest", same_height=True)
        names = {"measured": "seen", "expected": "predicted", "true": "the covariance itself"}
        for axes, case in zip(panels, cases, strict=True):
            for position, (key, label) in enumerate(names.items()):
                numbers, values = zip(*case[key], strict=True)
                axes.plot(numbers, values, **drawing.look(position), label=label)
            title = f"{SIDES[case['side']]}, rho {case['rho']:g}, {n} rows a batch, lr {case['lr']:g}"
            drawing.as_spectrum(axes, NEGLIGIBLE, "a 33rd", title)
        return figure


class Layer:
    """The middle layer of a trained network: its rows over all training data, and its averages; made when asked for."""

    def __init__(self, claim: Modes, data_dir: str | None, lr: float) -> None:
        self.claim, self.data_dir, self.lr = claim, data_dir, lr
        (self.name,) = FAMILIES[claim.family].layers

    @cached_property
    def _trained(self) -> tuple[Walk, dict[str, Tensor]]:
        """The walk behind its last step, and the spectra of the averages there."""
        walk = Walk(self.claim.family, self.claim.width, self.data_dir, self.claim.batch, self.lr)
        watcher = walk.watch([self.name], self.claim.moving)
        for _ in range(self.claim.steps):
            walk.step()
        spectra = watcher.spectrum(self.name)
        walk.close()
        return walk, {"input": spectra.input, "output": spectra.output}

    @property
    def loss(self) -> float:
        """Of the last batch."""
        return self._trained[0].loss

    @property
    def averages(self) -> dict[str, Tensor]:
        """Eigenvalues of what training left behind."""
        return self._trained[1]

    @cached_property
    def rows(self) -> dict[str, Tensor]:
        """Of every training sample: the layer's input with the bias's one, and the gradient of its own loss by the output."""
        walk = self._trained[0]
        kept: dict[str, list[Tensor]] = {side: [] for side in SIDES}

        def keep(layer: Any, inputs: tuple[Tensor], output: Tensor) -> None:
            kept["input"].append(torch.cat([inputs[0].detach(), torch.ones(len(output), 1)], 1))
            output.register_hook(lambda gradient: kept["output"].append(len(gradient) * gradient))

        handle = walk.model.get_submodule(self.name).register_forward_hook(keep)
        for x, y in zip(walk.data.train_x.split(AT_ONCE), walk.data.train_y.split(AT_ONCE), strict=True):
            inputs, targets = walk.problem.prepare(x, y)
            walk.problem.loss(walk.model(inputs), targets).backward()
        handle.remove()
        return {side: torch.cat(parts) for side, parts in kept.items()}

    @cached_property
    def covariances(self) -> dict[str, Tensor]:
        """Eigenvalues of C, descending."""
        return {side: _eigenvalues(_moment(rows)) for side, rows in self.rows.items()}

    @cached_property
    def unequal(self) -> dict[str, float]:
        """Mean fourth power of the rows' lengths over the square of the mean square."""
        squares = {side: rows.double().square().sum(1) for side, rows in self.rows.items()}
        return {side: float(one.square().mean() / one.mean().square()) for side, one in squares.items()}


def updates(rho: float) -> int:
    """After so many the first batch has lost its weight but for a hundredth."""
    return math.ceil(math.log(LEFT) / math.log(rho))


def averaged(draw: Callable[[], Tensor], rho: float, count: int) -> Tensor:
    """Eigenvalues, descending, of the running average of `count` batches, free of its start."""
    total = torch.zeros(())
    for _ in range(count):
        rows = draw()
        total = rho * total + (1 - rho) / len(rows) * (rows.T @ rows)
    return _eigenvalues(total.double() / (1 - rho**count))


def _moment(rows: Tensor) -> Tensor:
    """In float64, some rows at once."""
    total = torch.zeros(rows.shape[1], rows.shape[1], dtype=torch.float64)
    for part in rows.split(AT_ONCE):
        total += part.double().T @ part.double()
    return total / len(rows)


def _eigenvalues(matrix: Tensor) -> Tensor:
    return torch.linalg.eigvalsh(matrix).flip(0).clamp_min(0)


def _case(covariance: Tensor, rho: float, n: int, count: int) -> dict[str, Any]:
    """What can be said before anything is seen."""
    return {
        "d": len(covariance),
        "rho": rho,
        "n": n,
        "updates": count,
        "counts": effective_samples(rho, n),
        "predicted": expected_modes(covariance, rho, n, NEGLIGIBLE, count),
        "bound": retained_modes(rho, n, len(covariance), ASSUMED_ALPHA, NEGLIGIBLE),
    }


def _curves(covariance: Tensor, case: Mapping[str, Any], values: Tensor) -> dict[str, Any]:
    """Of a layer: spectra to be drawn, its own number of modes, and what fewer rows would make of it."""
    rho, n, count = case["rho"], case["n"], case["updates"]
    fewer = max(1, round(n / case["unequal"]))
    return {
        "measured": curve(values),
        "expected": curve(expected_spectrum(covariance, rho, n, count)),
        "true": curve(covariance),
        "covered": modes(covariance),
        "shorter": expected_modes(covariance, rho, fewer, NEGLIGIBLE, count),
    }


def foreseen(case: Mapping[str, Any]) -> bool:
    """Whether the prediction is within 10 % or 3 modes of what was seen on average."""
    return near(case["predicted"], case)


def near(number: float, case: Mapping[str, Any]) -> bool:
    """Whether a number is within 10 % or 3 modes of what was seen on average."""
    mean = statistics.fmean(case["seen"])
    return bool(abs(number - mean) <= max(NEAR * mean, FEW))


def _own_modes(kind: str, d: int) -> int:
    """Of a covariance of the simulation."""
    return modes(SPECTRA[kind](torch.arange(1, d + 1, dtype=torch.float64)))


def _cells(case: Mapping[str, Any]) -> list[str]:
    known = [f"{case['rho']:g}", str(case["n"]), f"{case['counts']:.0f}", str(case["updates"])]
    seen = [f"{case['predicted']:.1f}", around(case["seen"]), "yes" if foreseen(case) else "no"]
    return [*known, *seen, str(case["bound"])]


def _against(found: Found) -> Figure:
    """A point on the line is a number that was foreseen."""
    figure, panels = drawing.panels(2, across="modes predicted", up="modes seen (mean)")
    groups: list[dict[str, list[Mapping[str, Any]]]] = [
        _by(found["simulated"], lambda case: str(case["covariance"])),
        _by([*found["fixed"]], lambda case: SIDES[case["side"]]),
    ]
    for side in SIDES:
        groups[1][f"{SIDES[side]}, weights moving"] = [case for case in found["moving"] if case["side"] == side]
    for axes, cases, title in zip(panels, groups, ("simulated", "middle layer of a network"), strict=True):
        every = [case for group in cases.values() for case in group]
        numbers = [number for case in every for number in (case["predicted"], statistics.fmean(case["seen"]))]
        ends = [0.7 * min(numbers), 1.3 * max(numbers)]
        axes.plot(ends, ends, color="#999999", linewidth=0.9, label="as foreseen")
        line = [
            ends[0] * (ends[1] / ends[0]) ** (at / 50) for at in range(51)
        ]  # not straight: 3 modes are wider below 30
        low, high = ([max(x + sign * max(NEAR * x, FEW), ends[0]) for x in line] for sign in (-1, 1))
        axes.fill_between(line, low, high, color="#eeeeee", label="within 10 % or 3 modes")
        for position, (name, group) in enumerate(cases.items()):
            look = {**drawing.look(position, marked=True), "linestyle": "none"}
            axes.plot([c["predicted"] for c in group], [statistics.fmean(c["seen"]) for c in group], **look, label=name)
        if ends[1] > 10 * ends[0]:  # below a decade one tick would be left
            drawing.logarithmic(axes.xaxis)
            drawing.logarithmic(axes.yaxis)
        axes.set_title(title)
        axes.legend(frameon=False, fontsize=9, loc="upper left")
    return figure


def _by(
    cases: Iterable[Mapping[str, Any]], key: Callable[[Mapping[str, Any]], str]
) -> dict[str, list[Mapping[str, Any]]]:
    grouped: dict[str, list[Mapping[str, Any]]] = {}
    for case in cases:
        grouped.setdefault(key(case), []).append(case)
    return grouped
