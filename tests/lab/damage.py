"""Damage that can be done to any file, and what the command must make of it."""

from __future__ import annotations

BYTES = {
    "empty": lambda content: b"",
    "one byte": lambda content: content[:1],
    "cut in half": lambda content: content[: len(content) // 2],
    "cut at the end": lambda content: content[: -len(content) // 8],
    "zeros": lambda content: bytes(len(content)),
    "not UTF-8": lambda content: b"\xff\xfe" + content,
    "a picture": lambda content: b"\x89PNG\r\n\x1a\n" + bytes(range(256)),
    "nested without end": lambda content: b"[" * 100_000 + b"\n",
    "a page": lambda content: b"<!doctype html><title>404</title>\n",
}


def refused(result, name):
    """One line, the file's name in it, and something to do."""
    code, said = result
    assert code == 2, said
    assert len(said) == 1, said
    assert said[0].startswith("rkfac: ")
    assert name in said[0]
    assert ";" in said[0] or "did you mean" in said[0] or "has to be mended" in said[0]
    return said[0]
