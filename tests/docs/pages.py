"""The pages: where they are, and what of them is code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "RELEASING.md", *sorted(DOCS.rglob("*.md"))]

# A comment `<!-- run: ... -->` is code that readers need not see; `<!-- not run: why -->` stands right above a block.
PIECE = re.compile(
    r"^<!-- run:\n(?P<hidden>.*?)^-->$|^(?:<!-- not run:(?P<reason>[^\n]*)-->\n)?^```python[^\n]*\n(?P<shown>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class Code:
    """A piece of Python on a page, and in which of its lines it begins."""

    text: str
    line: int
    reason: str | None = None  # why it is not run

    @property
    def in_its_place(self) -> str:
        """After as many empty lines as there are above it, so that an error names the page's line."""
        return "\n" * (self.line - 1) + self.text


def code_of(text: str) -> Iterator[Code]:
    """All Python of a page, in order, shown or hidden."""
    for match in PIECE.finditer(text):
        kind = "hidden" if match["hidden"] is not None else "shown"
        line = text.count("\n", 0, match.start(kind)) + 1
        yield Code(match[kind], line, None if match["reason"] is None else match["reason"].strip())


def name_of(page: Path) -> str:
    """A page's name in a test."""
    return str(page.relative_to(ROOT))


def run(page: Path) -> dict[str, Any]:
    """The code of a page in a fresh scope, in order; what the scope holds afterwards."""
    torch.manual_seed(0)
    scope: dict[str, Any] = {"__name__": "page"}
    for code in code_of(page.read_text()):
        if code.reason is None:
            exec(compile(code.in_its_place, str(page), "exec", dont_inherit=True), scope)
    return scope
