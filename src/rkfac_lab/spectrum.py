"""The paper's Figure 1: how the spectra of the Kronecker factors fall off while K-FAC trains.

The training itself is `train.run`'s; a `Recorder` listens to every optimizer step and writes down the eigenvalues
of the chosen layers at the paper's steps. At the end the factors of every layer are looked at once, which is what
the picture "modes against width" is made of.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from rich.table import Table as RichTable
from rich.text import Text
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import rkfac
from rkfac_lab import disk, train
from rkfac_lab.config import RunConfig, from_dict, load, override, resolve
from rkfac_lab.data import Sources
from rkfac_lab.errors import LabError
from rkfac_lab.progress import Bar
from rkfac_lab.workloads import find

NEGLIGIBLE = 1 / 33  # the paper: with damping at a tenth of the largest eigenvalue, below this a mode can be dropped
ASSUMED_ALPHA = 0.1  # the paper's assumption in Proposition 3.1: lambda_max >= alpha sigma_max^2


class Spectra(Protocol):
    """The eigenvalues of one layer's two factors, descending."""

    input: Tensor
    output: Tensor


class Listened(Protocol):
    """What a recorder needs of an optimizer."""

    def spectrum(self, name: str) -> Spectra:
        """The two spectra of the layer of this name."""
        ...

    def report(self) -> Sequence[Any]:
        """One record a layer, with `name`, `covered`, `rank_input` and `rank_output`."""
        ...


@dataclass(frozen=True)
class Recording:
    """When to look: every `early_every` steps while the step is below `late_from`, then every `late_every`."""

    early_every: int = 30
    late_every: int = 300
    late_from: int = 300

    def due(self, step: int) -> bool:
        """Whether the paper would look after this step (counted from 0)."""
        return step % (self.early_every if step < self.late_from else self.late_every) == 0


@dataclass
class FactorHistory:
    """The spectra of one factor; `bound` is how many modes Proposition 3.1 allows above `NEGLIGIBLE`."""

    layer: str
    side: str
    width: int
    bound: int
    steps: list[int] = field(default_factory=list)
    eigenvalues: list[list[float]] = field(default_factory=list)

    def modes(self) -> list[int]:
        """At each recorded step, how many eigenvalues are above `NEGLIGIBLE` times the largest."""
        return [sum(value > NEGLIGIBLE * values[0] for value in values) for values in self.eigenvalues]

    def last(self) -> FactorHistory:
        """The same factor with its last spectrum only."""
        return replace(self, steps=self.steps[-1:], eigenvalues=self.eigenvalues[-1:])


class Recorder:
    """Called after every optimizer step; keeps the spectra of `layers` at the steps that are due."""

    def __init__(self, when: Recording, layers: Sequence[str] | None, rows: Mapping[str, int], decay: float) -> None:
        """`rows` is each layer's number of statistics rows a step (samples times positions); `decay` is rho."""
        self.when = when
        self.layers = layers
        self.rows = rows
        self.decay = decay
        self.step = -1
        self.chosen: dict[tuple[str, str], FactorHistory] = {}
        self.final: dict[tuple[str, str], FactorHistory] = {}
        self.latest: Listened | None = None

    def __call__(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """The shape of torch's optimizer step hooks; optimizers without spectra are none of our business."""
        if not hasattr(optimizer, "spectrum"):
            return
        listened: Listened = optimizer  # type: ignore[assignment]
        self.step += 1
        self.latest = listened
        if self.step == 0:
            self.layers = choose(covered(listened), self.layers)
        if self.when.due(self.step):
            self._look(self.chosen, self.layers or ())

    def finish(self) -> None:
        """Look once more: at the chosen layers if the last step was not due, and at every layer for the widths."""
        if self.latest is None:
            raise LabError("No step was taken, so there is no spectrum to show; give --steps-max at least 1.")
        if not self.when.due(self.step):
            self._look(self.chosen, self.layers or ())
        self.final = {key: history.last() for key, history in self.chosen.items()}
        self._look(self.final, [name for name in covered(self.latest) if (name, "input") not in self.final])

    def _look(self, into: dict[tuple[str, str], FactorHistory], names: Sequence[str]) -> None:
        assert self.latest is not None
        for name in names:
            spectra = self.latest.spectrum(name)
            for side, values in (("input", spectra.input), ("output", spectra.output)):
                history = into.setdefault((name, side), self._empty(name, side, len(values)))
                history.steps.append(self.step)
                history.eigenvalues.append([_rounded(value) for value in values.tolist()])

    def _empty(self, name: str, side: str, width: int) -> FactorHistory:
        from rkfac.theory import retained_modes

        bound = retained_modes(self.decay, self.rows.get(name, 1), width, ASSUMED_ALPHA, NEGLIGIBLE)
        return FactorHistory(name, side, width, bound)


def covered(optimizer: Listened) -> list[str]:
    """Names of the layers with two matrix factors, in the order of the model; diagonal factors have no modes to drop."""
    records = optimizer.report()
    return [r.name for r in records if r.covered and r.rank_input is not None and r.rank_output is not None]


def choose(names: Sequence[str], wanted: Sequence[str] | None) -> list[str]:
    """The layers to draw: those asked for, all of a small model, else two (of VGG16_bn the paper's 7th and 11th)."""
    if wanted:
        for name in wanted:
            if name not in names:
                raise LabError(f"There is no preconditioned layer '{name}'; choose from {', '.join(names)}.")
        return list(wanted)
    if len(names) <= 4:
        return list(names)
    return [names[int(0.45 * len(names))], names[int(0.7 * len(names))]]


def rows_per_step(model: nn.Module, inputs: Tensor) -> dict[str, int]:
    """How many rows each layer adds to its factors for one batch: samples times positions (n_M in the paper)."""
    found: dict[str, int] = {}

    def count(name: str) -> Any:
        def hook(module: nn.Module, arguments: Any, output: Any) -> None:
            if isinstance(output, Tensor) and hasattr(module, "weight"):
                features = output.shape[1] if isinstance(module, nn.Conv2d) else output.shape[-1]
                found[name] = output.numel() // features

        return hook

    handles = [module.register_forward_hook(count(name)) for name, module in model.named_modules()]
    training = model.training
    with torch.no_grad():
        model.eval()(inputs)
    model.train(training)
    for handle in handles:
        handle.remove()
    return found


def statistics_period(steps: int) -> int:
    """Steps between updates of the factors: the paper's 30, or less so that a short run has its 450 updates too.

    With fewer, the identity the factors start from would still be seen: it fades as rho to the number of updates.
    """
    return max(1, min(30, steps // 450))


def run(config: RunConfig, folder: Path, when: Recording, layers: Sequence[str] | None) -> Recorder:
    """Train as `config` says with a recorder listening; `config` must name an optimizer that has `spectrum`."""
    workload = find(config.workload, config.model, config.data)
    data = workload.data(Sources(config.data_dir, config.text_file))
    inputs, _ = workload.prepare(data.train_x[: config.batch_size], data.train_y[: config.batch_size])
    rows = rows_per_step(workload.model(data), inputs)
    recorder = Recorder(when, layers, rows, float(resolve(config).optimizer.arguments.get("factor_decay", 0.95)))
    handle = register_optimizer_step_post_hook(recorder)
    try:
        train.run(config, folder, progress=Bar())
    except KeyboardInterrupt:
        if recorder.latest is None:
            raise  # otherwise what was seen so far is still worth drawing
    finally:
        handle.remove()
    recorder.finish()
    return recorder


def paper_config(workload: str, steps: int, every: int, settings: Sequence[str] = (), **common: Any) -> RunConfig:
    """Exact K-FAC with the paper's settings; the paper's own workload has its schedules too.

    `every` is T_KU; T_KI stays the paper's 30 (or `every` if that is more), which is what takes the time.
    """
    known = find(workload)
    values: dict[str, Any] = {"workload": workload, "optimizer": {"name": "k-fac", "preset": "paper"}}
    if workload == "cifar10-vgg16bn":
        values = load("paper-k-fac").to_dict()
        values["schedule"].pop("inverse_every", None)
    arguments = values["optimizer"].setdefault("arguments", {})
    arguments.setdefault("lr", known.arguments("k-fac").get("lr", rkfac.paper_defaults()["lr"]))
    arguments.update(factor_every=every, inverse_every=max(every, 30))
    values.update({key: value for key, value in common.items() if value is not None})
    for text in settings:
        override(values, text)
    known = find(workload, values.get("model"), values.get("data"))
    samples = len(known.data(Sources(values.get("data_dir"), values.get("text_file"))).train_x)
    batch = values.setdefault("batch_size", known.batch_size)
    epochs = math.ceil(steps / math.ceil(samples / batch))
    length = {"max_steps": steps, "epochs": epochs, "evaluate_every": max(1, epochs // 10), "evaluate_steps": 0}
    return from_dict({**values, **length})


def write(recorder: Recorder, config: RunConfig, folder: Path) -> list[Path]:
    """Write both figures and `spectrum.json`; returns their paths."""
    from rkfac_lab import plots

    chosen, final = list(recorder.chosen.values()), list(recorder.final.values())
    title = f"{config.workload}: eigenvalues of the K-FAC factors"
    paths = [*plots.save(plots.spectra(chosen, title), folder / "spectrum")]
    title = f"{config.workload}: modes that matter after {recorder.step + 1} steps, by width"
    paths += plots.save(plots.modes_against_width(final, title), folder / "modes-against-width")
    content = {
        "config": config.to_dict(),
        "epsilon": NEGLIGIBLE,
        "alpha": ASSUMED_ALPHA,
        "rho": recorder.decay,
        "spectra": [_described(history) for history in chosen],
        "widths": [_described(history, spectra=False) for history in final],
    }
    path = folder / "spectrum.json"
    disk.write_text(path, json.dumps(content) + "\n")
    return [*paths, path]


def to_rich(recorder: Recorder) -> RichTable:
    """For every factor: its width, the modes above a 33rd of the largest eigenvalue, and Proposition 3.1's bound."""
    table = RichTable(title=f"after {recorder.step + 1} steps", title_justify="left")
    table.add_column("layer", no_wrap=True)
    table.add_column("factor")
    for name in ("width", "modes > largest/33", "Proposition 3.1"):
        table.add_column(name, justify="right")
    for history in sorted(recorder.final.values(), key=lambda h: (h.side, h.width)):
        modes = str(history.modes()[-1])
        table.add_row(Text(history.layer), history.side, str(history.width), modes, str(history.bound))
    return table


def _described(history: FactorHistory, spectra: bool = True) -> dict[str, Any]:
    plain = {**asdict(history), "modes": history.modes()}
    return plain if spectra else {key: value for key, value in plain.items() if key != "eigenvalues"}


def _rounded(value: float) -> float:
    """Six digits are more than a picture shows and keep the file small."""
    return float(f"{value:.6g}")
