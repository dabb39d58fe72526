"""Influence of training samples on a test loss, compared with training again without them.

To first order, leaving a sample out changes the weights by C^-1 g / N, g its gradient and C the curvature of the training loss
with its weight decay, and the test loss by the inner product of that with its own gradient. One solve for the test gradient
gives the influence of every training sample. The reference is the truth: a softmax regression on digits, whose loss has one
minimum, is trained again without each of the samples, until its gradient is zero. Beside it stands what the dense curvature
predicts.

    python examples/curvature_influence.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

import rkfac
from digits import tensors

SAMPLES, DECAY = 300, 1e-2


def split(model: nn.Module, flat: Tensor) -> dict[str, Tensor]:
    """A flat vector as tensors by name."""
    parameters = dict(model.named_parameters())
    parts = flat.split([p.numel() for p in parameters.values()])
    return {name: part.view(p.shape) for (name, p), part in zip(parameters.items(), parts, strict=True)}


def loss_of(model: nn.Module, flat: Tensor, x: Tensor, y: Tensor, counted: Tensor) -> Tensor:
    """The training loss of the samples that count, over the number of all, with weight decay."""
    losses = F.cross_entropy(functional_call(model, split(model, flat), (x,)), y, reduction="none")
    return (counted * losses).sum() / len(x) + DECAY / 2 * flat.square().sum()


def dense_curvature(model: nn.Module, flat: Tensor, x: Tensor) -> Tensor:
    """The Hessian of the training loss, formed as it is."""
    a = torch.cat([x, torch.ones_like(x[:, :1])], 1)
    p = functional_call(model, split(model, flat), (x,)).softmax(1)
    outer = torch.diag_embed(p) - p[:, :, None] * p[:, None]
    H = torch.einsum("ncd,ni,nj->cidj", outer, a, a) / len(x)  # class by class, the bias last in each
    classes, inputs = H.shape[:2]
    index = torch.arange(classes * inputs).view(classes, inputs)
    order = torch.cat([index[:, :-1].flatten(), index[:, -1]])
    return H.reshape(len(order), -1)[order][:, order] + DECAY * torch.eye(len(order), dtype=x.dtype)


def trained(model: nn.Module, starts: Tensor, x: Tensor, y: Tensor, counted: Tensor) -> Tensor:
    """Weights with a gradient of zero, for as many choices of samples as there are rows: Newton's method."""
    gradients = vmap(grad(lambda flat, some: loss_of(model, flat, x, y, some)))
    flat = starts
    for _ in range(60):
        inverse = torch.linalg.inv(dense_curvature(model, flat.mean(0), x))
        found = gradients(flat, counted)
        flat = flat - found @ inverse
        if float(found.norm(dim=1).max()) < 1e-12:
            return flat
    raise RuntimeError("Newton's method did not arrive")


def influences(model: nn.Module, flat: Tensor, x: Tensor, y: Tensor, direction: dict[str, Tensor]) -> Tensor:
    """What leaving out each training sample adds to the test loss, to first order."""

    def loss(p: dict[str, Tensor], one: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, p, (one[None],)), label[None])

    own = vmap(grad(loss), (None, 0, 0))(split(model, flat), x, y)
    return torch.stack([own[name].flatten(1) @ t.flatten() for name, t in direction.items()]).sum(0) / len(x)


def main() -> dict[str, float]:
    """Predict, train again, compare."""
    x, y, x_test, y_test = tensors()
    x, y, x_test = x[:SAMPLES].double(), y[:SAMPLES], x_test.double()
    model = nn.Linear(64, 10).double()
    start = torch.zeros(1, sum(p.numel() for p in model.parameters()), dtype=x.dtype)
    best = trained(model, start, x, y, torch.ones(1, SAMPLES, dtype=x.dtype))[0]
    model.load_state_dict(split(model, best))

    def test_loss(flat: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, split(model, flat), (x_test,)), y_test)

    curvature = rkfac.fit_curvature(
        model,
        [(x, y)],
        F.cross_entropy,
        fisher="exact",
        damping=DECAY,  # the decay is a part of the loss, and of its curvature
        damping_rule="product",
        relative_to=None,
    )
    gradient = grad(test_loss)(best)
    directions = {
        "K-FAC": curvature.inverse_vector_product(split(model, gradient)),
        "the dense matrix": split(model, torch.linalg.solve(dense_curvature(model, best, x), gradient)),
        "no curvature": split(model, gradient),
    }
    predicted = {name: influences(model, best, x, y, direction) for name, direction in directions.items()}
    without = 1 - torch.eye(SAMPLES, dtype=x.dtype)
    truth = vmap(test_loss)(trained(model, best.repeat(SAMPLES, 1), x, y, without)) - test_loss(best)
    found = {name: float(torch.corrcoef(torch.stack([truth, p]))[0, 1]) for name, p in predicted.items()}
    print(f"Each of {SAMPLES} training samples was left out, and the model trained again until its gradient was zero.")
    print("Correlation of the test loss's true change with the predicted one:")
    for name, value in found.items():
        print(f"  {name}: {value:.3f}")
    most = predicted["K-FAC"].topk(10).indices
    shared = len(set(most.tolist()) & set(truth.topk(10).indices.tolist()))
    print(f"Of the 10 samples that help most, K-FAC names {shared}.")
    return found


if __name__ == "__main__":
    main()
