"""Can the number of modes be predicted from the covariance of a layer's rows (the paper's future work)?

`rkfac.theory.expected_modes` is compared with what is seen: on simulated rows of known covariance, on the rows of trained
networks at fixed weights, which are independent in an MLP and not in a convolution, and while training moves the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from matplotlib.figure import Figure
from torch import Tensor

from rkfac_lab.claims import foresight
from rkfac_lab.claims.claim import FAILS, HOLDS, PARTLY, Claim, Found, Verdict
from rkfac_lab.claims.desk import Desk
from rkfac_lab.claims.foresight import HEADER, NEAR, by, cells, foreseen, near, said
from rkfac_lab.claims.looks import modes
from rkfac_lab.claims.text import around, plain, table
from rkfac_lab.claims.trained_rows import LEFT, Layer, Network, Training, averaged, updates
from rkfac_lab.claims.widths import FAMILIES
from rkfac_lab.plots import SIDES

SPECTRA: dict[str, Callable[[Tensor], Tensor]] = {
    "flat": torch.ones_like,
    "k^-1/2": lambda k: k**-0.5,
    "k^-1": lambda k: 1 / k,
    "k^-2": lambda k: k**-2,
}


@dataclass(frozen=True)
class Modes(Claim):
    """`dimensions`, `rows`, `decays`: of the simulation; `layer_*`: of the MLP at fixed weights; `conv_*`: of convolutions."""

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
    conv_family: str | None = "vgg"
    conv_width: int = 128
    conv_layers: tuple[str, ...] = ("features.20", "features.34")
    conv_steps: int = 100
    conv_lr: float = 0.3
    conv_samples: int = 2000
    conv_batches: tuple[int, ...] = (16, 64, 256)
    conv_decays: tuple[float, ...] = (0.5, 0.95)

    def small(self) -> Modes:
        """Small matrices, and a narrow network on the embedded digits, which has no convolutions."""
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
            conv_family=None,
        )

    def measure(self, desk: Desk) -> dict[str, Any]:
        """The simulation by covariance and size, networks by decay; they are trained again where a measurement goes on."""
        simulated: list[Any] = []
        for kind in SPECTRA:
            for d in self.dimensions:
                simulated += desk.part(f"simulated {kind} {d}", lambda k=kind, d=d: self._simulated(k, d))  # type: ignore[misc]
        fixed: list[Any] = []
        moving: list[Any] = []
        for lr in self.rates:
            (layer,) = Network(self._mlp(lr), desk.data_dir).layers
            for rho in self.layer_decays:
                name = f"fixed weights lr {lr:g} rho {rho:g}"
                fixed += desk.part(name, lambda l=layer, r=rho: self._fixed(l, r, self.layer_rows))  # type: ignore[misc]
            moving += desk.part(f"moving weights lr {lr:g}", lambda l=layer: self._moving(l))  # type: ignore[misc]
        convolved = {part: list(cases) for part, cases in self._convolved(desk)}
        return {"simulated": simulated, "fixed": fixed, "moving": moving, "convolved": convolved}

    def _convolved(self, desk: Desk) -> Iterator[tuple[str, list[Any]]]:
        """The same of convolutions, whose rows come as the positions of a picture."""
        layers = Network(self._conv(), desk.data_dir).layers if self.conv_family else []
        yield (
            "fixed",
            [
                found
                for layer in layers
                for rho in self.conv_decays
                for found in desk.part(
                    f"convolution {layer.name} rho {rho:g}",
                    lambda l=layer, r=rho: self._fixed(l, r, self.conv_batches),  # type: ignore[misc]
                )
            ],
        )
        yield (
            "moving",
            [
                found
                for layer in layers
                for found in desk.part(f"convolution {layer.name} moving", lambda l=layer: self._moving(l))  # type: ignore[misc]
            ],
        )

    def _mlp(self, lr: float) -> Training:
        layers = tuple(FAMILIES[self.family].layers)
        return Training(self.family, self.width, self.steps, self.batch, lr, self.moving, layers)

    def _conv(self) -> Training:
        return Training(
            str(self.conv_family),
            self.conv_width,
            self.conv_steps,
            self.batch,
            self.conv_lr,
            self.moving,
            self.conv_layers,
            self.conv_samples,
        )

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
                case = foresight.case(covariance, rho, n, updates(rho))
                made.append({"covariance": kind, **case, "seen": seen})
        return made

    def _fixed(self, layer: Layer, rho: float, batches: tuple[int, ...]) -> list[dict[str, Any]]:
        """Batches of so many samples, drawn with replacement."""
        made = []
        for side in SIDES:
            for n in batches:
                draw = layer.draw(side, n, torch.Generator().manual_seed(n))
                values = [averaged(draw, rho, updates(rho)) for _ in range(self.draws)]
                made.append(_of(layer, side, rho, n, updates(rho), values))
        return made

    def _moving(self, layer: Layer) -> list[dict[str, Any]]:
        """The average that training itself left behind, beside the covariance at the weights where it ended."""
        steps, averages = layer.network.training.steps, layer.network.averages[layer.name]
        return [_of(layer, side, self.moving, self.batch, steps, [averages[side]]) for side in SIDES]

    def verdict(self, found: Found) -> Verdict:
        """As `rule` says."""
        groups = {
            "simulated": found["simulated"],
            **{SIDES[side]: [case for case in found["fixed"] if case["side"] == side] for side in SIDES},
            **({"convolutions": found["convolved"]["fixed"]} if found["convolved"]["fixed"] else {}),
        }
        right = {name: sum(map(foreseen, cases)) for name, cases in groups.items()}
        cases, all_right = sum(map(len, groups.values())), sum(right.values())
        word = HOLDS if all_right == cases else PARTLY if 2 * all_right > cases else FAILS
        told = ", ".join(f"{name} {right[name]} of {len(groups[name])}" for name in groups)
        measured = (
            f"normal rows of known covariance (d to {max(self.dimensions)}) and the middle layer of {self.family} {self.width}, "
            f"{len(found['simulated'])} + {len(found['fixed'])} cases"
            + (
                f"; {len(self.conv_layers)} convolutions of {self.conv_family} {self.conv_width}"
                if self.conv_family
                else ""
            )
        )
        why = (
            f"The predicted number is within 10 % or 3 modes of the mean seen in {all_right} of {cases} cases ({told}), where "
            f"the number of modes of the covariance itself is in {self._plainly(found)}; of averages that a training left "
            f"behind, at weights that moved, in {self._left_behind(found)}."
        )
        return Verdict(word, measured, why)

    def rule(self, found: Found) -> str:
        """With what is said by the share alone."""
        cases = [*found["fixed"], *found["convolved"]["fixed"]]
        close = sum(abs(case["predicted"] - case["seen"][0]) <= NEAR * case["seen"][0] for case in cases)
        return (
            "it holds if the prediction is within 10 % or 3 modes of the mean seen in all cases of the simulation and at fixed "
            "weights, partly if in most. Factors of a network have few modes, of which 3 are many: within 10 % alone "
            f"{close} of these {len(cases)} are."
        )

    def _left_behind(self, found: Found) -> str:
        """How often the prediction is right where its assumptions are not."""
        groups = {"MLP": found["moving"], "convolutions": found["convolved"]["moving"]}
        known = {name: cases for name, cases in groups.items() if cases}
        return " and ".join(f"{sum(map(foreseen, cases))} of {len(cases)} ({name})" for name, cases in known.items())

    def _by_worth(self, found: Found) -> str:
        """What is gained by counting rows as what they are worth."""
        cases = found["convolved"]["fixed"]
        right, worth = sum(map(foreseen, cases)), sum(near(case["predicted by worth"], case) for case in cases)
        return f"As independent rows {right} of these {len(cases)} are right, by worth {worth}."

    def _plainly(self, found: Found) -> str:
        """How far one comes without any theory, by counting the modes of the covariance itself."""
        simulated = [(case, _own_modes(case["covariance"], case["d"])) for case in found["simulated"]]
        groups = {"simulated": simulated, "MLP": [(case, case["covered"]) for case in found["fixed"]]}
        if found["convolved"]["fixed"]:
            groups["convolutions"] = [(case, case["covered"]) for case in found["convolved"]["fixed"]]
        right = {name: sum(near(number, case) for case, number in group) for name, group in groups.items()}
        told = ", ".join(f"{name} {right[name]} of {len(group)}" for name, group in groups.items())
        return f"{sum(right.values())} ({told})"

    def page(self, found: Found) -> str:
        """Tables of each kind, with prediction, sight and the worst case."""
        simulated = [[case["covariance"], str(case["d"]), *cells(case)] for case in found["simulated"]]
        fixed, moving = (
            [
                [SIDES[case["side"]], f"{case['lr']:g}", plain(case["loss"]), *cells(case), *_worth(case)]
                for case in cases
            ]
            for cases in (found["fixed"], found["moving"])
        )
        beside = [*HEADER, "worth of a row", "predicted by worth"]
        true = ", ".join(f"{SIDES[case['side']]} {case['covered']} (lr {case['lr']:g})" for case in found["moving"])
        return f"""
Proposition 3.1 bounds the number of eigenvalues above epsilon times the largest whatever the rows are. What is to be *expected*
follows from the covariance C of the rows, from rho and from the rows of a batch: `rkfac.theory.expected_modes` solves two
equations for it, which hold for many independent rows. Here epsilon is 1/33 throughout, averages are free of their start and are
looked at when {100 * LEFT:g} % of the first batch's weight is left (`updates` in the prediction). *Rows that count*: of an evenly
weighted mean of equal variance, n (1 + rho) / (1 - rho). *Seen*: mean and standard deviation over {self.draws} draws.
*Right*: within 10 % or 3 modes. Where rows have few modes to begin with, the number of modes of the covariance is as good a
prediction, and such cases do not tell the two apart.

## Simulated rows

Normal rows whose covariance has the eigenvalues in the first column.

{table(["covariance", "d", *HEADER], simulated)}

![predicted and seen]({self.name}-cases.png)

## A network at fixed weights

{FAMILIES[self.family].about}: the middle layer at w = {self.width}, after {self.steps} steps of RS-KFAC with batches of
{self.batch}, at the learning rates {", ".join(f"{lr:g}" for lr in self.rates)} (the paper's is 0.3; in trials the loss of wide
MLPs went up with it at first). C is the second moment of the rows of all training samples, and batches are drawn from these with
replacement: so the rows are independent and C is theirs exactly, but they are not normal. *Worth of a row*: so many normal rows
make a moment that is as far from C, (tr(C)^2 + ||C||^2) / (E||x||^4 - ||C||^2) with the Frobenius norm; 1 for normal rows, less
where few long rows make up an average. *Predicted by worth*: the same prediction with n times that number.

{table(["factor", "lr", "last loss", *beside], fixed)}

![spectra]({self.name}-spectra.png)

## While training moves the weights

The average that the training itself left behind, every one of its {self.steps} steps in it, beside C at the weights where it
ended. The covariance itself, of infinitely many rows at those weights, has so many modes: {true}.

{table(["factor", "lr", "last loss", *beside], moving)}
{self._convolutions(found)}"""

    def _convolutions(self, found: Found) -> str:
        """Nothing, where none was looked at."""
        parts = found["convolved"]
        if not self.conv_family or not parts["fixed"]:
            return ""
        names = FAMILIES[self.conv_family].layers
        header = [
            "layer", "factor", "d", "positions", "rho", "pictures a batch", "seen", "predicted", "right",
            "worth of a picture", "predicted by worth", "right", "modes of C", "Proposition 3.1",
        ]  # fmt: skip
        fixed, moving = (
            [
                [
                    names[case["layer"]],
                    SIDES[case["side"]],
                    str(case["d"]),
                    str(case["positions"]),
                    f"{case['rho']:g}",
                    str(case["n"] // case["positions"]),
                    around(case["seen"]),
                    f"{case['predicted']:.1f}",
                    said(foreseen(case)),
                    plain(case["worth"] * case["positions"]),
                    f"{case['predicted by worth']:.1f}",
                    said(near(case["predicted by worth"], case)),
                    str(case["covered"]),
                    str(case["bound"]),
                ]
                for case in parts[part]
            ]
            for part in ("fixed", "moving")
        )
        return f"""
## Convolutions

{FAMILIES[self.conv_family].about}: {self.conv_width} of them, after {self.conv_steps} steps of RS-KFAC with batches of
{self.batch} at a learning rate of {self.conv_lr:g}. A row is a position of a picture, and positions of one picture are alike: the
theory's rows are independent, these are not. C is the second moment of the rows of {self.conv_samples} training pictures, and
batches are drawn from these with replacement, whole pictures at a time. *Predicted*: as if all rows were independent.
*Worth of a picture*: so many independent normal rows of the same C make a moment that is as far from C as that of one picture's
rows, (tr(C)^2 + ||C||^2) / (E||M||^2 - ||C||^2) with M the mean of x x^T over its positions. *Predicted by worth*: with so many
rows for each picture. {self._by_worth(found)}

{table(header, fixed, left=2)}

![spectra of convolutions]({self.name}-convolutions.png)

And the average that training itself left behind, every step in it, beside C at the weights where it ended:

{table(header, moving, left=2)}
"""

    def pictures(self, found: Found) -> dict[str, Figure]:
        """Predicted against seen, and the spectra of the layers."""
        middle = by(found["fixed"], lambda case: SIDES[case["side"]])
        for side in SIDES:
            middle[f"{SIDES[side]}, weights moving"] = [case for case in found["moving"] if case["side"] == side]
        simulated = by(found["simulated"], lambda case: str(case["covariance"]))
        drawn = {
            "cases": foresight.against({"simulated": simulated, "middle layer of a network": middle}),
            "spectra": foresight.spectra(self._largest_batches(found)),
        }
        convolved = found["convolved"]["fixed"]
        return {**drawn, "convolutions": foresight.spectra(self._hardest(convolved))} if convolved else drawn

    def _largest_batches(self, found: Found) -> dict[str, Any]:
        """Two decays at the largest batch, both factors."""
        n, decays = max(self.layer_rows), sorted({min(self.layer_decays), self.moving} & set(self.layer_decays))
        fixed = [case for case in found["fixed"] if case["n"] == n and case["lr"] == self.rates[0]]
        return {foresight.title(case): case for rho in decays for case in fixed if case["rho"] == rho}

    def _hardest(self, cases: Any) -> dict[str, Any]:
        """The smallest batches and the shortest memory: where the average is farthest from C."""
        names, fewest = FAMILIES[str(self.conv_family)].layers, min(self.conv_batches)
        return {
            f"{names[case['layer']]}, {SIDES[case['side']]}, rho {case['rho']:g}, {fewest} pictures a batch": case
            for case in cases
            if case["rho"] == min(self.conv_decays) and case["n"] == fewest * case["positions"]
        }


def _of(layer: Layer, side: str, rho: float, samples: int, count: int, values: list[Tensor]) -> dict[str, Any]:
    """One factor of a layer, from batches of so many samples."""
    covariance, positions = layer.covariances[side], layer.positions
    case = foresight.case(covariance, rho, samples * positions, count)
    known = {
        "layer": layer.name,
        "side": side,
        "positions": positions,
        "lr": layer.network.training.lr,
        "loss": layer.network.walk.loss,
    }
    return {**known, **case, **foresight.of_layer(covariance, case, layer.worth[side] / positions, values)}


def _own_modes(kind: str, d: int) -> int:
    """Of a covariance of the simulation."""
    return modes(SPECTRA[kind](torch.arange(1, d + 1, dtype=torch.float64)))


def _worth(case: Any) -> list[str]:
    return [plain(case["worth"]), f"{case['predicted by worth']:.1f}"]
