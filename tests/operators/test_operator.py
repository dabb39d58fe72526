"""An operator of a layer is the dense matrix that it stands for, in everything it does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rkfac
from operators.cases import CASES, Case, compare, dense, each_case, loss, trained

RANKS: dict[str, dict[str, Any]] = {
    "exact": {},
    "low rank": {"decomposition": rkfac.Nystrom(), "rank": 2, "tail": "trace"},
    "paper": {"decomposition": rkfac.RSVD(), "rank": 2, "tail": "zero"},
}
by_name = {case.name: case for case in CASES}


@each_case
@pytest.mark.parametrize("rule", ["factored", "product", "pi"])
@pytest.mark.parametrize("ranks", RANKS)
def test_is_the_block_s_own_matrix(case: Case, rule: str, ranks: str) -> None:
    optimizer = trained(case, damping_rule=rule, **RANKS[ranks])
    for name, operator in optimizer.curvature().items():
        compare(operator, dense(optimizer, name))


@pytest.mark.parametrize("sides", ["input", "output"])
@pytest.mark.parametrize("rule", ["factored", "product", "pi"])
def test_of_one_side_alone(sides: str, rule: str) -> None:
    optimizer = trained(by_name["linear"], sides=sides, damping_rule=rule)
    for name, operator in optimizer.curvature().items():
        compare(operator, dense(optimizer, name))


@pytest.mark.parametrize("measure", ["mean", "largest", None])
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("case", ["linear", "groups", "embedding", "norms"])
def test_of_second_moments_in_the_bases(case: str, ranks: str, measure: Any) -> None:
    optimizer = trained(by_name[case], rkfac.EKFAC, steps=2, relative_to=measure, **RANKS[ranks])
    for name, operator in optimizer.curvature().items():
        compare(operator, dense(optimizer, name))


@pytest.mark.parametrize("kind", [rkfac.BKFAC, rkfac.SKFAC])
def test_of_factors_that_are_never_formed(kind: type[rkfac.KFAC]) -> None:
    optimizer = trained(Case("wide", lambda: nn.Linear(14, 12), (3, 14)), kind, rank=3)
    compare(optimizer.curvature(""), dense(optimizer, ""))


def kronecker(A: Tensor, G: Tensor, damping_A: float, damping_G: float, extra: float) -> Tensor:
    """(G + l_G) (x) (A + l_A) + l on a matrix flattened row by row."""
    A, G = (X + l * torch.eye(len(X)).double() for X, l in ((A, damping_A), (G, damping_G)))
    return torch.kron(G, A) + extra * torch.eye(len(A) * len(G)).double()


@pytest.mark.parametrize("rule", ["factored", "product", "pi"])
@pytest.mark.parametrize("case", ["linear", "groups", "embedding"])
def test_is_the_kronecker_product_of_its_factors(case: str, rule: str) -> None:
    """Written out with torch.kron, and with the order of entries of each kind of layer."""
    optimizer = trained(by_name[case], damping_rule=rule, relative_to=None)
    name, block = next(iter(optimizer._blocks.items()))
    A, G = (factor.dense() for factor in block.factors.values())
    A, G = A.reshape(-1, *A.shape[-2:]), G.reshape(-1, *G.shape[-2:])
    l, parts = 0.3, []
    for a, g in zip(A, G, strict=True):
        pi = float((a.trace() / len(a) / (g.trace() / len(g))).sqrt())
        dampings = {"factored": (l, l, 0.0), "product": (0.0, 0.0, l), "pi": (pi * l**0.5, l**0.5 / pi, 0.0)}
        parts.append(kronecker(a, g, *dampings[rule]))
    C, (groups, d_G, d_A) = torch.block_diag(*parts), (len(A), G.shape[-1], A.shape[-1])
    index = torch.arange(len(C)).view(groups, d_G, d_A)
    if case == "embedding":  # a table's rows are the inputs
        order = index[0].T.flatten()
    else:
        order = torch.cat([index[..., :-1].flatten(), index[..., -1].flatten()])
    compare(optimizer.curvature(name), C[order][:, order])


@pytest.mark.parametrize("case", ["linear", "groups", "tied", "norms", "attention"])
@pytest.mark.parametrize("kind", [rkfac.KFAC, rkfac.RSKFAC, rkfac.EKFAC])
def test_a_step_is_its_solve(case: str, kind: type[rkfac.KFAC]) -> None:
    """Under graft=None, without momentum and with a rate of one, a step takes C^-1 times the gradient off."""
    model, x = by_name[case].model(), by_name[case].x()
    optimizer = kind(model, lr=1.0, graft=None, momentum=0.0, rows=None, factor_every=1, inverse_every=1)
    for _ in range(2):
        optimizer.zero_grad()
        loss(model(x)).backward()
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        optimizer.step()
    moved = {name: before[name] - p.detach() for name, p in model.named_parameters()}
    gradients = {name: p.grad for name, p in model.named_parameters()}
    covered = [name for operator in optimizer.curvature().values() for name in operator.parameters]
    assert covered
    found = optimizer.inverse_vector_product({name: gradients[name] for name in covered})
    for name in covered:
        torch.testing.assert_close(found[name], moved[name], rtol=1e-6, atol=1e-10)


@pytest.mark.parametrize("strategy", [rkfac.RSVD(), rkfac.SREVD(), rkfac.Nystrom()])
def test_a_sketch_of_full_rank_is_the_exact_operator(strategy: Any) -> None:
    case = by_name["linear"]
    exact, sketched = (trained(case, decomposition=s, rank=40).curvature() for s in (rkfac.Exact(), strategy))
    for name, operator in sketched.items():
        eye = torch.eye(operator.shape[0]).double()
        torch.testing.assert_close(operator.solve(eye), exact[name].solve(eye), rtol=1e-7, atol=1e-9)


def test_another_damping_than_that_in_force() -> None:
    small, large = (trained(by_name["linear"], damping=damping, relative_to="largest") for damping in (0.01, 5.0))
    C, expected = small.curvature("0", damping=5.0), large.curvature("0")
    torch.testing.assert_close(C.diagonal(), expected.diagonal())
    assert C.logdet() > small.curvature("0").logdet()


def test_groups_of_parameters_have_dampings_of_their_own() -> None:
    model, x = by_name["linear"].model(), by_name["linear"].x()
    groups = [{"params": model[0].parameters(), "damping": 0.1}, {"params": model[2].parameters(), "damping": 7.0}]
    optimizer = rkfac.KFAC(model, lr=0.0, params=groups, rows=None)
    loss(model(x)).backward()
    optimizer.step()
    whole = optimizer.curvature()
    for name, damping in (("0", 0.1), ("2", 7.0)):
        torch.testing.assert_close(whole[name].diagonal(), optimizer.curvature(name, damping=damping).diagonal())


def test_stays_what_it_was_when_the_optimizer_goes_on() -> None:
    model, x = by_name["linear"].model(), by_name["linear"].x()
    optimizer = rkfac.KFAC(model, lr=0.5, rows=None, factor_every=1, inverse_every=1)
    loss(model(x)).backward()
    optimizer.step()
    C = optimizer.curvature("0")
    before = C.diagonal()
    for _ in range(3):
        optimizer.zero_grad()
        loss(model(x)).backward()
        optimizer.step()
    assert torch.equal(C.diagonal(), before)
    assert not torch.allclose(optimizer.curvature("0").diagonal(), before)


def test_vectors_keep_their_precision_and_tensors_their_shapes() -> None:
    optimizer = trained(by_name["convolution"])
    C, layer = optimizer.curvature("0"), optimizer._model[0]
    tensors = (torch.randn_like(layer.weight), torch.randn_like(layer.bias))
    v = C.flatten(tensors)
    assert torch.equal(v, torch.cat([t.flatten() for t in tensors]))
    for back, given in zip(C.unflatten(v), tensors, strict=True):
        assert torch.equal(back, given)
    for dtype in (torch.float32, torch.bfloat16):
        solved = C.solve(v.to(dtype))
        assert solved.dtype == dtype
        torch.testing.assert_close(solved, C.solve(v.to(dtype).double()).to(dtype))
    assert C.parameters == ("0.weight", "0.bias")


def test_a_wide_layer_is_never_a_matrix_over_its_parameters() -> None:
    """A matrix over its 2.25 million parameters would have 40 terabytes."""
    layer, x = nn.Linear(1500, 1500, bias=False), torch.randn(20, 1500)
    optimizer = rkfac.RSKFAC(layer, lr=0.0, rank=8)
    layer(x).square().mean().backward()
    optimizer.step()
    C = optimizer.curvature("")
    v = torch.randn(C.shape[0], dtype=torch.float64)
    torch.testing.assert_close(C.solve(C @ v), v, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(C.sqrt_solve(C.sqrt_solve(C @ v)), v, rtol=1e-9, atol=1e-9)
    assert C.diagonal().sum().item() == pytest.approx(C.trace(), rel=1e-9)


def test_scipy_takes_it_for_one_of_its_own() -> None:
    linalg = pytest.importorskip("scipy.sparse.linalg")
    numpy = pytest.importorskip("numpy")
    optimizer = trained(by_name["linear"])
    C, D = optimizer.curvature("0"), dense(optimizer, "0").numpy()
    A, inverse = linalg.aslinearoperator(C), linalg.aslinearoperator(C.inverse)
    assert A.dtype == numpy.float64
    b = numpy.random.default_rng(0).standard_normal((len(D), 3))
    numpy.testing.assert_allclose(A @ b, D @ b, rtol=1e-9)
    numpy.testing.assert_allclose(A.T @ b[:, 0], D @ b[:, 0], rtol=1e-9)
    solution, trouble = linalg.cg(A, b[:, 0], rtol=1e-12)
    assert trouble == 0
    numpy.testing.assert_allclose(solution, numpy.linalg.solve(D, b[:, 0]), rtol=1e-6)
    steps = []
    linalg.cg(A, b[:, 0], M=inverse, rtol=1e-10, callback=lambda x: steps.append(x))
    assert len(steps) <= 2  # its own inverse is the perfect preconditioner
    largest = linalg.eigsh(A, k=2, which="LA", return_eigenvectors=False)
    numpy.testing.assert_allclose(numpy.sort(largest), numpy.linalg.eigvalsh(D)[-2:], rtol=1e-8)


# --- refusals


def test_what_has_no_operator_is_refused_by_name() -> None:
    model, x = by_name["linear"].model(), by_name["linear"].x()
    seng = rkfac.SENG(model, lr=0.0)
    loss(model(x)).backward()
    seng.step()
    for name in ("0", None):
        with pytest.raises(ValueError, match=r"layer '0' has no such operator.*SENG.*fit_curvature"):
            seng.curvature(name)
    with pytest.raises(ValueError, match=r"layer '0' has no such operator.*KLD-WRM.*fit_curvature"):
        trained(by_name["linear"], rkfac.KLDWRM).curvature("0")


def test_layers_without_curvature_are_refused_with_the_reason() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.PReLU(), nn.Linear(3, 2)).double()
    optimizer = rkfac.KFAC(model, exclude="2")
    with pytest.raises(ValueError, match=r"no preconditioned layer is called 'head'; there are '0'"):
        optimizer.curvature("head")
    with pytest.raises(ValueError, match=r"'2' has no curvature: excluded by pattern"):
        optimizer.curvature("2")
    with pytest.raises(ValueError, match=r"'1' has no curvature: no adapter for PReLU"):
        optimizer.curvature("1")
    with pytest.raises(ValueError, match=r"layer '0' has no curvature at the moment: no statistics yet"):
        optimizer.curvature("0")
    with pytest.raises(ValueError, match="damping"):
        optimizer.curvature("0", damping=-1.0)


def test_vectors_that_do_not_fit_are_refused() -> None:
    C = trained(by_name["linear"]).curvature("0")
    for v in (torch.randn(14).double(), torch.randn(15, 1, 1).double(), torch.arange(15)):
        with pytest.raises(ValueError, match="has 15 parameters"):
            C @ v
    with pytest.raises(ValueError, match=r"expected \[\(3, 4\), \(3,\)\]"):
        C.flatten((torch.randn(4, 3), torch.randn(3)))
