"""Words and tables of the pages; everything in them is the laboratory's own, so that nothing needs escaping."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def table(header: Sequence[str], lines: Sequence[Sequence[str]], left: int = 1) -> str:
    """A Markdown table whose first `left` columns are words."""
    rule = ["---" if position < left else "---:" for position in range(len(header))]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, rule, *lines))


def share(value: float | None, digits: int = 1) -> str:
    """As per cent."""
    return "-" if value is None else f"{100 * value:.{digits}f} %"


def plain(value: float | None, digits: int = 3) -> str:
    """With so many significant digits."""
    if value is None:
        return "-"
    return f"{value:.0f}" if abs(value) >= 10**digits else f"{value:.{digits}g}"


def around(values: Sequence[float], digits: int = 3) -> str:
    """Mean and sample standard deviation."""
    if not values:
        return "-"
    mean = plain(statistics.fmean(values), digits)
    return mean if len(values) < 2 else f"{mean} ± {statistics.stdev(values):.2g}"


def percent_around(values: Sequence[float]) -> str:
    """Of shares, in per cent."""
    if not values:
        return "-"
    mean = f"{100 * statistics.fmean(values):.1f}"
    return f"{mean} %" if len(values) < 2 else f"{mean} ± {100 * statistics.stdev(values):.1f} %"


def counted(number: int, thing: str) -> str:
    """1 seed, 3 seeds."""
    return f"{number} {thing}{'s' * (number != 1)}"
