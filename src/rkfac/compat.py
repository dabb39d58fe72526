"""Every private name of torch that the package uses, with the versions it was tried on, and nothing else.

Tried on torch 2.13 (CPU). Each function says what would have to be found again if the name went away.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_map_only

F = TypeVar("F", bound=Callable[..., Any])


def graph_task() -> int:
    """Number of the backward pass that is running in this thread, -1 outside of any."""
    return int(torch._C._current_graph_task_id())


def when_backward_ends(callback: Callable[[], None]) -> None:
    """Run a function at the end of the backward pass that is running (as DistributedDataParallel does)."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def inside_functional_transform() -> bool:
    """Whether somebody's vmap or grad is running, which is no training step."""
    return bool(torch._C._are_functorch_transforms_active())


def compiled_inside(module: nn.Module) -> nn.Module | None:
    """The module that torch.compile wrapped, None for any other module."""
    inner = module._modules.get("_orig_mod")
    return inner if inner is not None and type(module).__name__ == "OptimizedModule" else None


def compiled_call(module: nn.Module) -> Any:
    """What runs a module's graph: the forward of torch.compile's wrapper, what `module.compile()` left behind, or None."""
    return module.forward if compiled_inside(module) is not None else getattr(module, "_compiled_call_impl", None)


def replace_compiled_call(module: nn.Module, call: Any) -> None:
    """Put another callable in the place of what `compiled_call` found."""
    if compiled_inside(module) is not None:
        module.forward = call
    else:
        module._compiled_call_impl = call


def is_sharded(tensor: Tensor) -> bool:
    """Whether each process has a part of a tensor alone: a DTensor, whose module nobody has to import for this question."""
    return type(tensor).__name__ == "DTensor"


def own_rows(tensor: Any) -> Tensor:
    """This process's rows of a sharded tensor, in the same memory."""
    return cast(Tensor, tensor.detach().to_local())


def layout(sharded: Any) -> tuple[Any, list[str]]:
    """Over which processes a tensor is spread (a DeviceMesh), and how along each of their dimensions."""
    from torch.distributed.tensor import Shard

    return sharded.device_mesh, [
        "rows" if placement == Shard(0) else str(placement) for placement in sharded.placements
    ]


def fully_sharded(model: nn.Module) -> dict[str, Any]:
    """Modules that fully_shard was called for, by what the names of the parameters begin with that it may have sharded."""
    found = ((name, module) for name, module in model.named_modules() if kind_of(module) is not type(module))
    return {f"{name}." if name else "": module for name, module in found}


def _shard_groups(model: nn.Module) -> list[Any]:
    """What fully_shard keeps of the parameters it has sharded, a record for each module it was called for."""
    states = (module._get_fsdp_state() for module in fully_sharded(model).values())
    return [group for state in states for group in state._fsdp_param_groups]


def stand_ins(model: nn.Module) -> dict[int, Any]:
    """fully_shard's records of parameters, by the identity of the whole ones that stand in their places in the passes."""
    shards = [shard for group in _shard_groups(model) for shard in group.fsdp_params]
    return {id(shard._unsharded_param): shard for shard in shards if hasattr(shard, "_unsharded_param")}


def holds_gradient(shard: Any) -> bool:
    """Whether fully_shard has a whole gradient that is not shared out yet."""
    return shard.unsharded_accumulated_grad is not None or shard._unsharded_param.grad is not None


def averaged_otherwise(model: nn.Module) -> bool:
    """Whether fully_shard was told to divide sums of gradients by something of the user's (set_gradient_divide_factor)."""
    return any(group.gradient_divide_factor is not None for group in _shard_groups(model))


def sharded_like(sharded: Any, rows: Tensor) -> Tensor:
    """Some rows of each process as one tensor that is sharded as another."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        rows, sharded.device_mesh, sharded.placements, run_check=False, shape=sharded.shape, stride=sharded.stride()
    )


def kind_of(module: nn.Module) -> type[nn.Module]:
    """A module's class as its author wrote it: fully_shard puts one of its own in front."""
    kind = type(module)
    return kind.__bases__[1] if kind.__bases__[0].__name__ == "FSDPModule" else kind


_AT_REST: weakref.WeakKeyDictionary[nn.Module, dict[str, nn.Parameter]] = weakref.WeakKeyDictionary()


def own_parameter(module: nn.Module, name: str) -> nn.Parameter | None:
    """A module's own parameter, None when it has none of that name; quicker than looking through all.

    While a module that fully_shard has sharded runs, the whole parameter stands in the place of the sharded one, which is
    the one that optimizers know and that is found here.
    """
    found = leaf_parameter(module, name)
    if found is None:
        return None
    if is_sharded(found):
        _AT_REST.setdefault(module, {})[name] = found
    elif _AT_REST:
        known = _AT_REST.get(module, {}).get(name)
        return found if known is None or known.shape != found.shape else known
    return found


def leaf_parameter(module: nn.Module, name: str) -> nn.Parameter | None:
    """What stands in a parameter's place now, and gets the gradient of what the module does with it."""
    found = module._parameters.get(name)
    return found if isinstance(found, nn.Parameter) else None  # under functional_call any tensor stands there


def version_of(tensor: Tensor) -> int:
    """How often a tensor was changed in place."""
    return int(tensor._version)


def version_or_none(tensor: Tensor) -> int | None:
    """The same, None for tensors of torch.inference_mode, which nobody counts."""
    return None if tensor.is_inference() else version_of(tensor)


def with_tensors(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """Nested lists, tuples and dictionaries with a function of each tensor in the place of the tensor."""
    return tree_map_only(Tensor, function, tree)


def behind_view(tensor: Tensor) -> Tensor:
    """What a tensor is a view of, where that has the same elements: in-place changes of a view pass by the view's own hooks."""
    base = tensor._base
    return base if base is not None and base.requires_grad and base.numel() == tensor.numel() else tensor


class Dispatch(TorchDispatchMode):
    """Sees, while it is entered, every operation below autograd; what one returns gets its history afterwards.

    Arguments are the very tensors that autograd knows, with their bases and histories.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Run an operation, then look at it."""
        result = func(*args, **(kwargs or {}))
        self.ran(func, args, result)
        return result

    def ran(self, operation: Any, args: tuple[Any, ...], result: Any) -> None:
        """An operation is done."""

    @property
    def innermost(self) -> bool:
        """Whether leaving now leaves this one: modes are a stack, and leaving takes the uppermost off it."""
        return _get_current_dispatch_mode() is self


def base_of(tensor: Tensor) -> Tensor:
    """What a tensor is a view of, or itself."""
    base = tensor._base
    return tensor if base is None else base


def parameter_behind(tensor: Tensor) -> Tensor | None:
    """The parameter that a tensor is a cast and transposed copy of, by its history: autocast keeps such copies."""
    node = tensor.grad_fn
    while node is not None and node.name() in ("TBackward0", "ToCopyBackward0"):
        node = node.next_functions[0][0]
    return getattr(node, "variable", None)  # AccumulateGrad's


def saved_otherwise() -> bool:
    """Whether what autograd saves goes through somebody's hooks: checkpoints, offloading."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def is_replica(module: nn.Module) -> bool:
    """Whether a module is one of nn.DataParallel's copies for another device."""
    return bool(getattr(module, "_is_replica", False))


def has_hooks(tensor: Tensor) -> bool:
    """Whether somebody's hooks see, and may change, a tensor's gradient."""
    return bool(tensor._backward_hooks)


def forward_hooks(module: nn.Module) -> list[Any]:
    """The forward hooks that are in place."""
    return list(module._forward_hooks.values())


def out_of_graphs(function: F, reason: str) -> F:
    """Keep Dynamo out of a function; `reason` is what a user reads when that breaks a graph."""
    try:
        return cast(F, torch.compiler.disable(function, reason=reason))
    except TypeError:  # torch before 2.7 knows no reason
        return cast(F, torch.compiler.disable(function))


def called_by_distributed_checkpoint(within: int = 8) -> bool:
    """Whether torch.distributed.checkpoint asks for a state, which it says by nothing but its name in the call stack."""
    frame = sys._getframe(1)
    for _ in range(within):
        if frame is None:
            return False
        if frame.f_globals.get("__name__", "").startswith("torch.distributed.checkpoint"):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def timeout_of(group: Any, device: torch.device) -> timedelta | None:
    """How long the processes of a group wait for each other; a new group of theirs would have torch's own choice."""
    try:
        return cast(timedelta, group._get_backend(device).options._timeout)
    except (AttributeError, RuntimeError):  # a backend that tells nobody
        return None


def inside_join(model: nn.Module) -> bool:
    """Whether a DistributedDataParallel model is inside its `join()`, where processes that have no data left stay away."""
    config = getattr(model, "_join_config", None)
    return bool(getattr(config, "enable", False))


def calling_scaler(within: int = 24) -> Any:
    """The GradScaler whose `step` is under way around the caller, None if there is none: nothing but the call stack says so."""
    frame = sys._getframe(1)
    for _ in range(within):
        if frame is None:
            return None
        if frame.f_code.co_name == "step" and is_scaler(found := frame.f_locals.get("self")):
            return found
        frame = frame.f_back  # type: ignore[assignment]
    return None


def has_unscaled(scaler: Any, optimizer: torch.optim.Optimizer) -> bool:
    """Whether somebody has called an enabled GradScaler's `unscale_` for an optimizer since its last `update`."""
    states = scaler._per_optimizer_states
    return id(optimizer) in states and states[id(optimizer)]["stage"].name == "UNSCALED"


def current_scale(scaler: Any) -> Tensor:
    """The scale a GradScaler multiplies losses by, on its device."""
    return cast(Tensor, scaler._get_scale_async())


def is_scaler(value: Any) -> bool:
    """Whether something can tell its scale as a GradScaler does."""
    return hasattr(value, "_get_scale_async")


def padding_of(conv: Any) -> list[int]:
    """Padding of a convolution in the order F.pad wants, 'same' and 'valid' resolved."""
    return list(conv._reversed_padding_repeated_twice)
