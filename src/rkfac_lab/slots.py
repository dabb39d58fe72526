"""Places in Markdown pages that a command fills: between `<!-- NAME -->` and `<!-- end of NAME -->`."""

from __future__ import annotations

from pathlib import Path

from rkfac_lab import disk
from rkfac_lab.errors import LabError


def fill(page: Path, name: str, text: str) -> None:
    """Put `text` into the page's place of this name."""
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    try:
        whole = disk.read(page).decode()
    except FileNotFoundError:
        raise LabError(f"There is no page {page} to put a {name} into; make it, with a place for it.") from None
    if whole.count(begin) != 1 or whole.count(end) != 1:
        raise LabError(f"{page} has no place for a {name}: one line {begin} and, below it, one line {end}.")
    before, rest = whole.split(begin)
    _, after = rest.split(end)
    disk.write_text(page, f"{before}{begin}\n{text}\n{end}{after}")
