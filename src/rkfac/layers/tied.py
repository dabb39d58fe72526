"""One weight of several modules: nn.Linear layers, nn.Embedding tables, or tables and heads."""

from __future__ import annotations

from collections.abc import Sequence

from rkfac import compat
from rkfac.layers.base import Adapter, Uncovered, Use
from rkfac.layers.embedding import EmbeddingAdapter
from rkfac.layers.linear import LinearAdapter


class TiedAdapter(EmbeddingAdapter):
    """A table (rows of the table, width) whose rows are looked up and multiplied by: the gradient, transposed, is

    sum g onehot^T over the lookups + sum a h^T over the head's rows, a its inputs and h the gradients at its output.
    """

    unlike_its_ancestors = True  # half of what it sees are no lookups


def together(uses: Sequence[Use]) -> Adapter | Uncovered:
    """What serves a weight with all of its uses, tables first; biases of heads that share a weight take no part."""
    kinds = {type(use.adapter) for use in uses}
    if len(uses) == 1 or kinds == {LinearAdapter} or kinds == {EmbeddingAdapter}:
        return uses[0].adapter
    if kinds == {LinearAdapter, EmbeddingAdapter}:
        return TiedAdapter()
    names = ", ".join(f"{use.name!r} ({compat.kind_of(use.module).__name__})" for use in uses)
    return Uncovered(f"its weight is tied: only nn.Linear and nn.Embedding layers may share one, these are {names}")
