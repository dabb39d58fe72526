"""Which layers are preconditioned, which are not and why, and what the optimizer says of itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rkfac
from optim import stated
from optim.problems import (
    assert_moved,
    assert_same_averages,
    assert_same_parameters,
    averages,
    convnet,
    images,
    mlp,
    parameters,
    reader,
    rows,
    sentences,
    speaker,
    step,
    train,
)

EVERY: dict[str, Any] = {"factor_every": 1, "inverse_every": 1}


def reasons(optimizer: rkfac.KFAC) -> dict[str, str]:
    return {r.name: r.reason for r in optimizer.report() if not r.covered}


def covered(optimizer: rkfac.KFAC) -> set[str]:
    return {r.name for r in optimizer.report() if r.covered}


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 6)
        self.hidden = nn.Linear(6, 6)
        self.head = nn.Linear(6, 9, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.hidden(self.embedding(tokens))).mean(1))


def test_a_table_that_is_the_head_too_is_one_layer_under_the_table_s_name() -> None:
    model = Tied().double()
    optimizer = stated.KFAC(model, lr=0.1, momentum=0.0, kl_clip=None, graft=None, **EVERY)
    assert covered(optimizer) == {"embedding", "hidden"}
    assert not reasons(optimizer)
    start = parameters(model)
    tokens, _ = sentences()
    F.cross_entropy(model(tokens), torch.randint(9, (8,))).backward()
    optimizer.step()
    (report,) = (r for r in optimizer.report() if r.name == "embedding")
    assert report.shared_with == ("head",)
    assert (report.input_dim, report.output_dim) == (9, 6)
    moved, gradient = model.embedding.weight.detach() - start["embedding.weight"], model.embedding.weight.grad
    assert (moved * gradient).sum() < 0
    assert not torch.allclose(moved / moved.norm(), -gradient / gradient.norm(), atol=1e-2), "it is preconditioned"
    assert model.head.weight is model.embedding.weight


class Twice(nn.Module):
    """One module called at two places of a forward, or the two places stacked into one call."""

    def __init__(self, stacked: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 5)
        self.head = nn.Linear(5, 4)
        self.stacked = stacked

    def forward(self, x: Tensor) -> Tensor:
        if self.stacked:
            return self.head(torch.tanh(self.inner(torch.stack([x, 2 * x + 1], 1))).sum(1))
        return self.head(torch.tanh(self.inner(x)) + torch.tanh(self.inner(2 * x + 1)))


@pytest.mark.parametrize("fisher", ["empirical", "mc"])
def test_a_module_called_twice_equals_one_call_on_two_positions(fisher: str) -> None:
    model = Twice(stacked=False).double()
    other = Twice(stacked=True).double()
    other.load_state_dict(model.state_dict())
    optimizer, stacked = stated.KFAC(model, fisher=fisher, **EVERY), stated.KFAC(other, fisher=fisher, **EVERY)
    batches = [rows() for _ in range(3)]
    train(model, optimizer, batches)
    train(other, stacked, batches)
    assert_same_averages(optimizer, stacked)
    assert_same_parameters(model, other)


def test_one_module_under_two_names_is_one_layer() -> None:
    shared = nn.Linear(6, 6)
    model = nn.Sequential(shared, nn.Tanh(), shared, nn.Linear(6, 4)).double()
    optimizer = stated.KFAC(model, **EVERY)
    start = parameters(model)
    train(model, optimizer, [rows() for _ in range(2)])
    assert covered(optimizer) == {"0", "3"}
    assert_moved(model, start)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x).mean(1))


class OwnAttention(nn.MultiheadAttention):
    """With a forward of its own, which may mean anything."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


def test_attention_with_a_forward_of_its_own_trains_by_the_fallback_rule() -> None:
    model = Encoder().double()
    model.layer.self_attn = OwnAttention(6, 2, batch_first=True).double()
    optimizer = stated.KFAC(model, lr=0.05, momentum=0.0, kl_clip=None, **EVERY)
    assert covered(optimizer) == {"layer.linear1", "layer.linear2", "layer.norm1", "layer.norm2", "head"}
    assert reasons(optimizer).keys() == {"layer.self_attn", "layer.self_attn.out_proj"}
    assert set(reasons(optimizer).values()) == {"OwnAttention overrides forward of MultiheadAttention"}
    start = parameters(model)
    step(model, optimizer, (torch.randn(5, 3, 6, dtype=torch.float64), torch.randint(4, (5,))))
    assert_moved(model, start)
    for name in ("in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias"):
        p = model.layer.self_attn.get_parameter(name)
        torch.testing.assert_close(p.detach(), start[f"layer.self_attn.{name}"] - 0.05 * p.grad)
    model.eval()
    assert model(torch.randn(2, 3, 6, dtype=torch.float64)).isfinite().all()


def test_a_recurrent_network_trains_by_the_fallback_rule() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(6, 5, batch_first=True)
            self.head = nn.Linear(5, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.lstm(x)[0][:, -1])

    model = Recurrent().double()
    optimizer = stated.KFAC(model, lr=0.05, momentum=0.0, **EVERY)
    assert covered(optimizer) == {"head"}
    assert "LSTM" in reasons(optimizer)["lstm"]
    start = parameters(model)
    step(model, optimizer, (torch.randn(5, 3, 6, dtype=torch.float64), torch.randint(4, (5,))))
    for name, p in model.lstm.named_parameters():
        torch.testing.assert_close(p.detach(), start[f"lstm.{name}"] - 0.05 * p.grad)


def test_layers_too_wide_are_left_out_with_their_size() -> None:
    optimizer = stated.KFAC(mlp(), max_factor_dim=8)
    assert covered(optimizer) == {"0", "4"}  # 7 x 8, 4 x 8; the middle one's inputs are 8 + 1
    assert "9 x 9" in reasons(optimizer)["2"]
    assert "max_factor_dim" in reasons(optimizer)["2"]


@pytest.mark.parametrize(
    "keywords, expected",
    [
        ({"include": "0"}, {"0"}),
        ({"include": ("0", "1")}, {"0", "1"}),
        ({"include": "Conv2d"}, {"0", "3"}),
        ({"exclude": "*Norm*"}, {"0", "3", "6"}),
        ({"exclude": ["Conv*", "6"]}, {"1"}),
        ({"include": "Conv2d", "exclude": "3"}, {"0"}),
        ({}, {"0", "1", "3", "6"}),
    ],
)
def test_patterns_choose_layers_by_name_or_class(keywords: dict[str, Any], expected: set[str]) -> None:
    model = convnet()
    optimizer = stated.KFAC(model, **keywords, **EVERY)
    assert covered(optimizer) == expected
    assert all("pattern" in reason for reason in reasons(optimizer).values())
    start = parameters(model)
    step(model, optimizer, images())
    for name, value in parameters(model).items():
        # The bias before BatchNorm has no gradient.
        assert name == "0.bias" or not torch.equal(value, start[name]), name


def test_sharded_parameters_are_refused_by_name() -> None:
    class FlatParameter(nn.Parameter):
        """As FSDP calls its own."""

    model = mlp()
    model[2].weight = FlatParameter(model[2].weight.detach())
    with pytest.raises(ValueError, match=r"2\.weight.*sharded"):
        stated.KFAC(model)


def test_sparse_gradients_are_reported_and_refused_before_anything_moves() -> None:
    model = nn.Sequential(nn.Embedding(9, 6, sparse=True), nn.Flatten(), nn.Linear(30, 4)).double()
    optimizer = stated.KFAC(model, factor_start="unbiased", **EVERY)
    assert "sparse" in reasons(optimizer)["0"]
    start = parameters(model)
    with pytest.raises(RuntimeError, match="sparse=False"):
        step(model, optimizer, sentences())
    assert all(torch.equal(value, start[name]) for name, value in parameters(model).items())
    assert all(value.abs().max() == 0 for value in averages(optimizer).values())


def test_every_parameter_is_counted_once_in_the_report() -> None:
    for model in (mlp(), convnet(), Encoder(), reader(), speaker(), Tied()):
        optimizer = stated.KFAC(model)
        named = {name.rpartition(".")[0] for name, _ in model.named_parameters()}
        reports = optimizer.report()
        assert {r.name for r in reports} == named
        assert len(reports) == len(named)
        assert sum(r.parameters for r in reports) == sum(p.numel() for p in model.parameters())
        assert all(r.reason for r in reports), "nothing was observed yet, and every record says so"


def test_the_report_tells_what_is_kept_and_what_it_costs() -> None:
    model = mlp()
    optimizer = stated.RSKFAC(model, rank=3, damping=0.1, update_clip=1e-3, **EVERY)
    train(model, optimizer, [rows() for _ in range(2)])
    for report in optimizer.report():
        spectra = optimizer.spectrum(report.name)
        assert report.reason == ""
        assert (report.rank_input, report.rank_output) == (3, 3)
        assert (report.input_dim, report.output_dim) == (len(spectra.input), len(spectra.output))
        assert report.captured_input == pytest.approx(float(spectra.input[:3].sum() / spectra.input.sum()), rel=1e-2)
        assert report.damping_input == pytest.approx(0.1 * float(spectra.input[0]), rel=1e-2)
        assert report.damping_output == pytest.approx(0.1 * float(spectra.output[0]), rel=1e-2)
        assert 0 < report.clip < 1
        assert report.seconds.keys() == {"statistics", "refresh", "apply"}
        assert min(report.seconds.values()) > 0
        factors = 8 * (report.input_dim**2 + report.output_dim**2)
        assert report.bytes == {"factors": factors, "basis": 8 * 3 * (report.input_dim + report.output_dim)}


def test_the_spectrum_is_that_of_the_running_averages() -> None:
    model = mlp()
    optimizer = stated.RSKFAC(model, rank=2, **EVERY)
    train(model, optimizer, [rows() for _ in range(3)])
    factors = averages(optimizer)
    for name in ("0", "2", "4"):
        for side in ("input", "output"):
            expected = torch.linalg.eigvalsh(factors[f"{name}.{side}"]).flip(-1)
            torch.testing.assert_close(getattr(optimizer.spectrum(name), side), expected, atol=1e-12, rtol=1e-9)
    with pytest.raises(ValueError, match=r"'nowhere'.*'0', '2', '4'"):
        optimizer.spectrum("nowhere")


def test_the_spectrum_of_an_embedding_is_how_often_its_rows_are_used() -> None:
    model = reader()
    optimizer = stated.KFAC(model, factor_start="unbiased", **EVERY)
    tokens, labels = sentences()
    step(model, optimizer, (tokens, labels))
    counts = tokens.flatten().bincount(minlength=9).double().sort(descending=True)[0]
    spectrum = optimizer.spectrum("embedding").input
    torch.testing.assert_close(spectrum / spectrum.sum(), counts / counts.sum())


def test_a_person_can_read_the_repr() -> None:
    model = Encoder()
    optimizer = stated.RSKFAC(model, lr=0.25, params=list(model.named_parameters()), exclude="MultiheadAttention")
    text = repr(optimizer)
    assert text.startswith("RSKFAC(")
    assert text.endswith(")")
    assert "RSVD" in text
    assert "lr=0.25" in text
    assert "layer.self_attn" in text, "what is left to the fallback rule is named"
    assert "tensor(" not in text
    assert "linear1.weight" not in text, "no list of parameters"
    assert len(text) < 900


@pytest.mark.parametrize("kind", [rkfac.RSKFAC, rkfac.EKFAC, rkfac.SENG], ids=lambda kind: kind.__name__)
def test_a_warning_of_little_coverage_points_at_the_line_that_builds_the_optimizer(kind: type[rkfac.KFAC]) -> None:
    with pytest.warns(UserWarning, match="of 35 trained parameters") as caught:
        kind(nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2, bias=False)), exclude=("*",))
    assert caught[0].filename == __file__
