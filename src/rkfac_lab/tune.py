"""The learning rates and weight decays of several optimizers on one workload, chosen on equal terms."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from rkfac_lab import disk, plots, speech, tuning, tuning_text
from rkfac_lab.compare import check
from rkfac_lab.comparison import Comparison
from rkfac_lab.errors import LabError
from rkfac_lab.jobs import Display
from rkfac_lab.lock import locked
from rkfac_lab.search import Tuned

PICTURE = "tuning"
WRITTEN = (tuning.FILE, f"{PICTURE}.png", f"{PICTURE}.svg")


def run(
    comparison: Comparison,
    search: tuning.Search,
    folder: Path,
    *,
    workers: int = 1,
    console: Console | None = None,
    display: Display | None = None,
) -> Tuned | None:
    """Do the trials that are missing in `folder`, print the tables, write the choice and the picture; None if stopped."""
    console = console or speech.console()
    if workers < 1:
        raise LabError(f"--jobs is the number of trials side by side and must be at least 1, not {workers}.")
    check(comparison)
    with locked(folder):
        disk.sweep(folder, WRITTEN)
        try:
            tuned = tuning.tune(comparison, search, folder, display or Display(), workers)
        except KeyboardInterrupt:
            console.print(f"Interrupted; the same command with --out {folder} continues.", soft_wrap=True, markup=False)
            return None
        tuning_text.show(tuned, console)
        console.print("The trials and the picture of them:")
        for path in (folder / tuning.FILE, *plots.save(plots.tuning(tuned), folder / PICTURE)):
            console.print(f"  {path}", soft_wrap=True, highlight=False, markup=False)
    return tuned
