"""Table 1 as text: for the terminal, as Markdown, CSV and JSON."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any

from rich.table import Table as RichTable
from rich.text import Text

from rkfac_lab.harmless import csv_cell, markdown, visible
from rkfac_lab.tables import Spread, Table1, Target, ratios, reference_label

COSTS = "Steps and CPU seconds of training to each target"


def target_title(target: Target) -> str:
    """Short form for headings, such as "acc ≥ 97%"."""
    sign = "≥" if target.mode == "max" else "≤"
    return f"{metric_name(target.metric)} {sign} {metric_value(target.metric, target.value)}"


def metric_name(metric: str) -> str:
    """Short readable name of a metric."""
    return {"test_accuracy": "acc"}.get(metric, metric.replace("_", " "))


def metric_value(metric: str, value: float) -> str:
    """A metric's value as text: accuracies in per cent."""
    return f"{100 * value:.4g}%" if metric.endswith("accuracy") else f"{value:.4g}"


def to_markdown(table: Table1, reference: str | None = None) -> str:
    """The table and the ratios as GitHub-flavoured Markdown."""
    parts = [as_markdown(*_cells(table))]
    if table.targets:
        parts += [f"{COSTS}:", as_markdown(*_cost_cells(table))]
    if len(table.rows) > 1:
        parts.append(f"{markdown(_ratio_title(table, reference))}:")
        parts.append(as_markdown(*_ratio_cells(table, reference)))
    return "\n\n".join(parts) + "\n"


def to_rich(table: Table1, reference: str | None = None) -> list[RichTable]:
    """The table and the ratios for the terminal; `notes` has what there is to say about single rows."""
    bare = replace(table, rows=tuple(replace(row, notes="") for row in table.rows))
    tables = [as_rich(f"{table.workload}: mean ± standard deviation over the runs, times in seconds", *_cells(bare))]
    if table.targets:
        tables.append(as_rich(COSTS, *_cost_cells(table)))
    if len(table.rows) > 1:
        tables.append(as_rich(_ratio_title(table, reference), *_ratio_cells(table, reference)))
    return tables


def notes(table: Table1) -> list[str]:
    """One line for each row that had runs which diverged, failed or did not finish."""
    return [visible(f"{row.label}: {row.notes}") for row in table.rows if row.notes]


def to_json(table: Table1, reference: str | None = None) -> dict[str, Any]:
    """Everything as plain numbers, lists and dicts."""
    plain = asdict(table)
    plain["reference"] = reference or reference_label(table)
    plain["ratios"] = [asdict(ratio) for ratio in ratios(table, reference)] if table.rows else []
    return plain


def to_csv(table: Table1) -> str:
    """Raw numbers, one line an optimizer; empty where there is no number."""
    header = ["optimizer", "runs"]
    for target in table.targets:
        stem = f"{target.metric}_{target.value:g}"
        measures = ("seconds", "cpu_seconds", "steps", "epochs")
        header += [f"{stem}_hits", *(f"{stem}_{name}_{part}" for name in measures for part in ("mean", "std"))]
    header += [
        "epoch_seconds_mean",
        "epoch_seconds_std",
        f"best_{table.metric}_mean",
        f"best_{table.metric}_std",
        "notes",
    ]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(map(csv_cell, header))
    for row in table.rows:
        numbers: list[object] = [row.label, row.runs]
        for result in row.targets:
            spreads = (result.seconds, result.cpu_seconds, result.steps, result.epochs)
            numbers += [result.hits, *(number for value in spreads for number in _pair(value))]
        numbers += [*_pair(row.epoch_seconds), *_pair(row.best), row.notes]
        writer.writerow(map(csv_cell, numbers))
    return out.getvalue()


def _pair(value: Spread | None) -> tuple[object, object]:
    if value is None:
        return "", ""
    return value.mean, "" if value.std is None else value.std


def _cells(table: Table1) -> tuple[list[str], list[list[str]]]:
    header = ["optimizer", *(f"t({target_title(target)})" for target in table.targets), "t(epoch)"]
    header += [f"hit {metric_value(target.metric, target.value)}" for target in table.targets]
    header.append(f"best {metric_name(table.metric)}")
    noted = any(row.notes for row in table.rows)
    lines = []
    for row in table.rows:
        line = [row.label, *(_time(result.seconds) for result in row.targets), _time(row.epoch_seconds)]
        line += [f"{result.hits} of {result.runs}" for result in row.targets]
        line.append(_best(table.metric, row.best))
        lines.append([*line, row.notes] if noted else line)
    return ([*header, "notes"] if noted else header), lines


def _cost_cells(table: Table1) -> tuple[list[str], list[list[str]]]:
    names = [target_title(target) for target in table.targets]
    header = ["optimizer", *(f"steps({name})" for name in names), *(f"CPU({name})" for name in names)]
    lines = [
        [row.label, *(_fixed(r.steps, 0) for r in row.targets), *(_time(r.cpu_seconds) for r in row.targets)]
        for row in table.rows
    ]
    return header, lines


def _ratio_title(table: Table1, reference: str | None) -> str:
    return f"Times and steps divided by those of {reference or reference_label(table)} (below 1 is faster)"


def _ratio_cells(table: Table1, reference: str | None) -> tuple[list[str], list[list[str]]]:
    values = [metric_value(target.metric, target.value) for target in table.targets]
    header = ["optimizer", *(f"t({value})" for value in values), "t(epoch)"]
    header += [f"{name}({value})" for name in ("steps", "CPU") for value in values]
    lines = [
        [ratio.label, *map(_share, (*ratio.targets, ratio.epoch_seconds, *ratio.steps, *ratio.cpu_seconds))]
        for ratio in ratios(table, reference)
    ]
    return header, lines


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _time(value: Spread | None) -> str:
    """Seconds with the decimals that matter at their size, so that fast and slow optimizers both read well."""
    if value is None:
        return "-"
    return _fixed(value, 1 if value.mean >= 10 else 2 if value.mean >= 1 else 3)


def _fixed(value: Spread | None, decimals: int) -> str:
    if value is None:
        return "-"
    mean = f"{value.mean:.{decimals}f}"
    return mean if value.std is None else f"{mean} ± {value.std:.{decimals}f}"


def _best(metric: str, value: Spread | None) -> str:
    if value is None:
        return "-"
    if not metric.endswith("accuracy"):
        return _fixed(value, 1 if value.mean >= 100 else 2 if value.mean >= 1 else 4)
    return _fixed(Spread(100 * value.mean, None if value.std is None else 100 * value.std, value.count), 2) + "%"


def as_markdown(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table as GitHub-flavoured Markdown; text from runs is made harmless here."""

    def join(cells: Iterable[str]) -> str:
        return "| " + " | ".join(map(markdown, cells)) + " |"

    rule = [" --- " if position == 0 or name == "notes" else " ---: " for position, name in enumerate(header)]
    return "\n".join([join(header), f"|{'|'.join(rule)}|", *(join(line) for line in lines)])


def as_rich(title: str, header: Sequence[str], lines: Sequence[Sequence[str]]) -> RichTable:
    """A table for the terminal; text from runs is made harmless here."""
    table = RichTable(title=Text(visible(title)), title_justify="left")
    for position, name in enumerate(header):
        left = position == 0 or name == "notes"
        table.add_column(Text(visible(name)), justify="left" if left else "right", no_wrap=position == 0)
    for line in lines:
        table.add_row(*(Text(visible(cell)) for cell in line))
    return table
