"""What report() shows: records as before, and a table that says the same."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import rkfac
from optim import stated
from optim.enrolled import MEMBERS
from optim.problems import mlp, reader, rows, sentences, train
from rkfac.optim.report import LayerReport, Report
from rkfac.optim.report_text import MANY, WIDTH


def cells(line: str) -> list[str]:
    return line.split()


def test_the_records_are_a_list_as_before_and_can_be_written_down() -> None:
    model = mlp()
    optimizer = stated.RSKFAC(model, rank=3)
    train(model, optimizer, [rows()])
    report = optimizer.report()
    assert isinstance(report, list)
    assert [layer.name for layer in report] == ["0", "2", "4"]
    assert [layer.name for layer in report[1:]] == ["2", "4"]
    assert json.loads(json.dumps([dataclasses.asdict(layer) for layer in report]))[0]["rank_output"] == 3


def test_a_row_says_what_its_record_says() -> None:
    model = mlp()
    optimizer = stated.RSKFAC(model, rank=3, update_clip=1e-3)
    train(model, optimizer, [rows()])
    report = optimizer.report()
    header, *lines = str(report).splitlines()
    assert cells(header) == [
        *("layer", "kind", "in/out", "rank", "captured", "damping", "clip", "statistics", "refresh", "apply", "MB")
    ]
    for layer, line in zip(report, lines, strict=False):
        shown = dict(zip(cells(header), cells(line), strict=True))
        assert (shown["layer"], shown["kind"]) == (layer.name, "Linear")
        assert shown["in/out"] == f"{layer.input_dim}/{layer.output_dim}"
        assert shown["rank"] == "3/3"
        assert shown["captured"] == f"{100 * layer.captured_input:.0f}%/{100 * layer.captured_output:.0f}%"
        dampings = [float(part) for part in shown["damping"].split("/")]
        assert dampings == pytest.approx([layer.damping_input, layer.damping_output], rel=0.06)
        assert float(shown["clip"]) == pytest.approx(layer.clip, rel=0.06)
        assert float(shown["refresh"]) == pytest.approx(layer.seconds["refresh"], abs=0.006)


def test_columns_that_nobody_fills_are_left_out() -> None:
    model = mlp()
    optimizer = stated.KFAC(model)
    assert cells(str(optimizer.report()).splitlines()[0]) == [
        *("layer", "kind", "in/out", "statistics", "refresh", "apply", "MB", "state")
    ]


def test_the_lines_below_say_what_is_covered_what_it_took_and_what_is_not_and_why() -> None:
    model = reader()
    model.head.requires_grad_(False)
    optimizer = stated.KFAC(model, exclude=("norm",))
    train(model, optimizer, [sentences() for _ in range(2)])
    report = optimizer.report()
    covered, seconds, *left = str(report).splitlines()[1 + len(report) :]
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    share = 1 - (8 + 12) / trained
    assert report.covered_share == pytest.approx(share)
    assert covered.startswith(f"{share:.1%} of {trained:,} trained parameters in 2 of 5 layers preconditioned; ranks ")
    spent = sum(report.spent().values())
    assert 0 < spent <= report.seconds
    assert seconds.startswith(f"2 steps in {report.seconds:.2f} s, of them statistics ")
    assert left == [
        "by 'sgd': 'norm' (12 parameters): excluded by pattern",
        "by 'sgd': '' (8 parameters): no adapter for Reader",
        "frozen: 'head' (36 parameters): its weight is frozen (requires_grad=False)",
    ]


def test_layers_that_wait_are_not_counted_as_preconditioned() -> None:
    model = nn.ModuleDict({"used": nn.Linear(6, 4), "unused": nn.Linear(6, 14)}).double()
    optimizer = stated.KFAC(model, factor_every=1, inverse_every=1)
    first = "0.0% of 126 trained parameters in 0 of 2 layers preconditioned, 100.0% in 2 layers without curvature yet"
    assert first in str(optimizer.report())
    train(model["used"], optimizer, [rows()])
    line = "22.2% of 126 trained parameters in 1 of 2 layers preconditioned, 77.8% in 1 layer without curvature yet; ranks "
    assert line in " ".join(str(optimizer.report()).split())


def gpt(blocks: int) -> nn.Module:
    """Names and shapes that repeat themselves, as in a language model."""

    def block() -> nn.ModuleDict:
        parts = {"ln_1": nn.LayerNorm(4), "attention_projection": nn.Linear(4, 12), "ln_2": nn.LayerNorm(4)}
        return nn.ModuleDict({**parts, "multilayer_perceptron_inner": nn.Linear(12, 4)})

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a_transformer_with_a_name_that_is_longer_than_any_column = nn.ModuleList(
                [block() for _ in range(blocks)]
            )
            self.head = nn.Linear(4, 3)

        def forward(self, h: torch.Tensor) -> torch.Tensor:
            for one in self.a_transformer_with_a_name_that_is_longer_than_any_column:
                inner = torch.tanh(one["attention_projection"](one["ln_1"](h)))
                h = h + one["multilayer_perceptron_inner"](inner) + one["ln_2"](h)
            return self.head(h)

    return Model()


def test_many_layers_are_a_table_that_a_person_can_read() -> None:
    model = gpt(38)
    optimizer = rkfac.RSKFAC(model, lr=1e-3)
    optimizer.zero_grad()
    F.cross_entropy(model(torch.randn(8, 4)), torch.randint(0, 3, (8,))).backward()
    optimizer.step()
    report = optimizer.report()
    assert len(report) == 4 * 38 + 1
    lines = str(report).splitlines()
    assert all(len(line) <= WIDTH for line in lines)
    assert len(lines) == 1 + 4 + 2  # header, ln_*, projections, inner, head; what is covered, seconds
    (projections,) = [line for line in lines if "attention_projection (38)" in line]
    spent = sum(layer.seconds["refresh"] for layer in report if "attention_projection" in layer.name)
    assert f"{spent:.2f}" in cells(projections)
    assert any("ln_* (76)" in line for line in lines)


def test_few_layers_have_a_row_each() -> None:
    few, many = ([LayerReport(f"a.{n}.b", "Linear", True) for n in range(count)] for count in (MANY, MANY + 1))
    assert len([line for line in str(Report(few)).splitlines() if " Linear" in line]) == MANY
    assert len([line for line in str(Report(many)).splitlines() if " Linear" in line]) == 1


def test_layers_in_different_states_do_not_share_a_row() -> None:
    layers = [LayerReport(f"a.{n}", "Linear", True, parameters=3, trained=3 * (n != 5)) for n in range(MANY + 1)]
    shown = str(Report(layers)).splitlines()
    assert [cells(line)[:2] for line in shown[1:3]] == [["a.*", f"({MANY})"], ["a.5", "Linear"]]
    assert shown[2].endswith("frozen")


def test_a_model_without_layers_is_said_to_be_one() -> None:
    assert str(Report()).splitlines()[0] == "no layers"


@pytest.mark.parametrize("build", MEMBERS.values(), ids=MEMBERS)
def test_everybody_prints_a_table(build) -> None:  # type: ignore[no-untyped-def]
    model = reader()
    optimizer = build(model)
    assert str(optimizer.report()).startswith("layer")
    assert "No step was taken yet" in str(optimizer.advise())
    train(model, optimizer, [sentences()])
    lines = str(optimizer.report()).splitlines()
    assert all(len(line) <= WIDTH for line in lines[: 1 + len(optimizer.report())])
    assert repr(optimizer.report()).splitlines()[0] == lines[0]
