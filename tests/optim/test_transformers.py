"""Models of the transformers library, small and from configurations alone: nothing is downloaded."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rkfac
from curvature.brute import held, kfac
from optim.problems import assert_same_parameters, parameters, same, twin
from rkfac.layers import UnitAdapter, adapter_for

transformers: Any = pytest.importorskip("transformers")

VOCABULARY, WIDTH = 40, 12


def gpt2() -> nn.Module:
    sizes = {"n_positions": 8, "n_embd": WIDTH, "n_layer": 2, "n_head": 2}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    drops = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=VOCABULARY, **sizes, **ends, **drops))


def bert() -> nn.Module:
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    drops = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.BertConfig(vocab_size=VOCABULARY, max_position_embeddings=8, **sizes, **drops)
    return transformers.BertForMaskedLM(config)


def llama() -> nn.Module:
    sizes = {"hidden_size": WIDTH, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=1, **sizes)
    )


MODELS: dict[str, Callable[[], nn.Module]] = {"gpt2": gpt2, "bert": bert, "llama": llama}
LEFT = {"gpt2": 0, "bert": VOCABULARY, "llama": 0}  # the bias of a tied head
each_model = pytest.mark.parametrize("which", MODELS)


def tokens(n: int = 4) -> Tensor:
    return torch.randint(VOCABULARY, (n, 6))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, ids: Tensor) -> float:
    optimizer.zero_grad()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    return loss.item()


@each_model
def test_practically_all_parameters_are_preconditioned(which: str) -> None:
    model = MODELS[which]()
    optimizer = rkfac.RSKFAC(model, factor_every=1, inverse_every=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(model, optimizer, tokens())
    reports = optimizer.report()
    total = sum(p.numel() for p in model.parameters())
    assert sum(r.parameters for r in reports) == total
    assert sum(r.parameters for r in reports if r.covered and not r.reason) == total - LEFT[which]
    shared = {r.name: r.shared_with for r in reports if r.shared_with}
    tables = {"gpt2": "transformer.wte", "bert": "bert.embeddings.word_embeddings"}
    heads = {"gpt2": ("lm_head",), "bert": ("cls.predictions.decoder",)}
    assert shared == ({tables[which]: heads[which]} if which in tables else {})


@each_model
def test_thirty_steps_with_a_resume_are_bit_for_bit_those_without(which: str) -> None:
    model, batches = MODELS[which](), [tokens() for _ in range(30)]
    keywords: dict[str, Any] = {"lr": 0.05, "factor_every": 2, "inverse_every": 5, "rank": 4, "oversampling": 2}
    optimizer = rkfac.RSKFAC(model, **keywords)
    start = parameters(model)
    for batch in batches[:13]:
        step(model, optimizer, batch)
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), file)
    file.seek(0)
    model_state, optimizer_state = torch.load(file, weights_only=True)
    fresh = MODELS[which]()
    fresh.load_state_dict(model_state)
    resumed = rkfac.RSKFAC(fresh, **keywords)
    resumed.load_state_dict(optimizer_state)
    for batch in batches[13:]:
        assert step(fresh, resumed, batch) == step(model, optimizer, batch)
    assert_same_parameters(fresh, model, exactly=True)
    assert same(resumed.state_dict(), optimizer.state_dict())
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert sum(not torch.equal(p, start[name]) for name, p in parameters(model).items()) == len(start)


@each_model
def test_it_learns_to_repeat_a_batch(which: str) -> None:
    model, batch = MODELS[which](), tokens()
    optimizer = rkfac.RSKFAC(model, lr=0.3, factor_every=1, inverse_every=2)
    losses = [step(model, optimizer, batch) for _ in range(30)]
    assert losses[-1] < 0.8 * losses[0]


# --- Conv1D


def test_conv1d_has_the_factors_of_one_sample_at_a_time() -> None:
    model = gpt2().double()
    ids = tokens()
    optimizer = kfac(model, loss_average="sum")
    layer = model.transformer.h[1].mlp.c_fc
    other = twin(model)
    model(input_ids=ids).logits.sin().sum().backward()
    optimizer.step()
    A = G = 0.0
    for n in range(len(ids)):
        kept: dict[str, Tensor] = {}
        hook = other.transformer.h[1].mlp.c_fc.register_forward_hook(lambda _, x, y, k=kept: k.update(x=x[0], y=y))
        (g,) = torch.autograd.grad(other(input_ids=ids[n : n + 1]).logits.sin().sum(), kept["y"])
        hook.remove()
        for a, row in zip(kept["x"][0].detach(), g[0], strict=True):
            a = torch.cat([a, a.new_ones(1)])
            A, G = A + torch.outer(a, a), G + torch.outer(row, row)
    rows = ids.numel()  # terms of the loss too: one position each
    torch.testing.assert_close(held(optimizer, "transformer.h.1.mlp.c_fc"), (A[None] / rows, G[None] / rows))
    assert layer.weight.shape == (WIDTH, 4 * WIDTH)


@pytest.mark.parametrize("keywords", [{}, {"graft": None}, {"decomposition": rkfac.RSVD(), "rank": 3}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_conv1d_steps_as_a_linear_layer_does(keywords: dict[str, Any], dtype: torch.dtype) -> None:
    """Wide and narrow, so that thin and explicit solves are tried."""
    conv1d = transformers.pytorch_utils.Conv1D
    mine = nn.Sequential(conv1d(5, 6), nn.Tanh(), conv1d(700, 5), nn.Tanh(), conv1d(4, 700)).to(dtype)
    theirs = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 700), nn.Tanh(), nn.Linear(700, 4)).to(dtype)
    with torch.no_grad():
        for a, b in zip(mine, theirs, strict=True):
            if isinstance(b, nn.Linear):
                a.weight.normal_(std=0.3)
                a.bias.normal_(std=0.3)
                b.weight.copy_(a.weight.mT)
                b.bias.copy_(a.bias)
    settings = {"lr": 0.1, "factor_every": 1, "inverse_every": 2, "momentum": 0.9, **keywords}
    optimizers = [rkfac.KFAC(m, **settings) for m in (mine, theirs)]
    for _ in range(6):
        x, y = torch.randn(8, 6, dtype=dtype), torch.randint(4, (8,))
        for m, o in zip((mine, theirs), optimizers, strict=True):
            o.zero_grad()
            nn.functional.cross_entropy(m(x), y).backward()
            o.step()
    bound = 1e-9 if dtype == torch.float64 else 2e-4
    for a, b in zip(mine, theirs, strict=True):
        if isinstance(b, nn.Linear):
            torch.testing.assert_close(a.weight, b.weight.mT, rtol=bound, atol=bound)
            torch.testing.assert_close(a.bias, b.bias, rtol=bound, atol=bound)


# --- norms


def norms() -> dict[str, nn.Module]:
    from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm
    from transformers.models.mistral.modeling_mistral import MistralRMSNorm
    from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
    from transformers.models.t5.modeling_t5 import T5LayerNorm

    kinds = (LlamaRMSNorm, T5LayerNorm, Gemma2RMSNorm, MistralRMSNorm, Qwen2RMSNorm)
    return {kind.__name__: kind(WIDTH, eps=1e-5) for kind in kinds}


@pytest.mark.parametrize("name", ["LlamaRMSNorm", "T5LayerNorm", "Gemma2RMSNorm", "MistralRMSNorm", "Qwen2RMSNorm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_root_mean_square_norms_are_recognised(name: str, dtype: torch.dtype) -> None:
    module = norms()[name].to(dtype)
    adapter = adapter_for(module)
    assert isinstance(adapter, UnitAdapter)
    x = torch.randn(5, 3, WIDTH, dtype=dtype)
    with torch.no_grad():
        module.weight.normal_()
    y = module(x)
    g = torch.randn_like(y)
    y.backward(g)
    bound = 1e-5 if dtype == torch.float32 else 5e-2
    found = adapter.gradient(module, x, g)
    torch.testing.assert_close(found, module.weight.grad.float(), rtol=bound, atol=bound * float(found.abs().amax()))


# --- fisher="mc": targets drawn from what models of the library return


def classifier() -> nn.Module:
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    drops = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.BertConfig(vocab_size=VOCABULARY, max_position_embeddings=8, num_labels=3, **sizes, **drops)
    return transformers.BertForSequenceClassification(config)


RETURNED: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "gpt2": (gpt2, {"likelihood": rkfac.Categorical(class_dim=-1)}),
    "bert": (bert, {"likelihood": rkfac.Categorical(class_dim=-1)}),
    "bert-classifier": (classifier, {}),
}


def labelled(which: str) -> dict[str, Tensor]:
    ids = tokens()
    return {"input_ids": ids, "labels": ids[:, 0] % 3 if which == "bert-classifier" else ids}


@pytest.mark.parametrize("which", RETURNED)
def test_targets_are_drawn_from_the_logits_that_come_with_a_loss(which: str) -> None:
    """As they are from logits that are handed over; the loss is made inside of the model, before anybody sees an output."""
    make, keywords = RETURNED[which]
    model = make().double()
    other = twin(model)
    read, told = (kfac(m, fisher="mc", lr=0.1, **keywords) for m in (model, other))
    for batch in (labelled(which) for _ in range(2)):
        for m, optimizer in ((model, read), (other, told)):
            optimizer.zero_grad()
            out = m(**batch)
            if optimizer is told:
                optimizer.sample_fisher(out.logits)
            out.loss.backward()
            optimizer.step()
    assert same(read.state_dict(), told.state_dict())
    assert_same_parameters(model, other, exactly=True)


def test_logits_of_positions_without_a_word_on_where_the_classes_are_are_refused() -> None:
    model, ids = gpt2(), tokens()
    optimizer = rkfac.RSKFAC(model, fisher="mc")
    start = parameters(model)
    model(input_ids=ids, labels=ids).loss.backward()
    with pytest.raises(ValueError, match=r"class_dim=.*sample_fisher"):
        optimizer.step()
    assert same(parameters(model), start)


def test_a_tuple_of_several_tensors_is_refused() -> None:
    """Nothing says which of them are the logits."""
    model, ids = gpt2(), tokens()
    optimizer = rkfac.RSKFAC(model, fisher="mc", likelihood=rkfac.Categorical(class_dim=-1))
    model(input_ids=ids, labels=ids, return_dict=False)[0].backward()
    with pytest.raises(TypeError, match=r"returned tuple.*sample_fisher"):
        optimizer.step()
