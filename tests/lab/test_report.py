"""The HTML page without a browser: which runs it finds, what it embeds, what it refuses."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from matplotlib.colors import to_hex

from rkfac_lab import cli, plots, report
from rkfac_lab.errors import LabError
from rkfac_lab.record import Run, RunFolder
from rkfac_lab.tables import Failure

from .handmade import make_run

ASSETS = Path(str(resources.files("rkfac_lab"))) / "assets"
HOSTILE = "</script><img src=x onerror=\"document.title='broken in'\"><!--"


class Elements(HTMLParser):
    """Every element of a page: its name, its attributes and, of scripts and styles, the text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {"script": [], "style": [], "title": []}
        self.current = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self.current = tag

    def handle_endtag(self, tag: str) -> None:
        self.current = ""

    def handle_data(self, data: str) -> None:
        if self.current in self.texts:
            self.texts[self.current].append(data)


def embedded(text: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(Elements(text).texts["script"][0])
    return data


def write_folder(run: Run, folder: Path, date: str = "2026-01-01T00:00:00") -> Path:
    files = RunFolder(folder)
    folder.mkdir(parents=True)
    files.write("config.json", {"workload": "digits-mlp", "optimizer": {"name": run.summary["optimizer"]}, "seed": 4})
    files.write("environment.json", {"date": date, "versions": {"torch": "2.9"}})
    files.write("summary.json", run.summary)
    files.append([*run.epochs, *run.layers])
    return folder


def test_a_folder_is_a_run_or_holds_runs_or_a_comparison(tmp_path: Path) -> None:
    first = write_folder(make_run("sgd"), tmp_path / "all" / "runs" / "sgd-seed1", date="2026-01-02T00:00:00")
    write_folder(make_run("adamw"), tmp_path / "all" / "runs" / "xadamw-seed1", date="2026-01-01T00:00:00")
    write_folder(make_run("k-fac"), tmp_path / "all" / "tuning" / "k-fac-lr1")

    def labels(*paths: Path) -> list[str]:
        return [run.summary["label"] for run in report.find_runs(paths)]

    assert labels(first) == ["sgd"]
    assert labels(tmp_path / "all" / "runs") == ["adamw", "sgd"]  # by age
    assert labels(tmp_path / "all") == ["adamw", "sgd"]  # a comparison's tuning trials are not its results
    assert labels(first, tmp_path / "all") == ["sgd", "adamw"]  # none twice


def test_a_folder_that_is_no_run_is_refused_in_one_sentence(tmp_path: Path) -> None:
    alien = tmp_path / "alien"
    alien.mkdir()
    (alien / "config.json").write_text('{"editor": "vi"}')
    for path, reason in (
        (tmp_path / "none", "is not a folder"),
        (tmp_path / "empty", "holds no run"),
        (alien, "no configuration key 'editor'"),
    ):
        if path.name == "empty":
            path.mkdir()
        with pytest.raises(LabError, match=f"{path.name}.*{reason}") as caught:
            report.find_runs([path])
        assert "\n" not in str(caught.value)
    with pytest.raises(LabError, match="no run to show"):
        report.write([], tmp_path / "page.html")


def test_a_killed_run_is_shown_as_far_as_it_came_and_said(tmp_path: Path) -> None:
    folder = write_folder(make_run("sgd", accuracies=(0.5, 0.7, 0.9)), tmp_path / "sgd-1")
    (folder / "summary.json").unlink()
    metrics = folder / "metrics.jsonl"
    metrics.write_bytes(metrics.read_bytes()[:-20])
    [run] = embedded(report.page(report.find_runs([folder])))["groups"][0]["runs"]
    assert run["epochs"]["test_accuracy"] == [0.5, 0.7]
    assert (run["label"], run["seed"], run["status"]) == ("sgd", 4, "running")
    assert run["remarks"] == [
        "unfinished after 2 evaluations.",
        "the last line of metrics.jsonl was cut off while it was written and is left out.",
    ]


def test_a_whole_run_has_nothing_to_remark(tmp_path: Path) -> None:
    folder = write_folder(make_run("sgd"), tmp_path / "sgd-1")
    assert embedded(report.page(report.find_runs([folder])))["groups"][0]["runs"][0]["remarks"] == []


def test_the_bands_are_median_and_range_over_seeds_at_equal_epochs() -> None:
    runs = [
        make_run("sgd", seed, accuracies=values, epoch_seconds=seconds)
        for seed, values, seconds in ((1, (0.1, 0.9), (1, 2)), (2, (0.2, 0.6), (2, 2)), (3, (0.6, 0.7), (4, 5)))
    ]
    [optimizer] = report.contents(runs)["groups"][0]["optimizers"]
    assert optimizer["bands"]["test_accuracy"] == {
        "seconds": [2, 4],
        "cpu_seconds": [3, 6],
        "step": [6, 12],
        "epoch": [1, 2],
        "middle": [0.2, 0.7],
        "low": [0.1, 0.6],
        "high": [0.6, 0.9],
    }


def test_metrics_begin_with_the_one_the_comparison_is_about() -> None:
    accuracy = report.contents([make_run("sgd", targets=(0.8,))])
    assert accuracy["groups"][0]["metrics"] == ["test_accuracy", "test_loss", "train_loss"]
    errors = report.contents([make_run("sgd", metric="test_error", mode="min", accuracies=(12.0, 9.0), targets=(10,))])
    assert errors["groups"][0]["metrics"] == ["test_error", "test_loss", "train_loss"]


def test_workloads_and_optimizers_keep_their_order_of_appearance() -> None:
    names = [f"optimizer {number}" for number in range(9)]
    runs = [make_run("late", workload="w2"), *(make_run(name, workload="w1") for name in names)]
    second, first = report.contents(runs)["groups"]
    assert (second["workload"], first["workload"]) == ("w2", "w1")
    assert [entry["label"] for entry in first["optimizers"]] == names
    assert [entry["slot"] for entry in first["optimizers"]] == [0, 1, 2, 3, 4, 5, 6, 7, 0]
    assert [entry["dash"] for entry in first["optimizers"]] == [0, 1, 2, 3, 0, 1, 2, 3, 1]


def test_an_optimizer_has_its_colour_whatever_came_first() -> None:
    runs = [make_run(name) for name in ("sgd", "rs-kfac", "adamw")]
    looks = []
    for order in (runs, runs[::-1]):
        [group] = report.contents(order)["groups"]
        page = {entry["label"]: plots.PALETTE[entry["slot"]].lower() for entry in group["optimizers"]}
        figure = plots.curves(order)
        drawn = zip(figure.legends[0].get_texts(), figure.legends[0].get_lines(), strict=True)
        assert {text.get_text(): to_hex(line.get_color()) for text, line in drawn} == page
        looks.append(page)
    assert looks[0] == looks[1]


def layers_record(epoch: int, *layers: dict[str, Any]) -> dict[str, Any]:
    return {"kind": "layers", "epoch": epoch, "train_seconds": 1.5 * epoch, "layers": list(layers)}


def test_layers_are_turned_into_lists_over_training() -> None:
    first = {
        "name": "a",
        "covered": True,
        "rank_input": 3,
        "clip": 1 / 3,
        "bytes": {"basis": 7},
        "seconds": {"apply": 1.0},
    }
    later = first | {"rank_input": 5, "clip": 1, "bytes": {"basis": 8}, "seconds": {"apply": 4.0}}
    uncovered = {"name": "b", "covered": False, "rank_input": None, "reason": "excluded", "seconds": {}}
    records = [layers_record(1, first), layers_record(2, later, uncovered)]
    layers = report.contents([replace(make_run("k-fac"), layers=records)])["groups"][0]["runs"][0]["layers"]
    assert (layers["epoch"], layers["seconds"]) == ([1, 2], [1.5, 3.0])
    a, b = layers["items"]
    assert (a["rank_input"], a["clip"]) == ([3, 5], [0.333333, 1])
    assert (a["bytes"], a["seconds"]) == ({"basis": 8}, {"apply": 4.0})
    assert (b["covered"], b["reason"], b["rank_input"], b["seconds"]) == (False, "excluded", [None, None], None)


def test_clocks_that_began_again_when_a_run_was_resumed_are_added_up() -> None:
    clocks = [
        {"apply": 1.0, "refresh": 2.0},
        {"apply": 3.0, "refresh": 2.0},
        {"apply": 0.5, "refresh": 0.25},
        {"apply": 1.0, "refresh": 1.0},
    ]
    records = [layers_record(epoch, {"name": "a", "seconds": clock}) for epoch, clock in enumerate(clocks, start=1)]
    layers = report.contents([replace(make_run("k-fac"), layers=records)])["groups"][0]["runs"][0]["layers"]
    assert layers["items"][0]["seconds"] == {"apply": 4.0, "refresh": 3.0}


def test_runs_of_different_machines_are_told_apart_and_dated() -> None:
    def on(processor: str, day: int) -> Run:
        facts = {
            "processor": processor,
            "cpus": 2,
            "versions": {"torch": "2.9", "rkfac": "1"},
            "date": f"2026-01-0{day}T10",
        }
        return replace(make_run("sgd", day), environment=facts)

    machines = report.contents([on("A", 3), on("B", 1), on("A", 2)])["groups"][0]["machines"]
    assert machines == [
        {"name": "A", "size": "2 CPUs", "versions": "rkfac 1, torch 2.9", "dates": "2026-01-02 to 2026-01-03"},
        {"name": "B", "size": "2 CPUs", "versions": "rkfac 1, torch 2.9", "dates": "2026-01-01"},
    ]


def test_failures_are_rows_of_the_table() -> None:
    table = report.contents([make_run("sgd")], [Failure("muon", 1, "out of memory")])["groups"][0]["table"]
    assert [(row["label"], row["notes"]) for row in table["rows"]] == [("sgd", ""), ("muon", "1 failed: out of memory")]


def test_text_of_runs_stays_data() -> None:
    run = replace(make_run(HOSTILE, workload=HOSTILE), config={"label": HOSTILE})
    page = Elements(report.page([run]))
    names = [name for name, _ in page.found]
    assert names.count("script") == 2
    assert "img" not in names
    assert not any(key.startswith("on") or key in {"src", "href"} for _, attributes in page.found for key in attributes)
    group = json.loads(page.texts["script"][0])["groups"][0]
    assert (group["workload"], group["runs"][0]["label"], group["runs"][0]["config"]["label"]) == (HOSTILE,) * 3
    assert "".join(page.texts["title"]) == HOSTILE


def test_numbers_of_a_diverged_run_are_embedded_as_null() -> None:
    run = make_run("sgd", accuracies=(0.5, math.nan), status="diverged")
    run.epochs[1]["test_loss"] = math.inf
    shown = embedded(report.page([run]))["groups"][0]["runs"][0]
    assert shown["epochs"]["test_accuracy"] == [0.5, None]
    assert shown["epochs"]["test_loss"][1] is None


def test_the_page_allows_its_own_script_and_style_and_nothing_else() -> None:
    page = Elements(report.page([make_run("sgd")]))
    policy = next(a["content"] for name, a in page.found if name == "meta" and a.get("http-equiv"))

    def source(text: str) -> str:
        return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"

    script, style = page.texts["script"][1], page.texts["style"][0]
    # Neither of the last two falls back on default-src.
    own = f"script-src {source(script)}; style-src {source(style)}"
    assert policy == f"default-src 'none'; {own}; base-uri 'none'; form-action 'none'"
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|fetch\(|import\(", script)
    comment = "https://github.com/leeoniya/uPlot"  # in uPlot's first line
    assert set(re.findall(r"https?://[^\"' ]+", script + style)) == {"http://www.w3.org/2000/svg", comment}
    assert (ASSETS / "vendor" / "uPlot.LICENSE").read_text() in script  # who copies it copies its licence


def test_foreign_code_is_as_it_was_published() -> None:
    readme = (ASSETS / "vendor" / "README.md").read_text()
    listed = dict(re.findall(r"`([^`]+)` \| ([0-9a-f]{64})", readme))
    here = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in (ASSETS / "vendor").iterdir()}
    assert listed == {name: digest for name, digest in here.items() if name != "README.md"}
    assert "uPlot 1.6.32" in readme
    assert "v1.6.32" in (ASSETS / "vendor" / "uPlot.iife.min.js").read_text()[:100]


def budgeted(label: str, seed: int = 1, value: float = 0.9, **config: Any) -> Run:
    return replace(make_run(label, seed, accuracies=(0.5, value)), config=config)


def test_runs_of_different_budgets_are_shown_apart() -> None:
    runs = [budgeted("sgd", seed, 0.1 * epochs, epochs=epochs) for seed in (1, 2) for epochs in (4, 8)]
    groups = report.contents([*runs, budgeted("adamw", epochs=4, batch_size=None)])["groups"]
    assert [(group["workload"], group["budget"]) for group in groups] == [("digits-mlp", f"{n} epochs") for n in (4, 8)]
    assert [[row["label"] for row in group["table"]["rows"]] for group in groups] == [["sgd", "adamw"], ["sgd"]]
    assert [group["table"]["rows"][0]["best"]["mean"] for group in groups] == pytest.approx([0.5, 0.8])
    for group in groups:
        assert "different budgets (4 epochs; 8 epochs). They are shown apart" in group["warnings"][0]


@pytest.mark.parametrize(
    ("key", "values", "words"),
    [
        ("epochs", (1, 4), ("1 epoch", "4 epochs")),
        ("max_steps", (10, 20), ("at most 10 steps", "at most 20 steps")),
        ("time_budget", (1.5, 9.0), ("at most 1.5 seconds", "at most 9 seconds")),
        ("batch_size", (32, 64), ("batches of 32", "batches of 64")),
        ("max_steps", (None, 20), ("", "at most 20 steps")),
    ],
)
def test_each_part_of_a_budget_tells_runs_apart(key: str, values: tuple[Any, ...], words: tuple[str, ...]) -> None:
    groups = report.contents([budgeted("sgd", seed, **{key: value}) for seed, value in enumerate(values)])["groups"]
    assert [group["budget"] for group in groups] == list(words)
    assert [len(group["runs"]) for group in groups] == [1, 1]


def test_optimizers_with_a_budget_of_their_own_stay_together_and_that_is_said() -> None:
    runs = [budgeted("sgd", seed, epochs=8, batch_size=32) for seed in (1, 2)]
    [group] = report.contents([*runs, budgeted("adamw", epochs=4, batch_size=32)])["groups"]
    assert [entry["budget"] for entry in group["optimizers"]] == ["8 epochs, batches of 32", "4 epochs, batches of 32"]
    assert group["warnings"] == [
        "These optimizers had different budgets, and their curves and times are of different trainings "
        "(sgd: 8 epochs, batches of 32; adamw: 4 epochs, batches of 32)."
    ]


def test_the_course_of_the_learning_rate_is_said() -> None:
    def said(**config: Any) -> str:
        return str(report.contents([budgeted("sgd", **config)])["groups"][0]["optimizers"][0]["rate"])

    assert said() == ""
    assert said(lr_shape="linear") == "learning rate linear over the run"
    assert said(lr_shape="constant", schedule={"lr": {"1": 0.1, "5": 0.01}}) == "lr 0.1 from epoch 1, 0.01 from epoch 5"
    assert (
        said(lr_shape="linear", schedule={"rank": {"2": 9}}) == "learning rate linear over the run; rank 9 from epoch 2"
    )


def test_runs_of_one_label_with_other_settings_are_not_averaged() -> None:
    def given(seed: int, lr: float, **other: Any) -> Run:
        return budgeted("sgd", seed, optimizer={"name": "sgd", "arguments": {"lr": lr}}, epochs=2, **other)

    runs = [given(1, 0.1), given(2, 0.1, data_dir="elsewhere"), given(1, 0.3)]
    [group] = report.contents(runs)["groups"]
    assert [(row["label"], row["runs"]) for row in group["table"]["rows"]] == [("sgd (lr 0.1)", 2), ("sgd (lr 0.3)", 1)]
    assert [run["label"] for run in group["runs"]] == ["sgd (lr 0.1)", "sgd (lr 0.1)", "sgd (lr 0.3)"]
    assert group["warnings"] == []


def test_the_page_has_the_colours_of_the_figures() -> None:
    css = (ASSETS / "page.css").read_text()
    slots = {int(slot): colour for slot, colour in re.findall(r"\.s(\d) \{ --c: (.*?); \}", css)}
    slots = {
        slot: re.findall(r"--black: (.*?);", css)[0] if "black" in colour else colour for slot, colour in slots.items()
    }
    assert [slots[position] for position in sorted(slots)] == [colour.lower() for colour in plots.PALETTE]


def test_the_command_writes_the_page_and_refuses_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_folder(make_run("sgd"), tmp_path / "runs" / "sgd-1")
    out = tmp_path / "new" / "page.html"

    def rkfac(*arguments: object) -> int:
        monkeypatch.setattr(sys, "argv", ["rkfac", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return int(ended.value.code or 0)

    assert rkfac("report", tmp_path / "runs", "--out", out) == 0
    assert embedded(out.read_text())["groups"][0]["runs"][0]["label"] == "sgd"
    assert capsys.readouterr().out == f"1 run shown in {out}\n"
    assert rkfac("report", tmp_path / "missing", "--out", tmp_path / "other.html") == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "missing' is not a folder" in said
    assert not (tmp_path / "other.html").exists()
