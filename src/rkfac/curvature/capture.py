"""Hooks that turn a training step's forward and backward into the statistics of each layer.

A forward hook keeps the detached input and puts a tensor hook on the output (module backward hooks break under in-place
activations). Input and gradient meet in that hook, so a forward that is never differentiated, an evaluation, and the
recomputation of activation checkpointing count for nothing.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from rkfac.curvature.fisher import Likelihood

F = TypeVar("F", bound=Callable[..., Any])


def _eager(function: F) -> F:
    """Keep Dynamo out: hooks have side effects. Graphs of compiled models break at the first statistics step."""
    return cast(F, torch.compiler.disable(function))


class Observer(Protocol):
    """Who receives a layer's statistics."""

    wanted: bool

    def observe(self, x: Tensor, g: Tensor, one_pass: Pass) -> None:
        """Input and output gradient of one call of the layer."""


@dataclass(eq=False)
class Pass:
    """One forward of the model: calls of a layer within it are positions, calls in another are more samples."""

    samples: int
    differentiated: bool = False
    calls: list[tuple[Observer, Tensor, GradientEdge]] = field(default_factory=list)


class Capture:
    """All hooks of one optimizer on one model; `active` says whether the coming step collects statistics."""

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        self.active = True
        self.likelihood = likelihood
        self.generator = generator
        self._pass: Pass | None = None
        self._warned = False
        self._unread = ""  # what the model returned instead of logits since the last step
        self._handles: list[RemovableHandle] = [
            model.register_forward_pre_hook(_RootHook(self, "begin"), with_kwargs=True),
            model.register_forward_hook(_RootHook(self, "end"), with_kwargs=True),
        ]

    def attach(self, module: nn.Module, observer: Observer) -> None:
        """Watch a layer from now on."""
        # First of all hooks: a model that is one layer must see its call before its own end.
        hook = _LayerHook(self, observer)
        self._handles.append(module.register_forward_hook(hook, with_kwargs=True, prepend=True))

    def close(self) -> None:
        """Remove every hook."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.active = False

    @_eager
    def begin(self, inputs: Iterable[Any]) -> None:
        """A forward of the whole model starts; its batch size is the first input's leading dimension."""
        tensor = _first_tensor(inputs)
        self._pass = Pass(0 if tensor is None else _samples(tensor))

    @_eager
    def end(self, output: Any) -> None:
        """The model's output is known: with a likelihood, draw targets and send their gradients back."""
        if self.likelihood is not None and torch.is_grad_enabled() and self._pass is not None and self._pass.calls:
            if isinstance(output, Tensor):
                self.sample(output)
            else:
                self._unread = type(output).__name__

    def sample(self, output: Tensor) -> None:
        """Draw targets from the model's distribution and collect the gradients they cause at every layer."""
        current = self._pass
        if self.likelihood is None or self.generator is None or current is None or not current.calls:
            return
        self._unread = ""
        calls, current.calls = current.calls, []
        current.samples = self.likelihood.terms(output)
        with full_precision([output.device]):
            gradient = self.likelihood.draw_gradient(output.detach(), self.generator).to(output.dtype)
            edges = [edge for _, _, edge in calls]
            found = torch.autograd.grad(output, edges, gradient, retain_graph=True, allow_unused=True)
            for (observer, x, _), g in zip(calls, found, strict=True):
                if g is not None:
                    observer.observe(x, g.detach(), current)

    def require_sampled(self) -> None:
        """Refuse a step whose targets were never drawn because the model returned something else than logits."""
        if self._unread:
            unread, self._unread = self._unread, ""
            raise TypeError(
                f"fisher='mc' reads the model's output as logits, but it returned {unread}: "
                "call optimizer.sample_fisher(logits) after each forward"
            )

    @_eager
    def called(self, observer: Observer, inputs: Iterable[Any], output: Any) -> None:
        """A layer was called while statistics are wanted."""
        x = _first_tensor(inputs)
        if x is None or not isinstance(output, Tensor) or not torch.is_grad_enabled() or not output.requires_grad:
            return
        current = self._current(x)
        if self.likelihood is not None:
            if _inside_backward():
                return  # recomputed for a backward: its targets were drawn at the end of the forward
            # An edge, not the tensor: an in-place activation would turn the tensor into its own output.
            current.calls.append((observer, x.detach(), get_gradient_edge(output)))
            return
        seen: list[bool] = []
        output.register_hook(partial(self._arrived, observer, x.detach(), current, seen))

    def _arrived(self, observer: Observer, x: Tensor, current: Pass, seen: list[bool], g: Tensor) -> None:
        if seen and not self._warned:
            self._warned = True
            warnings.warn(
                "one forward pass was differentiated twice in a step; each backward counts as samples of its own. "
                "Add the losses and call backward once for exact statistics.",
                stacklevel=2,
            )
        seen.append(True)
        current.differentiated = True
        if self.active and observer.wanted:
            with full_precision([g.device]):
                observer.observe(x, g.detach(), current)

    def _current(self, x: Tensor) -> Pass:
        """The running pass; a new one when layers are called without the model, after a backward."""
        if self._pass is None or (self._pass.differentiated and not _inside_backward()):
            self._pass = Pass(_samples(x))
        return self._pass


def _inside_backward() -> bool:
    """Whether a backward pass is running: then a forward is the recomputation of a checkpoint."""
    return bool(torch._C._current_graph_task_id() != -1)


@contextmanager
def full_precision(devices: Iterable[torch.device]) -> Iterator[None]:
    """No autocast: curvature is computed in float32 or better also when the whole step stands inside an autocast."""
    with ExitStack() as stack:
        for kind in {device.type for device in devices}:
            if torch.amp.is_autocast_available(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


class _Inert:
    """What a hook becomes in a copied or unpickled model: nothing. The copy is not the model being optimized."""

    def __call__(self, *_: Any) -> None:
        return None


class _Hook:
    """A hook that does not travel with copies of the model, and does not keep a dropped optimizer alive."""

    def __init__(self, capture: Capture) -> None:
        self.capture = capture

    def __reduce__(self) -> tuple[type[_Inert], tuple[()]]:
        return _Inert, ()


class _LayerHook(_Hook):
    def __init__(self, capture: Capture, observer: Observer) -> None:
        super().__init__(capture)
        self.observer = observer

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if self.capture.active and self.observer.wanted and module.training:
            self.capture.called(self.observer, (*args, *kwargs.values()), output)


class _RootHook(_Hook):
    def __init__(self, capture: Capture, event: str) -> None:
        super().__init__(capture)
        self.event = event

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *output: Any) -> None:
        if not self.capture.active or not module.training:
            return
        if self.event == "begin":
            self.capture.begin((*args, *kwargs.values()))
        else:
            self.capture.end(output[0])


def _samples(x: Tensor) -> int:
    """Leading dimension; a vector of features is one sample, a vector of indices is many."""
    return x.shape[0] if x.ndim > 1 or (x.ndim == 1 and not x.is_floating_point()) else 1


def _first_tensor(values: Iterable[Any]) -> Tensor | None:
    """The first tensor among arguments, one level inside lists, tuples and dicts."""
    for value in values:
        if isinstance(value, Tensor):
            return value
        inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
        for item in inner:
            if isinstance(item, Tensor):
                return item
    return None


def close_with(owner: object, capture: Capture) -> None:
    """Remove the hooks when their owner is garbage, so that a forgotten optimizer costs nothing."""
    weakref.finalize(owner, capture.close)
