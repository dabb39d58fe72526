"""Labels are foreign text: they cannot leave the runs folder, steer a terminal, or act in a table, page or spreadsheet."""

from __future__ import annotations

import csv
import io
import sys
from pathlib import Path

import pytest
from rich.console import Console

from rkfac_lab import config, jobs, plots, progress, search, table_text, tables, tuning, tuning_text
from rkfac_lab.cli import main
from rkfac_lab.comparison import Comparison
from rkfac_lab.errors import LabError

from .handmade import make_run

STEERING = "a\x1b[2J\x1b]0;title\x07b\x9bc\u202ed\ne\r"


def printed(*parts):
    console = Console(file=io.StringIO(), width=200, force_terminal=False)
    for part in parts:
        console.print(part)
    return console.file.getvalue()


def steers(text):
    return [c for c in text.replace("\n", "") if ord(c) < 32 or 0x7F <= ord(c) < 0xA0 or c in "\u202e\u2066\u2028"]


@pytest.mark.parametrize("label", ["../../../escaped", "/tmp/escaped", "..", "a/b/../../..", "x" * 180, "\x1b[2J\n"])
def test_a_label_cannot_leave_the_runs_folder(tmp_path, tiny, monkeypatch, capsys, label):
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    (tmp_path / "work" / "run.toml").write_text(
        f'workload = "{tiny}"\nepochs = 1\nlabel = {tuning.json.dumps(label)}\n[optimizer]\nname = "sgd"\n'
    )
    monkeypatch.setattr(sys, "argv", ["rkfac", "train", "run.toml"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    found = [path.parent for path in tmp_path.rglob("config.json")]
    assert [path.parent for path in found] == [tmp_path / "work" / "runs"]
    spoken = capsys.readouterr()
    assert steers(spoken.out + spoken.err) == []


def test_nothing_on_the_terminal_steers_it():
    run = make_run(STEERING, targets=[0.8], workload=STEERING)
    other = make_run("sgd", workload=STEERING, status="diverged")
    table = tables.table1([run, other], [tables.Failure(STEERING, 1, STEERING)])
    assert steers(printed(*table_text.to_rich(table))) == []
    assert steers("".join(table_text.notes(table))) == []
    assert steers(progress.describe_run(run)) == []
    failed = search.Trial(STEERING, 0.1, None, STEERING, message=STEERING)
    tuned = search.Tuned(STEERING, STEERING, "max", 1, 0.1, (failed, search.Trial("sgd", 0.1, 1.0, "finished")))
    assert steers(printed(*tuning_text.to_rich(tuned))) == []
    assert steers("".join(tuning_text.notes(tuned))) == []
    console = Console(file=io.StringIO(), width=200)
    display = jobs.Display(console)
    display.start(Comparison("digits-mlp", ("sgd",), 1, (f"label={tuning.json.dumps(STEERING)}",)).jobs(Path("x")))
    display.job(0)
    display.failed(0, STEERING)
    display.stop()
    assert steers(console.file.getvalue()) == []
    assert len(console.file.getvalue().splitlines()) == 1


def test_errors_on_the_terminal_do_not_steer_it(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["rkfac", "report", STEERING])
    with pytest.raises(SystemExit):
        main()
    said = capsys.readouterr().err
    assert steers(said) == []
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    "label, shown",
    [
        ("a|b", r"a\|b"),
        ("![x](http://e.org/p.png)", r"\!\[x\](http\://e.org/p.png)"),
        ("<img src=x>", r"\<img src=x\>"),
        ("`code` *bold* _it_ ~~x~~", r"\`code\` \*bold\* \_it\_ \~\~x\~\~"),
        ("a\nb", r"a\\nb"),
        ("www.e.org me@e.org", r"www\.e.org me\@e.org"),
        ("&lt;", r"\&lt;"),
        ("rs-kfac lr=0.1", "rs-kfac lr=0.1"),
    ],
)
def test_markdown_in_labels_is_shown_and_not_obeyed(label, shown):
    text = table_text.to_markdown(tables.table1([make_run(label), make_run("sgd")]), reference=label)
    assert text.count(f"| {shown} |") == 2
    assert f"those of {shown} (below" in text


@pytest.mark.parametrize("label", ["=1+1", "+1", "-cmd", "@SUM(A1)", "\t=1", "\r=1", "  =1", '=HYPERLINK("x","y")'])
def test_formulas_in_labels_are_text_to_a_spreadsheet(label):
    failure = tables.Failure(label, 1, "=1+1")
    rows = list(csv.reader(io.StringIO(table_text.to_csv(tables.table1([make_run(label)], [failure])))))
    assert rows[1][0].startswith("'")
    assert label.strip() in rows[1][0].replace("\\t", "\t").replace("\\r", "\r")
    assert all(not cell.startswith(("=", "+", "-", "@", "\t", "\r")) for row in rows for cell in row)


@pytest.mark.parametrize("label", [r"$\frac$", "$a$", "_hidden", STEERING, r"a\b", "100$"])
def test_figures_show_labels_as_they_are(tmp_path, label):
    figure = plots.curves([make_run(label, workload=label)])
    png, svg = plots.save(figure, tmp_path / "curves")
    assert png.stat().st_size
    assert svg.stat().st_size
    assert len(figure.legends[0].get_texts()) == 1


def test_two_contenders_that_would_be_one_row_or_one_folder_are_refused(tmp_path):
    for place in ("a", "b"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "run.toml").write_text('[optimizer]\nname = "sgd"\n')
    paths = tuple(str(tmp_path / place / "run.toml") for place in ("a", "b"))
    with pytest.raises(LabError, match="share a run folder"):
        Comparison(contenders=paths)


def test_a_label_is_kept_as_it_was_given():
    assert config.load("digits-mlp", [f"label={tuning.json.dumps(STEERING)}"]).name == STEERING
