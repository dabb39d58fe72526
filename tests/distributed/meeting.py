"""What the processes of a crew do when they meet: some agree, some do not."""

from __future__ import annotations

import gc
import os
import signal
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

import rkfac
from distributed.together import averaged, batches, build, even, flat, made, same_everywhere, share, steps_of
from optim import stated


def said_by(action: Callable[[], Any]) -> str:
    """What it raises."""
    try:
        action()
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def differing(what: str) -> str:
    """Every process builds an optimizer that differs from the others' in one thing."""
    rank = distributed.get_rank()
    model = build("mlp")
    keywords: dict[str, Any] = {}
    if what == "shapes" and rank == 1:
        model = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 4)).double()
    if what == "frozen" and rank == 1:
        model[0].weight.requires_grad_(False)
    if what == "lr":
        keywords["lr"] = 0.1 * (1 + rank)
    if what == "damping_rule":
        keywords["damping_rule"] = "pi" if rank else "factored"
    if what == "exclude":
        keywords["exclude"] = ("4",) if rank else ()
    if what == "eager_start":
        keywords["eager_start"] = bool(rank)
    if what == "seed":
        keywords["seed"] = rank
    if what == "adaptive":
        keywords |= {"adaptive_damping": rkfac.LevenbergMarquardt(every=2 + rank)}
    if what == "groups":
        first, rest = list(model[0].parameters()), [*model[2].parameters(), *model[4].parameters()]
        keywords["params"] = [{"params": rest}, {"params": first}] if rank else [{"params": first}, {"params": rest}]
    if what == "class" and rank == 1:
        return said_by(lambda: stated.SREKFAC(model))
    return said_by(lambda: stated.RSKFAC(model, **keywords))


def refused(optimizer: str, keywords: dict[str, Any]) -> tuple[str, str]:
    """What a member says with others around, and when it is told to train by itself."""
    if keywords.get("generator"):
        keywords = {**keywords, "generator": torch.Generator()}
    first = said_by(lambda: made(optimizer, build("mlp"), **keywords))
    return first, said_by(lambda: made(optimizer, build("mlp"), process_group=False, **keywords))


def by_itself() -> tuple[bool, Tensor]:
    """process_group=False: different data, different results, nothing is exchanged."""
    model, rank = build("mlp"), distributed.get_rank()
    optimizer = made("RSKFAC", model, process_group=False)
    for _ in steps_of(model, optimizer, batches("mlp", 6, 12), even(12, distributed.get_world_size())):
        pass
    return same_everywhere(flat(model)), torch.tensor(rank)


def not_finite(where: str) -> tuple[list[str], bool, bool, bool]:
    """One process sees NaN or Inf once: warnings, whether all are finite and equal, whether statistics were left out."""
    model, rank = build("mlp"), distributed.get_rank()
    net = DistributedDataParallel(model)
    optimizer = made("RSKFAC", net, factor_every=1, inverse_every=1)
    data, cuts = batches("mlp", 6, 12), even(12, distributed.get_world_size())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for i, batch in enumerate(data):
            x, y = share(batch, rank, cuts)
            optimizer.zero_grad()
            handle = None
            if i == 3 and rank == 1 and where == "gradient":
                handle = model[2].register_full_backward_pre_hook(lambda m, g: (g[0] * float("inf"),))
            if i == 3 and rank == 1 and where == "input":
                x = x.clone()
                x[0, 0] = float("nan")
            F.cross_entropy(net(x), y).backward()
            if handle is not None:
                handle.remove()
                for p in model.parameters():  # the averaged gradient itself is repaired: statistics alone are spoilt
                    p.grad = torch.nan_to_num(p.grad, 0.0, 0.0, 0.0)
            for p in model.parameters():
                p.grad = torch.nan_to_num(p.grad, 0.0, 0.0, 0.0)
                distributed.broadcast(p.grad, 0)
            optimizer.step()
    updates = {
        s["updates"] for b in optimizer.state_dict()["curvature"]["blocks"].values() for s in b["factors"].values()
    }
    finite = bool(torch.isfinite(flat(model)).all())
    return [str(w.message) for w in caught], finite, same_everywhere(flat(model)), 5 in updates


def retired_in_one() -> tuple[list[str], bool]:
    """A weight that one process alone uses by hand as well: nobody preconditions it."""
    model, rank = build("mlp"), distributed.get_rank()
    optimizer = made("RSKFAC", model)
    for batch in batches("mlp", 6, 12):
        x, y = share(batch, rank, even(12, distributed.get_world_size()))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        if rank == 1:
            loss = loss + 30 * F.linear(x, model[0].weight).square().mean()
        loss.backward()
        for p in model.parameters():
            distributed.all_reduce(p.grad)
            p.grad /= distributed.get_world_size()
        optimizer.step()
    return [r.name for r in optimizer.report() if not r.covered or r.reason], same_everywhere(flat(model))


def sampled() -> tuple[bool, bool]:
    """fisher="mc": all processes are equal, and what they draw is not."""
    model = build("mlp")
    net = DistributedDataParallel(model)
    optimizer = made("RSKFAC", net, fisher="mc")
    for _ in steps_of(net, optimizer, batches("mlp", 8, 12), even(12, distributed.get_world_size())):
        pass
    drawn = torch.rand(8, generator=optimizer._settings.randomness.local("fisher", 0))
    return same_everywhere(flat(model)), same_everywhere(drawn)


def drawn_rows() -> bool:
    model = build("mlp")
    net = DistributedDataParallel(model)
    optimizer = made("RSKFAC", net, rows=2)
    for _ in steps_of(net, optimizer, batches("mlp", 8, 12), even(12, distributed.get_world_size())):
        pass
    return same_everywhere(flat(model))


def saved(
    optimizer: str, model: str, before: int, after: int, **keywords: Any
) -> tuple[dict[str, Any], dict[str, Any], Tensor]:
    """The state of model and optimizer after some steps, and the parameters after some more."""
    net = build(model)
    wrapped = DistributedDataParallel(net)
    own = made(optimizer, wrapped, **keywords)
    cuts = even(12, distributed.get_world_size())
    data = batches(model, before + after, 12)
    for _ in steps_of(wrapped, own, data[:before], cuts):
        pass
    state = {name: value.clone() for name, value in net.state_dict().items()}
    kept = _copied(own.state_dict())
    for _ in steps_of(wrapped, own, data[before:], cuts):
        pass
    return state, kept, flat(net)


def resumed(
    optimizer: str, model: str, state: dict[str, Any], kept: dict[str, Any], before: int, after: int, **keywords: Any
) -> tuple[Tensor, bool]:
    """Go on from a state that another number of processes has saved."""
    net = build(model)
    net.load_state_dict(state)
    wrapped = DistributedDataParallel(net)
    own = made(optimizer, wrapped, **keywords)
    own.load_state_dict(_copied(kept))  # tensors that came through a pipe are the memory of all processes
    for _ in steps_of(
        wrapped, own, batches(model, before + after, 12)[before:], even(12, distributed.get_world_size())
    ):
        pass
    return flat(net), same_everywhere(flat(net))


def _copied(state: Any) -> Any:
    if isinstance(state, Tensor):
        return state.clone()
    if isinstance(state, dict):
        return {k: _copied(v) for k, v in state.items()}
    return [_copied(v) for v in state] if isinstance(state, list) else state


def died(when: str) -> str:
    """One process is killed while something is exchanged; what the other one says."""
    model, rank = build("mlp"), distributed.get_rank()
    optimizer = made("RSKFAC", model)
    world = optimizer._company.world
    if rank == 1:
        name = {"statistics": "summed", "refresh": "spread", "agreement": "gathered"}[when]

        def die(*_: Any, **__: Any) -> Any:
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(world, name, die)
    x, y = share(batches("mlp", 1, 12)[0], rank, even(12, 2))
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    before = flat(model)
    what = said_by(optimizer.step)
    assert torch.equal(flat(model), before), "a parameter moved"
    return what


def stalled(seconds: float) -> str:
    """One process stays away."""
    import time

    group = distributed.new_group(timeout=timedelta(seconds=seconds))
    model, rank = build("mlp"), distributed.get_rank()
    optimizer = made("RSKFAC", model, process_group=group)
    x, y = share(batches("mlp", 1, 12)[0], rank, even(12, 2))
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    if rank == 1:
        time.sleep(3 * seconds)
        return "slept"
    return said_by(optimizer.step)


def counted(d: int, rank_kept: int) -> dict[str, int]:
    """Bytes that one step with statistics and a refresh hands over, for one wide layer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(d - 1, 8), nn.ReLU(), nn.Linear(8, 4))
    optimizer = rkfac.RSKFAC(model, lr=0.01, rank=rank_kept, exclude=("2",), rows=None, process_group=None)
    x, y = torch.randn(8, d - 1), torch.randint(4, (8,))
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    return dict(optimizer._company.world.sent)


def later() -> tuple[str, bool, str]:
    """The optimizer is built while nobody is there, as Lightning does; then the others come, and go."""
    real = distributed.is_initialized
    model = build("mlp")
    try:
        distributed.is_initialized = lambda: False
        optimizer = made("RSKFAC", model)
    finally:
        distributed.is_initialized = real
    alone = str(optimizer._company.world.size)
    net = DistributedDataParallel(model)
    data, cuts = batches("mlp", 4, 12), even(12, distributed.get_world_size())
    for _ in steps_of(net, optimizer, data, cuts):
        pass
    try:
        distributed.is_initialized = lambda: False
        gone = said_by(optimizer.step)
    finally:
        distributed.is_initialized = real
    return alone, same_everywhere(flat(model)) and not optimizer._company.world.alone, gone


def tensor_parallel() -> str:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2,))
    model = parallelize_module(build("mlp"), mesh, {"0": ColwiseParallel()})
    return said_by(lambda: stated.RSKFAC(model))


def saved_owned(before: int, after: int) -> Any:
    return saved("RSKFAC", "wide", before, after, memory="owned")


def resumed_owned(state: dict[str, Any], kept: dict[str, Any], before: int, after: int, memory: str) -> Any:
    return resumed("RSKFAC", "wide", state, kept, before, after, memory=memory)


def held() -> tuple[int, int, str]:
    """Bytes of averages with everything in every process and with owners, and what a spectrum of another's says."""
    found = []
    for memory in ("replicated", "owned"):
        net = build("wide")
        optimizer = made("RSKFAC", net, memory=memory)
        for _ in steps_of(net, optimizer, batches("wide", 3, 12), even(12, distributed.get_world_size())):
            pass
        found.append(sum(r.bytes["factors"] for r in optimizer.report() if r.covered))
    said = [said_by(lambda name=name: optimizer.spectrum(name)) for name in ("0", "2", "4")]
    return found[0], found[1], "; ".join(said)


def joined() -> str:
    """A model that is trained inside DistributedDataParallel's join()."""
    net = DistributedDataParallel(build("mlp"))
    optimizer = made("RSKFAC", net)
    x, y = share(batches("mlp", 1, 12)[0], distributed.get_rank(), even(12, 2))
    with net.join():
        F.cross_entropy(net(x), y).backward()
        return said_by(optimizer.step)


def early(how: str) -> tuple[bool, int, int, float]:
    """Whether all are equal, how often sums left early and were believed, how often they were sent again, the difference.

    `how`: "plain"; "dropped": a backward pass whose gradients are dropped comes first; "growing": inputs grow beyond all
    units once; "twice": accumulation of two passes.
    """
    from rkfac.distributed.early import Early

    believed, again = [], []
    real, summed = Early.totals, type(made("RSKFAC", build("mlp"))._company.world).summed

    def totals(self: Any, block: Any, alive: Any) -> Any:
        found = real(self, block, alive)
        (believed if found is not None else again).append(block.name)
        return found

    def counting(self: Any, tensors: Any, what: str, to: Any = None) -> Any:
        again.append(what)
        return summed(self, tensors, what, to)

    rank, size = distributed.get_rank(), distributed.get_world_size()
    nets = build("mlp"), build("mlp")
    wrapped = DistributedDataParallel(nets[1])
    optimizers = made("RSKFAC", nets[0], process_group=False), made("RSKFAC", wrapped)
    world = type(optimizers[1]._company.world)
    Early.totals, world.summed = totals, counting
    try:
        for i, batch in enumerate(batches("mlp", 12, 12)):
            scale = 1e25 if how == "growing" and i == 6 else 1.0
            for net, optimizer, (x, y) in zip(
                (nets[0], wrapped), optimizers, (batch, share(batch, rank, even(12, size))), strict=True
            ):
                optimizer.zero_grad()
                if how == "dropped":
                    (7 * F.cross_entropy(net(x), y)).backward()
                    optimizer.zero_grad()
                passes = 2 if how == "twice" else 1
                for _ in range(passes):
                    (F.cross_entropy(net(x * scale), y) / passes).backward()
                optimizer.step()
    finally:
        Early.totals, world.summed = real, summed
    difference = float((flat(nets[1]) - flat(nets[0])).abs().max())
    return same_everywhere(flat(nets[1])), len(believed), len(again), difference


def channels(optimizers: int) -> tuple[int, int]:
    """Threads of this process after one optimizer has come and gone, and after many have."""
    found = []
    for number in range(1 + optimizers):
        model = build("mlp")
        optimizer = made("RSKFAC", model, factor_every=1)
        for batch in batches("mlp", 2, 12):
            x, y = share(batch, distributed.get_rank(), even(12, 2))
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            averaged(model)
            optimizer.step()
        assert optimizer._company.early._group is not None
        del optimizer, model
        gc.collect()
        if number in (0, optimizers):
            found.append(len(os.listdir("/proc/self/task")))
    return found[0], found[1]


def died_early() -> tuple[str, float]:
    """One process is killed in a backward pass, after the first sums have left early in the others."""
    import time

    model, rank = build("mlp"), distributed.get_rank()
    optimizer = made("RSKFAC", model)
    began, said = 0.0, ""
    for i, batch in enumerate(batches("mlp", 5, 12)):
        x, y = share(batch, rank, even(12, 2))
        optimizer.zero_grad()
        if i == 4 and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        began, before = time.monotonic(), flat(model)
        F.cross_entropy(model(x), y).backward()
        said = said_by(optimizer.step)
    assert torch.equal(flat(model), before), "a parameter moved"
    timeout = optimizer._company.early._group._get_backend(torch.device("cpu")).options._timeout
    return f"{said} | {timeout.total_seconds():g}", time.monotonic() - began


def other_weights() -> tuple[str, str]:
    """Replicas that nobody made equal, and such that DistributedDataParallel made equal after the optimizer was built."""
    said = []
    for wrapped in (False, True):
        torch.manual_seed(distributed.get_rank())
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()
        optimizer = made("RSKFAC", model)
        net = DistributedDataParallel(model) if wrapped else model
        x, y = share(batches("mlp", 1, 12)[0], distributed.get_rank(), even(12, 2))
        F.cross_entropy(net(x), y).backward()
        said.append(said_by(optimizer.step))
    return said[0], said[1]


def frozen_bias(when: str) -> tuple[float, bool]:
    """A bias is frozen, and thawed, in the middle: difference to one process, whether all are equal."""
    rank, size = distributed.get_rank(), distributed.get_world_size()
    nets = build("mlp"), build("mlp")
    optimizers = made("RSKFAC", nets[0], process_group=False, factor_every=1), made("RSKFAC", nets[1], factor_every=1)
    for i, batch in enumerate(batches("mlp", 12, 12)):
        for net, optimizer, (x, y) in zip(nets, optimizers, (batch, share(batch, rank, even(12, size))), strict=True):
            if when == "before zero_grad" and i in (4, 8):
                net[2].bias.requires_grad_(i == 8)
            optimizer.zero_grad()
            if when == "after zero_grad" and i in (4, 8):
                net[2].bias.requires_grad_(i == 8)
            F.cross_entropy(net(x), y).backward()
        for p in nets[1].parameters():
            if p.grad is not None:
                distributed.all_reduce(p.grad)
                p.grad /= size
        for optimizer in optimizers:
            optimizer.step()
    return float((flat(nets[1]) - flat(nets[0])).abs().max()), same_everywhere(flat(nets[1]))


def with_a_group_of_one() -> bool:
    """Somebody has made a group in which not every process is."""
    distributed.new_group([0])
    model = build("mlp")
    net = DistributedDataParallel(model)
    optimizer = made("RSKFAC", net)
    for _ in steps_of(net, optimizer, batches("mlp", 8, 12), even(12, distributed.get_world_size())):
        pass
    return same_everywhere(flat(model)) and optimizer._company.early._group is not None


def shrinking() -> float:
    """A loss that falls by many powers of ten between two statistics, in float32: difference to one process."""
    rank, size = distributed.get_rank(), distributed.get_world_size()
    nets = build("mlp").float(), build("mlp").float()
    own = {"factor_every": 1, "inverse_every": 1, "factor_decay": 0.0, "momentum": 0.0}
    optimizers = made("KFAC", nets[0], process_group=False, **own), made("KFAC", nets[1], **own)
    for i, (x, y) in enumerate(batches("mlp", 5, 12)):
        scale = 1e-24 if i > 2 else 1.0
        for net, optimizer, (a, b) in zip(
            nets, optimizers, ((x.float(), y), share((x.float(), y), rank, even(12, size))), strict=True
        ):
            optimizer.zero_grad()
            (scale * F.cross_entropy(net(a), b)).backward()
        for p in nets[1].parameters():
            distributed.all_reduce(p.grad)
            p.grad /= size
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = 0.05 / scale
            optimizer.step()
    return float((flat(nets[1]) - flat(nets[0])).abs().max())
