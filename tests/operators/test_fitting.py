"""Curvature without training: against curvlinops, the dense Fisher, single batches; and a model that is left as it was."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rkfac
from curvature.brute import Enumerated, generalized_gauss_newton, identity, softmax_fisher
from operators.cases import CASES, Case

DOUBLE = torch.float64


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 5)).double()


def cnn() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 3, 2, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(48, 5)).double()


def classified(n: int = 12, *shape: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, *(shape or (4,)), dtype=DOUBLE), torch.randint(0, 5, (n,))


def batches(x: Tensor, y: Tensor, *sizes: int) -> list[tuple[Tensor, Tensor]]:
    return list(zip(x.split(sizes), y.split(sizes), strict=True))


def matrix(operator: rkfac.Operator) -> Tensor:
    return operator @ torch.eye(operator.shape[0], dtype=DOUBLE)


def mean(case: Case) -> Any:
    return lambda output, target: (output.flatten(1).sin() * target).sum(1).mean()


# --- what it is


@pytest.mark.parametrize("build, shape", [(mlp, (4,)), (cnn, (2, 3, 3))], ids=["mlp", "cnn"])
@pytest.mark.parametrize("fisher, theirs", [("empirical", "empirical"), ("exact", "type-2")])
def test_inverses_are_those_of_curvlinops(build: Any, shape: tuple[int, ...], fisher: Any, theirs: str) -> None:
    """Plain, heuristic and exact damping there are the factored, pi and product rules here; two batches of other sizes."""
    curvlinops = pytest.importorskip("curvlinops")
    torch.manual_seed(3)
    model, (x, y) = build(), classified(12, *shape)
    data = batches(x, y, 5, 7)
    found = rkfac.fit_curvature(model, data, F.cross_entropy, fisher=fisher, damping=0.07, relative_to=None)
    assert found.samples == 12
    for name, operator in found.items():
        parameters = list(model.get_submodule(name).parameters())
        factors = curvlinops.KFACLinearOperator(
            model, nn.CrossEntropyLoss(), parameters, data, check_deterministic=False, separate_weight_and_bias=False,
            fisher_type=theirs,
        )  # fmt: skip
        eye = torch.eye(operator.shape[0], dtype=DOUBLE)
        torch.testing.assert_close(found.damped(0.0)[name] @ eye, factors @ eye)
        rules: dict[Any, dict[str, bool]] = {
            "factored": {},
            "pi": {"use_heuristic_damping": True},
            "product": {"use_exact_damping": True},
        }
        if name == "0" and build is cnn:
            del rules[
                "factored"
            ]  # which depends on how a scale is split between the two factors: otherwise for positions
        for rule, keywords in rules.items():
            inverse = curvlinops.KFACInverseLinearOperator(factors, damping=0.07, **keywords)
            torch.testing.assert_close(found.damped(0.07, damping_rule=rule)[name].solve(eye), inverse @ eye)


@pytest.mark.parametrize("fisher, theirs", [("empirical", "empirical"), ("exact", "type-2")])
def test_second_moments_are_those_of_curvlinops(fisher: Any, theirs: str) -> None:
    curvlinops = pytest.importorskip("curvlinops")
    model, (x, y) = mlp(), classified(30)
    data = batches(x, y, 10, 20)
    found = rkfac.fit_curvature(
        model, data, F.cross_entropy, fisher=fisher, eigenvalues="moments", damping=0.0, relative_to=None
    )
    assert found.samples == 30
    for name, operator in found.items():
        expected = curvlinops.EKFACLinearOperator(
            model, nn.CrossEntropyLoss(), list(model.get_submodule(name).parameters()), data, fisher_type=theirs,
            check_deterministic=False, separate_weight_and_bias=False,
        ) @ torch.eye(operator.shape[0], dtype=DOUBLE)  # fmt: skip
        torch.testing.assert_close(matrix(operator), expected)


def test_second_moments_have_the_trace_of_the_fisher_and_are_closer_to_it() -> None:
    """They are its diagonal in the bases, the best there is; K-FAC's products are another diagonal in the same."""
    model, (x, y) = mlp(), classified(30)
    settings: dict[str, Any] = {"fisher": "exact", "damping": 0.0}
    products, moments = (
        rkfac.fit_curvature(model, batches(x, y, 10, 20), F.cross_entropy, eigenvalues=kind, **settings)
        for kind in ("products", "moments")
    )
    for name in moments:
        exact = generalized_gauss_newton(model, name, x, softmax_fisher).detach()
        assert moments[name].trace() == pytest.approx(float(exact.trace()), rel=1e-9)
        assert (matrix(moments[name]) - exact).norm() < 0.95 * (matrix(products[name]) - exact).norm()
    damped = moments.damped(0.3, relative_to=None)
    for name in moments:
        eye = torch.eye(moments[name].shape[0], dtype=DOUBLE)
        torch.testing.assert_close(matrix(damped[name]), matrix(moments[name]) + 0.3 * eye)
    with pytest.raises(ValueError, match="damping_rule='pi' damps factors, and layer '0' has second moments"):
        moments.damped(0.3, damping_rule="pi")


@pytest.mark.parametrize(
    "likelihood",
    [rkfac.Categorical(), rkfac.Categorical(class_dim=1), rkfac.Gaussian(), rkfac.Bernoulli()],
    ids=str,
)
def test_columns_are_the_second_moment_of_what_is_drawn(likelihood: Any) -> None:
    """Of one output, within 5 standard errors of 20000 draws, entry by entry."""
    shape = (1, 3, 2) if likelihood == rkfac.Categorical(class_dim=1) else (1, 3)
    output, generator, draws = torch.randn(shape, dtype=DOUBLE), torch.Generator().manual_seed(0), 20_000
    columns = [likelihood.column(output, k).flatten() for k in range(likelihood.columns(output))]
    found = torch.stack(columns)
    if len(shape) == 3:  # positions are samples of their own
        found = torch.cat([found * position for position in torch.eye(2, dtype=DOUBLE).repeat(1, 3)])
    many = likelihood.draw_gradient(output.expand(draws, *shape[1:]), generator).flatten(1)
    products = many[:, :, None] * many[:, None]
    error = products.std(0) / draws**0.5
    assert ((found.T @ found - products.mean(0)).abs() <= 5 * error + 1e-12).all()


@pytest.mark.parametrize("kind", ["gaussian", "categorical", "bernoulli"])
def test_the_exact_fisher_is_the_ggn_where_kfac_is_exact(kind: Any) -> None:
    """One sample: then the Kronecker product is no approximation."""
    model, x = mlp(), torch.randn(1, 4, dtype=DOUBLE)
    losses: dict[str, Any] = {
        "gaussian": lambda y, t: (y - t).square().sum() / 2,
        "categorical": lambda y, t: F.cross_entropy(y, t.argmax(1)),
        "bernoulli": lambda y, t: F.binary_cross_entropy_with_logits(y, t, reduction="sum"),
    }
    hessians: dict[str, Any] = {
        "gaussian": identity,
        "categorical": softmax_fisher,
        "bernoulli": lambda y: torch.diag(y.sigmoid() * (1 - y.sigmoid())),
    }
    data = [(x, torch.rand(1, 5, dtype=DOUBLE))]
    found = rkfac.fit_curvature(model, data, losses[kind], fisher="exact", likelihood=kind, damping=0.0)
    for name, operator in found.items():
        expected = generalized_gauss_newton(model, name, x, hessians[kind])
        torch.testing.assert_close(matrix(operator), expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("case", [case for case in CASES if case.name != "tied"], ids=attrgetter("name"))
def test_batches_of_any_sizes_are_one(case: Case) -> None:
    """But for a table that is also a head, whose two uses are weighed batch by batch."""
    model, x = case.model(), case.x()
    target = torch.randn(len(x), 1, dtype=DOUBLE)
    whole = rkfac.fit_curvature(model, [(x, target)], mean(case))
    parts = rkfac.fit_curvature(model, batches(x, target, 1, len(x) - 1), mean(case))
    assert whole.keys() == parts.keys()
    assert whole.samples == parts.samples
    for name in whole:
        torch.testing.assert_close(matrix(parts[name]), matrix(whole[name]), rtol=1e-8, atol=1e-12)


def test_a_tied_table_is_covered() -> None:
    case = next(case for case in CASES if case.name == "tied")
    x = case.x()
    found = rkfac.fit_curvature(case.model(), [(x, torch.randn(len(x), 1, dtype=DOUBLE))], mean(case))
    assert list(found) == ["table"]
    assert found["table"].shape == (15, 15)
    assert not found.left_out


def test_it_is_what_an_optimizer_that_stands_still_collects() -> None:
    model, (x, y) = cnn(), classified(12, 2, 3, 3)
    found = rkfac.fit_curvature(model, [(x, y)], F.cross_entropy, damping=0.2)
    optimizer = rkfac.KFAC(model, lr=0.0, damping=0.2, rows=None)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    for name, operator in optimizer.curvature().items():
        torch.testing.assert_close(matrix(found[name]), matrix(operator))


def test_many_draws_are_averaged() -> None:
    """Draws that go through the columns of the exact Fisher have it as their mean."""
    model, (x, y) = mlp(), classified()
    exact = rkfac.fit_curvature(model, [(x, y)], F.cross_entropy, fisher="exact")
    drawn = rkfac.fit_curvature(
        model, [(x, y)], F.cross_entropy, fisher="mc", likelihood=Enumerated("categorical"), draws=5
    )
    assert drawn.samples == exact.samples == 12
    for name in exact:
        torch.testing.assert_close(matrix(drawn[name]), matrix(exact[name]))
    sampled = [rkfac.fit_curvature(model, [(x, y)], F.cross_entropy, fisher="mc", draws=80, seed=s) for s in (0, 0, 1)]
    assert sampled[0].trace() == sampled[1].trace() != sampled[2].trace()
    assert sampled[0].damped(0.0).trace() == pytest.approx(exact.damped(0.0).trace(), rel=0.15)


def test_sums_and_means_of_losses_are_the_same_curvature() -> None:
    model, (x, y) = mlp(), classified()
    averaged = rkfac.fit_curvature(model, [(x, y)], F.cross_entropy)
    summed = rkfac.fit_curvature(
        model, [(x, y)], lambda y, t: F.cross_entropy(y, t, reduction="sum"), loss_average="sum"
    )
    for name in averaged:
        torch.testing.assert_close(matrix(summed[name]), matrix(averaged[name]))


def test_inputs_may_be_several() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 5)

        def forward(self, x: Tensor, scale: Tensor) -> Tensor:
            return self.layer(x) * scale

    model, (x, y), scale = Two().double(), classified(), torch.rand(12, 1, dtype=DOUBLE)
    found = [
        rkfac.fit_curvature(model, [(inputs, y)], F.cross_entropy)["layer"].diagonal()
        for inputs in ((x, scale), {"x": x, "scale": scale})
    ]
    torch.testing.assert_close(*found)


def test_small_dampings_have_digits_in_float32_too() -> None:
    """Eigenpairs are made in float64, for the damping may become any later."""
    model, (x, y) = mlp(), classified(200)
    double = rkfac.fit_curvature(model, [(x, y)], F.cross_entropy).damped(1e-5)
    single = rkfac.fit_curvature(model.float(), [(x.float(), y)], F.cross_entropy).damped(1e-5)
    v = torch.randn(15, dtype=DOUBLE)
    expected = double["0"].solve(v)
    assert float((single["0"].solve(v) - expected).norm() / expected.norm()) < 1e-3


def test_low_ranks_keep_their_trace_and_full_ranks_are_exact() -> None:
    model, (x, y) = mlp(), classified()

    def fit(**keywords: Any) -> rkfac.Curvature:
        return rkfac.fit_curvature(model, [(x, y)], F.cross_entropy, damping=0.0, **keywords)

    exact, whole = fit(), fit(decomposition=rkfac.Nystrom(), rank=9)
    low = fit(decomposition=rkfac.Nystrom(), rank=2)
    for name in exact:
        torch.testing.assert_close(matrix(whole[name]), matrix(exact[name]), rtol=1e-7, atol=1e-10)
        assert low[name].trace() == pytest.approx(exact[name].trace(), rel=1e-9)
        assert not torch.allclose(matrix(low[name]), matrix(exact[name]))


def test_another_damping_needs_no_other_fit() -> None:
    model, data = mlp(), [classified()]
    found = rkfac.fit_curvature(model, data, F.cross_entropy, damping=1.0)
    for rule, measure in (("pi", "mean"), ("product", None), ("factored", "largest")):
        settings: dict[str, Any] = {"damping_rule": rule, "relative_to": measure}
        again = rkfac.fit_curvature(model, data, F.cross_entropy, damping=0.03, **settings)
        changed = found.damped(0.03, **settings)
        for name in found:
            torch.testing.assert_close(matrix(changed[name]), matrix(again[name]))
    assert found.damped(0.5).layers["0"].rule == found.layers["0"].rule


# --- refusals


def test_refusals_say_what_to_do() -> None:
    model, (x, y) = mlp(), classified()
    fit = rkfac.fit_curvature
    ce: Any = F.cross_entropy
    with pytest.raises(ValueError, match="there are no batches"):
        fit(model, [], ce)
    with pytest.raises(ValueError, match=r"pairs \(inputs, targets\), batch 1 is a Tensor"):
        fit(model, x, ce)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="loss must return one number"):
        fit(model, [(x, y)], lambda o, t: F.cross_entropy(o, t, reduction="none"))
    spoilt = "batch 2 has activations or gradients that are not finite, in '0'"
    with pytest.warns(UserWarning, match="with NaN or Inf"), pytest.raises(ValueError, match=spoilt):
        fit(model, [(x, y), (x * torch.nan, y)], ce)
    with pytest.raises(ValueError, match="draws=3 goes with fisher='mc'"):
        fit(model, [(x, y)], ce, draws=3)
    with pytest.raises(NotImplementedError, match="Enumerated does not say what its Fisher is the sum of"):
        fit(model, [(x, y)], ce, fisher="exact", likelihood=Enumerated("categorical"))
    with pytest.raises(ValueError, match="say where the classes are"):
        fit(model, [(x[:, None], y)], lambda o, t: ce(o[:, 0], t), fisher="exact")
    with pytest.raises(ValueError, match="a generator that was used up"):
        fit(model, (batch for batch in [(x, y)]), ce, eigenvalues="moments")  # which goes through them twice
    with pytest.raises(ValueError, match="damping_rule"):
        fit(model, [(x, y)], ce, eigenvalues="moments", damping_rule="pi")
    with pytest.raises(ValueError, match="fisher"):
        fit(model, [(x, y)], ce, fisher="true")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="matches no module"):
        fit(model, [(x, y)], ce, include="head")
    with pytest.raises(ValueError, match="no layer of the model has a curvature: '0': no adapter for PReLU"):
        fit(nn.Sequential(nn.PReLU()), [(x, y)], ce)
    with torch.inference_mode(), pytest.raises(RuntimeError, match=r"outside of torch\.inference_mode"):
        fit(model, [(x, y)], ce)
    with pytest.raises(ValueError, match="give it a positive damping"):
        fit(model, [(x[:1], y[:1])], ce, damping=0.0)["0"].solve(torch.ones(15, dtype=DOUBLE))
