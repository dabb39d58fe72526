"""Text from runs (labels, notes, names of metrics) where it could do something: made to be only read."""

from __future__ import annotations

import re
import unicodedata

_MARKDOWN = re.compile(r"[\\`*_{}\[\]<>#|~!&@$^]|:(?=//)|(?<=www)\.")
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")


def visible(text: str) -> str:
    """One line without a character that steers a terminal or turns the direction of reading; shown as \\x1b instead."""
    return "".join(map(_written_out, text))


def markdown(text: str) -> str:
    """Text that Markdown shows as it is: no markup, link, image or HTML, and no end of a table's cell."""
    return _MARKDOWN.sub(lambda match: "\\" + match[0], visible(text))


def csv_cell(value: object) -> object:
    """A cell that a spreadsheet takes for text; numbers stay numbers."""
    if not isinstance(value, str):
        return value
    text = visible(value)
    return f"'{text}" if value.lstrip(" ").startswith(_FORMULA) else text


def plotted(text: str) -> str:
    """Text that matplotlib draws as it is: no formula, and no leading underscore, which hides a legend's entry."""
    shown = visible(text).replace("\\", "\\\\").replace("$", r"\$") if "$" in text else visible(text)
    return f" {shown}" if shown.startswith("_") else shown


def _written_out(character: str) -> str:
    kind = unicodedata.category(character)
    if kind in ("Cc", "Cs", "Zl", "Zp") or (kind == "Cf" and character != "\u00ad"):
        return character.encode("unicode_escape", "surrogatepass").decode("ascii")
    return character
