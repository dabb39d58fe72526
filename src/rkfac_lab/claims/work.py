"""`rkfac claims`: measure a claim, write its page, make all pages again, fill the table of all."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

import torch

from rkfac_lab import machine, record, slots
from rkfac_lab.claims import pages
from rkfac_lab.claims.all import CLAIMS
from rkfac_lab.claims.claim import Claim
from rkfac_lab.claims.desk import Desk
from rkfac_lab.errors import LabError, unknown
from rkfac_lab.lock import locked

PAGES = Path("docs/results/claims")
WORK = Path("runs/claims")
SMALL = "small-"  # before the names of what is no evidence


def find(name: str, small: bool = False) -> Claim:
    """The claim of this name."""
    if name not in CLAIMS:
        raise unknown("claim", name, CLAIMS)
    return CLAIMS[name].small() if small else CLAIMS[name]


def measure(claim: Claim, work: Path, jobs: int, threads: int, data_dir: str | None, small: bool) -> pages.Measured:
    """All that is missing of it in the folder `work`."""
    folder = work / f"{SMALL if small else ''}{claim.name}"
    words = ["rkfac", "claims", claim.name, *(["--small"] if small else [])]
    words += ["--jobs", str(jobs)] if jobs != 1 else []
    words += ["--threads", str(threads)] if threads != 1 else []
    with locked(folder), machine.threads(threads):
        found = claim.measure(Desk(folder, jobs, threads, data_dir))
        facts = record.environment(torch.device("cpu"))
    known = {
        "processor": facts["processor"],
        "cores": os.cpu_count(),
        "torch": facts["versions"].get("torch"),
        "threads of a run": threads,
        "runs side by side": jobs,
    }
    return pages.Measured(claim, found, known, shlex.join(words))


def rebuild(folder: Path, into: Path | None) -> list[Path]:
    """All pages whose numbers lie in `folder`, and the table of all on the page `into`."""
    found = pages.measured_in(folder, CLAIMS)
    if not found:
        raise LabError(f"{folder} holds no measured claim; `rkfac claims NAME` measures one.")
    written = [path for measured in found.values() for path in pages.rebuild(measured, folder)]
    if into is not None:
        where = os.path.relpath(folder, into.parent).rstrip("/") + "/"
        slots.fill(into, "claims", pages.summary(CLAIMS, found, where))
        written.append(into)
    return written


def listed(folder: Path) -> Sequence[tuple[str, str, str]]:
    """Of every claim its name, what it says, and what became of it."""
    found = pages.measured_in(folder, CLAIMS)
    return [
        (name, claim.title, found[name].verdict.word if name in found else "not measured")
        for name, claim in CLAIMS.items()
    ]
