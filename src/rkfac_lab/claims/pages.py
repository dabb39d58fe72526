"""From what was measured to what can be read: the JSON file of a claim, its page and its pictures, and the table of all."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rkfac_lab import disk, plots
from rkfac_lab.claims.claim import OPEN, Claim, Verdict
from rkfac_lab.claims.text import table
from rkfac_lab.errors import unknown

REMEDY = "make it again with `rkfac claims`"


@dataclass(frozen=True)
class Measured:
    """A claim with the sizes it was measured at, what was found, and where."""

    claim: Claim
    found: Mapping[str, Any]
    machine: Mapping[str, Any]
    command: str

    @property
    def verdict(self) -> Verdict:
        """What became of it."""
        return self.claim.verdict(self.found)


def write(measured: Measured, folder: Path) -> list[Path]:
    """The numbers, the page and the pictures; returns the paths, the page first."""
    content = {
        "claim": measured.claim.name,
        "command": measured.command,
        "machine": dict(measured.machine),
        "sizes": asdict(measured.claim),
        "found": dict(measured.found),
    }
    path = folder / f"{measured.claim.name}.json"
    disk.make_folder(folder)
    disk.write_text(path, json.dumps(content, indent=1) + "\n")
    return [*rebuild(read(path, {measured.claim.name: measured.claim}), folder), path]


def rebuild(measured: Measured, folder: Path) -> list[Path]:
    """The page and the pictures from the numbers."""
    name = measured.claim.name
    page = folder / f"{name}.md"
    disk.write_text(page, text(measured))
    pictures = [
        plots.save(figure, folder / f"{name}-{part}")[0]
        for part, figure in measured.claim.pictures(measured.found).items()
    ]
    for drawn in pictures:  # pages show the PNG; a second copy of every curve is not worth its place
        drawn.with_suffix(".svg").unlink()
    return [page, *pictures]


def read(path: Path, claims: Mapping[str, Claim]) -> Measured:
    """The numbers of one claim, whoever wrote them."""
    content = disk.read_json(path, REMEDY)
    try:
        name, sizes = content["claim"], content["sizes"]
        if name not in claims:
            raise unknown("claim", str(name), claims)
        claim = replace(claims[name], **{key: _hashable(value) for key, value in sizes.items()})
        return Measured(claim, content["found"], content["machine"], content["command"])
    except (KeyError, TypeError, AttributeError) as error:
        raise disk.damaged(path, f"it is not what a claim's measurement writes: {error}", REMEDY) from error


def _hashable(value: Any) -> Any:
    return tuple(map(_hashable, value)) if isinstance(value, list) else value


def text(measured: Measured) -> str:
    """The whole page."""
    claim, verdict = measured.claim, measured.verdict
    machine = ", ".join(f"{key} {value}" for key, value in measured.machine.items())
    return (
        "\n\n".join(
            (
                f"# {claim.title}",
                f"The paper: *{claim.says}*",
                f"**{verdict.word.capitalize()}.** {verdict.why}",
                f"The rule: {claim.rule(measured.found)}",
                f"Measured on {verdict.measured}. Everything here is made from [the numbers]({claim.name}.json) that this "
                "command wrote, and is made again from them by `rkfac claims --rebuild`:",
                f"    {measured.command}",
                f"({machine})",
                claim.page(measured.found).strip(),
            )
        )
        + "\n"
    )


def measured_in(folder: Path, claims: Mapping[str, Claim]) -> dict[str, Measured]:
    """All claims whose numbers lie in a folder, in their order."""
    return {name: read(folder / f"{name}.json", claims) for name in claims if (folder / f"{name}.json").is_file()}


def summary(claims: Mapping[str, Claim], found: Mapping[str, Measured], where: str) -> str:
    """One line a claim, those that nobody has measured included; `where` leads from the page to the folder of theirs."""
    lines = []
    for name, claim in claims.items():
        if name in found:
            verdict = found[name].verdict
            title = f"[{claim.title}]({where}{name}.md)"
        else:
            verdict, title = Verdict(OPEN, "nothing yet", f"`rkfac claims {name}` measures it."), claim.title
        lines.append([title, verdict.measured, f"**{verdict.word}**", verdict.why])
    return table(["claim", "measured on", "verdict", "why"], lines, left=4)
