"""What the processes of a crew do with a model that fully_shard has cut into rows."""

from __future__ import annotations

import hashlib
import io
import os
import signal
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, distributed, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

import rkfac
from distributed.meeting import said_by
from distributed.task import LENGTH, SETTINGS, VOCABULARY, language_model
from distributed.together import STEPS, batches, build, even, flat, made, of_the_first, same_everywhere, share
from optim.problems import Batch, parameters
from rkfac import LevenbergMarquardt


def cut(model: nn.Module, each: bool = True, **options: Any) -> nn.Module:
    """As its users do: every layer with children or parameters of its own kind, then the whole."""
    if each:
        for module in model.children():
            if any(True for _ in module.parameters()):
                fully_shard(module, **options)
    return fully_shard(model, **options)


def whole(model: nn.Module) -> Tensor:
    return torch.cat([p.full_tensor().flatten() for p in parameters(model).values()])


def same_curvature(optimizer: Any) -> bool:
    """Whether all processes keep the same averages and decompositions, to the last bit: whole tensors are equal anyway."""
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict()["curvature"]["blocks"], buffer)
    everybody: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(everybody, hashlib.blake2b(buffer.getvalue()).hexdigest())
    return len(set(everybody)) == 1


def loss_of(net: nn.Module, batch: Batch, cuts: list[int]) -> Tensor:
    x, y = share(batch, distributed.get_rank(), cuts)
    return F.cross_entropy(net(x), y)


def compared(
    optimizer: str,
    model: str,
    size: int = 12,
    passes: int = 1,
    each: bool = True,
    keywords: dict[str, Any] | None = None,
    steps: int = STEPS,
    options: dict[str, Any] | None = None,
) -> tuple[float, float, bool]:
    """Largest difference to one process with all samples, how far that one moved, whether all processes are equal."""
    keywords = keywords or {}
    cuts = even(size, distributed.get_world_size())
    data = batches(model, steps * passes, size)
    alone, net = build(model), cut(build(model), each, **(options or {}))
    start = flat(alone)
    alone_keywords = {**keywords, "process_group": False}
    alone_keywords.pop("memory", None)
    reference, own = made(optimizer, alone, **alone_keywords), made(optimizer, net, **keywords)
    for i in range(steps):
        some = data[i * passes : (i + 1) * passes]
        if distributed.get_rank() == 0:  # once is enough, and the others wait
            reference.zero_grad()
            for x, y in some:
                (F.cross_entropy(alone(x), y) / passes).backward()
            reference.step()
        own.zero_grad()
        for number, batch in enumerate(some):
            net.set_requires_gradient_sync(number == passes - 1)
            (loss_of(net, batch, cuts) / passes).backward()
        own.step()
    end = of_the_first(flat(alone))
    return float((whole(net) - end).abs().max()), float((end - start).abs().max()), same_curvature(own)


def refused(how: str) -> str:
    """What is said of a model that is cut otherwise, or of settings that need whole gradients."""
    model, size = build("mlp"), distributed.get_world_size()
    if how == "after":
        optimizer = made("RSKFAC", model)
        cut(model)
        loss_of(model, batches("mlp", 1, 12)[0], even(12, size)).backward()
        return said_by(optimizer.step)
    if how == "hybrid":
        mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("copies", "rows"))
        return said_by(lambda: made("RSKFAC", cut(model, mesh=mesh)))
    if how == "columns":
        by_columns = {"shard_placement_fn": lambda p: Shard(1) if p.ndim == 2 and p.shape[1] % size == 0 else None}
        return said_by(lambda: made("RSKFAC", cut(model, **by_columns)))
    if how == "left out":
        optimizer = made("RSKFAC", model, exclude=("*",))
        cut(model)
        loss_of(model, batches("mlp", 1, 12)[0], even(12, size)).backward()
        return said_by(optimizer.step)
    if how == "divided":
        net = cut(model, each=False)
        net.set_gradient_divide_factor(1.0)
        return said_by(lambda: made("RSKFAC", net))
    if how == "alone":
        return said_by(lambda: made("RSKFAC", cut(model), process_group=False))
    if how == "scaler":
        optimizer = made("RSKFAC", cut(model))
        scaler = torch.amp.GradScaler("cpu")
        loss = loss_of(model, batches("mlp", 1, 12)[0], even(12, size))
        scaler.scale(loss).backward()
        return said_by(lambda: scaler.step(optimizer))
    optimizer, keywords = {
        "backward": ("RSKFAC", {"apply": "backward"}),
        "mc": ("RSKFAC", {"fisher": "mc"}),
        "adaptive": ("RSKFAC", {"adaptive_damping": LevenbergMarquardt()}),
        "gradients": ("EKFAC-running", {}),
        "past": ("KLDWRM", {}),
    }[how]
    return said_by(lambda: made(optimizer, cut(model), **keywords))


def not_finite(who: int) -> tuple[list[str], bool, bool, bool]:
    """One process has a NaN among its samples: the warnings, whether nothing moved, then whether all are fine and equal."""
    net = cut(build("mlp"))
    optimizer = made("RSKFAC", net)
    cuts, data = even(12, distributed.get_world_size()), batches("mlp", 6, 12)
    for _ in steps(net, optimizer, data[:3], cuts):
        pass
    before, bad = whole(net), (data[3][0].clone(), data[3][1])
    bad[0][cuts[who]] = float("nan")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in steps(net, optimizer, [bad], cuts):
            pass
    still = torch.equal(whole(net), before)
    for _ in steps(net, optimizer, data[4:], cuts):
        pass
    after = whole(net)
    moved = bool(after.isfinite().all()) and not torch.equal(after, before)
    return [str(w.message) for w in said], still, moved, same_everywhere(after)


def steps(net: nn.Module, optimizer: torch.optim.Optimizer, data: list[Batch], cuts: list[int]) -> Iterator[None]:
    for batch in data:
        optimizer.zero_grad()
        loss_of(net, batch, cuts).backward()
        optimizer.step()
        yield


def saved(optimizer: str, folder: str, before: int, after: int) -> Tensor:
    net, data = cut(build("convnet")), batches("convnet", before + after, 12)
    own, cuts = made(optimizer, net), even(12, distributed.get_world_size())
    for _ in steps(net, own, data[:before], cuts):
        pass
    weights, state = get_state_dict(net, own)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)
    whole_state = get_optimizer_state_dict(net, own, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    whole_weights = get_model_state_dict(net, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if distributed.get_rank() == 0:
        torch.save((whole_weights, whole_state), Path(folder) / "whole.pt")
    for _ in steps(net, own, data[before:], cuts):
        pass
    return whole(net)


def resumed(optimizer: str, folder: str, before: int, after: int) -> tuple[Tensor, bool]:
    net, data = cut(build("convnet")), batches("convnet", before + after, 12)[before:]
    own = made(optimizer, net)
    weights, state = get_state_dict(net, own)
    found = {"model": weights, "optimizer": state}
    dcp.load(found, checkpoint_id=folder)
    set_state_dict(net, own, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
    for _ in steps(net, own, data, even(12, distributed.get_world_size())):
        pass
    return whole(net), same_everywhere(whole(net))


def died() -> str:
    """One process is killed while rows come together; what the other one says."""
    net, rank = cut(build("mlp")), distributed.get_rank()
    optimizer = made("RSKFAC", net)
    if rank == 1:
        optimizer._company.world.swapped = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    optimizer.zero_grad()
    loss_of(net, batches("mlp", 1, 12)[0], even(12, 2)).backward()
    before = [p.to_local().clone() for p in net.parameters()]
    what = said_by(optimizer.step)
    assert all(torch.equal(p.to_local(), old) for p, old in zip(net.parameters(), before, strict=True)), "a row moved"
    return what


def language(recomputed: bool) -> tuple[float, float, bool]:
    """GPT-2 with its blocks sharded, as `compared`; `recomputed`: activations are not kept."""
    a, b = language_model().train(), language_model().train()
    if recomputed:
        b.gradient_checkpointing_enable({"use_reentrant": False})
    for block in b.transformer.h:
        fully_shard(block)
    fully_shard(b)
    settings = {**SETTINGS, "graft": "adamw", "lr": 1e-2, "loss_average": "tokens"}
    settings.pop("momentum")
    alone, own = rkfac.RSKFAC(a, process_group=False, **settings), rkfac.RSKFAC(b, **settings)
    start, rank = flat(a), distributed.get_rank()
    for ids in torch.randint(VOCABULARY, (12, 4, LENGTH), generator=torch.Generator().manual_seed(5)):
        for net, optimizer, some in ((a, alone, ids), (b, own, ids[2 * rank : 2 * rank + 2])):
            optimizer.zero_grad()
            positions = torch.arange(LENGTH).expand(some.shape)
            net(input_ids=some, position_ids=positions, labels=some).loss.backward()
            optimizer.step()
    assert all(layer.covered for layer in own.report())
    return float((whole(b) - flat(a)).abs().max()), float((flat(a) - start).abs().max()), same_curvature(own)


def chosen(which: str) -> tuple[float, float, bool]:
    """As `compared`, with some parameters in other groups, in none, frozen, or thawed on the way."""
    alone, net = build("reader"), cut(build("reader"))
    start, data, cuts = flat(alone), batches("reader", STEPS, 12), even(12, distributed.get_world_size())
    optimizers = []
    for model, where in ((alone, {"process_group": False}), (net, {})):
        own = dict(model.named_parameters())
        if which in ("frozen bias", "frozen layer", "thawed"):
            own["hidden.bias" if which == "frozen bias" else "hidden.weight"].requires_grad_(False)
        rest = [p for name, p in own.items() if name not in ("hidden.bias", "norm.bias")]
        params = {
            "no group": rest,
            "groups": [rest, {"params": [own["hidden.bias"], own["norm.bias"]], "lr": 0.01}],
        }.get(which)
        if which == "groups":
            params = [{"params": rest}, params[1]]
        optimizers.append((model, made("RSKFAC", model, params=params, **where)))
    for number, batch in enumerate(data):
        for model, optimizer in optimizers:
            if which == "thawed" and number == 7:
                dict(model.named_parameters())["hidden.weight"].requires_grad_(True)
            optimizer.zero_grad()
            (loss_of(model, batch, cuts) if model is net else F.cross_entropy(model(batch[0]), batch[1])).backward()
            optimizer.step()
    own = optimizers[1][1]
    return float((whole(net) - flat(alone)).abs().max()), float((flat(alone) - start).abs().max()), same_curvature(own)


def accumulated(parameters_in: str, added_up_in: str) -> tuple[set[int], float]:
    """Two passes a step whose whole gradients are kept in a precision of their own: samples that statistics stood for.

    And how far the parameters end from those of one process, relative to the way.
    """
    dtypes = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
    policy = MixedPrecisionPolicy(param_dtype=dtypes[parameters_in], reduce_dtype=dtypes[added_up_in])
    alone, net = build("mlp").float(), cut(build("mlp").float(), mp_policy=policy)
    reference, own = made("KFAC", alone, process_group=False), made("KFAC", net)
    start, cuts, rows = flat(alone), even(12, distributed.get_world_size()), set()
    for x, y in batches("mlp", 6, 12):
        x = x.float()
        for optimizer in (reference, own):
            optimizer.zero_grad()
        for last in (False, True):
            (F.cross_entropy(alone(x), y) / 2).backward()
            net.set_requires_gradient_sync(last)
            (loss_of(net, (x, y), cuts).float() / 2).backward()
        for optimizer in (reference, own):
            optimizer.step()
        rows |= {block.rows for block in own._blocks.values()}
    return rows, float((whole(net) - flat(alone)).norm() / (flat(alone) - start).norm())


def spoilt_buffer(exclude: tuple[str, ...]) -> tuple[bool, bool, float]:
    """NaN in one process's rows of a momentum buffer: whether all stays finite, whether all is like one process with it."""
    alone, net = build("mlp"), cut(build("mlp"))
    keywords = {"weight_decay": 0.01, "exclude": exclude}
    reference, own = made("RSKFAC", alone, process_group=False, **keywords), made("RSKFAC", net, **keywords)
    cuts, data = even(12, distributed.get_world_size()), batches("mlp", 8, 12)
    for number, batch in enumerate(data):
        if number == 4:
            reference.state[alone[0].weight]["momentum_buffer"][0, 0] = float("nan")
            if distributed.get_rank() == 0:
                own.state[next(net.parameters())]["momentum_buffer"].to_local()[0, 0] = float("nan")
        for optimizer in (reference, own):
            optimizer.zero_grad()
        F.cross_entropy(alone(batch[0]), batch[1]).backward()
        loss_of(net, batch, cuts).backward()
        for optimizer in (reference, own):
            optimizer.step()
    shares: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(shares, [s["decay_share"] for s in own.state.values()])
    difference = float((whole(net) - flat(alone)).abs().max())
    return bool(whole(net).isfinite().all()), all(share == shares[0] for share in shares), difference


def frozen_saved(folder: str) -> float:
    """A layer is frozen from the start: through torch.distributed.checkpoint and on, beside a run that went on."""
    found = []
    data, cuts = batches("mlp", 8, 12), even(12, distributed.get_world_size())
    for part in ("first", "second"):
        net = cut(build("mlp"))
        next(net.parameters()).requires_grad_(False)
        own = made("RSKFAC", net)
        if part == "first":
            for _ in steps(net, own, data[:4], cuts):
                pass
        weights, state = get_state_dict(net, own)
        kept = {"model": weights, "optimizer": state}
        if part == "first":
            dcp.save(kept, checkpoint_id=folder)
        else:
            dcp.load(kept, checkpoint_id=folder)
            set_state_dict(net, own, model_state_dict=kept["model"], optim_state_dict=kept["optimizer"])
        for _ in steps(net, own, data[4:], cuts):
            pass
        found.append(whole(net))
    return float((found[0] - found[1]).abs().max())


def foreign_state(sharded: bool) -> str:
    """A whole optimizer's state for a sharded one, or the other way."""
    alone, net = build("mlp"), cut(build("mlp"))
    reference, own = made("RSKFAC", alone, process_group=False), made("RSKFAC", net)
    batch, cuts = batches("mlp", 1, 12)[0], even(12, distributed.get_world_size())
    F.cross_entropy(alone(batch[0]), batch[1]).backward()
    loss_of(net, batch, cuts).backward()
    reference.step()
    own.step()
    giver, taker = (reference, own) if sharded else (own, reference)
    return said_by(lambda: taker.load_state_dict(giver.state_dict()))


def after_a_look() -> tuple[bool, str]:
    """The optimizer is built, or gets a group, while whole weights stand in their places after an evaluation."""
    net = fully_shard(build("mlp"))
    batch, cuts = batches("mlp", 1, 12)[0], even(12, distributed.get_world_size())
    kept = list(net.parameters())
    with torch.no_grad():
        net(batch[0])
    stale = list(net.parameters())
    before = whole_of(kept)
    own = made("RSKFAC", net, params=kept[:2])
    with torch.no_grad():
        net(batch[0])
    own.add_param_group({"params": kept[2:]})
    loss_of(net, batch, cuts).backward()
    own.step()
    moved = all(not torch.equal(a, b) for a, b in zip(before, whole_of(kept), strict=True))
    return moved, said_by(lambda: made("RSKFAC", net, params=stale))


def whole_of(tensors: list[Any]) -> list[Tensor]:
    return [t.full_tensor().clone() for t in tensors]


def buffers(optimizer: str) -> tuple[int, int, int]:
    """Entries of all parameters, of this process's rows, and of this process's buffers after a few steps."""
    net = cut(build("wide"))
    own = made(optimizer, net)
    for _ in steps(net, own, batches("wide", 3, 12), even(12, distributed.get_world_size())):
        pass
    kept = [t for state in own.state.values() for t in state.values() if isinstance(t, Tensor)]
    mine = sum(p.to_local().numel() for p in net.parameters())
    return sum(p.numel() for p in net.parameters()), mine, sum(t.to_local().numel() for t in kept)


def sent(steps_taken: int) -> tuple[int, int, int]:
    """Bytes of this process's rows of covered layers, bytes it handed over for steps, and bytes of layers it brought together."""
    net = cut(build("wide"))
    own = made("RSKFAC", net)
    world, held = own._company.world, []
    brought = own._company.shards.brought
    own._company.shards.brought = lambda *args: held.append(brought(*args)) or held[-1]
    for _ in steps(net, own, batches("wide", steps_taken, 12), even(12, distributed.get_world_size())):
        pass
    most = max(sum(t.nbytes for tensors in one.values() for t in tensors) for one in held)
    return sum(p.to_local().nbytes for p in net.parameters()), world.sent["rows"], most


def in_bfloat16(steps_taken: int) -> tuple[float, bool, set[str], set[int]]:
    """Passes in 16 bits beside passes in 32: how far they end from each other, relative to the way they went.

    And whether all are equal, which layers are covered, and how many samples the last statistics stood for.
    """
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    ends, cuts = [], even(64, distributed.get_world_size())
    for options in ({}, {"mp_policy": half}):
        net = cut(build("mlp").float(), **options)
        own, start = made("recommended", net), whole(net)
        for x, y in batches("mlp", steps_taken, 64):
            own.zero_grad()
            for last in (False, True):  # whole gradients are kept in another precision meanwhile
                net.set_requires_gradient_sync(last)
                (loss_of(net, (x.float(), y), cuts) / 2).backward()
            own.step()
        ends.append(whole(net))
    covered = {layer.name for layer in own.report() if layer.covered}
    apart = float((ends[1] - ends[0]).norm() / (ends[0] - start).norm())
    return apart, same_everywhere(ends[1]), covered, {block.rows for block in own._blocks.values()}
