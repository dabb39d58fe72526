"""A wide factor keeps half of its matrix, and the other half nowhere."""

from __future__ import annotations

import gc
import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import rkfac
from rkfac.curvature.decompose import Request
from rkfac.curvature.factor import DenseFactor, Start
from rkfac.curvature.moment import Moment
from rkfac.linalg import DecompositionError
from rkfac.linalg.symmetric import folded_shape, strip_elements

each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


def settled(moment: Moment) -> Moment:
    assert moment.settle([float(t) for t in moment.readings()])
    return moment


def moment_of(rows: Tensor) -> Moment:
    moment = Moment()
    moment.add(rows)
    return settled(moment)


def of_both_kinds(rows: Tensor) -> Moment:
    """Rows, and the same once more as a finished sum cut into three strips that no factor has."""
    d = rows.shape[-1]
    cuts = sorted({0, d // 3, d // 2, d})

    def made(unit: Tensor) -> list[Tensor]:
        X = (unit * rows).mT @ (unit * rows)
        return [X[..., begin:end, begin:].clone() for begin, end in pairwise(cuts)]

    moment = Moment()
    moment.add(rows)
    moment.add_finished(made, rows.abs().amax())
    return settled(moment)


def request(strategy: rkfac.RSVD, damping: float) -> Request:
    return Request(
        strategy=strategy,
        name="a factor",
        rank=8,
        oversampling=4,
        power_iterations=1,
        tail="trace",
        warm_start=True,
        damping=damping,
        relative=True,
        generator=torch.Generator().manual_seed(0),
    )


@pytest.mark.parametrize("d", [1, 2, 7, 319, 320, 321, 777])
@pytest.mark.parametrize("groups", [(), (2,)], ids=["one", "groups"])
@each_dtype
def test_the_average_is_that_of_whole_matrices(d: int, groups: tuple[int, ...], dtype: torch.dtype) -> None:
    factor = DenseFactor((*groups, d), Start(False), torch.empty(0, dtype=dtype))
    expected, weight = torch.zeros(*groups, d, d, dtype=torch.float64), 0.0
    for decay in (0.9, 0.5, 0.8):
        rows = torch.randn(*groups, 5, d, dtype=dtype)
        factor.take(of_both_kinds(rows), decay)
        expected, weight = (
            decay * expected + (1 - decay) * 2 * rows.double().mT @ rows.double(),
            decay * weight + 1 - decay,
        )
        got, twin = factor.dense(), expected / weight
        assert torch.equal(got, got.mT)
        tolerance = 1e-12 if dtype == torch.float64 else 1e-5
        assert torch.linalg.norm(got - twin) <= tolerance * torch.linalg.norm(twin)
        torch.testing.assert_close(factor.trace(), got.diagonal(dim1=-2, dim2=-1).sum(-1))
    assert factor.nbytes == math.prod(groups) * strip_elements(d) * dtype.itemsize


def test_zero_rows_only_age_what_is_there() -> None:
    factor = DenseFactor((400,), Start(False), torch.empty(0))
    factor.take(moment_of(torch.randn(3, 400)), 0.5)
    before = factor.dense()
    factor.take(moment_of(torch.zeros(3, 400)), 0.5)
    torch.testing.assert_close(factor.dense(), before / 3)


def storages(least: int) -> set[int]:
    """Of living tensors, where they take so many bytes or more."""
    gc.collect()
    found = [o for o in gc.get_objects() if type(o) is Tensor and o.device.type == "cpu" and o.layout == torch.strided]
    return {s.data_ptr() for s in (t.untyped_storage() for t in found) if s.nbytes() >= least}


@pytest.mark.parametrize("damping", [1e-1, 1e-9], ids=["float32", "float64"])
def test_no_whole_matrix_outlives_a_refresh(damping: float) -> None:
    d = 2000
    whole = d * d * 4
    others = storages(whole)
    factor = DenseFactor((d,), Start(False), torch.empty(0))
    seen: list[torch.dtype] = []

    class Watched(rkfac.RSVD):
        def decompose(self, request: Request) -> Any:
            assert storages(whole) - others == {
                request.X.untyped_storage().data_ptr()
            }  # no second one, of any precision
            seen.append(request.X.dtype)
            return super().decompose(request)

    for _ in range(3):
        factor.take(moment_of(torch.randn(20, d)), 0.9)
        factor.adopt(factor.refresh(request(Watched(), damping)))
        assert storages(whole) <= others
    assert set(seen) == {torch.float32 if damping == 1e-1 else torch.float64}
    assert factor.nbytes < 0.6 * whole
    factor.dense().trace()
    factor.state_dict()
    assert storages(whole) <= others


def test_no_whole_matrix_outlives_a_failed_refresh() -> None:
    class Broken(rkfac.RSVD):
        def decompose(self, request: Request) -> Any:
            raise DecompositionError("no")

    others = storages(500 * 500 * 4)
    factor = DenseFactor((500,), Start(False), torch.empty(0))
    factor.take(moment_of(torch.randn(20, 500)), 0.9)
    with pytest.raises(DecompositionError) as error:
        factor.refresh(request(Broken(), 1e-1))
    del error
    assert storages(500 * 500 * 4) <= others


@pytest.mark.parametrize("d", [1, 2, 7, 319, 320, 321, 777])
@pytest.mark.parametrize("groups", [(), (2,)], ids=["one", "groups"])
@each_dtype
def test_a_state_saved_entry_by_entry_loads_to_the_same_matrix(
    d: int, groups: tuple[int, ...], dtype: torch.dtype
) -> None:
    X = torch.randn(*groups, d, d, dtype=dtype)
    X = X.triu() + X.triu(1).mT
    # The format written out: row i of the upper half after its diagonal, the lower half transposed into what is free.
    half, even = (d + 1) // 2, 1 - d % 2
    saved = torch.zeros(*groups, *folded_shape(d), dtype=dtype)
    for i in range(d):
        if i < half:
            saved[..., i, even + i :] = X[..., i, i:]
        else:
            saved[..., 1 - even + i - half :, i - half] = X[..., i, i:]
    factor = DenseFactor((*groups, d), Start(False), torch.empty(0, dtype=dtype))
    numbers = {"level": 0.0, "weight": 1.0, "identity": 0.0, "updates": 1, "basis": None}
    factor.load_state_dict({"value": saved, **numbers})
    assert torch.equal(factor.dense(), X.double())
    assert torch.equal(factor.state_dict()["value"], saved)
    factor.to(torch.device("meta"))
    assert factor.nbytes == math.prod(groups) * strip_elements(d) * dtype.itemsize
