"""The layer of one's own: ten lines, covered, and learned."""

from __future__ import annotations

import re

from examples.programs import FOLDER, run


def test_it_takes_ten_lines_is_covered_and_learns() -> None:
    scope = run("own_layer")
    assert [record.kind for record in scope["optimizer"].report() if record.covered] == [
        "GatedLinear",
        "GatedLinear",
        "Linear",
    ]
    assert scope["accuracy"](scope["model"]) > 0.8
    (layer,) = re.findall(
        r"^class GatedLinear.*?(?=^def train)", (FOLDER / "own_layer.py").read_text(), re.DOTALL | re.MULTILINE
    )
    lines = [line for line in layer.splitlines() if line.strip() and '"""' not in line]
    assert len(lines) <= 10
