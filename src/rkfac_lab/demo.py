"""The promise on the embedded workloads: each baseline, and rs-kfac in its place with its numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from rkfac_lab import compare, places, promise_text, speech
from rkfac_lab.comparison import Comparison, slug
from rkfac_lab.promise import Promise, promises

CONTENDERS = ("sgd", "rs-kfac+sgd", "adamw", "rs-kfac+adamw")
# None: the workload's own. The wide network has half of its own, so that all takes about two minutes on two cores.
EPOCHS = {"digits-autoencoder": None, "digits-mlp": 8}


def choose_folder(out: Path | None) -> Path:
    """Where the demonstration goes: `out`, continued if it is one, or a new dated folder in runs/."""
    return out or places.RUNS / f"demo-{datetime.now():%Y%m%d-%H%M%S}"


def run(
    folder: Path, seeds: int = 3, epochs: Mapping[str, int | None] = EPOCHS, console: Console | None = None
) -> dict[str, tuple[Promise, ...]] | None:
    """Compare on one workload after the other, then say what became of every pair; None if it was interrupted."""
    console = console or speech.console()
    found: dict[str, tuple[Promise, ...]] = {}
    for workload, budget in epochs.items():
        comparison = Comparison(workload, CONTENDERS, seeds, common={"epochs": budget})
        place = folder / slug(workload)
        results = compare.run(comparison, place, console=console, continued_by=f"--out {folder}")
        if results.interrupted:
            return None
        found[workload] = promises(results.runs, results.failures)
    for line in (*closing(found), f"The curves and the pages are in {folder}."):
        console.print(line, soft_wrap=True, highlight=False, markup=False)
    return found


def numbers(found: Mapping[str, Sequence[Promise]]) -> dict[str, Any]:
    """Every pair as plain values, and the line about all of them."""
    pairs = [pair for pairs in found.values() for pair in pairs]
    return {"workloads": {name: promise_text.to_json(own) for name, own in found.items()}, "verdict": verdict(pairs)}


def closing(found: Mapping[str, Sequence[Promise]]) -> list[str]:
    """Every pair's sentence under its workload's name, and one line about all of them."""
    said = [f"{workload}: {promise_text.sentence(pair)}" for workload, pairs in found.items() for pair in pairs]
    return ["", *said, verdict([pair for pairs in found.values() for pair in pairs])]


def verdict(pairs: Sequence[Promise]) -> str:
    """In how many pairs the K-FAC arrived sooner; a pair of which a seed never arrived is none of them."""
    if not pairs:
        return "No baseline has a result that rs-kfac could be measured against."
    never = sum(pair.reached < len(pair.arrivals) for pair in pairs)
    missed = f"; in {_share(never, len(pairs))} at least one seed never arrived" if never else ""
    steps, seconds = (sum(pair.sooner(measure) for pair in pairs) for measure in ("steps", "seconds"))
    kept = "kept but for those named above" if any(pair.other for pair in pairs) else "kept"
    return (
        f"One line replaced, the numbers {kept}: rs-kfac arrived sooner in steps in {_share(steps, len(pairs))}, "
        f"in seconds in {_share(seconds, len(pairs))}{missed}."
    )


def _share(count: int, total: int) -> str:
    return f"{count} of {total} pair{'s' * (total != 1)}"
