"""Hand-made power laws: exponents, where they cross, and what is said of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rkfac_lab.bench import scaling
from rkfac_lab.claims.claim import FAILS, HOLDS, PARTLY
from rkfac_lab.claims.complexity import PROMISED, Complexity, measured, overtaking
from rkfac_lab.claims.desk import Desk

WIDTHS = (1024, 2048, 4096, 8192)
SHORT = dict(zip(PROMISED, ("K", "RS", "SRE", "B", "SENG"), strict=True))


def laws(**powers):
    """A measurement in which a method's seconds beyond SGD's are a power of the width, the promised one if not given."""
    rows = []
    for method in PROMISED:
        power = powers.get(SHORT[method], float(PROMISED[method][1]))
        for width in WIDTHS:
            if method == scaling.EXACT and width > 4096:
                continue
            spent = {"refresh": (width / 1024) ** power, "application": 1e-9, "sgd": 0.0}
            spread = {part: {"median": v, "low": v, "high": v} for part, v in spent.items()}
            rows.append({"width": width, "method": method, **spread})
    return {"rows": rows}


def test_where_power_laws_cross():
    cubic, square = [(w / 2048) ** 3 for w in WIDTHS], [(w / 2048) ** 2 * 2 for w in WIDTHS]
    assert overtaking(WIDTHS, cubic, square) == (1, "4096")  # (w / 2048)^3 = 2 (w / 2048)^2
    assert overtaking(WIDTHS, square, cubic) == (0, "4096")
    between = [value * 2**0.5 for value in square]
    assert overtaking(WIDTHS, cubic, between) == (1, f"{2048 * 2**1.5:.0f}")


def test_crossings_that_were_not_measured():
    cubic, line = [w**3.0 for w in WIDTHS], [float(w) for w in WIDTHS]
    assert overtaking(WIDTHS, cubic, line) == (1, "below 1024")
    assert overtaking(WIDTHS, line, cubic) == (0, "below 1024")
    assert overtaking(WIDTHS, cubic, [1e12 * value for value in line]) == (1, "above 8192")
    assert overtaking(WIDTHS, cubic, [0.0, *line[1:]])[1] == "not to be told"
    assert overtaking((), (), ())[1] == "not to be told"


def test_crossings_within_the_quartiles_or_across_another_form_are_no_figures():
    claim, found = Complexity(widths=(256, 512, 1024)), {"rows": []}
    seconds = {  # RS-KFAC and SRE-KFAC cross, SENG falls under both where it changes its form
        "RS-KFAC (paper)": (1.0, 2.0, 4.0),
        "SRE-KFAC (paper)": (1.1, 2.1, 3.9),
        "SENG (paper)": (2.0, 3.0, 3.0),
    }
    for method, values in seconds.items():
        for width, value in zip(claim.widths, values, strict=True):
            nothing = {"median": 1e-12, "low": 1e-12, "high": 1e-12}
            refresh = {"median": value, "low": 0.95 * value, "high": 1.05 * value}
            found["rows"].append(
                {"width": width, "method": method, "refresh": refresh, "application": nothing, "sgd": nothing}
            )
    page = claim.page(found)
    assert "| RS-KFAC | SRE-KFAC | not told apart at 1024 |" in page
    assert "| RS-KFAC | SENG | between 512 and 1024, where SENG changes its form |" in page
    for row in found["rows"]:
        row["refresh"] |= {"low": row["refresh"]["median"], "high": row["refresh"]["median"]}
    assert "| RS-KFAC | SRE-KFAC | not told apart" not in claim.page(found)


def test_numbers_come_back_as_they_were():
    rows = measured(laws())
    assert scaling.exponents(rows)["K-FAC (paper)"]["both"] == pytest.approx(3)
    assert scaling.exponents(rows)["SENG (paper)"]["beyond"] == pytest.approx(1)


@pytest.mark.parametrize(
    ("powers", "word", "broken"),
    [
        ({}, HOLDS, 0),
        ({"K": 2.7, "RS": 1.6, "SRE": 2.3, "B": 0.2, "SENG": 1.25}, HOLDS, 0),
        ({"SENG": 1.4}, PARTLY, 1),
        ({"K": 2.0, "RS": 3.0, "SRE": 1.0, "B": 2.0}, PARTLY, 4),
        ({"K": 2.0, "RS": 3.0, "SRE": 1.0, "B": 2.0, "SENG": 2.0}, FAILS, 5),
    ],
)
def test_the_rules(powers, word, broken):
    verdict = Complexity().verdict(laws(**powers))
    assert verdict.word == word
    assert verdict.why.count("not so") == broken


def test_what_cannot_be_measured_is_not_counted():
    found = laws()
    for row in found["rows"]:
        if row["method"] == "SENG (paper)" and row["width"] == 1024:
            row["refresh"] = {"median": -1.0, "low": -1.0, "high": -1.0}
    assert Complexity().verdict(found).word == PARTLY
    assert "not to be told" in Complexity().page(found)


def test_a_page_of_power_laws():
    claim, found = Complexity(), laws()
    page = claim.page(found)
    assert "| K-FAC (paper) | 3.00 |" in page
    assert "| K-FAC | SENG | 1024 |" in page  # all laws meet there
    assert all(f"{claim.name}-{name}.png" in page for name in claim.pictures(found))


def test_a_small_measurement(tmp_path):
    claim = replace(Complexity().small(), widths=(16, 32), rank=4, exact_up_to=16)
    found = claim.measure(Desk(tmp_path))
    assert found == claim.measure(Desk(tmp_path))
    methods = [[row.method for row in measured(found) if row.width == width] for width in claim.widths]
    assert methods[0] == list(scaling.METHODS)
    assert methods[1] == [name for name in scaling.METHODS if name != scaling.EXACT]
    assert claim.page(found)


def test_seconds_that_fall_with_the_width_are_called_noise():
    assert "noise" not in Complexity().page(laws())
    found = laws()
    last = next(row for row in found["rows"] if row["method"] == "B-KFAC (paper)" and row["width"] == 8192)
    last["refresh"] = {"median": 1.0, "low": 1.0, "high": 1.0}
    assert (
        "noise, and so is a part of that exponent: those of B-KFAC (paper) fall from 4096 to 8192."
        in Complexity().page(found)
    )


def test_noise_at_the_widest_does_not_make_an_exponent_hold():
    found = laws(B=1.5)
    last = next(row for row in found["rows"] if row["method"] == "B-KFAC (paper)" and row["width"] == 8192)
    last["refresh"] = {"median": 2.0, "low": 2.0, "high": 2.0}
    verdict = Complexity().verdict(found)
    assert verdict.word == PARTLY
    assert "B-KFAC 0.45, 1.50 while they rise (1: at most 1.3, beyond SGD, not so)" in verdict.why
    assert "| 1.50, 1.50, -2.00 |" in Complexity().page(found)


def test_an_exponent_that_grows_beyond_its_limit_does_not_hold():
    """From 1024 to 4096 as the square root, then with the power of 1.6: 0.85 in the mean."""
    found = laws(SENG=0.5)
    rows = [row for row in found["rows"] if row["method"] == "SENG (paper)"]
    last = rows[-2]["refresh"]["median"] * 2**1.6
    rows[-1]["refresh"] = {"median": last, "low": last / 2, "high": 2 * last}
    verdict = Complexity().verdict(found)
    assert verdict.word == PARTLY
    assert "SENG 0.83, 1.60 in the last doubling (1: at most 1.3, beyond SGD, not so)" in verdict.why
    assert "| 6.06 ±75% |" in Complexity().page(found)
