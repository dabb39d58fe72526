"""A Laplace approximation: how sure a small regression network is, drawn, and compared with the dense posterior.

The posterior is N(weights, (N/s^2 F + p I)^-1), F the Fisher matrix of the outputs (unit variance), s the noise and p the
prior's precision: s^2/N (F + d I)^-1 with d = p s^2 / N, an absolute damping under the product rule. The standard deviation of
an output is that of the network's linearisation, sqrt(J C^-1 J^T). The reference is the same with the whole matrix of all
parameters, formed and inverted, which K-FAC takes for block-diagonal and each block for a Kronecker product.

    python examples/curvature_laplace.py [picture.png]
"""

from __future__ import annotations

import sys

import matplotlib.pyplot as plt
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap

import rkfac

NOISE, PRIOR = 0.15, 0.1


def data() -> tuple[Tensor, Tensor]:
    """A wave with a gap, and nothing beyond its ends."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.rand(30, 1, generator=generator, dtype=torch.float64) for _ in range(2))
    x = torch.cat([2.2 * left - 3.0, 1.5 * right + 0.9])
    return x, torch.sin(1.6 * x) + NOISE * torch.randn(x.shape, generator=generator, dtype=torch.float64)


def trained(x: Tensor, y: Tensor) -> nn.Module:
    """A network at the most probable weights."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=600, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        weights = sum((p.square().sum() for p in model.parameters()), torch.zeros((), dtype=torch.float64))
        loss = (model(x) - y).square().sum() / (2 * NOISE**2) + PRIOR / 2 * weights
        loss.backward()
        return loss

    optimizer.step(closure)  # type: ignore[arg-type]
    return model


def jacobians(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Of the output with respect to every parameter, a row a sample."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def output(p: dict[str, Tensor], one: Tensor) -> Tensor:
        return functional_call(model, p, (one[None],)).squeeze()

    return vmap(jacrev(output), (None, 0))(parameters, x)


def squared_error(output: Tensor, target: Tensor) -> Tensor:
    """The mean over samples; its Fisher matrix is that of a variance of one."""
    return (output - target).square().sum() / (2 * len(target))


def deviations(curvature: rkfac.Curvature, J: dict[str, Tensor], names: list[str]) -> Tensor:
    """Standard deviation of every output under the posterior of these parameters."""
    assert curvature.samples is not None
    found = []
    for n in range(len(J[names[0]])):
        row = {name: J[name][n] for name in names}
        solved = curvature.inverse_vector_product(row)
        found.append(sum(float((row[name] * solved[name]).sum()) for name in names))
    return torch.tensor(found, dtype=torch.float64).sqrt() * NOISE / curvature.samples**0.5


def dense_deviations(J_data: dict[str, Tensor], J: dict[str, Tensor], names: list[str]) -> Tensor:
    """The same with the whole matrix."""
    seen, asked = (torch.cat([rows[name].flatten(1) for name in names], 1) for rows in (J_data, J))
    precision = seen.T @ seen / NOISE**2 + PRIOR * torch.eye(seen.shape[1], dtype=torch.float64)
    return (asked * torch.linalg.solve(precision, asked.T).T).sum(1).sqrt()


def draw(path: str, grid: Tensor, mean: Tensor, found: Tensor, dense: Tensor, x: Tensor, y: Tensor) -> None:
    """The data, the network, and two standard deviations on either side of it."""
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    line, middle = grid[:, 0].numpy(), mean[:, 0].numpy()
    width = 2 * found.numpy()
    axes.fill_between(line, middle - width, middle + width, alpha=0.25, label="2 deviations, K-FAC")
    for sign in (-1, 1):
        label = "2 deviations, dense matrix" if sign > 0 else None
        axes.plot(line, middle + sign * 2 * dense.numpy(), "--", color="tab:red", linewidth=1, label=label)
    axes.plot(line, middle, color="tab:blue", label="the network")
    axes.plot(x[:, 0].numpy(), y[:, 0].numpy(), ".", color="black", markersize=4, label="data")
    axes.set(
        xlabel="input", ylabel="output", ylim=(-4, 4.5), title="Laplace approximation of a network with 321 parameters"
    )
    axes.legend(loc="upper center", ncols=4, fontsize="small")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(path: str = "laplace.png") -> dict[str, float]:
    """Fit, compare, draw."""
    x, y = data()
    model = trained(x, y)
    curvature = rkfac.fit_curvature(
        model,
        [(x, y)],
        squared_error,
        fisher="exact",
        likelihood="gaussian",
        damping=PRIOR * NOISE**2 / len(x),
        damping_rule="product",
        relative_to=None,
    )
    grid = torch.linspace(-4.5, 4.5, 91, dtype=torch.float64)[:, None]
    J_data, J, names = jacobians(model, x), jacobians(model, grid), [name for name, _ in model.named_parameters()]
    found, dense = deviations(curvature, J, names), dense_deviations(J_data, J, names)
    correlation = float(torch.corrcoef(torch.stack([found.log(), dense.log()]))[0, 1])
    ratio = float((found / dense).median())
    near = (grid - x.T).abs().amin(1) < 0.1
    last = names[-2:]  # of one output: there a Kronecker product is no approximation
    exact = dense_deviations(J_data, J, last)
    difference = float(((deviations(curvature, J, last) - exact) / exact).abs().max())
    draw(path, grid, model(grid).detach(), found, dense, x, y)
    print(f"deviation where there are data: {found[near].mean():.3f} (dense {dense[near].mean():.3f});")
    print(f"where there are none: {found[~near].mean():.3f} (dense {dense[~near].mean():.3f})")
    print(
        f"K-FAC beside the dense matrix, all layers: log deviations correlate by {correlation:.3f}, median ratio {ratio:.2f}"
    )
    print(f"the last layer alone, where K-FAC is exact: largest relative difference {difference:.1e}")
    print(f"drawn in {path}")
    return {
        "correlation": correlation,
        "ratio": ratio,
        "last layer": difference,
        "near": float(found[near].mean()),
        "far": float(found[~near].mean()),
    }


if __name__ == "__main__":
    main(*sys.argv[1:2])
