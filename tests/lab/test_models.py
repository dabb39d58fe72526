"""Networks: exact sizes, initialisation and what makes each of them what it claims to be."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from rkfac_lab import models
from rkfac_lab.errors import LabError


def parameters(model):
    return sum(p.numel() for p in model.parameters())


def kinds(model):
    return [type(m) for m in model.modules() if not list(m.children())]


def test_vgg16bn_is_the_papers():
    model = models.build("vgg16bn")
    assert parameters(model) == 14_990_922
    convolutions = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
    assert len(convolutions) == 13
    assert all(c.bias is not None and c.kernel_size == (3, 3) for c in convolutions)
    assert kinds(model)[-4:] == [nn.Linear, nn.ReLU, nn.Dropout, nn.Linear]
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


def test_vgg_convolutions_are_initialised_as_the_papers():
    torch.manual_seed(0)
    for module in models.build("vgg16bn").modules():
        if isinstance(module, nn.Conv2d) and module.weight.numel() > 100_000:
            assert module.weight.std().item() == pytest.approx(math.sqrt(2 / (9 * module.out_channels)), rel=0.02)
            assert module.bias.abs().max() == 0


def test_vgg_small_has_a_quarter_of_the_width():
    model = models.build("vgg16bn", width=0.25)
    assert [m.out_channels for m in model.modules() if isinstance(m, nn.Conv2d)] == [
        16, 16, 32, 32, 64, 64, 64, *[128] * 6
    ]  # fmt: skip
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


def test_autoencoder_is_the_classic_one():
    model = models.build("autoencoder")
    sizes = [784, 1000, 500, 250, 30, 250, 500, 1000, 784]
    linear = [m for m in model if isinstance(m, nn.Linear)]
    assert [m.in_features for m in linear] == sizes[:-1]
    assert [m.out_features for m in linear] == sizes[1:]
    after = {
        i: type(model[i + 1]) if i + 1 < len(model) else None for i, m in enumerate(model) if isinstance(m, nn.Linear)
    }
    # the code and the output are linear, all else goes through tanh
    assert list(after.values()) == [nn.Tanh] * 3 + [nn.Linear] + [nn.Tanh] * 3 + [None]


def test_mlp_sizes_and_no_activation_at_the_end():
    model = models.build("mlp", sizes=(6, 5, 4))
    assert kinds(model) == [nn.Flatten, nn.Linear, nn.ReLU, nn.Linear]
    assert parameters(model) == 6 * 5 + 5 + 5 * 4 + 4


def test_transformer_is_causal():
    torch.manual_seed(0)
    model = models.build("transformer", vocabulary=11, context=8, width=16, depth=2, heads=4).eval()
    tokens = torch.randint(11, (3, 8))
    changed = tokens.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 11
    before, after = model(tokens), model(changed)
    assert before.shape == (3, 8, 11)
    assert torch.allclose(before[:, :5], after[:, :5], atol=1e-6)
    assert (before[:, 5:] - after[:, 5:]).abs().amax(dim=(0, 2)).min() > 1e-4


def test_transformer_attends_as_the_formula_says():
    torch.manual_seed(0)
    model = models.build("transformer", vocabulary=5, context=4, width=8, depth=1, heads=2)
    attention = model.blocks[0].attention
    x = torch.randn(2, 4, 8)
    query, key, value = attention.qkv(x).split(8, dim=-1)
    heads = []
    for h in (slice(0, 4), slice(4, 8)):
        scores = query[..., h] @ key[..., h].mT / 2 + torch.full((4, 4), -math.inf).triu(1)
        heads.append(scores.softmax(-1) @ value[..., h])
    assert torch.allclose(attention(x), attention.proj(torch.cat(heads, -1)), atol=1e-6)


def test_every_matrix_of_the_transformer_is_a_layer_that_hooks_can_see():
    model = models.build("transformer", vocabulary=11)
    held = {
        id(p) for m in model.modules() if isinstance(m, nn.Linear | nn.Embedding | nn.LayerNorm) for p in m.parameters()
    }
    assert held == {id(p) for p in model.parameters()}


def test_unknown_model_names_the_nearest():
    with pytest.raises(LabError, match="did you mean 'vgg16bn'"):
        models.build("vgg16_bn")


def test_convnet_pools_where_it_is_told_and_averages_what_is_left():
    model = models.build("convnet", widths=(16, 16, 32, 32, 64, 64), pool_after=(2, 4), classes=10)
    unit = [nn.Conv2d, nn.BatchNorm2d, nn.ReLU]
    pooled = [*unit, *unit, nn.MaxPool2d]
    assert kinds(model) == [*pooled, *pooled, *unit, *unit, nn.AdaptiveAvgPool2d, nn.Flatten, nn.Linear]
    weights = 9 * (3 * 16 + 16 * 16 + 16 * 32 + 32 * 32 + 32 * 64 + 64 * 64)
    assert parameters(model) == weights + 2 * 224 + 650
    assert model[:-3](torch.zeros(2, 3, 16, 16)).shape == (2, 64, 4, 4)


def test_resnet_has_twenty_layers_and_shortcuts_only_where_shapes_change():
    model = models.build("resnet")
    convolutions = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
    assert [c.kernel_size for c in convolutions].count((3, 3)) == 19
    assert [(c.in_channels, c.out_channels, c.stride) for c in convolutions if c.kernel_size == (1, 1)] == [
        (16, 32, (2, 2)),
        (32, 64, (2, 2)),
    ]
    assert all(c.bias is None for c in convolutions)
    assert model[:-3](torch.zeros(2, 3, 16, 16)).shape == (2, 64, 4, 4)


def test_a_block_adds_its_input():
    block = models.resnet.BasicBlock(4, 4, stride=1)
    nn.init.zeros_(block.second[1].weight)  # nothing comes through the convolutions
    x = torch.rand(2, 4, 5, 5)
    assert torch.equal(block(x), x)
