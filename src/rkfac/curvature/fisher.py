"""Targets drawn from the model's own distribution, for the true Fisher instead of the empirical one.

Every likelihood gives the gradient at the model's output of the negative log-likelihood of a drawn target, summed over
the batch; its second moment is the Fisher of that output. One extra backward pass through the activations (no weight
gradients are formed) on steps that collect statistics; nothing on the others.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor


class Likelihood(ABC):
    """p(y | output): what the training loss is the negative logarithm of."""

    @abstractmethod
    def draw_gradient(self, output: Tensor, generator: torch.Generator) -> Tensor:
        """d(-log p(y | output)) / d output for y drawn from p(. | output)."""

    @abstractmethod
    def terms(self, output: Tensor) -> int:
        """How many independent targets the batch holds."""


@dataclass(frozen=True)
class Categorical(Likelihood):
    """Cross-entropy on logits; `class_dim` is where the classes are (1 in torch's loss for images, -1 for text)."""

    class_dim: int | None = None

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
        logits = self._logits(output.float() if output.dtype != torch.float64 else output)
        p = logits.softmax(-1)
        flat = p.reshape(-1, p.shape[-1]).to(generator.device)  # drawn where the generator lives
        labels = torch.multinomial(flat, 1, generator=generator).to(p.device).view(p.shape[:-1])
        g = p.scatter_add(-1, labels[..., None], p.new_full((*labels.shape, 1), -1.0))
        return g.movedim(-1, -1 if self.class_dim is None else self.class_dim)

    def terms(self, output: Tensor) -> int:
        """One a predicted class."""
        return self._logits(output)[..., 0].numel()


@dataclass(frozen=True)
class Gaussian(Likelihood):
    """Squared error, half the sum over a sample's outputs: unit variance."""

    def draw_gradient(self, output: Tensor, generator: torch.Generator) -> Tensor:
        """output - y is standard normal."""
        dtype = torch.float64 if output.dtype == torch.float64 else torch.float32
        return torch.randn(output.shape, dtype=dtype, device=generator.device, generator=generator).to(output.device)

    def terms(self, output: Tensor) -> int:
        """One a sample."""
        return output.shape[0] if output.ndim else 1


@dataclass(frozen=True)
class Bernoulli(Likelihood):
    """Binary cross-entropy on logits, summed over a sample's outputs."""

    def draw_gradient(self, output: Tensor, generator: torch.Generator) -> Tensor:
        """sigmoid - drawn bit."""
        p = (output.float() if output.dtype != torch.float64 else output).sigmoid()
        return p - torch.bernoulli(p.to(generator.device), generator=generator).to(p.device)

    def terms(self, output: Tensor) -> int:
        """One a sample."""
        return output.shape[0] if output.ndim else 1


NAMED: dict[str, Likelihood] = {"categorical": Categorical(), "gaussian": Gaussian(), "bernoulli": Bernoulli()}
