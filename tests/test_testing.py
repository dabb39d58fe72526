"""rkfac.testing.check_adapter: every adapter passes, and what is wrong with one is said in words."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from layers.cases import Case, each_case
from layers.own import OWN, GLUAdapter, LayerScale, LayerScaleAdapter, PictureScale, PictureScaleAdapter
from rkfac.layers import ProductAdapter, conv
from rkfac.layers.conv import ConvAdapter
from rkfac.layers.embedding import EmbeddingAdapter
from rkfac.layers.linear import LinearAdapter
from rkfac.testing import check_adapter


@each_case
def test_our_own_adapters_pass(case: Case) -> None:
    check_adapter(case.module(), case.x())


@pytest.mark.parametrize("name", OWN)
def test_adapters_of_somebodys_own_pass(name: str) -> None:
    build, adapter, shape = OWN[name]
    check_adapter(build(), torch.randn(shape), adapter=adapter)
    check_adapter(build(), torch.randn(shape), adapter=adapter(), seed=1)


def test_moments_without_rows_are_compared_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conv, "pays", lambda *_: True)
    check_adapter(nn.Conv2d(2, 3, 3, padding=1), torch.randn(4, 2, 5, 6))

    class Half(ConvAdapter):
        def input_moment(self, *arguments: Any) -> Callable[[Tensor], list[Tensor]] | None:
            make = super().input_moment(*arguments)
            return None if make is None else lambda unit: [strip / 2 for strip in make(unit)]

    with pytest.raises(AssertionError, match=r"Half\.input_moment: .*: it is 0\.5 times as large"):
        check_adapter(nn.Conv2d(2, 3, 3, padding=1), torch.randn(4, 2, 5, 6), adapter=Half)


# --- adapters with a fault each, for nn.Linear unless something else is said


class WrongSign(ProductAdapter):
    def gradients(self, module: nn.Module, x: Tensor, g: Tensor) -> Tensor:
        return -g


class TooLarge(ProductAdapter):
    def inputs(self, module: nn.Module, x: Tensor) -> Tensor:
        return 3 * x


class OtherOrder(ProductAdapter):
    def inputs(self, module: nn.Module, x: Tensor) -> Tensor:
        return x.flip(-1)


class NoBiasColumn(ProductAdapter):
    def input_rows(self, module: nn.Module, x: Tensor, bias: bool, *rest: Any) -> Iterator[Tensor]:
        return super().input_rows(module, x, False, *rest)


class BiasOfTwo(ProductAdapter):
    def input_rows(self, module: nn.Module, x: Tensor, bias: bool, *rest: Any) -> Iterator[Tensor]:
        for rows in super().input_rows(module, x, bias, *rest):
            yield torch.cat([rows[:, :-1], 2 * rows[:, -1:]], 1) if bias else rows


class WrongCount(ProductAdapter):
    def count(self, module: nn.Module, g: Tensor, sharing: str) -> int:
        return g.numel() if sharing == "expand" else g.shape[0]


class SamplesInTheSecondPlace(ProductAdapter):
    def count(self, module: nn.Module, g: Tensor, sharing: str) -> int:
        return g[..., 0].numel() if sharing == "expand" else g.shape[1]


class ForgetsWhatIsDrawn(ProductAdapter):
    def output_rows(self, module: nn.Module, x: Tensor, g: Tensor, sharing: str, drawn: Tensor | None = None) -> Tensor:
        return super().output_rows(module, x, g, sharing)


class DrawsOthers(ProductAdapter):
    def input_rows(
        self, module: nn.Module, x: Tensor, bias: bool, sharing: str, drawn: Tensor | None = None
    ) -> Iterator[Tensor]:
        return super().input_rows(module, x, bias, sharing, None if drawn is None else drawn.sort()[0])


class SumsInputs(ProductAdapter):
    def input_rows(
        self, module: nn.Module, x: Tensor, bias: bool, sharing: str, drawn: Tensor | None = None
    ) -> Iterator[Tensor]:
        for rows in super().input_rows(module, x, bias, sharing, drawn):
            yield rows * x.shape[1] if sharing == "reduce" else rows


class NoWayBack(ProductAdapter):
    def tensor(self, module: nn.Module, matrix: Tensor) -> Tensor:
        return matrix.flip(0).reshape(self.weight(module).shape)


class Transposed(ProductAdapter):
    transposed = True


class OtherShape(ProductAdapter):
    def input_shape(self, module: nn.Module, bias: bool) -> tuple[int, ...]:
        return (self.weight(module).shape[1],)


class OtherName(ProductAdapter):
    weight_name = "w"


class Raises(ProductAdapter):
    def inputs(self, module: nn.Module, x: Tensor) -> Tensor:
        raise ZeroDivisionError("no")


class NotPrecise(ProductAdapter):
    def output_rows(self, module: nn.Module, x: Tensor, g: Tensor, sharing: str, drawn: Tensor | None = None) -> Tensor:
        return super().output_rows(module, x, g, sharing, drawn).to(g.dtype)


class MixedSamples(ProductAdapter):
    """Sums are right, samples are not."""

    def by_sample(self, module: nn.Module, x: Tensor, g: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        inputs, gradients = super().by_sample(module, x, g, *rest)
        return inputs.flip(-3), gradients.flip(-3)


class WrongGradient(LinearAdapter):
    def gradient(self, module: nn.Module, x: Tensor, g: Tensor) -> Tensor:
        return super().gradient(module, x, g) / len(x)


@pytest.mark.parametrize(
    "adapter, said",
    [
        (WrongSign, r"WrongSign\.output_rows: the sum of all rows, the gradient of bias, .*: its sign is wrong"),
        (TooLarge, r"TooLarge\.input_rows: the sum of g a\^T, the gradient of weight, .*: it is 3 times as large"),
        (OtherOrder, r"OtherOrder\.input_rows: the sum of g a\^T.*: the columns are the right ones in another order"),
        (
            NoBiasColumn,
            r"NoBiasColumn\.input_rows: rows with a bias, whose last column is one, has shape \(10, 4\), and",
        ),
        (BiasOfTwo, r"BiasOfTwo\.input_rows: rows with a bias, whose last column is one, differs .* by 1,"),
        (WrongCount, r"WrongCount\.count says 30 rows under 'expand', and there are 10"),
        (SamplesInTheSecondPlace, r"SamplesInTheSecondPlace\.by_sample: under 'reduce' the samples has shape \(2,\)"),
        (ForgetsWhatIsDrawn, r"ForgetsWhatIsDrawn\.(by_sample|output_rows)"),
        (DrawsOthers, r"DrawsOthers\.(by_sample|input_rows): (drawn samples|what is drawn) under 'expand'"),
        (SumsInputs, r"SumsInputs\.input_rows: rows under 'reduce', the means .*: it is 2 times as large"),
        (NoWayBack, r"NoWayBack\.tensor: a weight made a matrix and back differs"),
        (Transposed, r"Transposed\.vector makes \(3,\) of the bias, and output_shape says \(4,\).*the other way round"),
        (OtherShape, r"OtherShape\.input_shape: a factor with a bias has shape \(4,\), and \(5,\) is right"),
        (OtherName, r"OtherName\.weight_name is 'w', and Linear has no parameter of its own of that name"),
        (Raises, r"Raises\.input_rows raises ZeroDivisionError: no"),
        (NotPrecise, r"NotPrecise\.output_rows makes rows in torch\.bfloat16 of inputs in bfloat16"),
        (MixedSamples, r"MixedSamples\.by_sample: "),
        (WrongGradient, r"WrongGradient\.gradient: the gradient of weight .*: it is 0\.2 times as large"),
        (GLUAdapter, r"GLUAdapter\.(output_rows|gradients).*"),
    ],
)
def test_a_fault_is_named(adapter: type[ProductAdapter], said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        check_adapter(nn.Linear(4, 3), torch.randn(5, 2, 4), adapter=adapter)


def test_without_a_bias_either_side_may_be_at_fault() -> None:
    with pytest.raises(AssertionError, match=r"WrongSign\.input_rows or output_rows: the sum of g a\^T.*sign is wrong"):
        check_adapter(nn.Linear(4, 3, bias=False), torch.randn(5, 4), adapter=WrongSign)


def test_a_start_at_zero_hides_nothing() -> None:
    """Gradients that depend on the weight look right as long as it is zero."""
    module = nn.Linear(4, 3)
    nn.init.zeros_(module.weight)
    nn.init.zeros_(module.bias)

    class Weighted(ProductAdapter):
        def gradients(self, module: nn.Module, x: Tensor, g: Tensor) -> Tensor:
            return g * (1 + module.bias)

    with pytest.raises(AssertionError, match="output_rows"):
        check_adapter(module, torch.randn(5, 4), adapter=Weighted)


class WrongScale(LayerScaleAdapter):
    def inputs(self, module: nn.Module, x: Tensor) -> Tensor:
        return -x


class WrongUnits(PictureScaleAdapter):
    def by_unit(self, module: nn.Module, t: Tensor, sharing: str) -> Tensor:
        return super().by_unit(module, t, sharing).flip(1)


class BatchInputs(LayerScaleAdapter):
    """What is drawn is centred without the rest."""

    def inputs(self, module: nn.Module, x: Tensor) -> Tensor:
        return x - x.mean(0)


class Centred(LayerScale):
    def forward(self, x: Tensor) -> Tensor:
        return self.gamma * (x - x.mean(0))


@pytest.mark.parametrize(
    "module, shape, adapter, said",
    [
        (LayerScale(4), (5, 2, 4), WrongScale, r"WrongScale\.unit_gradients: the sum over samples .*sign is wrong"),
        (PictureScale(3), (5, 3, 2, 2), WrongUnits, r"WrongUnits\.unit_gradients: the sum over samples"),
        (Centred(4), (5, 4), BatchInputs, r"BatchInputs\.unit_gradients: what is drawn under 'expand' differs"),
        (
            PictureScale(3),
            (5, 3, 2, 2),
            LayerScaleAdapter,
            r"weight_name is 'gamma', and PictureScale has no parameter",
        ),
    ],
)
def test_a_fault_of_a_scale_is_named(module: nn.Module, shape: tuple[int, ...], adapter: Any, said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        check_adapter(module, torch.randn(shape), adapter=adapter)


def test_a_fault_of_an_embedding_is_named() -> None:
    class CountsOnce(EmbeddingAdapter):
        def input_rows(self, *arguments: Any) -> Iterator[Tensor]:
            for counts in super().input_rows(*arguments):
                yield counts.clamp_max(1)

    with pytest.raises(AssertionError, match=r"CountsOnce\.input_rows: how often each column was looked up"):
        check_adapter(nn.Embedding(5, 3), torch.tensor([[0, 1, 1], [2, 2, 2]]), adapter=CountsOnce)


class Noisy(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(nn.functional.dropout(x, 0.5, self.training))


class Pair(nn.Linear):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x), x


class Unused(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight)


@pytest.mark.parametrize(
    "module, said",
    [
        (nn.Bilinear(2, 2, 2), "nothing serves this module: no adapter for Bilinear"),
        (Noisy(4, 3), "two calls of Noisy differ"),
        (Pair(4, 3), "Pair returns a tuple"),
        (Unused(4, 3), "the output of Unused does not depend on its bias"),
    ],
)
def test_a_layer_that_cannot_be_checked_says_why(module: nn.Module, said: str) -> None:
    adapter = None if isinstance(module, nn.Bilinear) else ProductAdapter
    with pytest.raises(AssertionError, match=said):
        check_adapter(module, torch.randn(5, 4), adapter=adapter)


def test_it_changes_neither_the_module_nor_anybodys_random_numbers() -> None:
    module = nn.BatchNorm1d(4)
    state, before = {k: v.clone() for k, v in module.state_dict().items()}, torch.get_rng_state()
    check_adapter(module, torch.randn(6, 4, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(value, state[key]) for key, value in module.state_dict().items())
    assert all(p.dtype == torch.float32 and p.grad is None for p in module.parameters())
