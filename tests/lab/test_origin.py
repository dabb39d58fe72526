"""Where runs come from: commands that make them again exactly, and sentences on how settings were chosen."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rkfac_lab import compare, config, origin, report, tuning, tuning_text
from rkfac_lab.comparison import Comparison
from rkfac_lab.errors import LabError
from rkfac_lab.jobs import Results
from rkfac_lab.search import Trial, Tuned

from .handmade import make_run
from .test_report import embedded, write_folder

pytestmark = pytest.mark.usefixtures("unadorned")
Command = Callable[..., tuple[int, list[str]]]
SETTINGS = ("threads=1", "rs-kfac.rank=50", 'label="it\'s $HOME; a b"')
COMMON = {"epochs": 5, "time_budget": 2.5, "data_dir": "some where"}


@pytest.mark.parametrize("kind", ["plain", "tuned", "tune"])
def test_the_command_of_a_comparison_says_the_same_comparison(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rkfac: Command
) -> None:
    comparison = Comparison("digits-autoencoder", ("rs-kfac", "sgd"), 2, SETTINGS, COMMON)
    search = tuning.in_passing(comparison, (0.0123456789, 0.1), 2) if kind == "tune" else None
    tuned = tmp_path / "a tuning.json" if kind == "tuned" else None
    if tuned:
        chosen = {"sgd": {"lr": 0.5}}
        tuned.write_text(json.dumps({"workload": "digits-autoencoder", "chosen": chosen}))
    found: dict[str, Any] = {}

    def heard(comparison: Comparison, folder: Path, **other: Any) -> Results:
        found.update(other, comparison=comparison)
        return Results()

    monkeypatch.setattr(compare, "run", heard)
    program, *words = shlex.split(origin.of_comparison(comparison, search, tuned, "sgd").command)
    assert program == "rkfac"
    assert rkfac(*words, "--out", tmp_path / "out") == (0, [])
    assert found["comparison"] == comparison
    assert (found["search"], found["tuned"], found["reference"]) == (search, tuned, "sgd")


RUNS: list[dict[str, Any]] = [
    {"workload": "digits-autoencoder", "optimizer": {"name": "rs-kfac+sgd"}, "seed": 3, "threads": 1},
    {"optimizer": {"name": "rs-kfac", "arguments": {"rank": 7, "damping": 1e-5}}, "label": 'it\'s $HOME; "a" b\nc'},
    {"optimizer": {"name": "k-fac", "preset": "paper"}, "schedule": {"damping": {"1": 0.1, "5": 0.01}}},
    {"optimizer": {"name": "sgd", "arguments": {"lr": 0.1}}, "max_steps": 7, "time_budget": 0.5, "evaluate_steps": 0},
    {"optimizer": {"name": "adamw", "arguments": {"betas": [0.9, 0.95]}}, "lr_shape": "constant", "data_dir": "a b"},
]


@pytest.mark.parametrize("values", RUNS)
def test_the_command_of_a_run_says_the_same_run(values: dict[str, Any]) -> None:
    recorded = config.resolve(config.from_dict(values)).to_dict()
    program, train, target, *words = shlex.split(origin.train_command(recorded))
    assert (program, train) == ("rkfac", "train")
    assert all(word.startswith("--set=") for word in words)
    again = config.resolve(config.load(target, [word.removeprefix("--set=") for word in words]))
    assert again.to_dict() == recorded


def test_what_nobody_tuned_is_the_workloads_own_or_named() -> None:
    def said(**chosen: Any) -> str:
        values = {"workload": "digits-autoencoder", "optimizer": chosen}
        return origin.chosen_of_run(config.resolve(config.from_dict(values)).to_dict())

    assert said(name="sgd") == "not tuned: the workload's own settings."
    assert said(name="rs-kfac", preset="paper") == "not tuned: the paper's own settings."
    assert said(name="sgd", arguments={"lr": 0.5, "dampening": 0.1}) == (
        "not tuned: the workload's own settings but for lr = 0.5 (its own: 0.03), dampening = 0.1 (its own: the default)."
    )
    recorded = {"workload": "digits-autoencoder", "optimizer": {"name": "sgd", "arguments": {"lr": 0.03}}}
    assert "but for momentum = the default (its own: 0.9)" in origin.chosen_of_run(recorded)
    unknown = "as given; how they were chosen was not recorded."
    assert origin.chosen_of_run({"workload": "nobody_has_this:ONE", "optimizer": {"name": "sgd"}}) == unknown
    assert origin.chosen_of_run({"workload": "digits-mlp", "optimizer": {"name": "of-later+sgd"}}) == unknown


def test_a_choice_is_told_with_its_trials() -> None:
    trials = [
        Trial("sgd", lr, value, "finished", arguments={"lr": lr}) for lr, value in ((0.1, 0.7), (0.3, 0.9), (1.0, 0.8))
    ]
    lost = Trial("adamw", 0.1, None, "diverged", arguments={"lr": 0.1})
    alone = Trial("muon", 0.02, 0.5, "finished", 0.1, arguments={"lr": 0.02, "weight_decay": 0.1})
    tuned = Tuned("digits-mlp", "validation_accuracy", "max", 4, 0.1, (*trials, lost, alone))
    told = tuning_text.sentences(tuning.to_json(tuned))
    how = "by validation accuracy after 4 epochs, on 10 % of the training data kept apart, with seed 1000."
    assert told == {
        "sgd": f"tuned: lr = 0.3, the best of 3 trials (learning rates 0.1 to 1) {how}",
        "muon": f"tuned: lr = 0.02, weight_decay = 0.1, the best of 1 trial (learning rates 0.02 to 0.02) {how} "
        "The best rate lies at the edge of those tried.",
    }  # adamw has no choice and keeps the workload's settings
    by_hand = tuning_text.sentences({"chosen": {"sgd": {"lr": "0.1\x1b"}, "x": {}}, "trials": 3})
    assert by_hand == {"sgd": "tuned: lr = 0.1\\x1b; how was not recorded.", "x": "tuned; how was not recorded."}


def test_a_page_made_later_says_what_the_comparison_kept(tmp_path: Path) -> None:
    for label in ("sgd", "adamw"):
        write_folder(make_run(label), tmp_path / "all" / "runs" / f"{label}-1")
    write_folder(make_run("muon"), tmp_path / "loose" / "muon-1")
    kept = origin.Origin("rkfac compare digits-mlp", "adamw", {"sgd": "tuned: lr = 0.1.", "adamw": "not tuned."})
    origin.keep(kept, tmp_path / "all")
    assert origin.of_run(tmp_path / "all" / "runs" / "sgd-1") == kept
    assert origin.of_run(tmp_path / "loose" / "muon-1") is None
    [group] = embedded(report.page(report.find_runs([tmp_path / "all"])))["groups"]
    assert group["commands"] == [kept.command]
    assert {entry["label"]: entry["chosen"] for entry in group["optimizers"]} == kept.chosen
    assert group["table"]["reference"] == "adamw"
    [both] = embedded(report.page(report.find_runs([tmp_path / "all", tmp_path / "loose"])))["groups"]
    assert both["commands"] == [kept.command]
    [loose] = embedded(report.page(report.find_runs([tmp_path / "loose"])))["groups"]
    assert loose["commands"] == []
    assert loose["runs"][0]["command"].startswith("rkfac train digits-mlp ")


def test_a_damaged_file_of_a_comparison_is_refused_in_one_sentence(tmp_path: Path) -> None:
    write_folder(make_run("sgd"), tmp_path / "runs" / "sgd-1")
    for text in ("{", '{"command": 3}', "[]"):
        (tmp_path / origin.FILE).write_text(text)
        with pytest.raises(LabError, match=r"comparison\.json") as caught:
            report.page(report.find_runs([tmp_path]))
        assert "\n" not in str(caught.value)


def test_a_comparison_keeps_its_command_and_the_page_has_it(tiny: str, tmp_path: Path, rkfac: Command) -> None:
    words = ["compare", tiny, "--optimizers", "sgd,adamw", "--seeds", "1", "--epochs", "1", "--set", "adamw.lr=0.5"]
    assert rkfac(*words, "--reference", "adamw", "--out", tmp_path / "c")[0] == 0
    kept = json.loads((tmp_path / "c" / origin.FILE).read_text())
    assert kept["command"] == "rkfac " + shlex.join(
        [*words[:4], "--seeds", "1", "--epochs", "1", "--reference", "adamw", "--set", "adamw.lr=0.5"]
    )
    assert kept["chosen"]["adamw"] == "not tuned: the workload's own settings but for lr = 0.5 (its own: 0.01)."
    [group] = embedded((tmp_path / "c" / "report.html").read_text())["groups"]
    assert group["commands"] == [kept["command"]]
    assert group["table"]["reference"] == "adamw"


# --- continuing


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the comparison of all tests is."""
    return tmp_path_factory.mktemp("once") / "c"


@pytest.fixture
def begun(once: Path, tiny: str, tmp_path: Path, rkfac: Command) -> Path:
    """A copy of a comparison with everything that can be told."""
    words = ["--optimizers", "sgd,adamw", "--seeds", "1", "--epochs", "1", "--set", "adamw.lr=0.5", "--grid", "0.1,0.2"]
    if not once.exists():
        assert rkfac("compare", tiny, *words, "--reference", "adamw", "--out", once)[0] == 0
    return shutil.copytree(once, tmp_path / "c")


def everything(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def labels(folder: Path) -> list[str]:
    return [row["label"] for row in json.loads((folder / "table.json").read_text())["rows"]]


def test_a_comparison_goes_on_as_it_was_begun(begun: Path, rkfac: Command) -> None:
    kept = (begun / origin.FILE).read_text()
    shutil.rmtree(begun / "runs" / "adamw-seed0")
    (begun / "table.json").unlink()
    code, said = rkfac("compare", "--resume", "--out", begun)
    assert code == 0, said
    assert (begun / origin.FILE).read_text() == kept
    assert sorted(path.name for path in (begun / "runs").iterdir()) == ["adamw-seed0", "sgd-seed0"]
    assert labels(begun) == ["sgd", "adamw"]
    assert json.loads((begun / "table.json").read_text())["reference"] == "adamw"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["digits-mlp"], "different: workload digits-mlp, not tiny"),
        (["--optimizers", "sgd"], "different: --optimizers sgd, not sgd,adamw"),
        (["--optimizers", "sgd,adamw,muon"], "different: --optimizers sgd,adamw,muon, not sgd,adamw"),
        (["--epochs", "2"], "different: --epochs 2, not 1"),
        (["--set", "adamw.lr=0.25"], "different: --set adamw.lr=0.25, not adamw.lr=0.5"),
        (["--grid", "0.1"], "different: --grid 0.1, not 0.1,0.2"),
        (["--time-budget", "5"], "different: --time-budget 5.0, not none"),
    ],
)
def test_what_would_be_another_comparison_is_refused_and_loses_nothing(
    words: list[str], said: str, begun: Path, rkfac: Command
) -> None:
    before = everything(begun)
    code, lines = rkfac("compare", *words, "--resume", "--out", begun)
    assert (code, len(lines)) == (2, 1)
    assert said in lines[0]
    assert everything(begun) == before


def test_more_seeds_are_added_and_fewer_take_none_away(begun: Path, rkfac: Command) -> None:
    assert rkfac("compare", "--resume", "--seeds", 2, "--optimizers", "adamw,sgd", "--out", begun)[0] == 0
    assert len(list((begun / "runs").iterdir())) == 4
    before = everything(begun)
    code, said = rkfac("compare", "--resume", "--seeds", 1, "--out", begun)
    assert (code, everything(begun)) == (2, before)
    assert "different: --seeds 1, not 2" in said[0]


def test_the_latest_comparison_goes_on_whatever_its_workload(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rkfac: Command
) -> None:
    monkeypatch.chdir(tmp_path)
    code, said = rkfac("compare", "--resume")
    assert (code, len(said)) == (2, 1)
    for name in ("compare-zeta-20200101-000000", f"compare-{tiny}-20210101-000000"):
        assert (
            rkfac("compare", tiny, "--optimizers", "sgd", "--seeds", 1, "--epochs", 1, "--out", f"runs/{name}")[0] == 0
        )
        shutil.rmtree(f"runs/{name}/runs")
    assert rkfac("compare", "--resume")[0] == 0
    assert [path.parent.name for path in Path("runs").glob("*/runs")] == [f"compare-{tiny}-20210101-000000"]


def test_where_nothing_was_begun_there_is_nothing_to_continue(tmp_path: Path, rkfac: Command) -> None:
    code, said = rkfac("compare", "--resume", "--out", tmp_path / "nothere")
    assert (code, len(said)) == (2, 1)
    assert "There is nothing to continue in" in said[0]
    assert not (tmp_path / "nothere").exists()


@pytest.mark.parametrize("earlier", ["nothing", "a command"])
def test_a_folder_of_an_earlier_version_needs_the_options_again(
    earlier: str, tiny: str, tmp_path: Path, rkfac: Command
) -> None:
    words = ["compare", tiny, "--optimizers", "sgd,adamw", "--seeds", 1, "--epochs", 1, "--out", tmp_path]
    assert rkfac(*words)[0] == 0
    kept = json.loads((tmp_path / origin.FILE).read_text())
    del kept["plan"]
    (tmp_path / origin.FILE).write_text(json.dumps(kept))
    if earlier == "nothing":
        (tmp_path / origin.FILE).unlink()
    code, said = rkfac("compare", "--resume", "--out", tmp_path)
    assert code == 2
    assert "does not say what was compared there" in said[0]
    before = everything(tmp_path)
    code, said = rkfac("compare", tiny, "--optimizers", "sgd", "--epochs", 1, "--resume", "--out", tmp_path)
    assert (code, everything(tmp_path)) == (2, before)
    assert "holds runs that this comparison has not (adamw-seed0)" in said[0]
    assert rkfac(*words, "--resume")[0] == 0
    assert rkfac("compare", "--resume", "--out", tmp_path)[0] == 0


def test_what_is_cut_short_while_it_tunes_goes_on_too(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rkfac: Command
) -> None:
    words = ["compare", tiny, "--optimizers", "sgd", "--seeds", 1, "--epochs", 1, "--grid", "0.1,0.2"]

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(tuning, "tune", interrupted)
        assert rkfac(*words, "--out", tmp_path / "c")[0] == 130
    code, said = rkfac("compare", "--resume", "--out", tmp_path / "c")
    assert code == 0, said
    assert json.loads((tmp_path / "c" / origin.FILE).read_text())["chosen"]["sgd"].startswith("tuned: lr = ")


def test_a_choice_after_fewer_steps_than_its_epochs_says_so() -> None:
    trial = Trial("sgd", 0.1, 0.7, "finished", arguments={"lr": 0.1})
    tuned = Tuned("digits-mlp", "validation_accuracy", "max", 4, 0.1, (trial,), max_steps=10)
    assert tuned.judged() == "after 4 epochs, at most 10 steps"
    written = tuning.to_json(tuned)
    assert "after 4 epochs, at most 10 steps, on 10 %" in tuning_text.sentences(written)["sgd"]
    del written["max_steps"]  # as it was written before
    assert "after 4 epochs, on 10 %" in tuning_text.sentences(written)["sgd"]
