"""What the loss is the mean of, in curvature without training: against gradients of each term, one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rkfac

DOUBLE = torch.float64


class Pooled(nn.Module):
    """Logits of a sample from all of its positions."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).mean(1)


class Twice(nn.Module):
    """One layer that every token goes through twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.tanh(self.layer(x)))


class Language(nn.Module):
    """A table that is also the head, and a layer between."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer, self.head = nn.Embedding(5, 3), nn.Linear(3, 3), nn.Linear(3, 5, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.layer(self.table(tokens))))


def fisher(model: nn.Module, layer: nn.Module, losses: Tensor) -> Tensor:
    """Mean over terms of g g^T, in the order of an operator: the weight flattened, then the bias."""
    rows = []
    for loss in losses:
        gradients = torch.autograd.grad(loss, list(layer.parameters()), retain_graph=True)
        rows.append(torch.cat([g.flatten() for g in gradients]))
    stacked = torch.stack(rows)
    return stacked.mT @ stacked / len(rows)


def by_token(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), y.flatten())


def fit(model: nn.Module, x: Any, y: Any, loss: Any, **keywords: Any) -> rkfac.Curvature:
    return rkfac.fit_curvature(model, [(x, y)], loss, damping=0.0, relative_to=None, **keywords)


def matrix(operator: rkfac.Operator) -> Tensor:
    return operator @ torch.eye(operator.shape[0], dtype=DOUBLE)


# --- samples


def test_pooled_logits_are_as_many_samples_as_targets() -> None:
    """Positions that are all alike, one sample: then the mean over them is one of them, and K-FAC is exact."""
    model = Pooled().double()
    x, y = torch.randn(1, 1, 6, dtype=DOUBLE).expand(1, 16, 6), torch.randint(4, (1,))
    found = fit(model, x, y, F.cross_entropy, weight_sharing="reduce")
    assert found.samples == 1
    expected = fisher(model, model.layer, F.cross_entropy(model(x), y, reduction="none"))
    torch.testing.assert_close(matrix(found["layer"]), expected)


@pytest.mark.parametrize("inputs", [lambda x: x, lambda x: (x,), lambda x: {"x": x}])
def test_pooled_logits_have_the_scale_of_the_exact_fisher(inputs: Any) -> None:
    """Targets drawn from the model: the empirical Fisher is then the Monte Carlo one, but for its draws."""
    torch.manual_seed(0)
    model = Pooled().double()
    x = torch.randn(256, 16, 6, dtype=DOUBLE)
    y = torch.multinomial(model(x).softmax(-1), 1)[:, 0].detach()
    drawn, exact = fit(model, inputs(x), y, F.cross_entropy), fit(model, x, y, F.cross_entropy, fisher="exact")
    assert drawn.samples == exact.samples == 256
    assert drawn.trace() == pytest.approx(exact.trace(), rel=0.1)


@pytest.mark.parametrize("average", ["batch", "sum"])
def test_one_position_is_the_mean_of_its_samples_products(average: Any) -> None:
    """One sample at a time K-FAC is exact; the mean over batches of one is then that of the factors."""
    model = nn.Linear(6, 4).double()
    x, y = torch.randn(1, 6, dtype=DOUBLE), torch.randint(4, (1,))
    expected = fisher(model, model, F.cross_entropy(model(x), y, reduction="none"))
    times = torch.full((7,), 0)
    reduction = "sum" if average == "sum" else "mean"
    found = fit(
        model, x[times], y[times], lambda o, t: F.cross_entropy(o, t, reduction=reduction), loss_average=average
    )
    assert found.samples == 7
    torch.testing.assert_close(matrix(found[""]), expected)


def test_a_mean_over_samples_counts_samples_though_each_has_many_tokens() -> None:
    """Tokens that are all alike, one sample: its gradient is that of one token, and K-FAC is exact."""
    model = nn.Linear(6, 4).double()
    x, y = torch.randn(1, 1, 6, dtype=DOUBLE).expand(1, 5, 6), torch.randint(4, (1, 1)).expand(1, 5)
    found = fit(model, x, y, by_token, weight_sharing="reduce")
    assert found.samples == 1
    torch.testing.assert_close(matrix(found[""]), fisher(model, model, by_token(model(x), y)[None]))


# --- tokens


@pytest.mark.parametrize("eigenvalues", ["products", "moments"])
def test_a_layer_that_is_called_twice_has_no_more_tokens(eigenvalues: Any) -> None:
    model = Twice().double()
    x, y = torch.randn(4, 6, 6, dtype=DOUBLE), torch.randint(6, (4, 6))
    found = fit(model, x, y, by_token, loss_average="tokens", eigenvalues=eigenvalues)
    flat = fit(model, x.flatten(0, 1), y.flatten(), by_token, eigenvalues=eigenvalues)
    assert found.samples == flat.samples == 24
    torch.testing.assert_close(matrix(found["layer"]), matrix(flat["layer"]))


def test_a_table_that_is_also_the_head_sees_each_token_once() -> None:
    model = Language().double()
    tokens = torch.randint(5, (4, 6))
    found = fit(model, tokens, tokens, by_token, loss_average="tokens")
    assert {name: layer.samples for name, layer in found.layers.items()} == {"table": 24, "layer": 24}


# --- told


@pytest.mark.parametrize("average", ["batch", "tokens"])
@pytest.mark.parametrize("eigenvalues", ["products", "moments"])
def test_padded_tokens_count_for_nothing(average: Any, eigenvalues: Any) -> None:
    """A token in five has a target; tokens that are all alike, so that K-FAC is exact."""
    model = nn.Linear(6, 4).double()
    x, y = torch.randn(1, 1, 6, dtype=DOUBLE).expand(8, 5, 6), torch.full((8, 5), -100)
    y[:, 0] = 2
    found = fit(
        model, x, y, by_token, terms=lambda x, y: (y != -100).sum(), loss_average=average, eigenvalues=eigenvalues
    )
    assert found.samples == 8
    expected = fisher(model, model, F.cross_entropy(model(x[:, 0]), y[:, 0], reduction="none"))
    torch.testing.assert_close(matrix(found[""]), expected)


def test_second_moments_of_padded_and_shifted_tokens_have_the_trace_of_the_fisher() -> None:
    """Of a last layer a token's gradient has one position, so that second moments have it exactly."""
    model = nn.Sequential(nn.Embedding(5, 3), nn.Tanh(), nn.Linear(3, 5)).double()
    tokens = torch.randint(5, (4, 6))
    targets = tokens.clone()
    targets[:, 4:] = -100

    def shifted(logits: Tensor, y: Tensor, reduction: str = "mean") -> Tensor:
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), y[:, 1:].flatten(), reduction=reduction)

    data = [(tokens[:1], targets[:1]), (tokens[1:], targets[1:])]
    found = rkfac.fit_curvature(
        model, data, shifted, terms=lambda x, y: int((y[:, 1:] != -100).sum()), eigenvalues="moments", damping=0.0
    )
    losses = shifted(model(tokens), targets, "none")
    expected = fisher(model, model[2], losses[targets[:, 1:].flatten() != -100])
    assert found.samples == 12
    assert found["2"].trace() == pytest.approx(float(expected.trace()), rel=1e-9)


def test_what_cannot_be_counted_is_asked_for() -> None:
    model, x, y = nn.Linear(6, 4), torch.randn(3, 6), torch.randint(4, (3,))
    with pytest.raises(ValueError, match=r"lengths \[1, 3\]: say how many with terms="):
        fit(model, x[:2], (y, y[:1]), lambda o, t: F.cross_entropy(o[:1], t[1]))
    with pytest.raises(ValueError, match="it holds no tensor: say how many with terms="):
        fit(model, [3], None, lambda o, t: o.sum())
    for wrong in (0, 1.5, True, None, torch.ones(2)):
        with pytest.raises(ValueError, match="terms must say an integer >= 1"):
            fit(model, x, y, F.cross_entropy, terms=lambda x, y, said=wrong: said)
    with pytest.raises(ValueError, match="terms must be a function of a batch's inputs and targets, got 3"):
        fit(model, x, y, F.cross_entropy, terms=3)
    with pytest.raises(ValueError, match="terms= goes with fisher='empirical' alone"):
        fit(model, x, y, F.cross_entropy, fisher="mc", terms=lambda x, y: 3)


# --- layers without a curvature


class ByHand(nn.Module):
    def __init__(self, called: bool) -> None:
        super().__init__()
        self.layer, self.called = nn.Linear(6, 6, bias=False), called

    def forward(self, x: Tensor) -> Tensor:
        own = self.layer(x) if self.called else x
        return F.linear(3 * own, 3 * self.layer.weight)


def test_a_model_without_any_says_the_true_reason() -> None:
    x, y = torch.randn(3, 6), torch.randint(6, (3,))
    with pytest.raises(ValueError, match=r"no layer of the model has a curvature: '': its weight is frozen"):
        fit(nn.Linear(6, 6).requires_grad_(False), x.requires_grad_(), y, F.cross_entropy)
    with pytest.raises(ValueError, match=r"curvature: 'layer': no statistics yet: no backward .* a call of it"):
        fit(ByHand(False), x, y, F.cross_entropy)
    with (
        pytest.warns(UserWarning, match="layer 'layer' has no curvature: most of its weight's gradient"),
        pytest.raises(
            ValueError, match=r"no layer of the model has a curvature: 'layer': most of its weight's gradient"
        ),
    ):
        fit(ByHand(True), x, y, F.cross_entropy)


def test_second_moments_of_a_table_that_is_also_the_head_are_not_promised() -> None:
    model, tokens = Language().double(), torch.randint(5, (4, 6))
    with pytest.warns(UserWarning, match="eigenvalues='moments' does not go with .* the head: 'table' keeps products"):
        found = fit(model, tokens, tokens, by_token, loss_average="tokens", eigenvalues="moments")
    plain = fit(model, tokens, tokens, by_token, loss_average="tokens")
    torch.testing.assert_close(matrix(found["table"]), matrix(plain["table"]))


def test_no_columns_are_no_error() -> None:
    C = fit(nn.Linear(6, 4), torch.randn(30, 6), torch.randint(4, (30,)), F.cross_entropy).damped(1.0)[""]
    for product in (C.solve, C.sqrt_solve, C.__matmul__):
        assert product(torch.ones(28, 0)).shape == (28, 0)
