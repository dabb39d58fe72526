"""Factors after one statistics step against brute force, one sample at a time."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

import rkfac
from curvature.brute import (
    Mean,
    Problem,
    Recorded,
    block_of,
    each_problem,
    factors,
    held,
    kfac,
    losses,
    statistics,
    weight_layers,
)
from optim.problems import average
from rkfac.curvature import moment as moment_module
from rkfac.curvature.factor import DenseFactor, DiagonalFactor, Start
from rkfac.curvature.moment import DiagonalMoment, Moment


@each_problem
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_both_factors_of_every_layer_equal_brute_force(problem: Problem, sharing: str) -> None:
    optimizer = statistics(problem, weight_sharing=sharing)
    model = problem.model()
    for name, module in weight_layers(model).items():
        A, G = factors(model, module, problem.x(), sharing)
        if getattr(module, "padding_idx", None) is not None:  # the padding row is never trained
            x = problem.x()
            A[:, module.padding_idx], A[:, :, module.padding_idx] = 0, 0
            G = masked_output_factor(model, module, x)
        got_A, got_G = held(optimizer, name)
        torch.testing.assert_close(got_A, A)
        torch.testing.assert_close(got_G, G)


def masked_output_factor(model: nn.Module, table: nn.Embedding, x: Tensor) -> Tensor:
    y: list[Tensor] = []
    handle = table.register_forward_hook(lambda _m, _a, out: y.append(out))
    value = losses(model(x)).sum()
    handle.remove()
    (g,) = torch.autograd.grad(value, y)
    g = g[x != table.padding_idx]
    return (x.shape[1] / x.shape[0] * g.mT @ g)[None]


@pytest.mark.parametrize("loss_average", ["batch", "sum"])
def test_a_mean_and_a_summed_loss_give_the_same_factors(loss_average: str) -> None:
    problem = Problem("", lambda: nn.Sequential(nn.Conv2d(2, 3, 2), nn.Tanh(), nn.Conv2d(3, 2, 2)), (4, 2, 4, 4))
    reference = statistics(problem)
    model = problem.model()
    optimizer = kfac(model, loss_average=loss_average)
    values = losses(model(problem.x()))
    (values.mean() if loss_average == "batch" else values.sum()).backward()
    optimizer.step()
    for name in weight_layers(model):
        for got, expected in zip(held(optimizer, name), held(reference, name), strict=True):
            torch.testing.assert_close(got, expected)


def test_a_duplicated_batch_gives_the_same_factors() -> None:
    problem = Problem("", lambda: nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)), (3, 2, 4))
    reference, model = statistics(problem), problem.model()
    optimizer = kfac(model)
    losses(model(torch.cat([problem.x()] * 2))).mean().backward()
    optimizer.step()
    for name in weight_layers(model):
        for got, expected in zip(held(optimizer, name), held(reference, name), strict=True):
            torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_a_kernel_as_large_as_the_image_is_a_linear_layer(sharing: str) -> None:
    conv = nn.Sequential(nn.Conv2d(2, 3, (4, 5)), nn.Flatten()).double()
    linear = nn.Sequential(nn.Flatten(), nn.Linear(40, 3)).double()
    with torch.no_grad():
        linear[1].weight.copy_(conv[0].weight.flatten(1))
        linear[1].bias.copy_(conv[0].bias)
    x = torch.randn(6, 2, 4, 5, dtype=torch.float64)
    made = []
    for model, name in ((conv, "0"), (linear, "1")):
        optimizer = kfac(model, weight_sharing=sharing)
        losses(model(x)).mean().backward()
        optimizer.step()
        made.append(held(optimizer, name))
    torch.testing.assert_close(made[0], made[1])


def test_a_sampled_fisher_collects_the_gradients_of_what_was_drawn() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 5)).double()
    x = torch.randn(6, 4, dtype=torch.float64)
    likelihood = Recorded()
    optimizer = kfac(model, fisher="mc", likelihood=likelihood)
    F.cross_entropy(model(x), torch.zeros(6, dtype=torch.long)).backward()  # its labels must leave no trace
    optimizer.step()
    (drawn,) = likelihood.drawn
    for name, module in weight_layers(model).items():
        A = G = 0.0
        for n in range(6):
            one = factors(model, module, x[n : n + 1], "expand", lambda y, n=n: (y * drawn[n]).sum(1))
            A, G = A + one[0] / 6, G + one[1] / 6
        torch.testing.assert_close(held(optimizer, name), (A, G))


# --- several calls, several backward passes


class Recurrent(nn.Module):
    """One Linear called three times in a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(self.cell(x))
        return x


def test_calls_within_a_forward_are_positions_of_a_sample() -> None:
    model = Recurrent().double()
    x = torch.randn(5, 4, dtype=torch.float64)
    optimizer = kfac(model)
    losses(model(x)).mean().backward()
    optimizer.step()
    torch.testing.assert_close(held(optimizer, "cell"), factors(model, model.cell, x, "expand"))


@each_problem
@pytest.mark.parametrize("cut", [1, 2])
def test_accumulated_micro_batches_equal_one_batch(problem: Problem, cut: int) -> None:
    reference, model = statistics(problem), problem.model()
    x = problem.x()
    optimizer = kfac(model)
    for part in (x[:cut], x[cut:]):
        (losses(model(part)).sum() / len(x)).backward()
    optimizer.step()
    for name in weight_layers(model):
        for got, expected in zip(held(optimizer, name), held(reference, name), strict=True):
            torch.testing.assert_close(got, expected)


def test_several_calls_and_micro_batches_together() -> None:
    model = Recurrent().double()
    x = torch.randn(6, 4, dtype=torch.float64)
    optimizer = kfac(model)
    for part in (x[:1], x[1:4], x[4:]):
        (losses(model(part)).sum() / len(x)).backward()
    optimizer.step()
    torch.testing.assert_close(held(optimizer, "cell"), factors(model, model.cell, x, "expand"))


def test_pending_rows_do_not_follow_in_place_changes_of_gradients_and_inputs() -> None:
    class Positions(nn.Module):
        """With one sample, autograd hands the gradient at the layer's output on as `place.grad`, the same memory."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(9, 8, bias=False)
            self.place = nn.Parameter(torch.zeros(3, 8))

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) + self.place.view(1, 3, 8)

    model = Positions().double()
    x = torch.randn(1, 3, 9, dtype=torch.float64)
    kept = x.clone()
    optimizer = kfac(model)
    losses(model(x)).mean().backward()
    x.zero_()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-6)
    optimizer.step()
    torch.testing.assert_close(held(optimizer, "layer"), factors(model, model.layer, kept, "expand"))


@pytest.mark.parametrize("module, shape", [(nn.Linear(4, 3), (5, 7, 4)), (nn.Conv1d(4, 3, 2), (5, 4, 7))])
def test_freezing_and_unfreezing_a_bias_keeps_the_scale(module: nn.Module, shape: tuple[int, ...]) -> None:
    model = nn.Sequential(module).double()
    x = torch.randn(shape, dtype=torch.float64)
    optimizer = kfac(model)
    for trained in (True, False, True):
        module.bias.requires_grad_(trained)
        optimizer.zero_grad()
        losses(model(x)).mean().backward()
        optimizer.step()
        A, G = factors(model, module, x, "expand")
        got_A, got_G = held(optimizer, "0")
        torch.testing.assert_close(got_A, A if trained else A[:, :-1, :-1])
        torch.testing.assert_close(got_G, G)


# --- norms


def units(optimizer: rkfac.KFAC, name: str) -> Tensor:
    """The small blocks (units, k, k) of a norm."""
    (factor,) = block_of(optimizer, name).factors.values()
    return factor.dense()


def _spread(t: Tensor, x: Tensor, norm: nn.Module) -> Tensor:
    """A scale or shift (n, *own shape) placed so that it multiplies samples of x."""
    if hasattr(norm, "normalized_shape"):
        return t.reshape(len(t), *[1] * (x.ndim - t.ndim), *t.shape[1:])
    return t.reshape(*t.shape, *[1] * (x.ndim - 2))


NORMS: list[tuple[nn.Module, tuple[int, ...], Any]] = [
    (nn.BatchNorm1d(3), (6, 3), lambda m, x: F.batch_norm(x, None, None, training=True, eps=m.eps)),
    (nn.BatchNorm2d(3), (6, 3, 2, 2), lambda m, x: F.batch_norm(x, None, None, training=True, eps=m.eps)),
    (nn.BatchNorm3d(2), (6, 2, 2, 2, 1), lambda m, x: F.batch_norm(x, None, None, training=True, eps=m.eps)),
    (nn.GroupNorm(2, 4), (5, 4, 3), lambda m, x: F.group_norm(x, 2, eps=m.eps)),
    (nn.LayerNorm(4), (5, 3, 4), lambda m, x: F.layer_norm(x, (4,), eps=m.eps)),
    (nn.LayerNorm((3, 4)), (5, 2, 3, 4), lambda m, x: F.layer_norm(x, (3, 4), eps=m.eps)),
    (nn.LayerNorm(4, bias=False), (5, 3, 4), lambda m, x: F.layer_norm(x, (4,), eps=m.eps)),
    (nn.RMSNorm(4), (5, 3, 4), lambda m, x: F.rms_norm(x, (4,), eps=m.eps)),
]
each_norm = pytest.mark.parametrize("norm, shape, normalise", NORMS, ids=[type(n[0]).__name__ for n in NORMS])


def per_sample(norm: nn.Module, x: Tensor, normalise: Any) -> Tensor:
    """Gradients (n, units, 1 or 2) of single samples' losses: every sample gets a scale and shift of its own."""
    names = [name for name, _ in norm.named_parameters()]
    own = [p.detach().expand(len(x), *p.shape).clone().requires_grad_() for p in norm.parameters()]
    y = normalise(norm, x) * _spread(own[0], x, norm)
    if "bias" in names:
        y = y + _spread(own[1], x, norm)
    found = torch.autograd.grad(losses(torch.tanh(y)).sum(), own)
    return torch.stack([t.flatten(1) for t in found], dim=-1)


@each_norm
def test_unit_blocks_are_means_of_per_sample_outer_products(norm: nn.Module, shape: Any, normalise: Any) -> None:
    model = nn.Sequential(norm, nn.Tanh()).double()
    with torch.no_grad():
        for p in model.parameters():
            p.normal_()
            p.view(-1)[0] = 0
    x = torch.randn(shape, dtype=torch.float64)
    optimizer = kfac(model, weight_sharing="reduce")
    losses(model(x)).mean().backward()
    optimizer.step()
    u = per_sample(norm, x, normalise)
    expected = torch.stack([torch.outer(v, v) for sample in u for v in sample]).unflatten(0, u.shape[:2]).mean(0)
    torch.testing.assert_close(units(optimizer, "0"), expected)


def test_unit_blocks_are_the_full_empirical_fisher_without_its_other_entries() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 2)).double()
    x = torch.randn(6, 3, dtype=torch.float64)
    optimizer = kfac(model)
    losses(model(x)).mean().backward()
    optimizer.step()
    plain = copy.deepcopy(model)  # without the hooks
    everything = {name: p.detach() for name, p in plain.named_parameters()}

    def loss(own: dict[str, Tensor], sample: Tensor) -> Tensor:
        return losses(functional_call(plain, {**everything, **own}, (sample[None],)))[0]

    own = {name: everything[name] for name in ("1.weight", "1.bias")}
    found = vmap(grad(loss), (None, 0))(own, x)
    J = torch.cat([found["1.weight"], found["1.bias"]], dim=1)
    full = (J.mT @ J / len(x)).reshape(2, 4, 2, 4)
    for unit in range(4):
        torch.testing.assert_close(units(optimizer, "1")[unit], full[:, unit, :, unit])


# --- token losses


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_a_token_average_is_the_fisher_of_one_token(sharing: str) -> None:
    """The same loss summed over tokens, called a sum over N*T samples, must give the same product of scales."""
    model = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Tanh(), nn.Linear(3, 2)).double()
    x = torch.randn(5, 6, 4, dtype=torch.float64)
    optimizer = kfac(model, loss_average="tokens", weight_sharing=sharing)
    (losses(model(x)).sum() / 30).backward()
    optimizer.step()
    layers = weight_layers(model)
    for name, module in layers.items():
        A, G = factors(model, module, x, sharing)  # g^ of a whole sequence's summed loss
        got_A, got_G = held(optimizer, name)
        # 1/(N T) sum_n vec vec^T: the whole-sequence block divided by the number of tokens in a sequence, where every
        # token counted as a sample already, by that number once more
        tokens = 36 if sharing == "expand" else 6
        torch.testing.assert_close(torch.kron(got_A[0], got_G[0]), torch.kron(A[0], G[0]) / tokens)
    reference = kfac(model, weight_sharing=sharing)
    losses(model(x)).mean().backward()
    reference.step()
    torch.testing.assert_close(units(optimizer, "1"), units(reference, "1") / tokens)


# --- running averages


def test_the_papers_start_blends_the_identity() -> None:
    problem = Problem("", lambda: nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Linear(3, 2)), (6, 4))
    first = statistics(problem)
    optimizer = statistics(problem, factor_start="identity", factor_decay=0.9)
    for name in ("0", "2"):
        for X, X_0 in zip(held(optimizer, name), held(first, name), strict=True):
            torch.testing.assert_close(X, 0.9 * torch.eye(X.shape[-1], dtype=X.dtype) + 0.1 * X_0)
    eye = torch.eye(2, dtype=torch.float64)
    got = units(optimizer, "1")
    torch.testing.assert_close(got, 0.9 * eye + 0.1 * units(first, "1"))


def test_an_identity_start_is_the_zero_start_plus_a_decayed_identity() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    optimizer = kfac(model, factor_start="identity", factor_decay=0.8)
    zero_started = [[torch.zeros_like(t) for t in held(optimizer, name)] for name in ("0", "2")]
    for _ in range(5):
        x = torch.randn(6, 4, dtype=torch.float64)
        optimizer.zero_grad()
        losses(model(x)).mean().backward()
        optimizer.step()
        for i, name in enumerate(("0", "2")):
            for old, new in zip(zero_started[i], factors(model, model[int(name)], x, "expand"), strict=True):
                old.mul_(0.8).add_(new, alpha=0.2)
    for i, name in enumerate(("0", "2")):
        for X, X_0 in zip(held(optimizer, name), zero_started[i], strict=True):
            torch.testing.assert_close(X, 0.8**5 * torch.eye(X.shape[-1], dtype=X.dtype) + X_0)


def test_a_dropped_identity_leaves_the_zero_started_average_as_it_is() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    dropped = kfac(model, factor_start="dropped", factor_decay=0.8)
    with_it = kfac(model, factor_start="identity", factor_decay=0.8)
    unbiased = kfac(model, factor_decay=0.8)
    for _ in range(5):
        losses(model(torch.randn(6, 4, dtype=torch.float64))).mean().backward()
        for optimizer in (dropped, with_it, unbiased):
            optimizer.step()
        model.zero_grad()
    for name in ("0", "2"):
        for X, whole, free in zip(*(o.factors(name) for o in (dropped, with_it, unbiased)), strict=True):
            torch.testing.assert_close(X, whole - 0.8**5 * torch.eye(len(X), dtype=X.dtype))
            torch.testing.assert_close(X, (1 - 0.8**5) * free)


def test_factors_are_the_whole_matrices_that_spectrum_has_the_eigenvalues_of() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Linear(3, 2))
    optimizer = kfac(model)
    losses(model(torch.randn(6, 4))).mean().backward()
    optimizer.step()
    for X, values in zip(optimizer.factors("0"), optimizer.spectrum("0"), strict=True):
        torch.testing.assert_close(torch.linalg.eigvalsh(X).flip(0).clamp_min(0), values)
        X.zero_()  # a copy
        assert values.sum() > 0
    assert all(X.abs().sum() > 0 for X in optimizer.factors("0"))
    with pytest.raises(ValueError, match="no preconditioned layer is called '1'; there are '0', '2'"):
        optimizer.factors("1")


def test_an_unbiased_average_is_the_weighted_mean_also_when_the_decay_changes() -> None:
    decays = [0.95, 0.5, 0.9, 0.0, 0.7, 0.99]
    model = nn.Sequential(nn.Linear(4, 3)).double()
    optimizer = kfac(model)
    weights: list[float] = []
    seen: list[tuple[Tensor, Tensor]] = []
    for decay in decays:
        optimizer.param_groups[0]["factor_decay"] = decay
        x = torch.randn(6, 4, dtype=torch.float64)
        optimizer.zero_grad()
        losses(model(x)).mean().backward()
        optimizer.step()
        weights = [w * decay for w in weights] + [1 - decay]
        seen.append(factors(model, model[0], x, "expand"))
        for i in range(2):
            mean = sum(w * X[i] for w, X in zip(weights, seen, strict=True)) / sum(weights)
            torch.testing.assert_close(held(optimizer, "0")[i], mean)


each_room = pytest.mark.parametrize("small", [0, moment_module.SMALL], ids=["little room", "room for all"])


def moment_of(rows: Tensor, scale: float, diagonal: bool = False) -> Moment:
    """As a step would hand it to a factor, from rows that came in pieces."""
    moment = DiagonalMoment() if diagonal else Moment()
    for part in [rows] if diagonal else rows.split(2, dim=-2):
        moment.add(part)
    assert moment.settle([float(t) for t in moment.readings()])
    moment.scale = scale
    return moment


@pytest.mark.parametrize("identity", [True, False])
@pytest.mark.parametrize("size", [1.0, 1e-18, 1e12], ids=["ordinary", "tiny", "huge"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@each_room
def test_every_kind_of_factor_follows_the_same_average(
    identity: bool, size: float, dtype: torch.dtype, small: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moment_module, "SMALL", small)
    monkeypatch.setattr(moment_module, "CHUNK", 9)  # two rows at a time
    like, start = torch.empty(0, dtype=dtype), Start(identity)
    dense, diagonal, batched = (
        DenseFactor((4,), start, like),
        DiagonalFactor((4,), start, like),
        DenseFactor((2, 4), start, like),
    )
    weight, X, D = 1.0 * identity, torch.eye(4).double() * identity, torch.ones(4).double() * identity
    for step, decay in enumerate((0.9, 0.5, 0.8)):
        rows = torch.randn(3 + 3 * step, 4, dtype=torch.float64) * size  # fewer rows than columns, then more
        keep, take = decay * weight / (decay * weight + 1 - decay), (1 - decay) / (decay * weight + 1 - decay)
        weight = decay * weight + 1 - decay
        moment = rows.to(dtype).double().mT @ rows.to(dtype).double()
        X, D = keep * X + take * 0.3 * moment, keep * D + take * 0.3 * rows[0].abs().to(dtype).double()
        dense.take(moment_of(rows.to(dtype), 0.3), decay)
        batched.take(moment_of(torch.stack([rows, 2 * rows]).to(dtype), 0.3), decay)
        diagonal.take(moment_of(rows[0].abs().to(dtype), 0.3, diagonal=True), decay)
        relative = 1e-5 if dtype == torch.float32 else 1e-12
        for got, expected in ((dense.dense(), X), (batched.dense()[0], X), (diagonal.dense().diagonal(), D)):
            assert torch.linalg.norm(got - expected) <= relative * torch.linalg.norm(expected)


@each_room
def test_pending_statistics_say_whether_they_are_finite(small: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moment_module, "SMALL", small)
    for n in (2, 9):  # kept as rows, summed up
        for bad in (float("nan"), float("inf")):
            moment = Moment()
            rows = torch.ones(n, 4)
            moment.add(rows)
            assert moment.settle([float(t) for t in moment.readings()])
            rows = rows.clone()
            rows[-1, 2] = bad
            moment.add(rows)
            assert not moment.settle([float(t) for t in moment.readings()])


def test_pooled_positions_reduce_to_their_mean() -> None:
    problem = Problem("", lambda: nn.Sequential(nn.Conv2d(2, 3, 2), Mean(2, 3), nn.Linear(3, 2)), (4, 2, 4, 4))
    optimizer, model = statistics(problem, weight_sharing="reduce"), problem.model()
    patches = F.unfold(problem.x(), 2).mean(-1)
    a = torch.cat([patches, patches.new_ones(4, 1)], 1)
    torch.testing.assert_close(held(optimizer, "0")[0][0], a.mT @ a / 4)
    assert model[0].weight.shape == (3, 2, 2, 2)


# --- calls that are no statistics


@pytest.mark.parametrize(
    "module, shape",
    [
        (nn.Linear(4, 3), (5, 4)),
        (nn.Linear(4, 3), (5, 2, 4)),
        (nn.Conv1d(4, 3, 2), (5, 4, 6)),
        (nn.LayerNorm(4), (5, 2, 4)),
        (nn.GroupNorm(2, 4), (5, 4, 3)),
        (nn.RMSNorm(4), (5, 4)),
        (nn.Embedding(4, 3), (5, 2)),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else str(len(value)),
)
def test_a_call_without_samples_leaves_no_trace(module: nn.Module, shape: tuple[int, ...]) -> None:
    model = nn.Sequential(module).double()
    x = torch.randint(0, 4, shape) if isinstance(module, nn.Embedding) else torch.randn(shape, dtype=torch.float64)
    optimizer = kfac(model, factor_decay=0.5)

    def state(batches: list[Tensor]) -> Any:
        optimizer.zero_grad()
        for batch in batches:
            (model(batch).pow(3).sum() / 5).backward()
        optimizer.step()
        return copy.deepcopy(optimizer.state_dict()["curvature"]["blocks"]["0"]["factors"])

    first, empty, both = state([x]), state([x[:0]]), state([x, x[:0]])
    for key in first:
        torch.testing.assert_close(average(empty[key]), average(first[key]))
        torch.testing.assert_close(average(both[key]), average(first[key]))
        assert [one[key]["updates"] for one in (first, empty, both)] == [1, 1, 2]


def test_functional_transforms_of_the_model_leave_no_trace() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3)).double()
    x = torch.randn(5, 4, dtype=torch.float64)
    optimizer, alone = kfac(model), copy.deepcopy(model)
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    vmap(grad(lambda p, s: functional_call(model, p, (s[None],)).sum()), (None, 0))(parameters, x)
    losses(model(x)).mean().backward()
    optimizer.step()
    torch.testing.assert_close(held(optimizer, "0"), factors(alone, alone[0], x, "expand"))
