"""Trials of every contender on equal terms: as many for each, the same budget, the same data, the same seed.

The best is the one whose metric is best at the end, or the one that needs the fewest steps to the hardest target
(`--by target`); a run that diverges, fails or never arrives cannot win. Where trials are short, the best of them can be
tried again with the whole budget, which then decides. The metric is measured on
a part of the training data that the trials do not train on, never on the test set, and the seed is none of those that
are reported afterwards: nothing is chosen on what it is judged by.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rkfac_lab import config as configuration
from rkfac_lab import disk, identity, optimizers
from rkfac_lab.comparison import Comparison, slug
from rkfac_lab.config import RunConfig
from rkfac_lab.data import Sources
from rkfac_lab.errors import LabError
from rkfac_lab.jobs import Display, Job, attempt
from rkfac_lab.record import Run, RunFolder
from rkfac_lab.search import Setting, Space, Trial, Tuned, finalists, next_settings, rates_around
from rkfac_lab.structure import checked
from rkfac_lab.validation import held_out
from rkfac_lab.workloads import Target, find

FILE = "tuning.json"
REMEDY = "name another file, or tune again"
SEED = 1000  # reported runs have seeds 0, 1, 2...
TRIALS, VALIDATION_SHARE = 8, 0.1
IN_PASSING = 0.2  # the validation share of the short trials of `rkfac compare --tune`
JUDGES = ("end", "target")
USUAL = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
# Where a sum over outputs makes the loss, and so the useful learning rates of plain gradients, of another size.
SMALLER = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3)
GRIDS = {"fashion-autoencoder": SMALLER, "digits-autoencoder": SMALLER}


@dataclass(frozen=True)
class Decays:
    """Weight decays of one kind of optimizer: the smallest useful one, the largest, and what to try instead of none."""

    smallest: float
    largest: float
    instead_of_none: tuple[float, ...]


# Steps as large as the gradient, with learning rates near 0.1; and Adam's small steps, where decays must be larger.
GRADIENT_SIZED = Decays(5e-5, 5e-3, (1e-4, 1e-3, 3e-4, 5e-3))
ADAM_SIZED = Decays(0.0, 0.3, (0.01, 0.1, 0.03, 0.3))
ADAM_LIKE = ("adamw", "muon", "soap")
DECAY_FACTORS = (0.1, 3.0, 0.3, 10.0)


@dataclass(frozen=True)
class Search:
    """How many trials each contender gets, on what data and for how long; `rates` of the first sweep given by hand."""

    trials: int = TRIALS
    rates: tuple[float, ...] = ()  # none: around each contender's own
    epochs: int | None = None  # None: the comparison's
    validation_share: float = VALIDATION_SHARE
    by: str = "end"  # what decides: the metric at the end, or the steps to the hardest "target"
    finalists: int = 0  # so many rates of each contender are tried again with all `final_epochs`
    final_epochs: int | None = None  # None: the workload's

    def __post_init__(self) -> None:
        """Refuse what cannot be tried."""
        if any(not math.isfinite(rate) or rate <= 0 for rate in self.rates):
            raise LabError("--grid needs learning rates greater than zero, such as --grid 0.01,0.03,0.1.")
        if self.trials < max(1, len(self.rates)):
            at_least = f"the {len(self.rates)} rates of --grid" if self.rates else "1"
            raise LabError(f"--trials must be at least {at_least}, not {self.trials}.")
        if self.by not in JUDGES:
            raise LabError(f"--by must be {' or '.join(JUDGES)}, not {self.by!r}.")
        if self.epochs is not None and self.epochs < 1:
            raise LabError(f"--tune-epochs must be at least 1, not {self.epochs}.")
        if self.finalists < 0 or (self.final_epochs is not None and not self.finalists):
            raise LabError("--finalists is how many rates are tried again with --final-epochs, such as --finalists 2.")
        if self.final_epochs is not None and self.final_epochs < 1:
            raise LabError(f"--final-epochs must be at least 1, not {self.final_epochs}.")
        if not 0 < self.validation_share <= 0.5:
            raise LabError(
                f"--validation-share must be greater than 0 (nothing is chosen on the test set) and at most 0.5, "
                f"not {self.validation_share!r}."
            )


def rates(text: str) -> tuple[float, ...]:
    """The learning rates in a comma-separated option; none in an empty one."""
    try:
        return tuple(sorted({float(word) for word in text.split(",") if word.strip()}))
    except ValueError:
        raise LabError(f"--grid {text!r} is not a list of numbers such as 0.01,0.03,0.1.") from None


def in_passing(comparison: Comparison, rates: Sequence[float] = (), epochs: int | None = None) -> Search:
    """`rkfac compare --tune`: one sweep of rates for everybody, for the epochs given or a third of the comparison's."""
    full = comparison.config(comparison.contenders[0], SEED).epochs or find(comparison.workload).epochs
    swept = tuple(rates) or GRIDS.get(comparison.workload, USUAL)
    return Search(len(swept), swept, max(1, full // 3) if epochs is None else epochs, IN_PASSING)


def tune(comparison: Comparison, search: Search, folder: Path, display: Display, workers: int = 1) -> Tuned:
    """Search for every contender, write `tuning.json` to `folder` and return the trials.

    Trials that have ended in `folder` are read and not done again, so that a search which was stopped goes on.
    """
    judge = judged_by(comparison.workload, search.validation_share, search.by)
    mode = judge.mode
    final_epochs = _final_epochs(comparison, search)
    spaces = _spaces(comparison, search)
    trials: dict[str, list[Trial]] = {name: [] for name in comparison.contenders}
    total = (search.trials + search.finalists) * len(trials)

    def tried(planned: Sequence[tuple[str, Setting]], before: int, final_epochs: int | None = None) -> list[Trial]:
        jobs = [_job(comparison, name, setting, search, folder, final_epochs) for name, setting in planned]
        for job in jobs:
            _require_ours(job)
        results = attempt(jobs, display, workers, before=before, total=total)
        if results.interrupted:
            raise KeyboardInterrupt
        if not results.runs and not before:
            raise LabError(f"Not one of the {len(jobs)} trials could be done: {results.failures[0].message}")
        runs = {run.path.name: run for run in results.runs}
        why = {failure.label: failure.message for failure in results.failures}
        return [
            _trial(name, setting, job.config, runs.get(job.folder.name), judge, why.get(job.config.name, ""))
            for (name, setting), job in zip(planned, jobs, strict=True)
        ]

    while planned := _round_robin(
        {name: next_settings(spaces[name], search.trials, mode, trials[name]) for name in trials}
    ):
        for trial in tried(planned, sum(map(len, trials.values()))):
            trials[trial.contender].append(trial)
    ahead = _round_robin({name: finalists(mine, mode, search.finalists) for name, mine in trials.items()})
    tuned = Tuned(
        comparison.workload,
        judge.name,
        mode,
        _epochs(comparison, search),
        search.validation_share,
        tuple(trial for mine in trials.values() for trial in mine),
        {name: found.own_decay for name, found in spaces.items()},
        comparison.config(comparison.contenders[0], SEED).max_steps,
        tuple(tried(ahead, search.trials * len(trials), final_epochs)) if ahead else (),
        final_epochs,
    )
    disk.write_text(folder / FILE, json.dumps(to_json(tuned), indent=2) + "\n")
    return tuned


@dataclass(frozen=True)
class Judge:
    """What decides between trials: a metric at the end of a run, or the steps until it meets a target."""

    metric: str
    mode: str
    target: Target | None = None

    @property
    def name(self) -> str:
        """What a person calls it."""
        return self.metric if self.target is None else f"steps_to_{self.metric}_{self.target.value:g}"

    def value(self, evaluations: Sequence[Mapping[str, Any]]) -> float | None:
        """Of a finished run; None: it has none to show."""
        if self.target is not None:
            reached = (e["step"] for e in evaluations if self.target.reached(e.get(self.metric)))
            found = next(reached, None)
        else:
            found = evaluations[-1].get(self.metric) if evaluations else None
        return None if found is None else float(found)


def judged_by(workload: str, validation_share: float, by: str = "end") -> Judge:
    """The hardest target's metric on the part kept apart, at the end, or the steps to the target itself."""
    problem = held_out(find(workload), validation_share)
    hardest = next(reversed(problem.targets), None)
    if by == "target":
        if hardest is None:
            raise LabError(f"{workload} has no target to arrive at; leave --by away.")
        return Judge(hardest.metric, "min", hardest)
    return Judge(f"{problem.measured_on}_loss", "min") if hardest is None else Judge(hardest.metric, hardest.mode)


def _spaces(comparison: Comparison, search: Search) -> dict[str, Space]:
    """The rates and decays to try for each contender, around its own on this workload."""
    configs = {name: configuration.resolve(comparison.config(name, SEED)) for name in comparison.contenders}
    for name in configs:
        if "lr" in comparison.config(name, SEED).schedule:
            raise LabError(f"{name} has a schedule for its learning rate, which cannot be tuned; leave one away.")
    first = next(iter(configs.values()))
    workload = find(first.workload, first.model, first.data)
    model = workload.model(workload.data(Sources(first.data_dir, first.text_file)))
    spaces = {}
    for name, config in configs.items():
        chosen = config.optimizer
        own = optimizers.own_settings(chosen.name, model, chosen.arguments)
        decay = own.get("weight_decay")
        spaces[name] = Space(
            search.rates or rates_around(float(own["lr"]), search.trials),
            () if decay is None else other_decays(chosen.name, float(decay)),
            None if decay is None else float(decay),
        )
    return spaces


def other_decays(optimizer: str, own: float) -> tuple[float, ...]:
    """Weight decays to try beside an optimizer's own, the most telling first."""
    sized_as = optimizer.rpartition("+")[2]  # of a K-FAC in another's place, that other
    kind = ADAM_SIZED if sized_as in ADAM_LIKE or own > GRADIENT_SIZED.largest else GRADIENT_SIZED
    if own == 0:
        return kind.instead_of_none
    multiples = [float(f"{own * factor:.3g}") for factor in DECAY_FACTORS]
    possible = [min(max(decay, kind.smallest), kind.largest) for decay in multiples]
    return tuple(dict.fromkeys(decay for decay in possible if decay != own))


def to_json(tuned: Tuned) -> dict[str, object]:
    """Everything that was tried and chosen, as plain values."""
    regions = {name: tuned.good_region(name) for name in tuned.contenders()}
    return {
        "workload": tuned.workload,
        "seed": SEED,
        "validation_share": tuned.validation_share,
        "metric": tuned.metric,
        "mode": tuned.mode,
        "epochs": tuned.epochs,
        "max_steps": tuned.max_steps,
        "trials": [{**asdict(trial), "decay": tuned.decay(trial)} for trial in tuned.trials],
        "finals": [{**asdict(trial), "decay": tuned.decay(trial)} for trial in tuned.finals],
        "final_epochs": tuned.final_epochs,
        "chosen": tuned.chosen(),
        "at_edge": tuned.at_edge(),
        "good_margin": tuned.margin_text(),
        "good_region": {
            name: region and {**asdict(region), "decades": region.decades} for name, region in regions.items()
        },
    }


@dataclass(frozen=True)
class _Written:
    """What is read again of a `tuning.json`."""

    workload: str
    chosen: dict[str, dict[str, Any]]


def read(path: Path, comparison: Comparison) -> dict[str, dict[str, Any]]:
    """The arguments that a `tuning.json` has for contenders of this comparison."""
    try:
        values = disk.read_json(path, REMEDY)
    except FileNotFoundError as error:
        raise LabError(f"There is no {path}; name the {FILE} that `rkfac tune` wrote.") from error
    try:
        known = {key: values[key] for key in ("workload", "chosen")}
        written: _Written = checked(known, _Written)
    except (KeyError, TypeError, LabError) as error:
        raise LabError(f"{path} is not what `rkfac tune` writes ({error}); {REMEDY}.") from error
    if written.workload != comparison.workload:
        raise LabError(f"{path} was tuned on {written.workload}, not on {comparison.workload}; {REMEDY}.")
    arguments = {name: written.chosen[name] for name in comparison.contenders if name in written.chosen}
    if not arguments:
        raise LabError(f"{path} chose nothing for {', '.join(comparison.contenders)}; {REMEDY}.")
    for name, chosen in arguments.items():
        for text in comparison.settings:
            key = text.partition("=")[0].strip().removeprefix(f"{name}.")
            if text.startswith(f"{name}.") and key in chosen:
                raise LabError(f"--set {text} and {path} both decide {key} of {name}; leave one of the two away.")
    return arguments


def _round_robin(wanted: Mapping[str, Sequence[Setting]]) -> list[tuple[str, Setting]]:
    """Everybody's first, then everybody's second..."""
    longest = max(map(len, wanted.values()))
    return [(name, mine[turn]) for turn in range(longest) for name, mine in wanted.items() if turn < len(mine)]


def _job(
    comparison: Comparison, contender: str, setting: Setting, search: Search, folder: Path, final_epochs: int | None
) -> Job:
    arguments, name = {"lr": setting.lr}, f"lr{setting.lr:g}"
    label = f"{contender} lr={setting.lr:g}"
    if setting.decay is not None:
        arguments["weight_decay"] = setting.decay
        name, label = f"{name}-wd{setting.decay:g}", f"{label} decay={setting.decay:g}"
    special: dict[str, Any] = {"label": label, "validation_share": search.validation_share}
    if search.epochs is not None:
        special["epochs"] = search.epochs
    if final_epochs is not None:
        special |= {"epochs": final_epochs, "max_steps": None, "label": f"{label} to the end"}
        name = f"{name}-final{final_epochs}"
    config = comparison.config(contender, SEED, arguments, **special)
    return Job(config, folder / "tuning" / f"{slug(contender)}-{name}")


def _require_ours(job: Job) -> None:
    """Refuse a folder of other trials now: as a trial that failed it would only be a line in the table."""
    target = RunFolder(job.folder)
    if target.exists():
        now = configuration.resolve(job.config)
        identity.require_same_run(target, identity.recorded(target), now, resume=True)


def _trial(contender: str, setting: Setting, config: RunConfig, run: Run | None, judge: Judge, message: str) -> Trial:
    given = config.optimizer.arguments
    if run is None:
        return Trial(contender, setting.lr, None, "failed", setting.decay, message=message, arguments=given)
    status = str(run.summary.get("status"))
    last = run.epochs[-1] if run.epochs else {}
    value = judge.value(run.epochs) if status == "finished" else None
    return Trial(
        contender,
        setting.lr,
        value,
        "not reached" if judge.target is not None and value is None and status == "finished" else status,
        setting.decay,
        steps=int(run.summary.get("steps") or 0),
        cpu_seconds=last.get("cpu_seconds"),
        arguments=given,
    )


def _epochs(comparison: Comparison, search: Search) -> int:
    config = comparison.config(comparison.contenders[0], SEED)
    return search.epochs or config.epochs or find(comparison.workload).epochs


def _final_epochs(comparison: Comparison, search: Search) -> int | None:
    """The budget of the finals, None if there are none; refuse one that is no longer than a trial's."""
    if not search.finalists:
        return None
    epochs = search.final_epochs or find(comparison.workload).epochs
    if epochs <= _epochs(comparison, search) and comparison.config(comparison.contenders[0], SEED).max_steps is None:
        raise LabError(
            f"--finalists is for trials shorter than the whole budget, and here both have {epochs} epoch"
            f"{'s' * (epochs != 1)}; give --epochs or --set max_steps=N for the trials, or leave it away."
        )
    return epochs
