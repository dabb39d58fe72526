"""Text as characters: a file the user names, or the source of Python's own standard library."""

from __future__ import annotations

import itertools
import sysconfig
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor

from ..errors import LabError
from .base import Dataset, Sources

CONTEXT = 64
LONGEST = 2_000_000  # characters read; enough for an epoch of 440 steps, small enough for a laptop
TEST_SHARE = 0.1
KNOWN = 255  # characters with a symbol of their own; all rarer ones share symbol 0


def python_source(limit: int = LONGEST) -> str:
    """The first `limit` characters of the standard library: its top-level modules, then its packages, by name."""
    library = Path(sysconfig.get_path("stdlib"))
    parts: list[str] = []
    length = 0
    packages = sorted(found.parent for found in library.glob("*/__init__.py"))  # not what was installed beside them
    inside = (path for package in packages for path in sorted(package.rglob("*.py")))
    for path in itertools.chain(sorted(library.glob("*.py")), inside):
        parts.append(path.read_text(encoding="utf-8", errors="replace"))
        length += len(parts[-1])
        if length >= limit:
            break
    if not parts:
        raise LabError(f"No source of the standard library in {library}; name a text with --set text_file=PATH.")
    return "".join(parts)[:limit]


def _named(text_file: str) -> str:
    try:
        with open(text_file, encoding="utf-8") as file:
            return file.read(LONGEST)
    except OSError as error:
        raise LabError(f"The text file {text_file} cannot be read ({error.strerror}); name another one.") from error
    except UnicodeDecodeError as error:
        raise LabError(
            f"The text file {text_file} is not UTF-8 text (byte {error.start}); name another one."
        ) from error


def encode(text: str) -> tuple[Tensor, int]:
    """Symbols of the characters, most frequent first, and the size of the vocabulary."""
    frequent = sorted(Counter(text).items(), key=lambda item: (-item[1], item[0]))[:KNOWN]
    symbol = {character: index for index, (character, _) in enumerate(frequent, start=1)}
    return torch.tensor([symbol.get(character, 0) for character in text]), len(symbol) + 1


def windows(symbols: Tensor, context: int = CONTEXT) -> tuple[Tensor, Tensor]:
    """Non-overlapping inputs (n, context) and the same shifted by one character as targets."""
    count = (len(symbols) - 1) // context
    inputs = symbols[: count * context].view(count, context)
    targets = symbols[1 : count * context + 1].view(count, context)
    return inputs, targets


def text(sources: Sources) -> Dataset:
    """Windows of characters; the last tenth of the text is the test set."""
    content = _named(sources.text_file) if sources.text_file else python_source()
    if len(content) < 40 * CONTEXT:
        raise LabError(
            f"The text file {sources.text_file} has {len(content)} characters; name one of at least {40 * CONTEXT}."
        )
    if len(set(content)) < 2:
        raise LabError(f"The text file {sources.text_file} repeats one character; name a text that can be learned.")
    symbols, vocabulary = encode(content)
    cut = int(len(symbols) * (1 - TEST_SHARE))
    return Dataset(*windows(symbols[:cut]), *windows(symbols[cut:]), classes=vocabulary, ordered=True)
