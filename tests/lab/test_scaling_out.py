"""`rkfac bench scaling-out`: real processes, what they send, and the model beside the measurements."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

from forked import forked
from rkfac_lab.bench import scaling_out
from rkfac_lab.bench.crowd import Crowd
from rkfac_lab.bench.scaling_model import Alone, Machine, longest_share, predicted
from rkfac_lab.bench.sharer import SHARED_PHASES
from rkfac_lab.errors import LabError

pytestmark = pytest.mark.timeout(600)
WIDTHS = (64, 256, 128, 64, 12, 64, 128, 256, 64)
PARAMETERS = sum(a * b + b for a, b in pairwise(WIDTHS))
HALVES = sum((a + 1) * (a + 2) // 2 + b * (b + 1) // 2 for a, b in pairwise(WIDTHS))


@pytest.fixture(scope="module")
def measured():
    with forked():
        return scaling_out.run(["small-mlp"], (1, 2), rounds=1)


def test_everybody_is_measured_in_every_number_of_processes(measured):
    results, papers = measured
    names = ("SGD", "RS-KFAC (default)")
    assert [(r.optimizer, r.processes) for r in results] == [(name, size) for name in names for size in (1, 2)]
    for r in results:
        assert tuple(r.phases) == SHARED_PHASES
        assert sum(r.phases.values()) == pytest.approx(r.amortised.median, rel=0.5)
        assert r.to_one.median > 0
        assert (r.to_one.median == 1) == (r.processes == 1)
    assert [p.processes for p in papers] == 2 * [1, *scaling_out.ON_PAPER]


def test_bytes_are_those_of_gradients_and_halves_of_factors(measured):
    (_, sgd), (alone, kfac) = measured[0][:2], measured[0][2:]
    assert sgd.sent == {"plain": {"gradients": 4 * PARAMETERS, "statistics": 0, "decompositions": 0}}
    assert sum(sum(kind.values()) for kind in alone.sent.values()) == 0
    assert kfac.sent["plain"] == sgd.sent["plain"]
    assert 0 < kfac.sent["statistics"]["statistics"] <= 1.1 * 4 * HALVES


def test_the_tables_and_the_numbers_are_complete(measured, capsys):
    from rich.console import Console

    for table in scaling_out.tables(*measured):
        Console(width=200).print(table)
    shown = capsys.readouterr().out
    for word in ("x one", "x SGD", "modelled", "gradients sent", "MB statistics", "1000", "GB/s"):
        assert word in shown
    found = json.loads(json.dumps(scaling_out.as_json(*measured), allow_nan=False))
    assert found["benchmark"] == "scaling-out"
    assert len(found["results"]) == 4


def test_one_process_comes_first():
    with pytest.raises(LabError, match="begins with 1"):
        scaling_out.run(["small-mlp"], (2, 4))
    with pytest.raises(LabError, match="benchmark problem"):
        scaling_out.run(["nothing"], (1, 2))


def _fails(rank, size):
    def answer(*order):
        raise SystemExit(3)

    return answer


def test_a_process_that_ends_early_is_said():
    with forked():
        crowd = Crowd(1, _fails)
    try:
        with pytest.raises(LabError, match="ended early"):
            crowd.do("anything")
    finally:
        crowd.end()


ALONE = Alone(
    passes=8.0,
    statistics=4.0,
    refresh=10.0,
    rest=1.0,
    every={"statistics": 2, "refresh": 5},
    sent={"gradients": 100, "statistics": 60, "decompositions": 30},
    costs=(3.0, 2.0, 2.0, 1.0),
)


def test_one_process_takes_what_it_took():
    parts = predicted(ALONE, Machine(1.0, 1.0, 2), 1)
    assert parts == {
        "passes": 8.0,
        "statistics": 2.0,
        "refresh": 2.0,
        "rest": 1.0,
        "gradients sent": 0.0,
        "statistics sent": 0.0,
        "decompositions sent": 0.0,
    }


def test_four_processes_by_hand():
    parts = predicted(ALONE, Machine(10.0, 0.5), 4)
    assert parts == pytest.approx(
        {
            "passes": 2.0,
            "statistics": 0.5,
            "refresh": 10 * 3 / 8 / 5,
            "rest": 1.0,
            "gradients sent": 2 + 1.5 * 100 / 10,
            "statistics sent": (2 + 1.5 * 60 / 10) / 2,
            "decompositions sent": (2 + 0.75 * 30 / 10) / 5,
        }
    )
    assert predicted(ALONE, Machine(10.0, 0.5), 4, grows=True)["passes"] == 8.0
    assert predicted(ALONE, Machine(10.0, 0.5, cores=2), 4)["passes"] == 4.0


def test_the_longest_share():
    assert longest_share((), 3) == 1.0
    assert longest_share((3.0, 2.0, 2.0, 1.0), 2) == 0.5
    assert longest_share((3.0, 2.0, 2.0, 1.0), 1000) == 3 / 8
