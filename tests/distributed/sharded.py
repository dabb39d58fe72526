"""What the processes of a crew do with a model that fully_shard has cut into rows."""

from __future__ import annotations

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
from distributed.together import STEPS, batches, build, even, flat, made, same_everywhere, share
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
        reference.zero_grad()
        own.zero_grad()
        for number, batch in enumerate(data[i * passes : (i + 1) * passes]):
            (F.cross_entropy(alone(batch[0]), batch[1]) / passes).backward()
            net.set_requires_gradient_sync(number == passes - 1)
            (loss_of(net, batch, cuts) / passes).backward()
        reference.step()
        own.step()
    found = whole(net)
    return float((found - flat(alone)).abs().max()), float((flat(alone) - start).abs().max()), same_everywhere(found)


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
    if how == "alone":
        return said_by(lambda: made("RSKFAC", cut(model), process_group=False))
    if how == "scaler":
        optimizer = made("RSKFAC", cut(model))
        optimizer.found_inf = torch.zeros(())  # as torch.amp.GradScaler does
        return said_by(optimizer.step)
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
    found = whole(b)
    return float((found - flat(a)).abs().max()), float((flat(a) - start).abs().max()), same_everywhere(found)


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
