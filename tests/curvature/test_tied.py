"""One weight of several modules: the documented formula, densely and one sample at a time, and what must not change it."""

from __future__ import annotations

import warnings
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rkfac
from curvature.brute import block_of, held, kfac
from rkfac.curvature.block import TiedBlock
from rkfac.curvature.factor import DiagonalFactor
from rkfac.curvature.moment import JoinedMoment, Moment, SquareMoment
from rkfac.layers import TiedAdapter

VOCABULARY, WIDTH, SAMPLES, LENGTH = 9, 4, 6, 5


class Language(nn.Module):
    """A table that is the head too; logits at every position, or one of a sample's mean."""

    def __init__(self, pooled: bool = False, bias: bool = False, padding: int | None = None) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH, padding_idx=padding)
        self.hidden = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=bias)
        self.head.weight = self.table.weight
        self.pooled = pooled

    def forward(self, tokens: Tensor) -> Tensor:
        h = torch.tanh(self.hidden(self.table(tokens)))
        return self.head(h.mean(1) if self.pooled else h)


def language(**options: Any) -> Language:
    torch.manual_seed(1)
    return Language(**options).double()


def sentences() -> tuple[Tensor, Tensor]:
    torch.manual_seed(2)
    return torch.randint(VOCABULARY - 2, (SAMPLES, LENGTH)), torch.randint(VOCABULARY, (SAMPLES, LENGTH))


def loss(model: Language, tokens: Tensor, labels: Tensor, reduction: str = "mean") -> Tensor:
    y = model(tokens)
    labels = labels[:, 0] if model.pooled else labels
    return F.cross_entropy(y.flatten(0, -2), labels.flatten(), reduction=reduction)


def pieces(model: Language, tokens: Tensor, labels: Tensor) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Of each sample: one-hot rows and gradients of the lookups, inputs and output gradients of the head, of its own loss."""
    found = []
    for n in range(SAMPLES):
        kept: dict[str, Tensor] = {}
        hooks = [
            model.table.register_forward_hook(lambda _, args, y, kept=kept: kept.update(looked_up=y)),
            model.head.register_forward_hook(lambda _, args, y, kept=kept: kept.update(a=args[0], logits=y)),
        ]
        value = loss(model, tokens[n : n + 1], labels[n : n + 1], "sum")
        for hook in hooks:
            hook.remove()
        g, h = torch.autograd.grad(value, [kept["looked_up"], kept["logits"]])
        one_hot = F.one_hot(tokens[n], VOCABULARY).double()
        if model.table.padding_idx is not None:
            real = (tokens[n] != model.table.padding_idx)[:, None]
            one_hot, g = one_hot * real, g[0] * real
        found.append((one_hot, g.reshape(-1, WIDTH), kept["a"].reshape(-1, WIDTH).detach(), h.reshape(-1, VOCABULARY)))
    return found


def by_hand(model: Language, sharing: str = "expand") -> tuple[Tensor, Tensor]:
    """X and Y of the docstring, in plain loops over samples and rows."""
    found = pieces(model, *sentences())
    if sharing == "reduce":
        found = [(e, g, a.mean(0, keepdim=True), h.sum(0, keepdim=True)) for e, g, a, h in found]
        terms = SAMPLES
    else:
        terms = sum(len(a) for _, _, a, _ in found)
    blocks = []
    for inputs, gradients in ((0, 1), (2, 3)):
        rows = sum(len(piece[inputs]) for piece in found)
        positions = rows / terms
        A = sum(torch.outer(r, r) for piece in found for r in piece[inputs]) / (terms * positions**2)
        G = sum(torch.outer(r, r) for piece in found for r in piece[gradients]) * positions / terms
        blocks.append((A, G))
    (A_1, G_1), (A_2, G_2) = blocks
    X, Y = [A_1, torch.diag(G_2.diagonal())], [G_1, A_2]
    f = [x.trace() * y.trace() for x, y in zip(X, Y, strict=True)]
    total = f[0] + f[1]
    return (
        sum(own / total * x / x.trace() for own, x in zip(f, X, strict=True)),
        sum(own * y / y.trace() for own, y in zip(f, Y, strict=True)),
    )


def collected(model: Language, scale: float = 1.0, reduction: str = "mean", **keywords: Any) -> tuple[Tensor, Tensor]:
    optimizer = kfac(model, **keywords)
    (scale * loss(model, *sentences(), reduction)).backward()
    optimizer.step()
    X, Y = held(optimizer, "table")
    return X[0], Y[0]


OPTIONS = [{}, {"pooled": True}, {"bias": True}, {"padding": 1}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_factors_are_those_of_the_formula(options: dict[str, Any], sharing: str) -> None:
    # A sum has as many terms whatever they are counted by.
    X, Y = collected(language(**options), reduction="sum", loss_average="sum", weight_sharing=sharing)
    expected = by_hand(language(**options), sharing)
    torch.testing.assert_close((X, Y), expected)
    torch.testing.assert_close(X.trace(), torch.ones_like(X.trace()))


def test_both_uses_weigh_something() -> None:
    """Guards the comparisons above."""
    model = language()
    X, Y = collected(model)
    for uses in ("lookups", "head"):
        optimizer = kfac(other := language())
        labels = sentences()[1]
        h = other.table(sentences()[0])
        if uses == "head":
            h = h.detach()
        y = other.head(torch.tanh(other.hidden(h)))
        y = F.linear(torch.tanh(other.hidden(h)), other.head.weight.detach()) if uses == "lookups" else y
        F.cross_entropy(y.flatten(0, 1), labels.flatten()).backward()
        optimizer.step()
        alone = held(optimizer, "table")
        assert not torch.allclose(alone[0][0], X, rtol=1e-2)
        assert not torch.allclose(alone[1][0], Y, rtol=1e-2)


def test_lookups_alone_are_an_embedding_and_the_head_alone_a_linear_layer() -> None:
    tokens, labels = sentences()
    model, plain = language(), language()
    plain.head.weight = nn.Parameter(plain.head.weight.detach().clone())
    mine, theirs = kfac(model), kfac(plain)
    for m, o in ((model, mine), (plain, theirs)):
        y = F.linear(torch.tanh(m.hidden(m.table(tokens))), m.head.weight.detach())
        F.cross_entropy(y.flatten(0, 1), labels.flatten()).backward()
        o.step()
    X, Y = (t[0] for t in held(mine, "table"))
    A, G = (t[0] for t in held(theirs, "table"))
    torch.testing.assert_close(torch.kron(X, Y), torch.kron(A, G))
    model, plain = language(), language()
    plain.head.weight = nn.Parameter(plain.head.weight.detach().clone())
    mine, theirs = kfac(model), kfac(plain)
    for m, o in ((model, mine), (plain, theirs)):
        F.cross_entropy(
            m.head(m.hidden(F.embedding(tokens, m.table.weight.detach()))).flatten(0, 1), labels.flatten()
        ).backward()
        o.step()
    X, Y = (t[0] for t in held(mine, "table"))
    A, G = (t[0] for t in held(theirs, "head"))
    torch.testing.assert_close(torch.kron(X, Y), torch.kron(torch.diag(G.diagonal()), A))


@pytest.mark.parametrize("scale", [1e-9, 1e-3, 1e6])
def test_the_size_of_the_loss_scales_one_side_alone(scale: float) -> None:
    X, Y = collected(language())
    scaled = collected(language(), scale)
    torch.testing.assert_close(scaled[0], X)
    torch.testing.assert_close(scaled[1] / scale**2, Y, rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1e-18, 1e-12, 1.0, 1e12])
def test_no_size_of_gradients_overflows_or_vanishes(scale: float, dtype: torch.dtype) -> None:
    X, Y = collected(language().to(dtype), scale)
    expected = by_hand(language())
    torch.testing.assert_close(X, expected[0], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(Y / scale**2, expected[1], rtol=1e-4, atol=1e-6 * float(expected[1].abs().amax()))


def test_a_summed_loss_and_a_gradient_scaler_change_nothing() -> None:
    expected = collected(language())
    torch.testing.assert_close(collected(language(), reduction="sum", loss_average="sum"), expected)
    torch.testing.assert_close(collected(language(), loss_average="tokens"), expected)
    model = language()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = kfac(model)
    scaler.scale(loss(model, *sentences())).backward()
    scaler.step(optimizer)
    torch.testing.assert_close(tuple(t[0] for t in held(optimizer, "table")), expected)


def test_accumulated_halves_are_the_whole_batch() -> None:
    model, (tokens, labels) = language(), sentences()
    optimizer = kfac(model)
    for half in (slice(3), slice(3, None)):
        (loss(model, tokens[half], labels[half]) / 2).backward()
    optimizer.step()
    torch.testing.assert_close(tuple(t[0] for t in held(optimizer, "table")), by_hand(language()))


def test_gradients_of_zero_leave_the_width_side_empty() -> None:
    model = language()
    X, Y = collected(model, 0.0)
    assert not Y.any()
    torch.testing.assert_close(X.trace(), torch.ones_like(X.trace()))


def test_a_vocabulary_is_never_a_matrix() -> None:
    model = nn.ModuleDict({"table": nn.Embedding(100_000, 3), "head": nn.Linear(3, 100_000, bias=False)})
    model["head"].weight = model["table"].weight
    optimizer = kfac(model, max_factor_dim=8)
    tokens = torch.randint(100_000, (4, 3))
    F.cross_entropy(model["head"](model["table"](tokens)).flatten(0, 1), tokens.flatten()).backward()
    optimizer.step()
    block = block_of(optimizer, "table")
    assert isinstance(block, TiedBlock)
    assert isinstance(block.factors["input"], DiagonalFactor)
    assert block.nbytes["factors"] < 1_000_000
    (report,) = optimizer.report()
    assert report.covered
    assert not report.reason
    assert report.shared_with == ("head",)
    assert report.parameters == 300_000


def test_the_head_s_bias_trains_by_the_fallback_rule_and_says_why() -> None:
    model = language(bias=True)
    optimizer = kfac(model, lr=0.1)
    start = model.head.bias.detach().clone()
    loss(model, *sentences()).backward()
    optimizer.step()
    torch.testing.assert_close(model.head.bias.detach(), start - 0.1 * model.head.bias.grad)
    (left,) = (r for r in optimizer.report() if not r.covered)
    assert (left.name, left.parameters) == ("head.bias", VOCABULARY)
    assert "'table'" in left.reason
    assert sum(r.parameters for r in optimizer.report()) == sum(p.numel() for p in model.parameters())


def test_the_step_is_the_dense_solve() -> None:
    """lr 1, no momentum: W - (X + l)^-1 J (Y + l)^-1, in coordinates of the table."""
    model = language()
    optimizer = kfac(model, lr=1.0, damping=0.3, relative_to=None)
    start = model.table.weight.detach().clone()
    loss(model, *sentences()).backward()
    J = model.table.weight.grad.clone()
    optimizer.step()
    X, Y = by_hand(language())
    eye = torch.eye
    expected = torch.linalg.solve(X + 0.3 * eye(VOCABULARY).double(), J)
    expected = torch.linalg.solve(Y + 0.3 * eye(WIDTH).double(), expected.mT).mT
    torch.testing.assert_close(model.table.weight.detach(), start - expected)


@pytest.mark.parametrize("side", ["input", "output"])
def test_one_side_alone_is_that_side_of_both(side: str) -> None:
    found, expected = collected(language(), sides=side), by_hand(language())
    kept = ["input", "output"].index(side)
    torch.testing.assert_close(found[kept], expected[kept])
    torch.testing.assert_close(found[1 - kept], torch.eye(len(found[1 - kept])).double())


# --- several modules of one kind


class Two(nn.Module):
    """The same weight at two places: one module called twice, or two modules that share it."""

    def __init__(self, kind: str, shared: bool) -> None:
        super().__init__()
        make = (lambda: nn.Linear(4, 4, bias=False)) if kind == "linear" else (lambda: nn.Embedding(4, 4))
        self.one = make()
        self.two = make() if shared else self.one
        self.two.weight = self.one.weight
        self.kind, self.head = kind, nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.one(x)) if self.kind == "linear" else self.one(x).sum(1)
        return self.head(torch.tanh(h + (self.two(h) if self.kind == "linear" else self.two(x).mean(1))))


@pytest.mark.parametrize("kind", ["linear", "embedding"])
@pytest.mark.parametrize("fisher", ["empirical", "mc"])
@pytest.mark.parametrize("apply", ["step", "backward"])
def test_two_modules_that_share_a_weight_are_one_that_is_called_twice(kind: str, fisher: str, apply: str) -> None:
    torch.manual_seed(3)
    models = [Two(kind, shared).double() for shared in (False, True)]
    models[1].load_state_dict({**models[0].state_dict(), "two.weight": models[0].one.weight.detach()})
    x = torch.randn(6, 4).double() if kind == "linear" else torch.randint(4, (6, 5))
    y = torch.randint(3, (6,))
    found = []
    for model in models:
        optimizer = kfac(model, lr=0.1, fisher=fisher, apply=apply)
        for _ in range(3):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        found.append((*held(optimizer, "one"), model.one.weight.detach()))
        assert {r.name for r in optimizer.report() if r.covered} == {"one", "head"}
    torch.testing.assert_close(found[1], found[0])


def test_other_ties_are_refused_by_name() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide, self.point = nn.Linear(4, 3, bias=False), nn.Conv1d(4, 3, 1, bias=False)
            self.wide.weight = nn.Parameter(self.point.weight.detach()[..., 0].clone())
            self.norm, self.other = nn.LayerNorm(4), nn.LayerNorm(4)
            self.other.weight = self.norm.weight
            self.table, self.sparse = nn.Embedding(5, 4), nn.Embedding(5, 4, sparse=True)
            self.sparse.weight = self.table.weight

    model = Mixed()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer = kfac(model)
    reasons = {r.name: r.reason for r in optimizer.report() if not r.covered}
    assert "only nn.Linear and nn.Embedding layers may share" in reasons["norm"]
    assert "'other' (LayerNorm)" in reasons["norm"]
    assert reasons["table"] == "its weight is tied to another module's"
    assert "sparse=True" in reasons["sparse"]
    assert sum(r.parameters for r in optimizer.report()) == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("exclude", ["Embedding", "head"])
def test_a_tied_weight_is_chosen_only_if_all_its_uses_are(exclude: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer = kfac(language(), exclude=exclude)
    reasons = {r.name: r.reason for r in optimizer.report() if not r.covered}
    assert reasons == {"table": "excluded by pattern", "head": "excluded by pattern"} or reasons.keys() == {
        "table",
        "head",
    }


def test_a_weight_untied_or_tied_once_more_retires_its_block() -> None:
    for change in ("untied", "tied"):
        model = language()
        optimizer = kfac(model)
        if change == "untied":
            model.head.weight = nn.Parameter(model.head.weight.detach().clone())
        else:
            model.third = nn.Linear(WIDTH, VOCABULARY, bias=False)
            model.third.weight = model.head.weight
        loss(model, *sentences()).backward()
        with pytest.warns(UserWarning, match="'table' trains by the fallback rule from now on"):
            optimizer.step()


def test_an_optimizer_without_a_block_for_ties_leaves_them_out_by_name() -> None:
    class Plain(rkfac.KFAC):
        block_types: ClassVar[Any] = {
            kind: block for kind, block in rkfac.KFAC.block_types.items() if kind is not TiedAdapter
        }

    optimizer = Plain(language(), exclude=())
    reasons = {r.name: r.reason for r in optimizer.report() if not r.covered}
    assert reasons.keys() == {"table", "head"}
    assert set(reasons.values()) == {"Plain has no curvature for a weight that Embedding and Linear share"}


# --- moments


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1e-18, 1.0, 1e12])
@pytest.mark.parametrize("n", [3, 400])
def test_traces_and_squares_are_those_of_the_rows(size: float, dtype: torch.dtype, n: int) -> None:
    rows = size * torch.randn(n, 500, dtype=dtype)
    moment, squares = Moment(), SquareMoment()
    for part in rows.split(250):
        moment.add(part, 2.0)
        squares.add(part, 2.0)
    diagonal = 2 * rows.double().square().sum(0)
    torch.testing.assert_close(moment.trace() / size**2, diagonal.sum() / size**2, rtol=1e-5, atol=0)
    torch.testing.assert_close(squares.trace() / size**2, diagonal.sum() / size**2, rtol=1e-12, atol=0)
    assert squares.settle([float(t) for t in squares.readings()])
    value = torch.full((500,), 3.0)
    exponent = round(squares.level)
    squares.blend_into([value], 0.5, 0.25, exponent)
    torch.testing.assert_close(value.double(), 1.5 + 0.25 * diagonal * 2.0**-exponent, rtol=1e-5, atol=1e-5)


def test_a_sum_of_moments_blends_them_all_and_none_leaves_what_is_kept() -> None:
    parts = []
    for scale in (1.0, 1e-6, 0.0):
        moment = SquareMoment()
        moment.add(torch.full((1, 4), 2.0))
        moment.settle([float(t) for t in moment.readings()])
        moment.scale = scale
        parts.append(moment)
    value = torch.ones(4)
    JoinedMoment(parts).blend_into([value], 0.5, 1.0, 0)
    torch.testing.assert_close(value, torch.full((4,), 0.5 + 4 * (1 + 1e-6)))
    empty = JoinedMoment(parts[2:])
    assert empty.level == float("-inf")
    empty.blend_into([value], 0.5, 1.0, 0)
    torch.testing.assert_close(value, torch.full((4,), 0.25 + 2 * (1 + 1e-6)))
