"""Two networks that know different digits become one that knows all of them.

Both start from the same weights; one is trained on some classes, the other one on the rest. Around its own minimum each loss is
about (w - w_i)^T C_i (w - w_i) / 2, and the sum of both has its minimum at (C_1 + C_2)^-1 (C_1 w_1 + C_2 w_2): an average in
which each network decides about the directions that it knows something of. A sum of two Kronecker products is none, so that
the system is solved by conjugate gradients with products alone, layer by layer. The damping is chosen on a part of the training
data. The references: plain averages, and for two small networks the same system with dense matrices.

    python examples/curvature_merging.py
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rkfac
from digits import tensors

HELD_BACK = 256  # training samples that dampings are chosen on
DAMPINGS = (1e-2, 1e-3, 1e-4, 1e-5)


def trained(model: nn.Module, x: Tensor, y: Tensor) -> nn.Module:
    """A copy after 400 steps of SGD."""
    model, generator = copy.deepcopy(model), torch.Generator().manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(400):
        some = torch.randint(len(x), (64,), generator=generator)
        optimizer.zero_grad()
        F.cross_entropy(model(x[some]), y[some]).backward()
        optimizer.step()
    return model


def solve(operators: Sequence[rkfac.Operator], weights: Sequence[Tensor]) -> Tensor:
    """(sum C_i)^-1 sum C_i w_i by conjugate gradients, from the plain average on."""

    def times(v: Tensor) -> Tensor:
        return torch.stack([C @ v for C in operators]).sum(0)

    right = torch.stack([C @ w for C, w in zip(operators, weights, strict=True)]).sum(0)
    w = torch.stack(list(weights)).mean(0)
    residual = right - times(w)
    direction, square = residual.clone(), residual @ residual
    for _ in range(1000):
        if square.sqrt() <= 1e-8 * right.norm():
            break
        product = times(direction)
        step = square / (direction @ product)
        w, residual = w + step * direction, residual - step * product
        before, square = square, residual @ residual
        direction = residual + square / before * direction
    return w


def merged(models: Sequence[nn.Module], curvatures: Sequence[rkfac.Curvature]) -> nn.Module:
    """One network of several."""
    made, found = copy.deepcopy(models[0]), dict[str, Tensor]()
    states = [model.state_dict() for model in models]
    for name in curvatures[0]:
        operators = [curvature[name] for curvature in curvatures]
        C = operators[0]
        weights = [C.flatten([state[key].double() for key in C.parameters]) for state in states]
        found |= dict(zip(C.parameters, C.unflatten(solve(operators, weights)), strict=True))
    made.load_state_dict(found)
    return made


def averaged(models: Sequence[nn.Module]) -> nn.Module:
    """Plain averages of all weights."""
    made, states = copy.deepcopy(models[0]), [model.state_dict() for model in models]
    made.load_state_dict({key: torch.stack([state[key] for state in states]).mean(0) for key in states[0]})
    return made


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """In per cent."""
    return 100 * float((model(x).argmax(1) == y).double().mean())


def agrees_with_dense() -> float:
    """Largest relative difference from the same system with both matrices formed, for two small networks."""
    torch.manual_seed(0)
    x, y = torch.randn(50, 4, dtype=torch.float64), torch.randint(0, 3, (50,))
    models = [nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double() for _ in range(2)]
    curvatures = [rkfac.fit_curvature(model, [(x, y)], F.cross_entropy, fisher="exact") for model in models]
    found, worst = merged(models, curvatures).state_dict(), 0.0
    for name, C in curvatures[0].items():
        matrices = [curvature[name] @ torch.eye(C.shape[0], dtype=torch.float64) for curvature in curvatures]
        weights = [C.flatten([model.state_dict()[key] for key in C.parameters]) for model in models]
        right = sum((M @ w for M, w in zip(matrices, weights, strict=True)), torch.zeros_like(weights[0]))
        expected = torch.linalg.solve(matrices[0] + matrices[1], right)
        difference = (C.flatten([found[key] for key in C.parameters]) - expected).norm() / expected.norm()
        worst = max(worst, float(difference))
    return worst


def merge_digits(classes: int) -> dict[str, float]:
    """One network for the first so many digits, one for the others: test accuracies on all ten of what they become."""
    x, y, x_test, y_test = tensors()
    x_held, y_held, x, y = x[:HELD_BACK], y[:HELD_BACK], x[HELD_BACK:], y[HELD_BACK:]
    torch.manual_seed(0)
    start = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    parts = [y < classes, y >= classes]
    models = [trained(start, x[part], y[part]) for part in parts]
    curvatures = [
        rkfac.fit_curvature(
            model, [(x[part], y[part])], F.cross_entropy, fisher="exact", damping_rule="product", relative_to=None
        )
        for model, part in zip(models, parts, strict=True)
    ]
    candidates = [merged(models, [curvature.damped(damping) for curvature in curvatures]) for damping in DAMPINGS]
    best = max(candidates, key=lambda model: accuracy(model, x_held, y_held))
    return {
        "first": accuracy(models[0], x_test, y_test),
        "second": accuracy(models[1], x_test, y_test),
        "average": accuracy(averaged(models), x_test, y_test),
        "merged": accuracy(best, x_test, y_test),
    }


def main() -> dict[int, dict[str, float]]:
    """Two ways to divide the digits."""
    found = {}
    for classes in (5, 8):
        found[classes] = a = merge_digits(classes)
        print(f"digits 0 to {classes - 1} and {classes} to 9, test accuracy on all ten:")
        print(f"  the two networks {a['first']:.1f} % and {a['second']:.1f} %, averaged {a['average']:.1f} %,", end=" ")
        print(f"merged by curvature {a['merged']:.1f} %")
    print(
        f"conjugate gradients beside the dense system of two small networks: relative difference {agrees_with_dense():.1e}"
    )
    return found


if __name__ == "__main__":
    main()
