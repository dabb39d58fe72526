"""What a model's outputs mean: targets drawn from its own distribution, and how far two distributions are from each other.

For the true Fisher instead of the empirical one every likelihood gives the gradient at the model's output of the negative
log-likelihood of a drawn target, summed over the batch; its second moment is the Fisher of that output. One extra backward
pass through the activations (no weight gradients are formed) on steps that collect statistics; nothing on the others.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor


class Likelihood(ABC):
    """p(y | output): what the training loss is the negative logarithm of."""

    at_positions: ClassVar[bool] = False  # whether every position of an output is a target of its own

    @abstractmethod
    def draw_gradient(self, output: Tensor, generator: torch.Generator) -> Tensor:
        """d(-log p(y | output)) / d output for y drawn from p(. | output)."""

    @abstractmethod
    def terms(self, output: Tensor) -> int:
        """How many independent targets the batch holds."""

    def columns(self, output: Tensor) -> int:
        """How many gradients at a sample's output, made by `column`, have the Fisher of that output as their sum of squares."""
        raise NotImplementedError(
            f"{type(self).__name__} does not say what its Fisher is the sum of: draw from it (fisher='mc')"
        )

    def column(self, output: Tensor, number: int) -> Tensor:
        """One of them, for all samples: sum over numbers of c c^T is E[g g^T] of drawn targets, and nothing is drawn."""
        raise NotImplementedError(
            f"{type(self).__name__} does not say what its Fisher is the sum of: draw from it (fisher='mc')"
        )

    def divergence(self, output: Tensor, other: Tensor) -> Tensor:
        """(KL(p, q) + KL(q, p)) / 2 of what two outputs mean, summed over the batch: near zero half the Fisher's square."""
        raise NotImplementedError(f"{type(self).__name__} does not say how far two outputs are from each other")


@dataclass(frozen=True)
class Categorical(Likelihood):
    """Cross-entropy on logits; `class_dim` is where the classes are (1 in torch's loss for images, -1 for text)."""

    class_dim: int | None = None
    at_positions = True

    def _logits(self, output: Tensor) -> Tensor:
        if output.ndim == 0:
            raise ValueError("it is a single number, not logits")
        if self.class_dim is None and output.ndim > 2:
            raise ValueError(
                f"the model's output has shape {tuple(output.shape)}: say where the classes are with "
                "likelihood=rkfac.Categorical(class_dim=...)"
            )
        return output.movedim(-1 if self.class_dim is None else self.class_dim, -1)

    def draw_gradient(self, output: Tensor, generator: torch.Generator) -> Tensor:
        """softmax - one-hot of a drawn class."""
        p = self._logits(_precise(output)).softmax(-1)
        flat = p.reshape(-1, p.shape[-1]).to(generator.device)  # drawn where the generator lives
        labels = torch.multinomial(flat, 1, generator=generator).to(p.device).view(p.shape[:-1])
        g = p.scatter_add(-1, labels[..., None], p.new_full((*labels.shape, 1), -1.0))
        return g.movedim(-1, -1 if self.class_dim is None else self.class_dim)

    def columns(self, output: Tensor) -> int:
        """Classes."""
        return self._logits(output).shape[-1]

    def column(self, output: Tensor, number: int) -> Tensor:
        """sqrt(p_c) (softmax - one-hot of c): a class is drawn with probability p_c."""
        p = self._logits(_precise(output)).softmax(-1)
        g = p.clone()
        g[..., number] -= 1
        g = g * p[..., number, None].sqrt()
        return g.movedim(-1, -1 if self.class_dim is None else self.class_dim)

    def terms(self, output: Tensor) -> int:
        """One a predicted class."""
        return self._logits(output)[..., 0].numel()

    def divergence(self, output: Tensor, other: Tensor) -> Tensor:
        """sum (p - q) (log p - log q) / 2; a class that both leave out (a logit of -inf) counts for nothing."""
        p, q = (self._logits(_precise(logits)).log_softmax(-1) for logits in (output, other))
        nowhere = (p == -math.inf) & (q == -math.inf)
        p, q = p.masked_fill(nowhere, 0.0), q.masked_fill(nowhere, 0.0)
        return ((p.exp() - q.exp()) * (p - q)).sum() / 2


class _OfSamples(Likelihood):
    """A sample's outputs belong to one target, and are independent of each other."""

    def columns(self, output: Tensor) -> int:
        """Outputs of a sample."""
        return output[0].numel() if output.ndim else 1

    def column(self, output: Tensor, number: int) -> Tensor:
        """Standard deviation of the drawn gradient, at one output alone."""
        chosen = torch.zeros_like(_precise(output)).reshape(self.terms(output), -1)
        chosen[:, number] = self._deviation(_precise(output)).reshape(chosen.shape)[:, number]
        return chosen.reshape(output.shape)

    @abstractmethod
    def _deviation(self, output: Tensor) -> Tensor:
        """Of the gradient at every output."""

    def terms(self, output: Tensor) -> int:
        """One a sample."""
        return output.shape[0] if output.ndim else 1


@dataclass(frozen=True)
class Gaussian(_OfSamples):
    """Squared error, half the sum over a sample's outputs: unit variance."""

    def _deviation(self, output: Tensor) -> Tensor:
        return torch.ones_like(output)

    def draw_gradient(self, output: Tensor, generator: torch.Generator) -> Tensor:
        """output - y is standard normal."""
        dtype = torch.float64 if output.dtype == torch.float64 else torch.float32
        return torch.randn(output.shape, dtype=dtype, device=generator.device, generator=generator).to(output.device)

    def divergence(self, output: Tensor, other: Tensor) -> Tensor:
        """Half the squared distance."""
        return (_precise(output) - _precise(other)).square().sum() / 2


@dataclass(frozen=True)
class Bernoulli(_OfSamples):
    """Binary cross-entropy on logits, summed over a sample's outputs."""

    def _deviation(self, output: Tensor) -> Tensor:
        p = output.sigmoid()
        return (p * (1 - p)).sqrt()

    def draw_gradient(self, output: Tensor, generator: torch.Generator) -> Tensor:
        """sigmoid - drawn bit."""
        p = _precise(output).sigmoid()
        return p - torch.bernoulli(p.to(generator.device), generator=generator).to(p.device)

    def divergence(self, output: Tensor, other: Tensor) -> Tensor:
        """sum (p - q) (logit p - logit q) / 2."""
        a, b = _precise(output), _precise(other)
        return ((a.sigmoid() - b.sigmoid()) * (a - b)).sum() / 2


def _precise(output: Tensor) -> Tensor:
    """In float32 or better."""
    return output if output.dtype == torch.float64 else output.float()


NAMED: dict[str, Likelihood] = {"categorical": Categorical(), "gaussian": Gaussian(), "bernoulli": Bernoulli()}
