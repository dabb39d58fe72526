"""Hooks that turn a training step's forward and backward into the statistics of each layer.

A forward hook keeps the detached input and puts a tensor hook on the output (module backward hooks break under in-place
activations). The gradient that arrives there is only a candidate: it counts once the same backward pass has added to the
gradient of the layer's own weight. So a forward that is never differentiated, `torch.autograd.grad` with respect to inputs
(adversarial examples, gradient penalties), functional transforms and the recomputation of a checkpoint count for nothing;
and what was counted for a gradient that somebody dropped is dropped with it.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rkfac import compat
from rkfac.curvature.calls import Arrival, Call, Dependant, Observer, Pass, Watched, dropped
from rkfac.curvature.hooks import BROKEN_GRAPH, Hook, Removable, first_tensor, full_precision
from rkfac.curvature.inside import Inside
from rkfac.layers.base import Use


class Capture:
    """All hooks of one optimizer on one model; `active` says whether the coming step collects statistics."""

    def __init__(self, model: nn.Module) -> None:
        self.active = True
        self.when_counted: Callable[[Any], None] | None = None  # told when a pass has reached a layer's weight
        self.terms: int | None = None  # that the loss of coming passes is the mean of, if somebody knows
        self.otherwise = "trains by the fallback rule"  # what a layer does that it finds no curvature for
        self._around = weakref.ref(model)
        self._refusal: Exception | None = None
        self._pass: Pass | None = None
        self._tasks: set[int] = set()  # backward passes that are under way
        self._warned = False
        self._layers: dict[int, Watched] = {}
        self._insides: dict[int, Inside[tuple[Watched, Use]]] = {}  # by the module that they are the inside of
        self._registrations: list[Callable[[], Removable]] = []
        self._handles: list[Removable] = []
        self._dependants: list[Dependant] = []
        self.install(partial(model.register_forward_pre_hook, _RootHook(self)))

    def install(self, register: Callable[[], Removable]) -> None:
        """Put a hook in place."""
        self._registrations.append(register)
        self._handles.append(register())

    def tell(self, dependant: Dependant) -> None:
        """Let somebody else know when gradients are gone."""
        self._dependants.append(dependant)

    @contextmanager
    def unhooked(self) -> Iterator[None]:
        """The model without any of these hooks."""
        self._remove()
        try:
            yield
        finally:
            self._handles = [register() for register in self._registrations]

    def _remove(self) -> None:
        for inside in self._insides.values():
            inside.let_go()
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def refuse(self, refusal: Exception) -> None:
        """Remember why the coming step must not be taken; hooks are no place to raise."""
        self._refusal = self._refusal or refusal

    def check(self) -> None:
        """Refuse a step whose statistics cannot be what was asked for."""
        refusal, self._refusal = self._refusal, None
        if refusal is not None:
            raise refusal

    # --- watching layers

    def attach(self, observer: Observer) -> None:
        """Watch a layer from now on."""
        watched = Watched(observer)
        self._layers[id(observer)] = watched
        for use in observer.uses:
            if use.within is not None:
                self._look_inside(watched, use)
                continue
            # First of all hooks: a model that is one layer must see its call before its own end.
            hook = _CallHook(self, watched, use)
            self.install(partial(use.module.register_forward_hook, hook, with_kwargs=True, prepend=True))

    def _look_inside(self, watched: Watched, use: Use) -> None:
        """Have a module looked into while it runs, for one weight more."""
        assert use.within is not None
        module = use.within.module
        if id(module) not in self._insides:
            inside = self._insides[id(module)] = Inside(use.within)
            self.install(partial(module.register_forward_pre_hook, _EnterInsideHook(self, inside)))
            hook = _LeaveInsideHook(self, inside)
            # Called also when the forward raises: nothing must be left entered.
            self.install(partial(module.register_forward_hook, hook, with_kwargs=True, prepend=True, always_call=True))
        self._insides[id(module)].watch(
            partial(compat.leaf_parameter, use.module, use.adapter.weight_name), (watched, use)
        )

    def follow(self, observer: Observer, use: Use | None = None) -> None:
        """Notice when gradients reach the layer's weight, from the first step on that it is trained.

        `use`: what runs now. Gradients never reach a sharded weight, but the whole one that stands in its place meanwhile.
        """
        watched = self._layers[id(observer)]
        leaf: Tensor | None = observer.weight
        if compat.is_sharded(observer.weight):
            leaf = None if use is None else compat.leaf_parameter(use.module, use.adapter.weight_name)
        if leaf is None or not observer.weight.requires_grad or watched.leaf is leaf:
            return
        watched.leaf = leaf
        if leaf is not observer.weight and (model := self._around()) is not None:
            watched.shard = compat.stand_ins(model).get(id(leaf))
        self.install(partial(leaf.register_post_accumulate_grad_hook, _WeightHook(self, watched)))

    def foreign(self, observer: Observer) -> str:
        """Why a layer's statistics do not describe its gradient, or an empty string."""
        return self._layers[id(observer)].foreign

    def unseen(self, observer: Observer) -> bool:
        """Whether no call of a layer came by since the last step."""
        return not self._layers[id(observer)].seen

    def drop(self) -> None:
        """The gradients are gone, and what was counted with them; a forward may be under way."""
        for watched in self._layers.values():
            watched.arrived.clear()
            watched.counted = None
        for dependant in self._dependants:
            dependant.drop()

    def forget(self) -> None:
        """The step is over."""
        self.drop()
        self._pass = None
        for watched in self._layers.values():
            watched.seen = watched.doubled = False

    def drop_stale(self, observer: Observer) -> None:
        """Drop statistics whose gradient is gone: `model.zero_grad()` tells no optimizer."""
        watched = self._layers[id(observer)]
        if watched.counted is not None and self._gone(watched, watched.counted):
            watched.counted = None
            observer.discard()

    def _gone(self, watched: Watched, counted: tuple[Tensor, int]) -> bool:
        weight, leaf = watched.observer.weight, watched.leaf
        if leaf is None or leaf is weight:
            return dropped(counted, weight.grad)
        return weight.grad is None and watched.shard is not None and not compat.holds_gradient(watched.shard)

    def close(self) -> None:
        """Remove every hook."""
        self._remove()
        self._registrations = []
        self.active = False

    # --- what the hooks do

    def new_pass(self) -> Pass:
        """For a forward that begins."""
        return Pass(terms=self.terms, told=self.terms)

    def begin(self) -> None:
        """A forward of the whole model starts."""
        for inside in self._insides.values():
            inside.let_go()  # one that was interrupted
        self._pass = self.new_pass()

    def called(self, watched: Watched, use: Use, module: nn.Module, inputs: Iterable[Any], output: Any) -> None:
        """A layer was called while statistics are wanted."""
        x = first_tensor(inputs)
        if x is None or not isinstance(output, Tensor):
            return
        # A Linear layer's output on sequences is a view, and an in-place activation behind it goes past the view's hooks.
        source = compat.behind_view(output)
        self._found(watched, use, module, x, output, source, _seen_from(source, output))

    def entered(self, inside: Inside[tuple[Watched, Use]]) -> None:
        """A module that uses weights without calling their owners begins to run."""
        if not torch.is_grad_enabled() or compat.inside_functional_transform():
            return
        if any(watched.observer.wanted for watched, _ in inside.watching):
            inside.enter()

    def left(
        self,
        inside: Inside[tuple[Watched, Use]],
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        ran: bool,
    ) -> None:
        """It has run, or raised."""
        noticed = inside.let_go()
        for found in noticed if ran else ():
            watched, use = found.who
            samples = inside.within.container.samples(module, args, kwargs)
            if watched.observer.wanted and found.fits(samples):
                x, y = found.inputs(samples), found.result
                self._found(watched, use, module, x, y, y, found.laid_out(samples))

    def _found(
        self,
        watched: Watched,
        use: Use,
        module: nn.Module,
        x: Tensor,
        output: Tensor,
        source: Tensor,
        laid_out: Callable[[Tensor], Tensor],
    ) -> None:
        """A layer's call: its input, its output, and the tensor whose gradient, laid out, is that at the output."""
        if not torch.is_grad_enabled() or not output.requires_grad or not watched.observer.weight.requires_grad:
            return
        if compat.inside_functional_transform() or watched.observer.trouble:
            return
        if module is not use.called or compat.is_replica(module):
            self.refuse(RuntimeError("nn.DataParallel is not supported: it runs copies of the layers; use one device"))
            return
        watched.seen = True
        self.follow(watched.observer, use)  # it may have been thawed since the last step
        call = Call(self._current(), use, x.detach(), laid_out)
        self.registered(watched, call, source)
        source.register_hook(_ArrivalHook(self, watched, call))

    def registered(self, watched: Watched, call: Call, output: Tensor) -> None:
        """A call that may come to count; sampled targets need to know its place in the graph."""

    def arrived(self, watched: Watched, call: Call, g: Tensor) -> None:
        """A gradient reached a layer's output: a candidate, until the same backward reaches the weight."""
        call.one_pass.differentiated = True
        if torch.is_grad_enabled():
            watched.doubled = True  # a gradient of gradients: the weight will have other sources as well
        if not self.active or not watched.observer.wanted:
            return
        if call.backwards and not self._warned:
            self._warned = True
            warnings.warn(
                "one forward pass was differentiated twice in a step; each backward counts as samples of its own. "
                "Add the losses and call backward once for exact statistics.",
                stacklevel=2,
            )
        self.drop_stale(watched.observer)
        if (
            not watched.verified
            and watched.counted is None
            and watched.leaf is not None
            and _holds_something(watched.leaf.grad)
        ):
            watched.doubled = True  # the sum with what was there before is not what these calls explain
        task, g = compat.graph_task(), call.laid_out(g.detach())
        if call.one_pass.terms is None and g.numel():
            call.one_pass.terms = watched.observer.terms(call.use, call.x, g)
        call.one_pass.holds(call.use, g)
        if task not in self._tasks:
            self._tasks.add(task)
            compat.when_backward_ends(lambda: self._ended(task))
        watched.arrived.append(Arrival(call, task, g))

    def _ended(self, task: int) -> None:
        """A backward pass is over: what has not reached its weight by now never will."""
        self._tasks.discard(task)
        for watched in self._layers.values():
            if watched.arrived:
                watched.arrived = [arrival for arrival in watched.arrived if arrival.task != task]

    def statistic(self, arrival: Arrival) -> Tensor | None:
        """What enters the statistics for a call: the gradient of the loss itself (the empirical Fisher)."""
        return arrival.gradient

    def accumulated(self, watched: Watched, weight: Tensor) -> None:
        """The gradient of the weight, or of what stands in its place, has grown: what arrived in this backward pass counts."""
        task, observer = compat.graph_task(), watched.observer
        arrivals = [arrival for arrival in watched.arrived if arrival.task == task]
        if not arrivals:
            return
        watched.arrived = [arrival for arrival in watched.arrived if arrival.task != task]
        gradient = weight.grad
        assert gradient is not None
        with full_precision([gradient.device]):
            if not (watched.verified or watched.counted or watched.doubled or observer.natural):
                self._verify(watched, arrivals, gradient, weight)
            if not watched.foreign:
                for arrival in arrivals:
                    call = arrival.call
                    call.backwards += 1
                    statistic = self.statistic(arrival)
                    if statistic is not None and call.one_pass.terms is not None:
                        observer.observe(call.use, call.x, statistic, call.one_pass, call.one_pass.terms)
        for arrival in arrivals:
            arrival.call.drawn = None
        watched.counted = (gradient, compat.version_of(gradient))
        if self.when_counted is not None:
            with full_precision([gradient.device]):
                self.when_counted(observer)

    def _verify(self, watched: Watched, arrivals: list[Arrival], gradient: Tensor, weight: Tensor) -> None:
        """Once a layer: see that its gradient is what its calls say it is."""
        if compat.has_hooks(weight):
            return  # a hook of somebody's changes the gradient on its way
        calls = [(a.call.use, a.call.x, a.gradient) for a in arrivals if a.gradient.numel()]
        explained = watched.observer.explains(calls, gradient, weight)
        watched.verified = explained is not None
        if explained is False:
            watched.foreign = (
                "most of its weight's gradient does not come from calling it: the weight is used by hand somewhere, as in "
                "F.linear(h, embedding.weight), its forward does more than such a layer's (a gate, a clamp), or the loss "
                "holds a large term of the weight itself"
            )
            warnings.warn(f"layer {watched.observer.name!r} {self.otherwise}: {watched.foreign}", stacklevel=2)

    def _current(self) -> Pass:
        """The running pass; a new one when layers are called without the model, after a backward."""
        if self._pass is None or (self._pass.differentiated and compat.graph_task() == -1):
            self._pass = self.new_pass()
        return self._pass


def _seen_from(source: Tensor, output: Tensor) -> Callable[[Tensor], Tensor]:
    """What makes the gradient at an output of that at what it is a view of, knowing nothing but their shapes."""
    if source is output or (source.is_contiguous() and output.is_contiguous()):
        return partial(_shaped, output.shape)
    offset = int(output.storage_offset()) - int(source.storage_offset())
    return partial(_as_viewed, source.shape, source.stride(), output.shape, output.stride(), offset)


def _shaped(shape: torch.Size, g: Tensor) -> Tensor:
    return g.reshape(shape)


def _as_viewed(
    shape: torch.Size, strides: tuple[int, ...], seen: torch.Size, seen_strides: tuple[int, ...], offset: int, g: Tensor
) -> Tensor:
    """A layer that ends with a transposition returns its product's elements in another order."""
    return g.new_empty_strided(shape, strides).copy_(g).as_strided(seen, seen_strides, offset)


def _holds_something(gradient: Tensor | None) -> bool:
    return gradient is not None and bool(gradient.any())


# --- hooks


class _RootHook(Hook):
    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if self.capture.active:
            _begin(self.capture)


class _LayerHook(Hook):
    def __init__(self, capture: Capture, watched: Watched) -> None:
        super().__init__(capture)
        self.watched = watched


class _CallHook(_LayerHook):
    def __init__(self, capture: Capture, watched: Watched, use: Use) -> None:
        super().__init__(capture, watched)
        self.use = use

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if self.capture.active and self.watched.observer.wanted:
            _called(self.capture, self.watched, self.use, module, (*args, *kwargs.values()), output)


class _InsideHook(Hook):
    def __init__(self, capture: Capture, inside: Inside[tuple[Watched, Use]]) -> None:
        super().__init__(capture)
        self.inside = inside


class _EnterInsideHook(_InsideHook):
    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if self.capture.active:
            _entered(self.capture, self.inside)


class _LeaveInsideHook(_InsideHook):
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if self.inside.entered:
            _left(self.capture, self.inside, module, args, kwargs, output is not None)


class _ArrivalHook(_LayerHook):
    def __init__(self, capture: Capture, watched: Watched, call: Call) -> None:
        super().__init__(capture, watched)
        self.call = call

    def __call__(self, g: Tensor) -> None:
        self.capture.arrived(self.watched, self.call, g)


class _WeightHook(_LayerHook):
    def __call__(self, weight: Tensor) -> None:
        if self.watched.arrived:
            self.capture.accumulated(self.watched, weight)


def _begin(capture: Capture) -> None:
    capture.begin()


def _called(
    capture: Capture, watched: Watched, use: Use, module: nn.Module, inputs: tuple[Any, ...], output: Any
) -> None:
    capture.called(watched, use, module, inputs, output)


def _entered(capture: Capture, inside: Inside[tuple[Watched, Use]]) -> None:
    capture.entered(inside)


def _left(
    capture: Capture,
    inside: Inside[tuple[Watched, Use]],
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    ran: bool,
) -> None:
    capture.left(inside, module, args, kwargs, ran)


# Hooks have side effects: Dynamo must run them, not trace them.
_begin = compat.out_of_graphs(_begin, BROKEN_GRAPH)
_called = compat.out_of_graphs(_called, BROKEN_GRAPH)
_entered = compat.out_of_graphs(_entered, BROKEN_GRAPH)
_left = compat.out_of_graphs(_left, BROKEN_GRAPH)


def close_with(owner: object, capture: Capture) -> None:
    """Remove the hooks when their owner is garbage, so that a forgotten optimizer costs nothing."""
    weakref.finalize(owner, capture.close)
