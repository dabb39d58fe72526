"""B-KFAC: against an independent implementation, its limits, what it forms, what it decides and what it refuses."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import rkfac
from optim import stated
from optim.problems import assert_same_parameters, mlp, rows, same, train, twin
from optim.test_trajectory import assert_follows, batches, in_numpys_words, network, weights_and_biases
from oracles import numpy_online
from rkfac.curvature.factor import OnlineFactor

EVERY: dict[str, Any] = {"factor_every": 1, "inverse_every": 2}


def wide(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(30, 40), nn.Tanh(), nn.Linear(40, 4)).to(dtype)


def wide_rows(n: int = 5, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 30, dtype=dtype), torch.randint(4, (n,))


# --- the algorithm


SHORT: dict[str, Any] = {"factor_every": 2, "inverse_every": 6}
OFTEN: dict[str, Any] = {"correct_every": 1, "correct_share": 0.5}


@pytest.mark.parametrize(
    ("changes", "samples"),
    [
        ({"inverse_every": 10}, None),
        (SHORT, None),
        ({**SHORT, "tail": "trace"}, None),
        ({**SHORT, "rank": 3, "tail": "trace", "apply": "backward"}, 3),
        ({**SHORT, "rank": 3, "variant": "b-r", "overwrite_every": 2}, 3),
        ({**SHORT, "rank": 3, "variant": "b-r", "overwrite_every": 3, "tail": "trace"}, 3),
        ({**SHORT, "variant": "b-r-c", "overwrite_every": 3, "correct_every": 2}, None),
        ({**SHORT, "rank": 4, "variant": "b-r-c", "overwrite_every": 2, **OFTEN, "tail": "trace"}, 3),
        ({**SHORT, "rank": 3, "variant": "b-r-c", "overwrite_every": 4, "correct_every": 3, "correct_share": 1.0}, 3),
    ],
    ids=[
        *("paper", "short periods", "trace", "few samples, trace, backward", "b-r", "b-r, trace"),
        *("b-r-c", "b-r-c, trace, half of the modes", "b-r-c, all modes"),
    ],
)
def test_thirty_steps_agree_with_numpy(changes: dict[str, Any], samples: int | None) -> None:
    """With few samples both sides of the hidden layer and the input of the last are online."""
    model, data = network(), [(x[:samples], y[:samples]) for x, y in batches()]
    keywords = {**rkfac.paper_defaults(), "rank": 5, "weight_decay": 0.0, "apply": "step", **changes}
    generator, source = (torch.Generator().manual_seed(5) for _ in range(2))
    optimizer = rkfac.BKFAC(model, **keywords, decomposition=rkfac.Exact(), generator=generator)
    history, losses = numpy_online.train(
        weights_and_biases(model),
        data,
        kind=numpy_online.Online,
        reduce=False,
        **in_numpys_words(keywords, "inverse_every"),
        tail=keywords["tail"],
        overwrite_every=keywords.get("overwrite_every"),
        correct_every=keywords.get("correct_every"),
        correct_share=keywords.get("correct_share", 0.2),
        draw=lambda modes: torch.randperm(modes, generator=source).numpy(),
    )
    assert_follows(model, optimizer, data, history, losses)
    report = optimizer.report()
    assert [r.kept_input for r in report] == ["dense", "online", "dense" if samples is None else "online"]
    assert [r.kept_output for r in report] == ["dense", "dense" if samples is None else "online", "dense"]
    assert all(r.updates >= 3 for r in report)


@pytest.mark.parametrize("apply", ["step", "backward"])
@pytest.mark.parametrize("start", ["unbiased", "identity"])
def test_while_nothing_is_cut_it_is_exact_kfac(apply: str, start: str) -> None:
    """Six statistics of two rows have rank twelve: as many modes as are kept."""
    model = wide()
    other = twin(model)
    settings = {**EVERY, "factor_start": start, "tail": "trace", "graft": None, "lr": 0.05, "momentum": 0.0}
    optimizer = stated.BKFAC(model, **{**settings, "apply": apply, "rank": 12})
    exact = stated.KFAC(other, **settings)
    data = [wide_rows(2) for _ in range(6)]
    train(model, optimizer, data)
    train(other, exact, data)
    assert {"online"} == {r.kept_input for r in optimizer.report()}
    assert_same_parameters(model, other, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("variant", ["b", "b-r", "b-r-c"])
@pytest.mark.parametrize("graft", ["sgd", None])
def test_the_factored_direction_of_the_backward_pass_is_the_dense_one(variant: str, graft: str | None) -> None:
    model = wide()
    other = twin(model)
    settings = {**EVERY, "rank": 6, "variant": variant, "graft": graft, "lr": 0.05, "momentum": 0.9}
    in_backward = stated.BKFAC(model, **{**settings, "apply": "backward"})
    in_step = stated.BKFAC(other, **{**settings, "apply": "step"})
    data = [wide_rows() for _ in range(8)]
    train(model, in_backward, data)
    train(other, in_step, data)
    assert in_backward._blocks["0"].rowwise is not None
    assert_same_parameters(model, other, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("warm_start", [False, True])
def test_after_an_overwrite_it_is_rs_kfac(warm_start: bool) -> None:
    """Where every refresh overwrites, its bases are those of RS-KFAC, and so are its steps."""
    model = wide()
    other = twin(model)
    settings = {**EVERY, "rank": 6, "oversampling": 2, "warm_start": warm_start, "lr": 0.05}
    optimizer = stated.BKFAC(model, variant="b-r", overwrite_every=1, **settings)
    randomized = stated.RSKFAC(other, **settings)
    data = [wide_rows() for _ in range(5)]
    train(model, optimizer, data)
    train(other, randomized, data)
    assert_same_parameters(model, other, rtol=1e-11, atol=1e-13)
    block = optimizer._blocks["0"]
    assert block.input.refreshes == 3
    torch.testing.assert_close(block.input.kept.dense(), block.input.low.dense())


def test_an_overwrite_that_is_not_due_makes_another_step() -> None:
    """Guards the test above."""
    model = wide()
    other = twin(model)
    settings = {**EVERY, "rank": 6, "oversampling": 2, "lr": 0.05}
    data = [wide_rows() for _ in range(5)]
    train(model, stated.BKFAC(model, variant="b-r", overwrite_every=2, **settings), data)
    train(other, stated.RSKFAC(other, **settings), data)
    assert not torch.equal(model[0].weight, other[0].weight)


def test_corrections_bring_the_modes_nearer_to_the_average() -> None:
    errors = {}
    for variant in ("b-r", "b-r-c"):
        model = wide()
        optimizer = stated.BKFAC(
            model,
            rank=6,
            variant=variant,
            overwrite_every=1000,
            lr=0.0,
            **EVERY,
            **({"correct_every": 1, "correct_share": 1.0} if variant == "b-r-c" else {}),
        )
        torch.manual_seed(1)
        train(model, optimizer, [wide_rows() for _ in range(12)])
        factor = optimizer._blocks["0"].input
        X, unit = factor.average.whole()
        U = factor.kept.U
        errors[variant] = float(((U.mT @ (X * unit) @ U).diagonal() - factor.kept.s).abs().max() / factor.kept.s[0])
    assert errors["b-r-c"] < 1e-12 < 1e-3 < errors["b-r"]


def test_an_automatic_rank_uses_what_the_damping_leaves_visible() -> None:
    """Kept are at most 256 modes; a larger damping sees fewer of them."""
    ranks = []
    for damping in (1e-3, 0.3, 10.0):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(400, 3)).double()
        optimizer = rkfac.BKFAC(model, lr=0.0, damping=damping, relative_to="largest", **EVERY)
        for _ in range(4):
            optimizer.zero_grad()
            x = torch.randn(20, 400, dtype=torch.float64) * torch.logspace(0, -3, 400, dtype=torch.float64)
            model(x).square().mean().backward()
            optimizer.step()
        (report,) = optimizer.report()
        assert report.kept_input == "online"
        factor = optimizer._blocks["0"].input
        low = factor.kept.with_trace(factor.trace())
        expected = rkfac.linalg.sufficient_rank(low.s, damping * float(low.s[0]), trace=float(low.trace()), d=low.dim)
        assert report.rank_input == expected
        ranks.append(report.rank_input)
    assert ranks[0] > ranks[1] >= ranks[2]


# --- what it forms


class Largest(TorchDispatchMode):
    """Entries of the largest tensor that any operation has made, and bytes of all that lived at once at most."""

    def __init__(self) -> None:
        super().__init__()
        self.entries = self.held = self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else (made,):
            if isinstance(tensor, Tensor):
                self.entries = max(self.entries, tensor.numel())
                self._follow(tensor.untyped_storage())
        return made

    def _follow(self, storage: torch.UntypedStorage) -> None:
        place, size = storage._cdata, storage.nbytes()
        if place not in self.known:
            self.known.add(place)
            self.held += size
            self.peak = max(self.peak, self.held)
            weakref.finalize(storage, self._forget, place, size)

    def _forget(self, place: int, size: int) -> None:
        self.known.discard(place)
        self.held -= size


@contextmanager
def largest() -> Iterator[Largest]:
    with Largest() as watch:
        yield watch


def steps_of(build: Any, d: int, side: str = "input", **keywords: Any) -> Largest:
    torch.manual_seed(0)
    head = nn.Linear(d, 8) if side == "input" else nn.Sequential(nn.Linear(8, d), nn.Tanh())
    with largest() as watch:
        model = nn.Sequential(head)
        optimizer = build(model, lr=0.01, rank=8, factor_every=1, inverse_every=1, **keywords)
        for _ in range(3):
            optimizer.zero_grad()
            x = torch.randn(16, d if side == "input" else 8)
            nn.functional.cross_entropy(model(x), torch.randint(8, (16,))).backward()
            optimizer.step()
    (report,) = optimizer.report()
    assert report.covered
    assert (report.rank_input if side == "input" else report.rank_output) == 8
    return watch


@pytest.mark.parametrize("apply", ["step", "backward"])
@pytest.mark.parametrize("side", ["input", "output"])
def test_no_matrix_of_the_width_squared_is_ever_formed(apply: str, side: str) -> None:
    """Nor anything near it: what lives at once is a few hundred numbers for each of the layer's inputs or outputs."""
    d = 16384
    watch = steps_of(rkfac.BKFAC, d, side, apply=apply)
    assert watch.entries < 100 * d
    assert watch.peak < 4 * 1000 * d


def test_the_watch_sees_matrices() -> None:
    d = 1024
    for build, keywords in ((rkfac.RSKFAC, {}), (rkfac.BKFAC, {"variant": "b-r"})):
        watch = steps_of(build, d, **keywords)
        assert watch.entries >= d * d / 2
        assert watch.peak >= 4 * d * d / 2
    assert steps_of(rkfac.BKFAC, d).entries < 100 * d


def test_factors_that_are_surely_online_may_be_wider_than_the_widest_matrix() -> None:
    """The input side is 31 wide, the output side 40; 4 rows and 6 modes are fewer than either."""

    def covered(build: Any, **keywords: Any) -> bool:
        model = wide()
        optimizer = build(model, rank=6, max_factor_dim=20, **keywords)
        return "0" in optimizer._blocks

    assert covered(rkfac.BKFAC, rows=4)
    assert not covered(rkfac.BKFAC, rows=30)  # may be dense: 30 + 6 is not fewer than 31
    assert not covered(rkfac.BKFAC, rows=None)
    assert not covered(rkfac.BKFAC, rows=4, variant="b-r")
    assert not covered(rkfac.RSKFAC, rows=4)


def test_what_is_surely_online_stays_so_whatever_comes() -> None:
    """Five calls of four rows are more than was bargained for: they are taken in pieces."""
    model = wide()
    optimizer = stated.BKFAC(model, rank=20, rows=4, lr=0.01, **EVERY)
    for _ in range(3):
        optimizer.zero_grad()
        for _ in range(5):
            x, y = wide_rows(12)
            (nn.functional.cross_entropy(model(x), y) / 5).backward()
        optimizer.step()
    factor = optimizer._blocks["0"].input
    assert isinstance(factor, OnlineFactor)
    assert len(factor.kept.s) == 20


# --- what it decides


def test_the_kind_of_a_factor_is_decided_by_the_first_statistic_and_kept() -> None:
    model = wide()
    optimizer = stated.BKFAC(model, rank=6, lr=0.01, **EVERY)
    train(model, optimizer, [wide_rows(24), wide_rows(40), wide_rows(2)])
    report = optimizer.report()
    assert [(r.kept_input, r.kept_output) for r in report] == [("online", "online"), ("online", "dense")]
    late = stated.BKFAC(twin(model), rank=7, lr=0.01, **EVERY)
    train(late._model, late, [wide_rows(24), wide_rows(2)])
    assert late.report()[0].kept_input == "dense"  # 24 + 7 is not fewer than 31


@pytest.mark.parametrize("variant", ["b", "b-r-c"])
def test_a_resumed_run_keeps_what_was_decided(variant: str) -> None:
    model = wide(torch.float32)
    settings = {"rank": 6, "variant": variant, "lr": 0.02, **EVERY}
    data = [wide_rows(dtype=torch.float32) for _ in range(9)]
    optimizer = stated.BKFAC(model, **settings)
    train(model, optimizer, data[:4])
    other = twin(model)
    resumed = stated.BKFAC(other, **settings)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert same(resumed.state_dict(), optimizer.state_dict())
    train(model, optimizer, data[4:])
    train(other, resumed, data[4:])
    assert_same_parameters(other, model, exactly=True)
    assert same(resumed.state_dict(), optimizer.state_dict())


def _not_orthonormal(state: dict[str, Any]) -> None:
    state["factors"]["input"]["value"] *= 2


def _too_few_values(state: dict[str, Any]) -> None:
    state["factors"]["input"]["s"] = state["factors"]["input"]["s"][:-1]


def _negative(state: dict[str, Any]) -> None:
    state["factors"]["input"]["s"] = -state["factors"]["input"]["s"]


def _no_trace(state: dict[str, Any]) -> None:
    del state["factors"]["input"]["trace"]


def _odd_count(state: dict[str, Any]) -> None:
    state["factors"]["input"]["refreshes"] = -1


def _undecided(state: dict[str, Any]) -> None:
    state["online"] = {"input": "yes"}


def _strange_side(state: dict[str, Any]) -> None:
    state["online"] = {"inside": True}


def _dense_after_all(state: dict[str, Any]) -> None:
    state["online"]["input"] = False


@pytest.mark.parametrize(
    "spoil",
    [_not_orthonormal, _too_few_values, _negative, _no_trace, _odd_count, _undecided, _strange_side, _dense_after_all],
)
def test_a_damaged_state_is_refused_and_changes_nothing(spoil: Any) -> None:
    model = wide()
    optimizer = stated.BKFAC(model, rank=6, lr=0.02, **EVERY)
    train(model, optimizer, [wide_rows() for _ in range(3)])
    before = copy.deepcopy(optimizer.state_dict())
    damaged = copy.deepcopy(before)
    spoil(damaged["curvature"]["blocks"]["0"])
    with pytest.raises(ValueError, match="does not fit"):
        optimizer.load_state_dict(damaged)
    assert same(optimizer.state_dict(), before)
    train(model, optimizer, [wide_rows()])


def test_variants_do_not_load_each_other_s_states() -> None:
    model = wide()
    optimizer = stated.BKFAC(model, rank=6, **EVERY)
    train(model, optimizer, [wide_rows()])
    with pytest.raises(ValueError, match="method"):
        stated.BKFAC(model, rank=6, variant="b-r", **EVERY).load_state_dict(optimizer.state_dict())


# --- scales and failures


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1e-18, 1e-9, 1e6, 1e12])
def test_directions_do_not_depend_on_the_size_of_gradients(dtype: torch.dtype, size: float) -> None:
    """With relative damping and SGD's lengths, multiplying the loss multiplies the step."""
    moves = []
    for scale in (1.0, size):
        model = wide(dtype)
        start = model[0].weight.detach().clone()
        optimizer = stated.BKFAC(model, rank=6, lr=1.0 / scale, momentum=0.0, **EVERY)
        torch.manual_seed(3)
        for _ in range(3):
            x, y = wide_rows(dtype=dtype)
            model[0].weight.data.copy_(start)
            optimizer.zero_grad()
            (nn.functional.cross_entropy(model(x), y) * scale).backward()
            optimizer.step()
        assert optimizer.report()[0].kept_output == "online"
        moves.append(model[0].weight.detach() - start)
    length = torch.linalg.norm(moves[0])
    assert length > 0
    assert torch.linalg.norm(moves[1] - moves[0]) <= (1e-3 if dtype == torch.float32 else 1e-8) * length


def test_a_solver_that_fails_costs_a_warning_and_no_statistic(monkeypatch: pytest.MonkeyPatch) -> None:
    model = wide()
    optimizer = stated.BKFAC(model, rank=6, lr=0.01, **EVERY)
    train(model, optimizer, [wide_rows() for _ in range(2)])
    block = optimizer._blocks["0"]
    before, trace = block.input.kept, block.input.trace()

    def broken(*args: Any, **keywords: Any) -> Any:
        raise rkfac.linalg.DecompositionError("no answer")

    from rkfac.curvature.factor import online

    monkeypatch.setattr(online, "online_update", broken)
    with pytest.warns(UserWarning, match="no answer"):
        train(model, optimizer, [wide_rows()])
    torch.testing.assert_close(block.input.kept.U, before.U)
    assert block.input.trace() != trace  # the rows are in the tail
    assert block.failures == 1
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())
    monkeypatch.undo()
    train(model, optimizer, [wide_rows() for _ in range(2)])
    assert block.failures == 0


# --- arguments


@pytest.mark.parametrize(
    ("name", "value", "variant"),
    [
        ("variant", "c", None),
        ("variant", None, None),
        ("overwrite_every", 0, "b-r"),
        ("overwrite_every", True, "b-r"),
        ("correct_every", 2.5, "b-r-c"),
        ("correct_share", 0.0, "b-r-c"),
        ("correct_share", 1.5, "b-r-c"),
        ("correct_share", float("nan"), "b-r-c"),
        ("overwrite_every", 3, "b"),
        ("correct_every", 3, "b-r"),
        ("correct_share", 0.5, "b-r"),
        ("apply", "forward", None),
    ],
)
def test_a_bad_value_is_refused_by_name(name: str, value: Any, variant: str | None) -> None:
    model = mlp()
    with pytest.raises(ValueError, match=name):
        rkfac.BKFAC(model, **{name: value, **({} if variant is None else {"variant": variant})})
    assert not model._forward_hooks


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, True),
        ({"graft": None}, True),
        ({"damping_rule": "pi"}, True),
        ({"graft": "adamw"}, False),
        ({"damping_rule": "product"}, False),
        ({"adaptive_damping": rkfac.LevenbergMarquardt()}, False),
        ({"apply": "step"}, False),
    ],
)
def test_it_preconditions_in_the_backward_pass_where_it_can(settings: dict[str, Any], expected: bool) -> None:
    assert rkfac.BKFAC(mlp(), **settings)._settings.backward is expected


def test_what_cannot_go_together_is_said() -> None:
    with pytest.raises(ValueError, match="backward"):
        rkfac.BKFAC(mlp(), apply="backward", graft="adamw")
    model = mlp()
    train(model, rkfac.BKFAC(model), [rows() for _ in range(2)])
