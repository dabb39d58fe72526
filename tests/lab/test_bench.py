"""What the benchmarks compute and write; how long things take is never asserted."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn
from typer.testing import CliRunner

import rkfac
from rkfac_lab import cli_bench
from rkfac_lab.bench import collecting, decompose, holdings, memory, problems, scaling, step, streams
from rkfac_lab.bench.contestants import chosen, contestants
from rkfac_lab.bench.entrant import PHASES, Entrant
from rkfac_lab.bench.problems import Problem
from rkfac_lab.bench.timing import Spread, digits, interleaved
from rkfac_lab.cli import app
from rkfac_lab.errors import LabError


def tiny(**changes: Any) -> Problem:
    settings: dict[str, Any] = {
        "name": "tiny",
        "build": lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, 10)),
        "batches": lambda: streams.pictures(8, 1, 6, pool=3),
        "stream": "small pictures",
        "rounds": 1,
        "warm_up": 2,
        "plain": 2,
        "statistics": 1,
    }
    return Problem(**{**settings, **changes})


def bench(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["bench", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.output


def written(path: Path, benchmark: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    assert content["benchmark"] == benchmark
    assert content["machine"]["threads"] == torch.get_num_threads()
    assert "torch" in content["machine"]["versions"]
    return content


# --- measuring


def test_contestants_take_turns() -> None:
    order: list[str] = []
    seconds = interleaved({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, rounds=3, settle=0.0)
    assert order == ["a", "b"] * 3
    assert set(seconds) == {"a", "b"}


def test_a_spread_is_a_median_with_its_quartiles() -> None:
    spread = Spread.of([1.0, 2.0, 3.0, 4.0, 100.0])
    assert spread == Spread(3.0, 2.0, 4.0)
    assert str(spread) == "3 ±33%"
    both = Spread.through(lambda part: part["a"] + part["b"], {"a": spread, "b": Spread(1.0, 0.5, 1.5)})
    assert both == Spread(4.0, 2.5, 5.5)


@pytest.mark.parametrize(
    "value, said", [(0.0, "0"), (0.001234, "0.00123"), (1.5, "1.5"), (99.96, "100"), (1234.5, "1234")]
)
def test_seconds_have_three_digits(value: float, said: str) -> None:
    assert digits(value).rstrip(".") == said


# --- the stream of batches


def test_pictures_have_a_spectrum_that_decays_and_labels_that_follow_from_them() -> None:
    batches = streams.pictures(64, 3, 16)
    assert len(batches) == streams.POOL
    assert batches[0][0].shape == (64, 3, 16, 16)
    rows = torch.cat([x.flatten(1) for x, _ in batches])
    values = torch.linalg.eigvalsh(rows.mT @ rows).flip(-1)
    assert float(values[0]) > 20 * float(values[100])
    labels = torch.cat([y for _, y in batches])
    assert set(labels.tolist()) == set(range(10))
    weight = torch.linalg.lstsq(rows, nn.functional.one_hot(labels).float()).solution
    assert float(((rows @ weight).argmax(1) == labels).float().mean()) > 0.5
    assert not torch.equal(batches[0][0], batches[1][0])


def test_sentences_are_shifted_by_one_and_say_something_of_the_next_token() -> None:
    x, y = streams.sentences(4, 32, 20)[0]
    assert x.shape == y.shape == (4, 32)
    assert torch.equal(x[:, 1:], y[:, :-1])
    pairs = torch.zeros(20, 20)
    for x, y in streams.sentences(8, 64, 20):
        pairs.index_put_((x.flatten(), y.flatten()), torch.ones(x.numel()), accumulate=True)
    joint, alone = pairs / pairs.sum(), pairs.sum(0) / pairs.sum()
    known = -(joint * (joint / joint.sum(1, keepdim=True)).clamp_min(1e-9).log()).nansum()
    assert float(known) < 0.8 * float(-(alone * alone.clamp_min(1e-9).log()).sum())


def test_every_contestant_sees_the_same_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, seen = tiny(), {}

    def spy(self: step.Entrant, kind: str, batch: tuple[Tensor, Tensor]) -> None:
        seen.setdefault(self.name, []).append((kind, float(batch[0].sum())))
        real(self, kind, batch)

    real = step.Entrant.step
    monkeypatch.setattr(step.Entrant, "step", spy)
    step.run(problem, chosen(problem, ("AdamW", "K-FAC", "SOAP")), rounds=2)
    assert set(seen) == {"SGD", "AdamW", "SOAP", "K-FAC (paper)"}
    whole = seen["K-FAC (paper)"]
    assert len({batch for _, batch in whole}) == 3
    for name, kinds in {"SGD": ("plain",), "AdamW": ("plain",), "SOAP": ("plain", "refresh")}.items():
        assert seen[name] == [(kind, batch) for kind, batch in whole if kind in kinds]


# --- steps


def test_amortised_seconds_weigh_each_kind_of_step_by_how_often_it_occurs() -> None:
    seconds = {"plain": 1.0, "statistics": 2.0, "refresh": 12.0}
    whole_period = [seconds["refresh" if i % 50 == 0 else "statistics" if i % 10 == 0 else "plain"] for i in range(50)]
    assert step.amortised(seconds, 10, 50) == pytest.approx(sum(whole_period) / 50)
    assert step.amortised({"plain": 1.0, "refresh": 5.0}, 10, 10) == pytest.approx(1.4)  # SOAP has no statistics steps


def test_every_kind_of_step_is_the_kind_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds: list[tuple[bool, bool]] = []
    real = rkfac.KFAC.step

    def spied(self: rkfac.KFAC, closure: None = None) -> None:
        before = counted(self)
        real(self, closure)
        after = counted(self)
        kinds.append((after[0] > before[0], after[1] > before[1]))

    def counted(optimizer: rkfac.KFAC) -> tuple[int, int]:
        (block,) = optimizer.state_dict()["curvature"]["blocks"].values()
        return block["factors"]["input"]["updates"], block["version"]

    monkeypatch.setattr(rkfac.KFAC, "step", spied)
    problem = tiny()
    sgd, kfac = step.run(problem, chosen(problem, ("K-FAC",)))
    collects, refreshes, plain = (True, False), (True, True), (False, False)
    warm_up = [refreshes, collects, refreshes, plain]  # the very first step must make a basis
    assert kinds == [*warm_up, plain, plain, collects, refreshes]
    assert sgd.ratio.median == pytest.approx(1.0)
    assert kfac.every == {"statistics": 10, "refresh": 50}
    assert kfac.ranks["1"] == (37, 10)
    medians = {kind: spread.median for kind, spread in kfac.seconds.items()}
    assert kfac.amortised.median == pytest.approx(step.amortised(medians, 10, 50))


def test_ratios_are_those_within_a_round() -> None:
    """A machine that gets ten times slower for a round says nothing about anybody."""
    sgd, other = (Entrant(name, contestant, tiny()) for name, contestant in chosen(tiny(), ("AdamW",)).items())
    for slow in (1.0, 10.0, 1.0):
        for entrant, own in ((sgd, 1.0), (other, 1.5)):
            for seconds in (0.9, 1.0, 1.2):
                entrant.phases["plain"]["update"].append(own * slow * seconds)
            entrant.end_round()
    assert step._ratios(other, sgd, lambda seconds: seconds["plain"]) == pytest.approx([1.5, 1.5, 1.5])


def test_shares_of_the_phases_sum_to_one_and_first_order_has_two_phases() -> None:
    problem = tiny()
    sgd, kfac = step.run(problem, chosen(problem, ("K-FAC",)))
    for result in (sgd, kfac):
        assert tuple(result.phases) == PHASES
        assert sum(step.shares(result.phases).values()) == pytest.approx(1.0)
    assert {phase for phase, seconds in sgd.phases.items() if seconds} == {"forward/backward", "update"}
    assert all(seconds > 0 for seconds in kfac.phases.values())


def test_peers_refresh_when_they_are_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    soap = pytest.importorskip("pytorch_optimizer").SOAP
    refreshed: list[str] = []
    real = soap.get_orthogonal_matrix_qr

    def spied(self: Any, *arguments: Any, **keywords: Any) -> Any:
        refreshed.append("qr")
        return real(self, *arguments, **keywords)

    monkeypatch.setattr(soap, "get_orthogonal_matrix_qr", spied)
    problem = tiny(rounds=2, plain=12)
    _, result = step.run(problem, chosen(problem, ("SOAP",)))
    assert result.every == {"refresh": 10}
    assert len(refreshed) == 2 * 2  # weight and bias, once a round; the warm-up's comes before there is a basis


def test_without_names_the_slow_ones_stay_away() -> None:
    text = problems.PROBLEMS["transformer"]
    usual = chosen(text)
    assert {"SGD", "AdamW", "RS-KFAC (default)", "RS-KFAC (paper)", "RS-KFAC (default, AdamW's length)"} <= set(usual)
    assert not {"SOAP", "Shampoo", "K-FAC (paper)", "SRE-KFAC (paper)"} & set(usual)
    assert set(chosen(text, ("Shampoo",))) == {"SGD", "Shampoo"}
    assert "RS-KFAC (default, AdamW's length)" not in contestants(problems.PROBLEMS["mlp"])
    with pytest.raises(LabError, match="Lion"):
        chosen(text, ("Lion",))


def test_a_transformer_is_measured_with_the_average_its_loss_takes() -> None:
    problem = tiny(
        build=lambda: problems.models.build("transformer", vocabulary=12, context=8, width=8, depth=1, heads=2),
        batches=lambda: streams.sentences(2, 8, 12, pool=2),
        kfac=problems.PROBLEMS["transformer"].kfac,
    )
    results = step.run(problem, chosen(problem))
    assert len(results) >= 5
    entrant = contestants(problem)["RS-KFAC (default)"].build(problem.build())
    assert entrant.state_dict()["curvature"]["fingerprint"]["loss_average"] == "tokens"


def test_the_step_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(problems.PROBLEMS, "tiny", tiny())
    out = tmp_path / "step.json"
    said = bench("step", "--problems", "tiny", "--optimizers", "AdamW,K-FAC", "--rounds", 2, "--profile", "--out", out)
    for word in ("K-FAC (paper)", "AdamW", "10/50", *PHASES, "checkpoint MB"):
        assert word in said
    content = written(out, "step")
    first = content["results"][0]
    assert first["stream"] == "small pictures"
    assert first["seconds"]["plain"]["low"] <= first["seconds"]["plain"]["median"] <= first["seconds"]["plain"]["high"]


# --- memory


def test_bytes_are_counted_by_kind_and_a_checkpoint_is_as_large_as_its_file(tmp_path: Path) -> None:
    problem = tiny()
    entrants = {entrant.name: entrant for entrant in step.race(problem, chosen(problem, ("AdamW", "K-FAC")))}
    parameters = 4 * (36 * 10 + 10)
    assert holdings.held(entrants["SGD"].optimizer) == {"buffers": parameters, "factors": 0, "bases": 0}
    steps = 2 * 4  # AdamW counts its steps in a tensor a parameter
    assert holdings.held(entrants["AdamW"].optimizer)["buffers"] == 2 * parameters + steps
    kfac = entrants["K-FAC (paper)"].optimizer
    assert holdings.held(kfac)["factors"] == holdings.held(kfac)["bases"] == 4 * (37**2 + 10**2)
    torch.save(kfac.state_dict(), tmp_path / "state.pt")
    assert math.isclose(holdings.checkpoint_size(kfac), (tmp_path / "state.pt").stat().st_size, rel_tol=0.02)


def test_a_measured_process_has_a_peak_and_bytes_by_kind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(problems.PROBLEMS, "tiny", tiny())
    without_memory = [torch.eye(3).to_sparse(), torch.empty(3, device="meta")]  # others may have left such behind
    found = memory.measure("tiny", "RS-KFAC (paper)")
    assert len(without_memory) == 2
    assert found["parameters"] == 4 * (36 * 10 + 10)
    assert found["peak"] > 1e7
    assert set(found["held"]) == set(memory.KINDS)


def test_memory_is_printed_beside_sgds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(problems.PROBLEMS, "tiny", tiny())

    def here(problem: str, optimizer: str) -> memory.Result:
        return memory.Result(**memory.measure(problem, optimizer))

    monkeypatch.setattr(memory, "in_a_process_of_its_own", here)
    out = tmp_path / "memory.json"
    said = bench("memory", "--problems", "tiny", "--optimizers", "AdamW,RS-KFAC", "--out", out)
    for word in ("AdamW", "RS-KFAC (paper)", "factors", "bases", "peak beyond SGD's", "checkpoint"):
        assert word in said
    assert {result["optimizer"] for result in written(out, "memory")["results"]} > {"SGD", "AdamW"}


def test_a_process_of_its_own_says_what_went_wrong() -> None:
    with pytest.raises(LabError, match="could not be measured on nothing: KeyError"):
        memory.in_a_process_of_its_own("nothing", "SGD")


# --- width


@pytest.mark.parametrize("power", [2.0, 3.0])
def test_exponents_of_power_laws_are_found(power: float) -> None:
    widths = [1024, 2048, 4096]
    assert scaling.exponent(widths, [1e-9 * width**power for width in widths]) == pytest.approx(power)
    assert scaling.exponent([1024], [1.0]) is None


def test_the_scaling_command_measures_and_does_not_extrapolate(tmp_path: Path) -> None:
    out = tmp_path / "scaling.json"
    said = bench("scaling", "--widths", "16,32", "--rank", 4, "--exact-up-to", 16, "--rounds", 1, "--out", out)
    assert "exponent" in said
    content = written(out, "scaling")
    assert {r["width"] for r in content["results"] if r["method"] == scaling.EXACT} == {16}
    assert content["exponents"][scaling.EXACT] == dict.fromkeys(scaling.PARTS)
    assert content["exponents"]["RS-KFAC (paper)"]["refresh"] is not None
    assert {r["method"] for r in content["results"]} == set(scaling.METHODS)
    assert out.with_suffix(".png").stat().st_size > 1000
    assert out.with_suffix(".svg").exists()


def test_what_is_left_without_sgds_step_spreads_as_far_as_both_do():
    parts = Spread(2.0, 1.0, 4.0), Spread(1.0, 0.5, 1.5), Spread(0.5, 0.25, 1.0)
    measured = scaling.Measurement(64, "K-FAC (paper)", *parts)
    assert measured.both == Spread(3.0, 1.5, 5.5)
    assert measured.beyond == Spread(2.5, 0.5, 5.25)


def test_methods_at_work_in_the_backward_pass_are_measured_by_whole_steps() -> None:
    """Application beyond SGD's step, refresh beyond a plain one, each in its own round: a slow round is slow for all."""

    class Timed:
        name = "B-KFAC (paper)"

        def __init__(self, **rounds: list[list[float]]) -> None:
            self.by_round = rounds.__getitem__

    own = Timed(plain=[[3.0, 3.5, 4.0], [13.0, 13.5, 14.0]], refresh=[[9.5], [19.5]])
    measured = scaling._beyond(64, own, Timed(plain=[[1.0, 2.0, 2.5], [11.0, 12.0, 12.5]]))  # type: ignore[arg-type]
    assert measured.application.median == 1.5
    assert measured.refresh.median == 6.0
    assert (measured.refresh.low, measured.refresh.high) == (6.0, 6.0)
    assert scaling.exponent([1024, 2048], [0.0, 1.0]) is None


# --- statistics and decompositions


def test_the_statistics_command(tmp_path: Path) -> None:
    out = tmp_path / "statistics.json"
    said = bench("statistics", "--layers", "4@6,linear12", "--batch", 2, "--rows", 8, "--rounds", 1, "--out", out)
    assert "8 drawn rows" in said
    results = written(out, "statistics")["results"]
    assert {(r["layer"], r["batch"]) for r in results} == {("4@6", 2), ("linear12", 8)}
    assert {collecting.PLAIN, "rkfac, all rows"} <= {r["method"] for r in results}


def test_a_layer_of_no_known_form_is_refused() -> None:
    for name in ("conv", "64@", "@4", "linear", "0@4"):
        with pytest.raises(LabError, match="64@32"):
            collecting.call(name, 2)


def test_the_benchmark_factor_has_the_spectrum_of_a_k_factor() -> None:
    X, earlier = decompose.factor_pair(600)
    values = torch.linalg.eigvalsh(X).flip(-1)
    assert torch.equal(X, X.mT) or float((X - X.mT).abs().max()) < 1e-6
    assert float(values[200]) < float(values[0]) / 10**1.5  # 1.5 orders of magnitude within 200 modes
    assert float(values[-1]) >= -1e-6
    # Five statistics later: the old part decayed, a PSD part was added.
    assert float(torch.linalg.eigvalsh(X - 0.95**5 * earlier).min()) > -1e-5


def test_decompose_reports_what_each_contestant_captured() -> None:
    rows = decompose.run([200], rank=40, oversampling=10, rounds=1)
    by_method = {row.method: row for row in rows}
    assert len(by_method) == 9
    assert by_method["eigh"].captured == pytest.approx(1.0, abs=1e-4)
    assert by_method["Cholesky inverse"].captured is None
    for name in ("rsvd q=4", "srevd q=4", "nystrom q=4", "svd_lowrank niter=4", "scikit-learn n_iter=4"):
        captured = by_method[name].captured
        assert captured is not None
        assert 0.9 < captured <= 1.0001
    assert by_method["nystrom q=4"].captured >= by_method["srevd q=4"].captured - 1e-5  # type: ignore[operator]


def test_the_decompose_command_prints_a_table_and_writes_json(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "bench.json"
    said = bench("decompose", "--dimensions", 120, "--rank", 20, "--rounds", 1, "--out", out)
    assert "nystrom warm q=1" in said
    assert {m["d"] for m in written(out, "decompose")["results"]} == {120}


def test_tables_fit_into_a_file() -> None:
    """Names and ratios are not cut off where no terminal says how wide it is."""
    name, spread = "RS-KFAC (default, AdamW's length)", Spread(0.01234, 0.01, 0.02)
    result = step.Result(
        "p", "s", name, {"statistics": 10, "refresh": 50}, dict.fromkeys(step.KINDS, spread), spread, Spread(24.68, 20.0, 40.0),
        dict.fromkeys(PHASES, 0.0123), {"factors": 10**9}, 10**9, {},
    )  # fmt: skip
    console = Console(width=cli_bench.FILE_WIDTH)
    with console.capture() as capture:
        for table in (*step.tables([result]), *step.profiles([result])):
            console.print(table)
    assert "…" not in capture.get()
