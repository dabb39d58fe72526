"""A small causal transformer over characters, built of nn.Linear so that K-FAC covers every matrix."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .registry import model


class SelfAttention(nn.Module):
    """Causal multi-head attention; not nn.MultiheadAttention, which hides its matrices from layer hooks."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.proj(mixed.transpose(1, 2).reshape(batch, length, width))
        return out


class Block(nn.Module):
    """Pre-norm attention and MLP, each with a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = SelfAttention(width, heads)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class Transformer(nn.Module):
    """Token and position embeddings, `depth` blocks, a final norm and a linear head."""

    def __init__(self, vocabulary: int, context: int, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)
        for embedding in (self.token, self.position):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        # Expanded to the batch so that the position embedding sees one row a sample, as every other layer does.
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        x = self.token(tokens) + self.position(positions)
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


@model("transformer")
def transformer(vocabulary: int, context: int = 64, width: int = 128, depth: int = 2, heads: int = 4) -> nn.Module:
    """A causal transformer returning logits (batch, length, vocabulary)."""
    return Transformer(vocabulary, context, width, depth, heads)
