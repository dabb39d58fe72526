"""Pages hold nothing but what was measured; what was measured once is read and not measured again."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest

from rkfac_lab.claims import pages, work
from rkfac_lab.claims.all import CLAIMS
from rkfac_lab.claims.claim import HOLDS, Claim, Verdict
from rkfac_lab.claims.desk import Desk
from rkfac_lab.config import from_dict
from rkfac_lab.errors import LabError

RESULTS = Path(__file__).parents[3] / "docs" / "results"


@dataclass(frozen=True)
class Sum(Claim):
    """One and one is two."""

    name: ClassVar[str] = "sum"
    title: ClassVar[str] = "One and one is two"
    says: ClassVar[str] = "obviously"
    terms: tuple[int, ...] = (1, 1)

    def measure(self, desk):
        return {"sum": desk.part("the sum", lambda: sum(self.terms))}

    def verdict(self, found):
        return Verdict(HOLDS, f"{len(self.terms)} terms", f"It is {found['sum']}.")

    def rule(self, found):
        return "it holds whatever it is."

    def page(self, found):
        return f"The sum is {found['sum']}."

    def pictures(self, found):
        return {}

    def small(self):
        return replace(self, terms=(1,))


@pytest.fixture
def known(monkeypatch):
    monkeypatch.setitem(CLAIMS, "sum", Sum())
    return CLAIMS


def test_a_part_is_measured_once(tmp_path):
    desk, times = Desk(tmp_path), []

    def measured():
        times.append(1)
        return {"a": (1, 2.5), "b": None}

    first = desk.part("a part", measured)
    assert first == desk.part("a part", measured) == {"a": [1, 2.5], "b": None}
    assert len(times) == 1
    assert desk.part("another", measured) == first
    assert len(times) == 2


def test_a_part_that_was_stopped_leaves_nothing(tmp_path):
    def stopped():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Desk(tmp_path).part("a part", stopped)
    assert Desk(tmp_path).part("a part", lambda: 7) == 7


def test_runs_are_done_once_and_other_settings_are_refused(tmp_path, tiny):
    def wanted(lr):
        return {
            "one": from_dict({"workload": tiny, "optimizer": {"name": "sgd", "arguments": {"lr": lr}}, "epochs": 1})
        }

    desk = Desk(tmp_path)
    first = desk.train(wanted(0.1))["one"]
    written = (first.path / "metrics.jsonl").stat().st_mtime_ns
    assert desk.train(wanted(0.1))["one"].epochs == first.epochs
    assert (first.path / "metrics.jsonl").stat().st_mtime_ns == written
    with pytest.raises(LabError, match=r"optimizer\.arguments\.lr"):
        desk.train(wanted(0.2))


def test_a_run_that_fails_is_nobodys_row(tmp_path, tiny):
    bad = from_dict({"workload": tiny, "optimizer": {"name": "sgd", "arguments": {"momentum": -1.0}}})
    good = from_dict({"workload": tiny, "optimizer": {"name": "sgd"}, "epochs": 1})
    assert list(Desk(tmp_path).train({"bad": bad, "good": good})) == ["good"]


def test_the_command_measures_writes_and_lists(known, typed, tmp_path):
    code, out, _ = typed("claims", "sum", "--out", tmp_path, "--work", tmp_path / "work")
    assert code == 0
    assert "One and one is two: holds. It is 2." in out
    page = (tmp_path / "sum.md").read_text()
    assert "**Holds.** It is 2." in page
    assert "    rkfac claims sum\n" in page
    content = json.loads((tmp_path / "sum.json").read_text())
    assert content["found"] == {"sum": 2}
    assert content["sizes"] == {"terms": [1, 1]}
    _, listed, _ = typed("claims", "--out", tmp_path)
    assert any("sum" in line and "holds" in line for line in listed.splitlines())
    assert any("fewer-epochs" in line and "not measured" in line for line in listed.splitlines())


def test_small_ones_go_elsewhere_and_say_so(known, rkfac, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rkfac("claims", "sum", "--small")
    assert "rkfac claims sum --small" in (tmp_path / "runs" / "claims" / "sum.md").read_text()
    assert not (tmp_path / "docs").exists()


def test_a_page_is_made_again_with_the_sizes_it_was_measured_at(known, rkfac, tmp_path):
    rkfac("claims", "sum", "--out", tmp_path, "--work", tmp_path / "work")
    before = (tmp_path / "sum.md").read_text()
    content = json.loads((tmp_path / "sum.json").read_text())
    (tmp_path / "sum.json").write_text(json.dumps({**content, "sizes": {"terms": [1, 1, 1]}, "found": {"sum": 3}}))
    table = tmp_path / "README.md"
    table.write_text("above\n<!-- claims -->\nold\n<!-- end of claims -->\nbelow\n")
    rkfac("claims", "--rebuild", "--out", tmp_path, "--into", table)
    after = (tmp_path / "sum.md").read_text()
    assert after == before.replace("2 terms", "3 terms").replace(" is 2", " is 3")
    text = table.read_text()
    assert text.startswith("above\n<!-- claims -->\n| claim |")
    assert text.endswith("<!-- end of claims -->\nbelow\n")
    assert "| [One and one is two](./sum.md) | 3 terms | **holds** | It is 3. |" in text
    assert "| nothing yet | **open** | `rkfac claims fewer-epochs` measures it. |" in text


@pytest.mark.parametrize(
    "content", ["[]", "{}", '{"claim": "sum", "sizes": {"other": 1}, "found": {}, "machine": {}, "command": ""}']
)
def test_numbers_that_no_claim_wrote_are_refused(known, content, tmp_path):
    (tmp_path / "sum.json").write_text(content)
    with pytest.raises(LabError, match=r"sum\.json is damaged"):
        pages.read(tmp_path / "sum.json", known)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("tides",), "tides"),
        (("--rebuild", "sum"), "leave the claim's name away"),
        (("--into", "x.md"), "--into goes with --rebuild"),
        (("--rebuild", "--out", "nowhere"), "nowhere holds no measured claim"),
    ],
)
def test_mistakes_are_one_sentence(known, typed, arguments, said):
    code, _, err = typed("claims", *arguments)
    assert code == 2
    assert said in err


MEASURED = sorted(path.stem for path in (RESULTS / "claims").glob("*.json"))


@pytest.mark.parametrize("name", MEASURED)
def test_every_page_is_what_its_numbers_make(name):
    measured = pages.read(RESULTS / "claims" / f"{name}.json", CLAIMS)
    assert (RESULTS / "claims" / f"{name}.md").read_text() == pages.text(measured)
    for picture in measured.claim.pictures(measured.found):
        assert (RESULTS / "claims" / f"{name}-{picture}.png").is_file()


def test_the_table_of_claims_is_what_their_numbers_make():
    found = pages.measured_in(RESULTS / "claims", CLAIMS)
    table = pages.summary(CLAIMS, found, "claims/")
    assert f"<!-- claims -->\n{table}\n<!-- end of claims -->" in (RESULTS / "README.md").read_text()


def test_every_claim_can_be_tried_small():
    for name in CLAIMS:
        assert work.find(name, small=True) != work.find(name)
