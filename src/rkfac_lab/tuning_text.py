"""The trials of a tuning and what was chosen, for the terminal and in sentences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from rkfac_lab import budgets
from rkfac_lab.errors import LabError
from rkfac_lab.harmless import visible
from rkfac_lab.search import Region, Trial, Tuned
from rkfac_lab.structure import checked
from rkfac_lab.table_text import metric_name, metric_value


def show(tuned: Tuned, console: Console) -> None:
    """Print the tables and the notes, not narrower than they need to be where no terminal says how wide."""
    wide = console if console.is_terminal else Console(file=console.file, width=max(console.width, 120))
    for table in to_rich(tuned):
        wide.print(table)
    for note in notes(tuned):
        console.print(note, soft_wrap=True, highlight=False, markup=False)


def to_rich(tuned: Tuned) -> list[RichTable]:
    """Every trial (the chosen ones have a star), then one row an optimizer with what became of it."""
    return [_trials(tuned), _choice(tuned)]


def notes(tuned: Tuned) -> list[str]:
    """One line for each contender that more trials might serve better, and why the failed ones failed."""
    edge = "did best at the edge of the rates tried; more trials or a wider --grid may serve it better."
    nothing = "has no trial that ended well and keeps the workload's settings."
    said = [f"{name} {edge}" for name in tuned.at_edge()]
    said += [f"{name} {nothing}" for name in tuned.contenders() if tuned.best(name) is None]
    why = dict.fromkeys((trial.contender, trial.message) for trial in (*tuned.trials, *tuned.finals) if trial.message)
    return [visible(text) for text in [*said, *(f"{name} failed: {message}" for name, message in why)]]


class _Tried(TypedDict):
    contender: str
    lr: float


class _Told(TypedDict):
    """What a sentence needs of a `tuning.json`."""

    metric: str
    epochs: int
    max_steps: int | None
    validation_share: float
    seed: int
    trials: list[_Tried]
    at_edge: list[str]
    finals: list[_Tried]
    final_epochs: int | None


def sentences(written: Mapping[str, Any]) -> dict[str, str]:
    """How each contender that has a choice came by it, from what `tuning.json` holds."""
    try:
        told: _Told | None = checked({"max_steps": None, "finals": [], "final_epochs": None, **written}, _Told)
    except LabError:  # by hand, or by an earlier version
        told = None
    return {name: _sentence(told, name, arguments) for name, arguments in written["chosen"].items()}


def _sentence(told: _Told | None, name: str, arguments: Mapping[str, Any]) -> str:
    chosen = ", ".join(f"{key} = {arguments[key]}" for key in ("lr", "weight_decay") if key in arguments)
    said = f"tuned: {chosen}" if chosen else "tuned"
    rates = sorted(trial["lr"] for trial in told["trials"] if trial["contender"] == name) if told else []
    if told is None or not rates:
        return visible(f"{said}; how was not recorded.")
    said += (
        f", the best of {_count(len(rates), 'trial')} (learning rates {rates[0]:g} to {rates[-1]:g}) by "
        f"{metric_name(told['metric'])} after {budgets.in_words(told)}, on "
        f"{100 * told['validation_share']:g} % of the training data kept apart, with seed {told['seed']}."
    )
    finals = sorted({trial["lr"] for trial in told["finals"] if trial["contender"] == name})
    if finals:
        again = " and ".join(f"{rate:g}" for rate in finals)
        said += f" It decided between {again} after {budgets.in_words({'epochs': told['final_epochs']})}."
    edge = " The best rate lies at the edge of those tried." if name in told["at_edge"] else ""
    return visible(said + edge)


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'s' * (number != 1)}"


def _trials(tuned: Tuned) -> RichTable:
    title = f"{tuned.workload}: {metric_name(tuned.metric)} {tuned.judged()} (* chosen)"
    again = tuned.judged_again()
    table = _table(title, ("optimizer", "lr", "weight decay", "result", *([again] if again else [])))
    for name in tuned.contenders():
        best = tuned.best(name)
        mine = sorted(tuned.of(name), key=lambda trial: (trial.decay is not None, trial.lr, trial.decay or 0.0))
        finals = {(final.lr, final.decay): final for final in tuned.finals_of(name)}
        for position, trial in enumerate(mine):
            cells = [f"{trial.lr:g}", _number(tuned.decay(trial)), _result(tuned, trial) + "*" * (trial is best)]
            final = finals.get((trial.lr, trial.decay))
            if again:
                cells.append(_result(tuned, final) + "*" * (final is best) if final else "")
            table.add_row(Text(visible(name) if position == 0 else ""), *map(Text, cells))
        table.add_section()
    return table


def _choice(tuned: Tuned) -> RichTable:
    title = f"Chosen; good learning rates are {tuned.margin_text()}"
    header = ("optimizer", "trials", "lr", "weight decay", "result", "at an edge", "good region", "decades")
    table = _table(title, header)
    for name in tuned.contenders():
        best, region = tuned.best(name), tuned.good_region(name)
        chosen = ["-", "-", "-", "-"]
        if best is not None:
            edge = "yes" if name in tuned.at_edge() else "no"
            chosen = [f"{best.lr:g}", _number(tuned.decay(best)), _result(tuned, best), edge]
        cells = [str(len(tuned.of(name))), *chosen, *_region(region)]
        table.add_row(Text(visible(name)), *map(Text, cells))
    return table


def _table(title: str, header: tuple[str, ...]) -> RichTable:
    table = RichTable(title=Text(visible(title)), title_justify="left")
    for position, name in enumerate(header):
        table.add_column(name, justify="right" if position else "left", no_wrap=position == 0)
    return table


def _result(tuned: Tuned, trial: Trial) -> str:
    return visible(trial.status) if trial.value is None else metric_value(tuned.metric, trial.value)


def _region(region: Region | None) -> tuple[str, str]:
    if region is None:
        return "-", "-"
    return f"{region.low:g} to {region.high:g}", f"{'≥ ' * region.open}{region.decades:.1f}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"
