"""Several processes under torchrun: the steps of one, one run folder, any number of them to continue, and no one left waiting."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from forked import forking
from rkfac_lab import averaging, joining, ranks
from rkfac_lab.cli import main
from rkfac_lab.errors import LabError
from rkfac_lab.ranks import Ranks
from rkfac_lab.record import load_run

TIMES = ("train_seconds", "cpu_seconds", "epoch_seconds", "eval_seconds")
PATIENCE = 500  # seconds, on a machine that has other things to do

pytestmark = pytest.mark.timeout(600)

# A network with everything that one process has for itself: statistics of a batch, and random numbers.
MODULE = '''
import dataclasses
import os
import torch
from torch import nn
from torch.nn import functional as F
import rkfac
from rkfac_lab import ranks, workloads

ranks.ALIKE = 3.0
g = torch.Generator().manual_seed(0)
X, Y = torch.randn(40, 6, generator=g), torch.arange(40) % 3
DATA = workloads.Dataset(X[:32], Y[:32], X[32:], Y[32:], classes=3)
NOISY = workloads.Workload(
    name="noisy", about="for tests", data=lambda sources: DATA, batch_size=11, epochs=9, loss=F.cross_entropy,
    model=lambda data: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 3)),
    metrics={"test_accuracy": workloads.accuracy}, targets=(), lr_shape="constant",
)

PRECISE = dataclasses.replace(  # the same without either, in double precision
    NOISY, name="precise", data=lambda sources: dataclasses.replace(DATA, train_x=X[:32].double(), test_x=X[32:].double()),
    model=lambda data: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double(),
)

class OwnKFAC(rkfac.RSKFAC):
    """A K-FAC of somebody's own."""

def halves(sources):
    return dataclasses.replace(DATA, train_x=X[:32].double() / 2, test_x=X[32:].double() / 2)

def wide(data):
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3)).double()

class Broken(torch.optim.SGD):
    """Fails in its third step, everywhere."""

    alone = False

    def step(self, closure=None):
        self.taken = getattr(self, "taken", 0) + 1
        if self.taken == 3 and (os.environ.get("RANK") == "1" or not self.alone):
            raise RuntimeError("no rows left")
        return super().step(closure)

class BrokenInOne(Broken):
    """Fails in its third step, in one process."""

    alone = True

class Endless(torch.optim.SGD):
    """Says when it has begun, and takes its time."""

    def step(self, closure=None):
        import time
        open(f"begun.{os.environ['RANK']}", "w").close()
        time.sleep(0.02)
        return super().step(closure)
'''


def flags(folder, *settings, steps=6, workload="digits-autoencoder"):
    given = [word for text in ("lr_shape=constant", "threads=1", *settings) for word in ("--set", text)]
    return ["train", workload, "--max-steps", str(steps), "--folder", folder, *given]


def named(optimizer, *settings, **keywords):
    return flags(optimizer, f"optimizer.name={optimizer}", *settings, **keywords)


TOGETHER = {name: named(name) for name in ("sgd", "adamw", "muon", "rs-kfac")}
PRECISE = {
    name: flags(f"precise-{name}", f"optimizer.name={name}", steps=7, workload="noisy_problem:PRECISE")
    for name in ("sgd", "adamw", "rs-kfac", "ek-fac", "rs-kfac+adamw")
}
OWN = ("model=noisy_problem:wide", "data=noisy_problem:halves", 'optimizer.arguments.decomposition={kind = "nystrom"}')
PRECISE["own"] = flags(
    "precise-own", "optimizer.name=noisy_problem:OwnKFAC+adamw", *OWN, steps=7, workload="noisy_problem:PRECISE"
)
# 32 samples: a last batch of one, of which the second process has nothing; and batches that do not go in two.
UNEVEN = flags("uneven", "optimizer.name=rs-kfac", "batch_size=31", steps=9, workload="noisy_problem:PRECISE")
ODD = flags("odd", "optimizer.name=rs-kfac", "batch_size=101", steps=15)
SOAP = named("soap", steps=3)
FEWER, MORE = flags("grows", "optimizer.name=rs-kfac", steps=3), flags("grows", "optimizer.name=rs-kfac", steps=6)
BEGUN = flags("begun-alone", "optimizer.name=rs-kfac", steps=3)
CONTINUED = [*flags("begun-alone", "optimizer.name=rs-kfac", steps=6), "--resume"]
OWNED = ("optimizer.name=rs-kfac", "optimizer.arguments.memory=owned", "checkpoint_seconds=0")
NOISE = {
    name: flags(name, *OWNED, steps=steps, workload="noisy_problem:NOISY")
    for name, steps in (("whole", 7), ("parts", 4))
}
REST = [*flags("parts", *OWNED, steps=7, workload="noisy_problem:NOISY"), "--resume"]
BUDGET = [*flags("budget", "optimizer.name=sgd", steps=10**6), "--time-budget", "0.2", "--set", "epochs=100000"]
COMPARED = "sgd,rs-kfac,noisy_problem:Broken"
COMPARISON = ["compare", "digits-autoencoder", "--optimizers", COMPARED, "--seeds", "1", "--set", "max_steps=4"]
COMPARISON += ["--set", "noisy_problem:Broken.lr=0.01", "--set", "sgd.lr=0.01", "--out", "comparison"]
REFUSED = {
    "tune": ["tune", "digits-mlp"],
    "demo": ["demo"],
    "spectrum": ["spectrum"],
    "bench": ["bench", "step"],
    "data": ["data", "list"],
    "report": ["report", "sgd"],
    "compare --tune": ["compare", "digits-mlp", "--tune"],
    "seng": flags("seng", "optimizer.name=seng"),
    "again": [*named("sgd"), "--seed", "0"],
}
COMMANDS = [
    *TOGETHER.values(),
    *PRECISE.values(),
    UNEVEN,
    ODD,
    SOAP,
    FEWER,
    CONTINUED,
    *NOISE.values(),
    REST,
    BUDGET,
    COMPARISON,
    *REFUSED.values(),
]


def torchrun(folder, *arguments):
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-port",
        str(free_port()),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder)}
    return subprocess.run(
        [*command, *map(str, arguments)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def alone(monkeypatch, folder, arguments):
    """The same command in this process."""
    folder.mkdir(exist_ok=True)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["rkfac", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """The working folder of both processes, after all errands; what each of them said is in its answers."""
    folder = tmp_path_factory.mktemp("torchrun")
    (folder / "noisy_problem.py").write_text(MODULE)
    with pytest.MonkeyPatch.context() as patch:
        alone(patch, folder, BEGUN)
    (folder / "commands.json").write_text(json.dumps(COMMANDS))
    done = torchrun(folder, Path(__file__).with_name("errands.py"), "commands.json", "answers")
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def answers(place):
    found = [json.loads((place / f"answers.{rank}.json").read_text()) for rank in range(2)]
    return [{repr(command): own for command, own in zip(COMMANDS, one, strict=True)} for one in found]


def parameters(folder):
    state = torch.load(folder / "checkpoint.pt", weights_only=True)
    return torch.cat([value.double().flatten() for value in state["model"].values()])


def numbers(run):
    left_out = (*TIMES, "kind")
    return [{k: v for k, v in line.items() if k not in left_out and v is not None} for line in run.epochs]


def assert_same_run(got, wanted, far):
    """`far`: how much parameters and measurements of the two may differ, in float32."""
    torch.testing.assert_close(parameters(got.path), parameters(wanted.path), rtol=0, atol=far)
    assert [line["step"] for line in got.epochs] == [line["step"] for line in wanted.epochs]
    for mine, its in zip(numbers(got), numbers(wanted), strict=True):
        assert mine == pytest.approx(its, rel=10 * far)


# Parameters are of size one. Sums of gradients in another order differ in their last bits, 6e-8; SGD and Muon pass that on
# as it is, AdamW's first steps are quotients of gradients by their size, also where that is next to nothing, and K-FAC
# divides by damped eigenvalues. EK-FAC's bases are eigenvectors, also of eigenvalues that are all but equal.
FAR = {"sgd": 1e-6, "muon": 1e-5, "adamw": 1e-4, "rs-kfac": 1e-4}


@pytest.mark.parametrize("optimizer", TOGETHER)
def test_two_processes_take_the_steps_of_one(place, answers, tmp_path, monkeypatch, optimizer):
    assert [one[repr(TOGETHER[optimizer])][0] for one in answers] == [0, 0]
    alone(monkeypatch, tmp_path, TOGETHER[optimizer])
    assert_same_run(load_run(place / optimizer), load_run(tmp_path / optimizer), FAR[optimizer])


@pytest.mark.parametrize("optimizer", PRECISE)
def test_in_double_precision_nothing_but_the_last_bits_differs(place, answers, tmp_path, monkeypatch, optimizer):
    assert [one[repr(PRECISE[optimizer])][0] for one in answers] == [0, 0]
    (tmp_path / "noisy_problem.py").write_text(MODULE)
    alone(monkeypatch, tmp_path, PRECISE[optimizer])
    assert_same_run(load_run(place / f"precise-{optimizer}"), load_run(tmp_path / f"precise-{optimizer}"), 1e-7)


@pytest.mark.parametrize("command, folder, far", [(UNEVEN, "uneven", 1e-7), (ODD, "odd", 1e-4)])
def test_shares_that_differ_and_a_process_without_samples_change_nothing(
    place, answers, tmp_path, monkeypatch, command, folder, far
):
    assert [one[repr(command)][0] for one in answers] == [0, 0]
    (tmp_path / "noisy_problem.py").write_text(MODULE)
    alone(monkeypatch, tmp_path, command)
    assert_same_run(load_run(place / folder), load_run(tmp_path / folder), far)


def test_an_optimizer_that_amplifies_last_bits_still_trains(place, answers):
    """SOAP's first bases are those of a matrix of low rank, which any rounding turns: two halves in one process do as well."""
    run = load_run(place / "soap")
    assert run.summary["status"] == "finished"
    assert run.epochs[-1]["train_loss"] < 45


def test_what_two_began_one_continues(place, answers, tmp_path, monkeypatch):
    alone(monkeypatch, place, [*MORE, "--resume"])
    alone(monkeypatch, tmp_path, MORE)
    assert_same_run(load_run(place / "grows"), load_run(tmp_path / "grows"), 1e-4)
    assert load_run(place / "grows").environment["processes"] == 1


def test_what_one_began_two_continue(place, answers, tmp_path, monkeypatch):
    assert [one[repr(CONTINUED)][0] for one in answers] == [0, 0]
    alone(monkeypatch, tmp_path, MORE)
    assert_same_run(load_run(place / "begun-alone"), load_run(tmp_path / "grows"), 1e-4)
    assert load_run(place / "begun-alone").environment["processes"] == 2


def test_a_run_of_two_in_parts_is_the_whole_run_bit_for_bit(place, answers):
    """With BatchNorm and dropout, of which every process has its own, and a part of the averages."""
    assert [one[repr(REST)][0] for one in answers] == [0, 0]
    assert torch.equal(parameters(place / "parts"), parameters(place / "whole"))
    assert numbers(load_run(place / "parts"))[-1] == numbers(load_run(place / "whole"))[-1]


def test_a_budget_of_seconds_ends_all_at_the_same_step(place, answers):
    assert [one[repr(BUDGET)][0] for one in answers] == [0, 0]
    run = load_run(place / "budget")
    assert run.summary["status"] == "finished"
    assert 0.2 <= run.summary["train_seconds"] < 20


def test_the_first_process_alone_writes_and_speaks(place, answers):
    first, second = answers
    for command in (*TOGETHER.values(), COMPARISON):
        assert first[repr(command)][1]
    assert load_run(place / "sgd").environment["processes"] == 2
    folders = sorted(path.parent.relative_to(place).as_posix() for path in place.rglob("config.json"))
    compared = [f"comparison/runs/{name}-seed0" for name in ("noisy_problem_Broken", "rs-kfac", "sgd")]
    assert [folder for folder in folders if "/" in folder] == compared
    assert not list(place.rglob(".lock"))
    assert len(list(place.rglob("report.html"))) == 1
    assert "finished" not in second[repr(COMPARISON)][2]


def test_a_comparison_goes_on_when_all_fail_at_one_contender(place, answers):
    assert [one[repr(COMPARISON)][0] for one in answers] == [0, 0]
    assert "no rows left" in answers[0][repr(COMPARISON)][2]
    rows = json.loads((place / "comparison" / "table.json").read_text())["rows"]
    assert {row["label"] for row in rows} >= {"sgd", "rs-kfac"}
    assert (place / "comparison" / "runs" / "noisy_problem_Broken-seed0" / "traceback.txt").is_file()


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_for_one_process_is_refused_in_one_sentence(answers, name):
    wanted = {"compare --tune": "--tune is for one process", "seng": "SENG cannot train with 2 processes"}
    wanted["again"] = "already holds this run"
    for one in answers:
        code, _, said = one[repr(REFUSED[name])]
        assert code == 2
        assert wanted.get(name, f"rkfac {name} is a command of one process") in said
        assert len(said.strip().splitlines()) == 1


def test_a_refusal_is_said_once_and_ends_torchrun(tmp_path):
    done = torchrun(tmp_path, "-m", "rkfac_lab.cli", "bench", "scaling")
    assert done.returncode != 0
    assert done.stderr.count("rkfac bench is a command of one process, and torchrun has started 2") == 1


# --- failures: processes that are started without torchrun, which would end the others by itself


def _process(rank, port, folder, arguments):
    os.chdir(folder)
    for name, number in (("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", 2), ("MASTER_PORT", port)):
        os.environ[name] = str(number)
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    for stream, descriptor in (("out", 1), ("err", 2)):
        with open(f"{stream}.{rank}", "w") as file:
            os.dup2(file.fileno(), descriptor)
    sys.stdout, sys.stderr = (os.fdopen(descriptor, "w", buffering=1) for descriptor in (1, 2))
    sys.__stderr__ = sys.stderr
    sys.argv = ["rkfac", *arguments]
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    main()


@pytest.fixture
def pair(tmp_path):
    """Start a command in two processes; what they left behind is ended with the test."""
    (tmp_path / "noisy_problem.py").write_text(MODULE)
    context, started = forking(), []

    def start(*arguments):
        port = free_port()
        for rank in range(2):
            process = context.Process(target=_process, args=(rank, port, str(tmp_path), arguments))
            process.start()
            started.append(process)
        return started

    yield start
    for process in started:
        process.kill()
        process.join()


def ended(processes, seconds=120.0):
    until = time.monotonic() + seconds
    for process in processes:
        process.join(max(0.0, until - time.monotonic()))
    return [process.exitcode for process in processes]


def said(folder, rank):
    lines = (folder / f"err.{rank}").read_text().splitlines()
    return [line for line in lines if line.startswith(("rkfac: ", "interrupted"))]


def until_begun(folder, seconds=120.0):
    until = time.monotonic() + seconds
    while not all((folder / f"begun.{rank}").exists() for rank in range(2)):
        assert time.monotonic() < until, [(folder / f"err.{rank}").read_text() for rank in range(2)]
        time.sleep(0.05)


def endless(folder):
    arguments = ("optimizer.name=noisy_problem:Endless", "optimizer.arguments.lr=0.01", "epochs=100000")
    return flags("run", *arguments, steps=10**6, workload="noisy_problem:NOISY")


def test_a_process_that_fails_alone_ends_the_others_with_a_line_each(pair, tmp_path):
    optimizer = ("optimizer.name=noisy_problem:BrokenInOne", "optimizer.arguments.lr=0.01")
    assert ended(pair(*flags("run", *optimizer, workload="noisy_problem:NOISY"))) == [1, 1]
    (first,), (second,) = said(tmp_path, 0), said(tmp_path, 1)
    assert "process 1 of 2 failed without the others" in second
    assert "RuntimeError: no rows left" in second
    assert "process 0 of 2 failed without the others" in first
    assert "could not be exchanged, since another process has failed" in first
    assert load_run(tmp_path / "run").summary["status"] == "running"


def test_a_process_that_is_killed_ends_the_other_with_a_line(pair, tmp_path):
    processes = pair(*endless(tmp_path))
    until_begun(tmp_path)
    processes[1].kill()
    assert ended(processes) == [1, -9]
    (line,) = said(tmp_path, 0)
    assert "another process has failed, was stopped or stayed away" in line
    assert "--resume" in line


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_of_all_is_written_down_once(pair, tmp_path, how):
    processes = pair(*endless(tmp_path))
    until_begun(tmp_path)
    for process in processes:
        os.kill(process.pid, how)
    assert ended(processes) == [130, 130]
    assert load_run(tmp_path / "run").summary["status"] == "interrupted"
    assert len(said(tmp_path, 0)) == 1
    assert said(tmp_path, 1) == []


# --- without processes


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("count", [1, 2, 6, 7, 20])
def test_shares_are_the_whole_in_order_and_nearly_equal(size, count):
    things = list(range(count))
    shares = [Ranks(rank, size).share(count) for rank in range(size)]
    parts = [things[part] for part, _ in shares]
    assert sum(weight for _, weight in shares) == pytest.approx(1)
    assert [thing for part in parts for thing in part] == things
    assert [weight for _, weight in shares] == pytest.approx([len(part) / count for part in parts])
    lengths = [len(part) for part in parts]
    assert lengths == sorted(lengths, reverse=True)
    assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize("values", [{"WORLD_SIZE": "2"}, {"WORLD_SIZE": "two"}])
def test_variables_that_promise_others_are_not_believed_alone(monkeypatch, rkfac, values):
    for name in joining.NEEDED:
        monkeypatch.delenv(name, raising=False)
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    code, lines = rkfac("train", "digits-mlp")
    assert code == 2
    assert len(lines) == 1
    assert "torchrun" in lines[0]


def test_one_process_of_torchrun_s_is_one_process(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    with joining.joined() as together:
        assert together is ranks.here() is ranks.ALONE


def test_one_gpu_is_not_for_all():
    from rkfac_lab import machine

    with pytest.raises(LabError, match="each has its own"):
        machine.device("cuda:0", Ranks(0, 2))


def test_random_numbers_of_a_step_are_each_process_s_own_and_leave_everybody_s_alone():
    device = torch.device("cpu")
    torch.manual_seed(5)
    before = torch.get_rng_state()
    drawn = []
    for rank, step in ((0, 1), (1, 1), (1, 2), (1, 1)):
        with averaging.own_randomness(Ranks(rank, 2), device, 0, step):
            drawn.append(torch.rand(4))
    assert torch.equal(drawn[1], drawn[3])
    assert len({tuple(one.tolist()) for one in drawn}) == 3
    assert torch.equal(torch.get_rng_state(), before)
