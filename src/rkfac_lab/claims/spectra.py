"""Do the spectra of the factors decay within about 200 modes, and does the width not matter (Figure 1)?

The same network at several widths takes equal steps. What an average that starts from the identity would look like follows
from one that is free of its start, n updates later: its eigenvalues s become (1 - rho^n) s + rho^n.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

from matplotlib.figure import Figure

import rkfac
from rkfac.theory import retained_modes
from rkfac_lab.claims import looks, paper, spectrum_pictures
from rkfac_lab.claims.claim import FAILS, HOLDS, PARTLY, Claim, Found, Verdict
from rkfac_lab.claims.desk import Desk
from rkfac_lab.claims.looks import Series
from rkfac_lab.claims.text import plain, table
from rkfac_lab.claims.widths import FAMILIES, FIGURE, SHORT, Pace, Walk
from rkfac_lab.plots import SIDES
from rkfac_lab.spectrum import ASSUMED_ALPHA, NEGLIGIBLE, rows_per_step

ENOUGH = 220  # the paper's rank
GROWN = 1.5  # times as many modes at the largest width as at the smallest: no longer "whatever the width"
FLAT = 0.8  # of all modes above the line: hardly any decay
WIDE = 500  # narrower factors have not many more modes than could be above the line
DIVERGED = 2 * math.log(10)  # a loss: that of guessing among ten classes is half of it
WALKS = ("walks", "fast")  # at the family's learning rate, and at the paper's; both are judged
FORGOTTEN = 20  # updates after which nothing of an average with rho = 0.5 is left but a millionth


@dataclass(frozen=True)
class Spectra(Claim):
    """`families`: by name, with widths; factors wider than `once_above` are decomposed once, with the long memory alone."""

    name: ClassVar[str] = "spectrum"
    title: ClassVar[str] = "The spectrum decays within about 200 modes whatever the width"
    says: ClassVar[str] = (
        "“Once the spectrum reaches its equilibrium state, we get this 1.5 orders of magnitude decay within 200 modes "
        "irrespective of the size of the K-factor.” (Section 3)"
    )

    families: tuple[tuple[str, tuple[int, ...]], ...] = (
        ("vgg", (64, 128, 256, 512)),
        ("mlp", (512, 1024, 2048, 4096, 8192)),
    )
    batches: tuple[int, ...] = (64, 256)
    steps: tuple[int, ...] = (10, 20, 30)
    decay: float = 0.95
    short: float = 0.5
    once_above: int = 5000
    fast: tuple[str, tuple[int, ...]] = ("mlp", (512, 1024, 2048))  # also at the paper's own learning rate
    fast_rate: float = 0.3
    later: tuple[tuple[str, tuple[int, ...]], ...] = (("vgg", (64, 128)), ("mlp", (512, 1024, 2048)))  # for longer
    later_steps: tuple[int, ...] = (100, 200, 400)
    settled: tuple[tuple[str, tuple[int, ...]], ...] = (("vgg", (64, 128)),)  # until the averages have settled
    settled_steps: tuple[int, ...] = (300, 1500, 3000, 5100)

    def small(self) -> Spectra:
        """On the embedded digits."""
        return replace(
            self,
            families=(("digits", (128, 256, 512)),),
            batches=(64, 128),
            steps=(5, 15, 30),
            fast=("digits", (128, 256, 512)),
            later=(("digits", (128, 256)),),
            later_steps=(40, 80),
            settled=(("digits", (128, 256)),),
            settled_steps=(60, 150),
        )

    def measure(self, desk: Desk) -> dict[str, Any]:
        """Every network with every batch size, one walk each; the short memory with the largest batch alone."""
        walks = [
            self._part(desk, family, width, batch)
            for family, widths in self.families
            for width in widths
            for batch in self.batches
        ]
        family, widths = self.fast
        fast = [self._part(desk, family, width, max(self.batches), self.fast_rate) for width in widths]
        longer = {
            name: [
                self._part(desk, family, width, max(self.batches), steps=steps, pace=pace)
                for family, widths in families
                for width in widths
            ]
            for name, families, steps, pace in (
                ("later", self.later, self.later_steps, SHORT),
                ("settled", self.settled, self.settled_steps, FIGURE),
            )
        }
        return {"walks": walks, "fast": fast, **longer}

    def _part(
        self,
        desk: Desk,
        family: str,
        width: int,
        batch: int,
        lr: float | None = None,
        steps: Sequence[int] | None = None,
        pace: Pace = SHORT,
    ) -> dict[str, Any]:
        """Measured once; `steps`: others than the claim's."""
        name = f"{family} {width} batch {batch}" + (f" lr {lr:g}" if lr else "") + (f" to {steps[-1]}" if steps else "")
        walked = partial(self._walked, family, width, batch, desk.data_dir, lr, steps or self.steps, pace)
        return {"family": family, "width": width, "batch": batch, **desk.part(name, walked)}

    def _walked(
        self,
        family: str,
        width: int,
        batch: int,
        data_dir: str | None,
        lr: float | None,
        steps: Sequence[int],
        pace: Pace,
    ) -> dict[str, Any]:
        walk = Walk(family, width, data_dir, batch, lr, pace=pace)
        layers = FAMILIES[family].layers
        inputs, _ = walk.problem.prepare(walk.data.train_x[:batch], walk.data.train_y[:batch])
        rows = rows_per_step(walk.model, inputs)
        often = [layer for layer in layers if looks.widest(walk.model.get_submodule(layer)) <= self.once_above]
        lasting, last = walk.watch(list(layers), self.decay), steps[-1]
        fading: rkfac.RSKFAC | None = None
        seen: dict[tuple[float, str, str], dict[str, Any]] = {}
        for step in range(1, last + 1):
            if step == max(1, last + 1 - FORGOTTEN) and batch == max(self.batches) and often and pace.watched == 1:
                fading = walk.watch(often, self.short)
            walk.step()
            for layer in (layers if step == last else often) if step in steps else ():
                self._look(seen, lasting, self.decay, layer, step, rows[layer])
        for layer in often:
            if fading is not None:
                self._look(seen, fading, self.short, layer, last, rows[layer])
        walk.close()
        return {"loss": walk.loss, "factors": list(seen.values())}

    def _look(
        self,
        into: dict[tuple[float, str, str], dict[str, Any]],
        watcher: rkfac.RSKFAC,
        decay: float,
        layer: str,
        step: int,
        rows: int,
    ) -> None:
        """Both factors of a layer."""
        spectra = watcher.spectrum(layer)
        for side, values in (("input", spectra.input), ("output", spectra.output)):
            bound = retained_modes(decay, rows, len(values), ASSUMED_ALPHA, NEGLIGIBLE)
            fresh = {"layer": layer, "side": side, "rho": decay, "d": len(values), "rows": rows, "bound": bound}
            factor = into.setdefault((decay, layer, side), {**fresh, "looks": []})
            factor["looks"].append(looks.looked(values, decay, step, watcher.report()[0].updates))
            factor["curve"], factor["largest"] = looks.curve(values), float(values[0])

    def _factors(self, walks: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Every factor of every walk, with what it is of."""
        return [
            {**factor, **{key: walk[key] for key in ("family", "width", "batch", "loss")}}
            for walk in walks
            for factor in walk["factors"]
        ]

    def _series(
        self, found: Found, rho: float, walks: str = "walks"
    ) -> dict[tuple[str, str, str, int], list[Mapping[str, Any]]]:
        """Factors that differ in the width of the network alone, in its order."""
        series: dict[tuple[str, str, str, int], list[Mapping[str, Any]]] = {}
        for factor in sorted(self._factors(found[walks]), key=lambda f: f["width"]):
            if factor["rho"] == rho:
                key = (factor["family"], factor["layer"], factor["side"], factor["batch"])
                series.setdefault(key, []).append(factor)
        return series

    def verdict(self, found: Found) -> Verdict:
        """As `rule` says."""
        series, settled = self._judged(found), self._sided(found, "settled")
        kept = {where: most <= ENOUGH and growth < GROWN for where, (most, growth) in self._asked(found).items()}
        word = HOLDS if all(kept.values()) else PARTLY if any(kept.values()) else FAILS
        families = ", ".join(f"{name} {min(widths)} to {max(widths)} wide" for name, widths in self.families)
        narrow = ", ".join(f"{name} {min(widths)} to {max(widths)} wide" for name, widths in self.settled)
        measured = f"{families}, batch {' and '.join(map(str, self.batches))}, {self.steps[-1]} steps"
        measured += f"; {narrow}, {self.settled_steps[-1]} steps"
        told = ", ".join(f"{SIDES[side]} {looks.fullest(one)}" for side, one in series.items())
        later = ", ".join(f"{SIDES[side]} {self._grew(one)}" for side, one in settled.items())
        return Verdict(
            word,
            measured,
            f"Above a 33rd of the largest are, after {self.steps[-1]} steps, at most: {told}{self._flat(found)}; after "
            f"{self.settled_steps[-1]} steps of the narrower networks, by which the paper saw an equilibrium: {later}.",
        )

    def _asked(self, found: Found) -> dict[tuple[str, str], tuple[int, float]]:
        """Of early and settled factors of each side the most modes, and the largest growth with the width."""
        judged = (("early", self._judged(found), WIDE), ("settled", self._sided(found, "settled"), 0))
        return {
            (when, side): (looks.most(one), looks.growth(one, above) or 1.0)
            for when, sides, above in judged
            for side, one in sides.items()
        }

    def rule(self, found: Found) -> str:
        """With what was found of each of its parts."""
        told = ", ".join(
            f"{when} {SIDES[side]} {'yes' if most <= ENOUGH and growth < GROWN else 'no'} ({most} modes, {growth:.2f} times)"
            for (when, side), (most, growth) in self._asked(found).items()
        )
        return (
            f"each factor is asked, early (step {self.steps[-1]}) and settled (step {self.settled_steps[-1]}), whether it has "
            f"at most {ENOUGH} modes above the line and fewer than {GROWN:g} times as many in the widest network as in the "
            f"narrowest (early: of factors wider than {WIDE}); it holds if all four are so, partly if one is: {told}. Trainings "
            f"that diverged, with a loss above {DIVERGED:.1f}, twice that of guessing, are left out. (The settled part was "
            "added, and the rule written anew, when the early figures were known and the settled ones were not: the claim is "
            "about an equilibrium.)"
        )

    def _grew(self, series: Sequence[Series]) -> str:
        """Modes of every width, layer by layer, from either start where that matters."""
        told = []
        for layer in filter(None, series):  # of some all trainings diverged
            name = FAMILIES[layer[0]["family"]].layers[layer[0]["layer"]]
            told.append(f"{name} {' and '.join(map(_from_either_start, layer))}")
        return "; ".join(told) or "none"

    def _sided(self, found: Found, walks: str) -> dict[str, list[Series]]:
        """Factors by side, width by width, of all trainings that did not diverge."""
        every = self._series(found, self.decay, walks).items()
        return {
            side: [[factor for factor in one if factor["loss"] < DIVERGED] for key, one in every if key[2] == side]
            for side in SIDES
        }

    def _judged(self, found: Found) -> dict[str, list[Series]]:
        """Those of the first steps, at either learning rate."""
        slow, fast = (self._sided(found, walks) for walks in WALKS)
        return {side: slow[side] + fast[side] for side in SIDES}

    def _flat(self, found: Found) -> str:
        """In how many layers nearly all modes are above the line whatever the width, and the widest of these."""
        series = self._series(found, self.decay)
        flat = {
            key: one
            for key, one in series.items()
            if len(one) > 1 and all(factor["looks"][-1]["unbiased"] > FLAT * factor["d"] for factor in one)
        }
        if not flat:
            return ""
        family, layer, side, batch = widest_one = max(flat, key=lambda key: flat[key][-1]["d"])
        seen = ", ".join(f"{factor['looks'][-1]['unbiased']} of {factor['d']}" for factor in flat[widest_one])
        return (
            f" ({len(flat)} of {len(series)} factors are nearly flat at every width, such as the {SIDES[side]} of "
            f"{family}'s {FAMILIES[family].layers[layer]}, batch {batch}: {seen})"
        )

    def page(self, found: Found) -> str:
        """Modes by width, at each step, from each start; then the short memory."""
        last = self.steps[-1]
        rates = ", ".join(f"{FAMILIES[family].lr:g} for {family}" for family, _ in self.families)
        parts = [
            f"""
Every network takes the same number of steps with batches of the same size, trained by RS-KFAC with the paper's settings (damping
a tenth of the largest eigenvalue, update clip 0.07, rank {paper.RANK}) but for averages that are free of their start, statistics
every {SHORT.statistics} steps, inverses every {SHORT.inverses}, and a constant learning rate: {rates}.
Beside it another RS-KFAC, of learning rate zero, looks at some layers: it has statistics of
every step, from all rows. Its factors are decomposed exactly, in float64. A mode counts if its eigenvalue is above a 33rd of the
largest, which is the paper's line: with a damping of a tenth of the largest, what lies below hardly matters. *Unbiased*: the
average is free of its start. *Identity*: it starts from the identity, as in the paper, of which rho^n is left after n updates
({self.decay**last:.2g} here after {last}); the same training, from (1 - rho^n) s + rho^n. A row is a sample, times a position in
convolutions. Proposition 3.1 is the paper's bound with its alpha = 0.1, at most the width of the factor.

These are the first {last} steps of a training with as many updates of the averages; the narrower networks follow below, for
{self.later_steps[-1]} steps, and for {self.settled_steps[-1]} at the pace of the paper's figure, by which it has the decay of
output factors. The verdict rests on the first {last} and on the last of these, unbiased; in brackets, what the identity makes
of them.
On a GPU, `rkfac spectrum cifar10-vgg16bn --steps-max 13720 --every 30` goes as far as the figure does at every width.
""".strip()
        ]
        for family, _ in self.families:
            parts.append(f"## {FAMILIES[family].about}")
            parts += [self._table(found, family, side) for side in SIDES]
        parts.append(f"![modes against width]({self.name}-width.png)\n\n![spectra]({self.name}-curves.png)")
        parts += [self._fast(found), self._later(found), self._settled(found), self._short(found)]
        return "\n\n".join(parts)

    def _table(self, found: Found, family: str, side: str, walks: str = "walks") -> str:
        steps = {"later": self.later_steps, "settled": self.settled_steps}.get(walks, self.steps)
        header = ["layer", "width", "d", "batch", "rows a step", "largest eigenvalue"]
        header += [f"modes at step {step}" for step in steps]
        header += [f"identity start, step {steps[-1]}", "Proposition 3.1", "last loss"]
        lines = []
        for (of, layer, where, batch), series in sorted(self._series(found, self.decay, walks).items()):
            for factor in series if (of, where) == (family, side) else ():
                seen = {look["step"]: look for look in factor["looks"]}
                modes = [str(seen[step]["unbiased"]) if step in seen else "-" for step in steps]
                lines.append(
                    [
                        FAMILIES[family].layers[layer],
                        *map(str, (factor["width"], factor["d"], batch, factor["rows"])),
                        plain(factor["largest"]),
                        *modes,
                        str(factor["looks"][-1]["identity"]),
                        str(factor["bound"]),
                        plain(factor["loss"]),
                    ]
                )
        return f"The {SIDES[side]}:\n\n{table(header, lines)}"

    def _fast(self, found: Found) -> str:
        """What the choice of the learning rate does to all this."""
        family, _ = self.fast
        return "\n\n".join(
            [
                f"""## At the paper's learning rate

In first trials the loss of wide MLPs went up with the paper's {self.fast_rate:g}, so that {family} has {FAMILIES[family].lr:g}
above. On the embedded digits, which learn with either, the choice decided whether the modes grew with the width. So here is the
same at {self.fast_rate:g}, batch {max(self.batches)}; the verdict rests on both.""",
                *(self._table(found, family, side, "fast") for side in SIDES),
            ]
        )

    def _later(self, found: Found) -> str:
        """What is left of a flat beginning."""
        parts = [
            f"""## Later

The same for {self.later_steps[-1]} steps, batch {max(self.batches)}, of the networks that this machine trains so far."""
        ]
        for family, _ in self.later:
            parts.append(f"### {FAMILIES[family].about}")
            parts += [self._table(found, family, side, "later") for side in SIDES]
        return "\n\n".join(parts)

    def _settled(self, found: Found) -> str:
        """The equilibrium of which the paper speaks."""
        updates = -(-self.settled_steps[-1] // FIGURE.watched)
        parts = [
            f"""## Once the averages have settled

The same at the pace of the paper's Figure 1: statistics every {FIGURE.statistics} steps, of the training and of who looks,
inverses every {FIGURE.inverses}, learning rate and damping by the schedule of Section 5 (0.3, 0.2 and 0.1 in the first epochs),
batch {max(self.batches)}. After {self.settled_steps[-1]} steps the averages have had {updates} updates, and
{self.decay**updates:.1g} is left of an identity{self._remnant(found, updates)}. Networks that this machine trains so
far{self._too_narrow(found)}."""
        ]
        for family, _ in self.settled:
            parts.append(f"### {FAMILIES[family].about}")
            parts += [self._table(found, family, side, "settled") for side in SIDES]
        parts.append(f"![spectra once settled]({self.name}-settled.png)")
        return "\n\n".join(parts)

    def _remnant(self, found: Found, updates: int) -> str:
        """What is left of the identity beside the smallest of all largest eigenvalues."""
        factors = [factor for series in self._series(found, self.decay, "settled").values() for factor in series]
        if not factors:
            return ""
        least = min(factors, key=lambda factor: float(factor["largest"]))
        share_of_it = self.decay**updates / least["largest"]
        name = f"{SIDES[least['side']]} of the {FAMILIES[least['family']].layers[least['layer']]} of width {least['width']}"
        return f", which is {share_of_it:.2g} of the largest eigenvalue of the {name}, the smallest of all"

    def _too_narrow(self, found: Found) -> str:
        """Where no factor could have more modes than the paper keeps."""
        narrow = [
            SIDES[side]
            for side, series in self._sided(found, "settled").items()
            if max((factor["d"] for one in series for factor in one), default=0) <= ENOUGH
        ]
        return (
            f"; of so narrow networks no {' and no '.join(narrow)} could have more than {ENOUGH} modes, but it can grow"
            if narrow
            else ""
        )

    def _short(self, found: Found) -> str:
        """The decay of KLD-WRM, of which the paper expects fewer modes."""
        long = {key: series for key, series in self._series(found, self.decay).items() if key[3] == max(self.batches)}
        short = self._series(found, self.short)
        lines = []
        for (family, layer, side, batch), series in long.items():
            known = {factor["width"]: factor for factor in short.get((family, layer, side, batch), ())}
            for lasting, fading in ((one, known[one["width"]]) for one in series if one["width"] in known):
                where = [family, FAMILIES[family].layers[layer], SIDES[side], str(lasting["width"]), str(lasting["d"])]
                modes = [str(one["looks"][-1]["unbiased"]) for one in (lasting, fading)]
                lines.append([*where, modes[0], modes[1], str(lasting["bound"]), str(fading["bound"])])
        header = ["network", "layer", "factor", "width", "d"]
        header += [f"modes, rho {rho:g}" for rho in (self.decay, self.short)]
        header += [f"Proposition 3.1, rho {rho:g}" for rho in (self.decay, self.short)]
        return f"""## A shorter memory

The paper expects fewer modes where rho is 0.5, as in KLD-WRM. The same trainings at the same weights, batch {max(self.batches)},
unbiased; of the shorter memory the last {min(FORGOTTEN, self.steps[-1])} updates are seen, before which nothing of it
is left. Factors wider than {self.once_above} were decomposed once, with the longer memory.

{table(header, lines, left=3)}"""

    def pictures(self, found: Found) -> dict[str, Figure]:
        """Modes against the width of the factor, and the curves of the largest batch."""
        early, settled = (self._series(found, self.decay, walks) for walks in ("walks", "settled"))
        return {
            "width": spectrum_pictures.against_width(early, self.steps[-1], ENOUGH),
            "curves": spectrum_pictures.curves(early, max(self.batches), self.steps[-1]),
            "settled": spectrum_pictures.curves(settled, max(self.batches), self.settled_steps[-1]),
        }


def _from_either_start(factor: Mapping[str, Any]) -> str:
    """Modes of all; in brackets those of an average that started from the identity, where they are others."""
    last = factor["looks"][-1]
    other = f" ({last['identity']} from the identity)" if last["identity"] != last["unbiased"] else ""
    return f"{last['unbiased']}{other} of {factor['d']}"
