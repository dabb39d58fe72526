"""Optimizers, models, data and strategies of the user's own, by module:NAME and as tables."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import rkfac
from rkfac_lab import config, optimizers, record, report, tables, train
from rkfac_lab.errors import LabError
from rkfac_lab.workloads import WORKLOADS, find

SOURCE = Path(__file__).parents[2] / "src"
MODULE = '''
import torch
from torch import nn
import rkfac
from rkfac_lab.data import Dataset, Sources


class OwnKFAC(rkfac.RSKFAC):
    """With a setting of its own, and a damping of its own."""

    def __init__(self, model, lr=None, *, patience=3, damping=0.5, **keywords):
        super().__init__(model, lr, damping=damping, **keywords)
        self.model, self.patience = model, patience


class Grandchild(OwnKFAC):
    pass


class Descent(torch.optim.SGD):
    pass


class Halved(rkfac.Decomposition):
    """Half of what is exact."""

    def __init__(self, share=0.5):
        self.share = share

    def decompose(self, request):
        low = rkfac.Exact().decompose(request)
        return low.truncate(max(1, int(self.share * low.dim)))


def wide(data):
    return nn.Sequential(nn.Linear(data.train_x.shape[1], 7), nn.Tanh(), nn.Linear(7, data.classes))


def few(sources):
    g = torch.Generator().manual_seed(1)
    x, y = torch.randn(24, 9, generator=g), torch.arange(24) % 3
    return Dataset(x[:16], y[:16], x[16:], y[16:], classes=3)


def no_model(data):
    return "a model"


def two_arguments(data, width):
    return nn.Linear(1, 1)


NUMBER = 3
'''


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A folder to work in with mine.py in it, which Python forgets afterwards."""
    (tmp_path / "mine.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(tmp_path))])
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    yield tmp_path
    sys.modules.pop("mine", None)


def command(*arguments, folder=None):
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "PYTHONSAFEPATH": "1"}  # as the console script: no folder
    call = [sys.executable, "-m", "rkfac_lab.cli", *map(str, arguments)]
    return subprocess.run(call, env=environment, cwd=folder, capture_output=True, text=True, check=False)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))


# --- optimizers


def test_a_class_derived_from_ours_gets_the_model_and_the_seed_and_its_arguments_are_known(mine):
    model = network()
    built = optimizers.build("mine:OwnKFAC", model, {"lr": 0.25, "rank": 3, "patience": 5}, seed=7)
    assert built.model is model
    assert (built.patience, built.param_groups[0]["damping"], built.param_groups[0]["lr"]) == (5, 0.5, 0.25)
    assert built._settings.randomness.state_dict() == rkfac.RSKFAC(network(), seed=7)._settings.randomness.state_dict()
    with pytest.raises(LabError, match="argument of mine:OwnKFAC 'patienc'; did you mean 'patience'"):
        optimizers.build("mine:OwnKFAC", model, {"patienc": 1})
    assert isinstance(optimizers.build("mine:Descent", model, {"lr": 0.1}), torch.optim.SGD)


@pytest.mark.parametrize(
    "name, kin", [("mine:OwnKFAC", "rs-kfac"), ("mine:Grandchild", "rs-kfac"), ("rkfac:EKFAC", "ek-fac")]
)
def test_it_has_the_needs_and_the_settings_of_the_one_it_derives_from(mine, name, kin):
    assert optimizers.kin(name) == kin
    for workload in WORKLOADS.values():
        assert workload.arguments(name) == workload.arguments(kin)
        assert workload.arguments(f"{name}+adamw") == workload.arguments(f"{kin}+adamw")
    assert find("text-transformer").arguments(name)["loss_average"] == "tokens"


def test_others_have_no_kin_and_take_nobodys_place(mine):
    assert optimizers.kin("mine:Descent") is None
    assert optimizers.kin("sgd") is None
    assert find("digits-mlp").arguments("mine:Descent") == {}
    for name in ("mine:Descent+sgd", "torch.optim:SGD+adamw"):
        with pytest.raises(LabError, match="There is no K-FAC to put in the place of"):
            optimizers.build(name, network(), {})
    with pytest.raises(LabError, match="optimizer for mine:OwnKFAC to take the place of: 'muon'"):
        optimizers.grafted("mine:OwnKFAC+muon")


def test_the_paper_s_preset_is_that_of_its_kin(mine):
    (mine / "slow.py").write_text("import rkfac\nclass Slow(rkfac.SENG):\n    pass\n")
    for name, expected in (("mine:OwnKFAC", rkfac.paper_defaults()), ("slow:Slow", rkfac.seng_defaults())):
        whole = config.resolve(config.from_dict({"optimizer": {"name": name, "preset": "paper"}}))
        assert whole.optimizer.arguments == expected
    sys.modules.pop("slow", None)


def test_a_comparison_counts_it_among_the_kfacs_and_the_page_imports_nothing(mine, rkfac):
    """In its own place and in SGD's, against baselines, one of them of the user's own too."""
    contenders = "mine:OwnKFAC,mine:OwnKFAC+sgd,mine:Descent,sgd"
    arguments = (
        "--seeds",
        1,
        "--set",
        "max_steps=2",
        "--set",
        "model=mine:wide",
        "--set",
        "mine:Descent.lr=0.1",
        "--out",
        "c",
    )
    code, said = rkfac("compare", "digits-mlp", "--optimizers", contenders, *arguments)
    assert code == 0, said
    runs = [record.load_run(path) for path in sorted((mine / "c" / "runs").iterdir())]
    assert {row.label: row.baseline for row in tables.table1(runs).rows} == {
        "mine:OwnKFAC": False,
        "mine:OwnKFAC+sgd": False,
        "mine:Descent": True,
        "sgd": True,
    }
    table = json.loads((mine / "c" / "table.json").read_text())
    assert [(made["label"], made["baseline"]) for made in table["promises"]] == [("mine:OwnKFAC+sgd", "sgd")]
    sys.modules.pop("mine", None)
    (mine / "mine.py").unlink()
    report.write(runs, mine / "page.html")
    assert "mine" not in sys.modules
    assert "mine:OwnKFAC+sgd" in (mine / "page.html").read_text()


# --- models and data

OWN = ["model=mine:wide", "data=mine:few", "optimizer.name=mine:OwnKFAC", "batch_size=8", "threads=1"]


def test_a_model_and_data_of_ones_own_train_and_go_on(mine, rkfac):
    settings = [word for text in OWN for word in ("--set", text)]
    ended = command("train", "digits-mlp", *settings, "--epochs", 2, "--set", "lr_shape=constant", folder=mine)
    assert ended.returncode == 0, ended.stderr
    folder = mine / "runs" / "digits-mlp_model_mine_wide_data_mine_few-mine_OwnKFAC-seed0"
    run = record.load_run(folder)
    assert (run.config["model"], run.config["data"]) == ("mine:wide", "mine:few")
    assert run.summary["workload"] == "digits-mlp, model mine:wide, data mine:few"
    assert (run.summary["steps"], run.summary["kfac"]) == (4, True)
    saved = torch.load(folder / record.CHECKPOINT, weights_only=False)
    assert "(7, 9)" in str([tuple(t.shape) for t in _tensors(saved)])
    code, said = rkfac("train", folder, "--epochs", 3, "--resume")
    assert code == 0, said
    straight = train.run(config.load("digits-mlp", [*OWN, "epochs=3", "lr_shape=constant"]), mine / "straight")
    numbers = [[line[key] for key in ("step", "train_loss", "test_loss")] for line in straight.epochs]
    assert numbers == [
        [line[key] for key in ("step", "train_loss", "test_loss")] for line in record.load_run(folder).epochs
    ]


def _tensors(value):
    if isinstance(value, torch.Tensor):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [tensor for one in inner for tensor in _tensors(one)]


def test_they_are_compared_tuned_and_have_spectra(mine, rkfac):
    given = ["--set", "model=mine:wide", "--set", "data=mine:few", "--set", "batch_size=8"]
    tuned = ("--trials", 2, "--grid", "0.01,0.1", "--epochs", 1)
    for arguments in (
        ("compare", "digits-mlp", "--optimizers", "rs-kfac,sgd", "--seeds", 1, "--epochs", 1, *given, "--out", "c"),
        ("tune", "digits-mlp", "--optimizers", "mine:OwnKFAC", *tuned, *given, "--out", "t"),
        ("spectrum", "digits-mlp", "--steps-max", 2, *given, "--out", "s"),
    ):
        code, said = rkfac(*arguments)
        assert code == 0, said
    assert json.loads((mine / "c" / "table.json").read_text())["workload"].endswith("data mine:few")


def test_another_model_is_another_run_and_another_problem(mine, rkfac):
    begun = config.load("digits-mlp", ["optimizer.name=sgd", "max_steps=1"])
    train.run(begun, mine / "r")
    with pytest.raises(LabError, match=r"another configuration \(different: model\)"):
        train.run(config.load("digits-mlp", ["optimizer.name=sgd", "max_steps=1", "model=mine:wide"]), mine / "r")
    (mine / "other.toml").write_text('workload = "digits-mlp"\nmodel = "mine:wide"\n[optimizer]\nname = "sgd"\n')
    code, said = rkfac("compare", "digits-mlp", "--optimizers", "adamw,other.toml", "--out", "c")
    assert code == 2
    assert "models or data of their own, and cannot be compared" in " ".join(said)


@pytest.mark.parametrize(
    "setting, said",
    [
        ("model=wide", "The model wide is not of the form module:NAME"),
        ("model=mine:wid", "There is no model in mine named 'wid'; did you mean 'wide'?"),
        ("model=nowhere:wide", "The model nowhere:wide needs the module nowhere"),
        ("model=mine:NUMBER", "The model mine:NUMBER is no function of one argument (the data, a Dataset)"),
        ("model=mine:two_arguments", "The model mine:two_arguments is no function of one argument"),
        ("model=mine:no_model", "The model mine:no_model returned a str, and a Module belongs there"),
        ("model=3", "model must be a text, not 3"),
        ("data=mine:wide", "The data mine:wide failed in mine.py, line 36: AttributeError: 'Sources' object has no"),
        ("data=mine:wide", "'train_x'; it gets where data is, a Sources, and returns a Dataset."),
        ("data=mine:NUMBER", "The data mine:NUMBER is no function of one argument (where data is, a Sources)"),
        ("data=mine:no_model", "The data mine:no_model returned a str, and a Dataset belongs there"),
    ],
)
def test_what_cannot_be_used_is_said_before_anything_is_written(mine, setting, said):
    with pytest.raises(LabError, match=re.escape(said)):
        train.run(config.load("digits-mlp", ["optimizer.name=sgd", setting]), mine / "r")
    assert not (mine / "r").exists()


# --- strategies


def strategy(value, name="k-fac"):
    return optimizers.build(name, network(), {"decomposition": value})._settings.decomposition


@pytest.mark.parametrize(
    "written, expected",
    [
        ('{kind = "exact"}', rkfac.Exact()),
        ('{kind = "rsvd", rank = 3}', rkfac.RSVD(rank=3)),
        ('{kind = "srevd", rank = "auto", max_rank = 9}', rkfac.SREVD(rank="auto", max_rank=9)),
        (
            '{kind = "nystrom", power_iterations = 2, warm_start = false}',
            rkfac.Nystrom(power_iterations=2, warm_start=False),
        ),
        ('{kind = "auto", exact_up_to = 4}', rkfac.Auto(exact_up_to=4)),
        ('{kind = "auto", large = {kind = "rsvd", rank = 2}}', rkfac.Auto(large=rkfac.RSVD(rank=2))),
        ("nystrom", rkfac.Nystrom()),
    ],
)
def test_a_strategy_is_a_table_or_a_word(written, expected):
    read = config.load("digits-mlp", [f"optimizer.arguments.decomposition={written}"])
    assert strategy(read.optimizer.arguments["decomposition"]) == expected
    assert config.from_dict(json.loads(json.dumps(read.to_dict()))) == read


def test_other_objects_are_made_the_same_way(mine):
    for likelihood, expected in (
        ({"kind": "categorical", "class_dim": 1}, rkfac.Categorical(1)),
        ("gaussian", rkfac.Gaussian()),
    ):
        built = optimizers.build("rs-kfac", network(), {"fisher": "mc", "likelihood": likelihood})
        assert built._fingerprint == rkfac.RSKFAC(network(), fisher="mc", likelihood=expected)._fingerprint
    inner = {"kind": "inner-steps", "steps": 2, "weight": 0.5}
    built = optimizers.build("kld-wrm", network(), {"variant": "qe", "inner": inner, "graft": None})
    assert built._method.inner == rkfac.InnerSteps(steps=2, weight=0.5)


def test_a_strategy_of_ones_own(mine):
    made = strategy({"kind": "mine:Halved", "share": 0.25})
    assert (type(made).__name__, made.share) == ("Halved", 0.25)
    run = train.run(
        config.load(
            "digits-mlp", ["model=mine:wide", "max_steps=3", 'optimizer.arguments.decomposition={kind="mine:Halved"}']
        ),
        mine / "r",
    )
    assert run.summary["status"] == "finished"
    assert run.config["optimizer"]["arguments"]["decomposition"] == {"kind": "mine:Halved"}


def test_a_run_with_a_strategy_goes_on_bit_for_bit(tiny, tmp_path):
    text = f'workload = "{tiny}"\nepochs = 4\nthreads = 1\n[optimizer]\nname = "k-fac"\n[optimizer.arguments]\n'
    text += 'inverse_every = 2\nfactor_every = 1\ndecomposition = {kind = "nystrom", rank = 2, power_iterations = 2}\n'
    (tmp_path / "run.toml").write_text(text)
    whole = config.load(str(tmp_path / "run.toml"))
    straight = train.run(whole, tmp_path / "straight")
    train.run(config.load(str(tmp_path / "run.toml"), ["max_steps=5"]), tmp_path / "halted")
    kept = json.loads((tmp_path / "halted" / config.FILE).read_text())
    assert kept["optimizer"]["arguments"]["decomposition"] == {"kind": "nystrom", "rank": 2, "power_iterations": 2}
    resumed = train.run(config.load(str(tmp_path / "halted"), ["max_steps=1000"]), tmp_path / "halted", resume=True)
    assert [e["test_loss"] for e in straight.epochs] == [e["test_loss"] for e in resumed.epochs]
    plain = train.run(config.load(tiny, ["epochs=4", "threads=1", "optimizer.name=k-fac"]), tmp_path / "plain")
    assert [e["test_loss"] for e in plain.epochs] != [e["test_loss"] for e in straight.epochs]


@pytest.mark.parametrize(
    "arguments, said",
    [
        ({"decomposition": {"kind": "nystrm"}}, "no kind of decomposition 'nystrm'; did you mean 'nystrom'?"),
        ({"decomposition": "qr"}, "no kind of decomposition 'qr'; choose from: auto, exact, nystrom, rsvd, srevd."),
        (
            {"decomposition": {"rank": 3}},
            "decomposition needs a kind, as in decomposition = {kind = 'exact'}; choose from: auto",
        ),
        ({"decomposition": {"kind": 3}}, "decomposition needs a kind"),
        (
            {"decomposition": {"kind": "rsvd", "ranks": 3}},
            "no argument of the decomposition rsvd 'ranks'; did you mean 'rank'?",
        ),
        (
            {"decomposition": {"kind": "exact", "rank": 3}},
            "no argument of the decomposition exact 'rank'; choose from: none.",
        ),
        (
            {"decomposition": {"kind": "rsvd", "rank": -3}},
            "The decomposition rsvd does not accept rank=-3: rank must be",
        ),
        ({"decomposition": {"kind": "auto", "large": {"kind": "b"}}}, "no kind of large 'b'"),
        ({"decomposition": {"kind": "auto", "large": 3}}, "does not accept large=3: large must be a strategy"),
        ({"decomposition": {"kind": "mine:Halve"}}, "no decomposition in mine named 'Halve'; did you mean 'Halved'?"),
        (
            {"decomposition": {"kind": "mine:wide"}},
            "mine:wide is not derived from rkfac.Decomposition and was not called",
        ),
        ({"decomposition": {"kind": "rkfac:Gaussian"}}, "is not derived from rkfac.Decomposition"),
        ({"decomposition": 3}, "decomposition must be a strategy such as rkfac.RSVD(), got 3"),
        (
            {"likelihood": {"kind": "poisson"}},
            "no kind of likelihood 'poisson'; choose from: bernoulli, categorical, gaussian.",
        ),
        ({"adaptive_damping": {"kind": "levenberg-marquardt"}}, "adaptive_damping needs step(closure)"),
    ],
)
def test_what_is_no_strategy_is_said_in_one_sentence(mine, arguments, said):
    with pytest.raises(LabError, match=re.escape(said)) as refused:
        optimizers.build("k-fac", network(), arguments)
    assert "\n" not in str(refused.value)


def test_tables_for_other_optimizers_are_theirs(mine):
    (mine / "others.py").write_text(
        "import torch\nclass Inner(torch.optim.SGD):\n    def __init__(self, params, lr=0.1, inner=None):\n"
        "        super().__init__(params, lr=lr)\n        self.inner = inner\n"
    )
    assert optimizers.build("others:Inner", network(), {"inner": {"kind": "x"}}).inner == {"kind": "x"}
    sys.modules.pop("others", None)
