"""Comma-separated options of the command line."""

from __future__ import annotations

from rkfac_lab.errors import LabError


def names(text: str) -> tuple[str, ...]:
    """The names in a comma-separated option."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def sizes(option: str, text: str, example: str) -> list[int]:
    """The whole numbers from 1 to 999999 in a comma-separated option."""
    words = names(text)
    if not words or not all(word.isdecimal() and 0 < len(word) < 7 and int(word) for word in words):
        raise LabError(f"{option} {text!r} is not a list of sizes such as {example}.")
    return [int(word) for word in words]
