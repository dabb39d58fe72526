"""Embeddings: inputs are one-hot, so the input factor is the diagonal of how often each row was looked up."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor, nn

from rkfac.layers.base import KroneckerAdapter, by_position, statistics_dtype
from rkfac.layers.registry import register


@register(nn.Embedding)
class EmbeddingAdapter(KroneckerAdapter):
    """The gradient of the table, transposed, is sum g onehot^T."""

    def refusal(self, module: nn.Module) -> str:
        """Options of nn.Embedding that change what its gradient means."""
        table = cast(nn.Embedding, module)
        if table.sparse:
            return "sparse=True gives sparse gradients, which this optimizer does not handle"
        if table.scale_grad_by_freq:
            return "scale_grad_by_freq=True rescales its gradient"
        return ""

    def has_bias(self, module: nn.Module) -> bool:
        """Never."""
        return False

    def diagonal_input(self) -> bool:
        """One-hot rows are never formed."""
        return True

    def input_rows(
        self, module: nn.Module, x: Tensor, bias: bool, sharing: str, drawn: Tensor | None = None
    ) -> Iterator[Tensor]:
        """How often each row of the table was looked up, (rows of the table,): the diagonal itself, of all lookups."""
        table = cast(nn.Embedding, module)
        counts = torch.bincount(x.flatten(), minlength=table.num_embeddings).to(statistics_dtype(table.weight))
        if table.padding_idx is not None:
            counts[table.padding_idx] = 0
        yield counts

    def output_rows(self, module: nn.Module, x: Tensor, g: Tensor, sharing: str, drawn: Tensor | None = None) -> Tensor:
        """Gradients at the output, a row a position; the padding row has none."""
        table = cast(nn.Embedding, module)
        rows = by_position(g, drawn).to(statistics_dtype(g))
        if table.padding_idx is None:
            return rows
        tokens = x.flatten() if drawn is None else x.flatten()[drawn]
        return rows * (tokens != table.padding_idx)[:, None]

    def count(self, module: nn.Module, g: Tensor, sharing: str) -> int:
        """Lookups, those of the padding row too."""
        return g.numel() // cast(nn.Embedding, module).embedding_dim

    def input_shape(self, module: nn.Module, bias: bool) -> tuple[int, ...]:
        """(rows of the table,)."""
        return (cast(nn.Embedding, module).num_embeddings,)

    def output_shape(self, module: nn.Module) -> tuple[int, ...]:
        """(width,)."""
        return (cast(nn.Embedding, module).embedding_dim,)

    def matrix(self, module: nn.Module, weight: Tensor) -> Tensor:
        """The table transposed: (width, rows of the table)."""
        return weight.mT

    def gradient(self, module: nn.Module, x: Tensor, g: Tensor) -> Tensor:
        """Each looked-up row gets the gradients of its positions."""
        rows = self.output_rows(module, x, g, "expand")
        return rows.new_zeros(cast(nn.Embedding, module).weight.shape).index_add_(0, x.flatten(), rows)

    def tensor(self, module: nn.Module, matrix: Tensor) -> Tensor:
        """Transposed back."""
        return matrix.mT
