"""Statistics of targets drawn from the model's own distribution (`fisher="mc"`).

Targets are drawn when the loss's gradient arrives at the model's output, at the very beginning of the backward pass: one
more pass through the activations sends their gradients to every layer, and what the loss's own backward then finds at a
layer counts with the drawn gradient in the place of the loss's. A forward that is never differentiated draws nothing.
The output is that of the outermost module called, which need not be the model itself (`self.net(x)`, or
`model.head(model.body(x))`: the piece whose output gradient arrives first).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from rkfac import compat
from rkfac.curvature.calls import Arrival, Call, Observer, Pass, Watched
from rkfac.curvature.capture import Capture
from rkfac.curvature.fisher import Likelihood
from rkfac.curvature.hooks import BROKEN_GRAPH, Hook, full_precision
from rkfac.curvature.randomness import Randomness

MOST_OPEN = 32  # forwards before one backward that a step may have
ADVICE = "call optimizer.sample_fisher(logits) after each forward"


@dataclass(eq=False)
class SampledPass(Pass):
    """A forward with its calls' places in the graph, until targets are drawn for it."""

    calls: list[tuple[Call, GradientEdge]] = field(default_factory=list)
    outputs: list[tuple[int, GradientEdge]] = field(default_factory=list)
    layers: set[int] = field(default_factory=set)
    reached: set[int] = field(default_factory=set)  # outputs that the drawn gradient flowed through
    logits: dict[int, tuple[Tensor, int]] = field(
        default_factory=dict
    )  # outputs by number, here so that they can be let go
    drawn: bool = False
    unread: str = ""  # what was returned instead of logits

    def let_go(self) -> None:
        """Of the graph, which holds hooks that hold this."""
        self.calls, self.outputs, self.logits = [], [], {}


class SampledCapture(Capture):
    """A capture that replaces the loss's gradients by those of drawn targets."""

    def __init__(self, model: nn.Module, likelihood: Likelihood, randomness: Randomness) -> None:
        super().__init__(model)
        self.draws = 0
        self._likelihood = likelihood
        self._randomness = randomness
        self._drawing = False
        self._inside: list[nn.Module] = []  # modules whose forward is running, outermost first
        self._containers: set[int] = set()
        self._open: list[SampledPass] = []  # forwards since the last step; they hold graphs that hold them
        self._model = model
        self._contain(model)

    def attach(self, observer: Observer) -> None:
        """Watch a layer, and every module around it."""
        super().attach(observer)
        for module in self._model.modules():
            if any(inner is use.called for inner in module.modules() for use in observer.uses):
                self._contain(module)

    def _contain(self, module: nn.Module) -> None:
        if id(module) in self._containers:
            return
        self._containers.add(id(module))
        self.install(partial(module.register_forward_pre_hook, _EnterHook(self), prepend=True))
        self.install(partial(module.register_forward_hook, _LeaveHook(self)))

    def forget(self) -> None:
        """Drop everything that is under way."""
        super().forget()
        self._inside.clear()
        passes, self._open = self._open, []
        for one_pass in passes:
            one_pass.let_go()

    def new_pass(self) -> Pass:
        """With room for its calls."""
        made = SampledPass()
        self._open.append(made)
        if len(self._open) > MOST_OPEN:  # forwards that nobody differentiates, as in a validation without no_grad
            self._open.pop(0).let_go()
        return made

    # --- what the hooks do

    def enter(self, module: nn.Module) -> None:
        """A module's forward begins."""
        if module is self._model:
            self._inside.clear()  # a forward that raised has left its modules behind
        elif module in self._inside:
            del self._inside[self._inside.index(module) :]
        self._inside.append(module)

    def drop(self) -> None:
        """Also what a forward that raised has left behind; nobody drops gradients inside of a forward."""
        super().drop()
        self._inside.clear()

    def leave(self, module: nn.Module, output: Any) -> None:
        """A module's forward ends; when it was the outermost, its output may be the model's."""
        while self._inside and self._inside.pop() is not module:
            pass
        current = self._pass
        if self._inside or not isinstance(current, SampledPass) or compat.graph_task() != -1:
            return
        if not torch.is_grad_enabled() or not current.calls:
            return
        logits = read_logits(output)
        if logits is None:
            current.unread = type(output).__name__
        elif logits.requires_grad:
            current.unread = ""
            number = len(current.outputs)
            current.outputs.append((number, get_gradient_edge(logits)))
            current.logits[number] = (logits, compat.version_of(logits))
            logits.register_hook(_OutputHook(self, current, number))

    def registered(self, watched: Watched, call: Call, output: Tensor) -> None:
        """Remember where in the graph a call stands."""
        current = call.one_pass
        assert isinstance(current, SampledPass)
        if compat.graph_task() == -1:
            current.layers.add(id(watched))
            # An edge, not the tensor: an in-place activation would turn the tensor into its own output.
            current.calls.append((call, get_gradient_edge(output)))
        elif id(watched) not in current.layers:
            self.refuse(
                RuntimeError(
                    f"fisher='mc' cannot see layer {watched.observer.name!r} inside a reentrant checkpoint: pass "
                    "use_reentrant=False to torch.utils.checkpoint"
                )
            )

    def output_arrived(self, current: SampledPass, number: int) -> None:
        """The loss's gradient reached an output: the first one in a backward pass is what targets are drawn from."""
        if self._drawing or not self.active:
            return
        if not current.drawn:
            logits, version = current.logits.pop(number, (None, 0))
            current.logits = {}
            if logits is not None and compat.version_of(logits) != version:
                self.refuse(RuntimeError(f"fisher='mc': the model's output was changed in place: do not, or {ADVICE}"))
            elif logits is not None:
                self.draw(logits, current)
        elif number not in current.reached:
            self.refuse(
                RuntimeError(f"fisher='mc' found several outputs in one forward and cannot draw for them all: {ADVICE}")
            )

    def draw(self, logits: Tensor, one_pass: Pass | None = None) -> None:
        """Draw targets from the model's distribution and send their gradients to every call of the pass."""
        current = self._pass if one_pass is None else one_pass
        if not isinstance(current, SampledPass) or not current.calls:
            return
        current.drawn, current.unread = True, ""
        calls, current.calls = current.calls, []
        values = logits.detach()
        if not bool(torch.isfinite(values).all()):
            return  # nothing can be drawn: the step goes on without statistics and deals with its gradients
        generator = self._randomness.local("fisher", self.draws)
        self.draws += 1
        self._drawing = True
        try:
            with full_precision([logits.device]), torch.no_grad():
                current.terms = self._likelihood.terms(values)
                gradient = self._likelihood.draw_gradient(values, generator).to(logits.dtype)
            edges = [edge for _, edge in calls] + [edge for _, edge in current.outputs]
            found = torch.autograd.grad(logits, edges, gradient, retain_graph=True, allow_unused=True)
        except ValueError as error:
            self.refuse(ValueError(f"fisher='mc' cannot read the model's output: {error}; or {ADVICE}"))
            return
        except RuntimeError as error:
            if "use_reentrant" not in str(error):
                raise
            self.refuse(
                RuntimeError(
                    "fisher='mc' cannot see through a reentrant checkpoint: pass use_reentrant=False to torch.utils.checkpoint"
                )
            )
            return
        finally:
            self._drawing = False
        for (call, _), g in zip(calls, found, strict=False):
            call.drawn = None if g is None else call.laid_out(g.detach())
        current.reached = {
            number for (number, _), g in zip(current.outputs, found[len(calls) :], strict=True) if g is not None
        }
        current.outputs = []

    def draw_by_hand(self, logits: Tensor) -> None:
        """Draw for the forward that has just ended; the next call of a layer begins another one."""
        self.draw(logits)
        self._pass = None

    def arrived(self, watched: Watched, call: Call, g: Tensor) -> None:
        """The loss's gradient only; drawn gradients pass the same places."""
        if not self._drawing:
            super().arrived(watched, call, g)

    def statistic(self, arrival: Arrival) -> Tensor | None:
        """The drawn gradient."""
        current = arrival.call.one_pass
        if isinstance(current, SampledPass) and not current.drawn and current.calls:
            what = f"but it returned {current.unread}" if current.unread else "but the loss does not come from there"
            self.refuse(TypeError(f"fisher='mc' reads the model's output as logits, {what}: {ADVICE}"))
        return arrival.call.drawn


def read_logits(output: Any) -> Tensor | None:
    """Logits in what a model returned: a tensor, something with `.logits` or ["logits"], or the only tensor in it."""
    if isinstance(output, Tensor):
        return output
    named = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    if isinstance(named, Tensor):
        return named
    values: Iterable[Any] = output.values() if isinstance(output, Mapping) else ()
    if isinstance(output, list | tuple):
        values = output
    tensors = [v for v in values if isinstance(v, Tensor) and v.is_floating_point() and v.requires_grad]
    return tensors[0] if len(tensors) == 1 else None


class _EnterHook(Hook):
    capture: SampledCapture

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if self.capture.active:
            _enter(self.capture, module)


class _LeaveHook(Hook):
    capture: SampledCapture

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self.capture.active:
            _leave(self.capture, module, output)


class _OutputHook(Hook):
    capture: SampledCapture

    def __init__(self, capture: SampledCapture, current: SampledPass, number: int) -> None:
        super().__init__(capture)
        self.current, self.number = current, number

    def __call__(self, g: Tensor) -> None:
        self.capture.output_arrived(self.current, self.number)


def _enter(capture: SampledCapture, module: nn.Module) -> None:
    capture.enter(module)


def _leave(capture: SampledCapture, module: nn.Module, output: Any) -> None:
    capture.leave(module, output)


_enter = compat.out_of_graphs(_enter, BROKEN_GRAPH)
_leave = compat.out_of_graphs(_leave, BROKEN_GRAPH)
