"""The batch once more: the calls of a model that its gradients came from, run again with other parameters.

A call counts once a backward pass that came by its output has added to a gradient of the model. So forwards that nobody
differentiates, and `torch.autograd.grad` with respect to inputs, count for nothing, and what was counted for gradients that
somebody dropped is dropped with them. Until then a call is held by the graph of its output alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call

from rkfac import compat
from rkfac.curvature.calls import dropped
from rkfac.curvature.capture import Capture
from rkfac.curvature.hooks import Hook
from rkfac.curvature.sampled import read_logits

Result = TypeVar("Result")
BROKEN_GRAPH = (
    "rkfac notes the batch here, to run it again in the step. Hand torch.compile(model) to the optimizer: calls are then noted "
    "around the graph, which stays whole"
)


@dataclass(eq=False)
class Recorded:
    """One call of a model: its arguments, and the autocast it ran under."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    versions: Sequence[tuple[Tensor, int | None]]  # of all tensors among the arguments
    autocast: Sequence[tuple[str, bool, torch.dtype]]

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any], devices: set[str]) -> Recorded:
        """A call that begins."""
        found: list[Tensor] = []

        def note(tensor: Tensor) -> Tensor:
            found.append(tensor.detach())  # it shares the version with the tensor, not the graph
            return found[-1]

        args, kwargs = compat.with_tensors(note, (args, kwargs))
        kinds = sorted(kind for kind in devices if torch.amp.is_autocast_available(kind))
        return cls(
            args,
            kwargs,
            [(tensor, compat.version_or_none(tensor)) for tensor in found],
            [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds],
        )

    @property
    def intact(self) -> bool:
        """Whether its arguments are what they were."""
        return all(compat.version_or_none(tensor) == version for tensor, version in self.versions)

    def logits(self, model: nn.Module) -> Tensor:
        """The call again."""
        with ExitStack() as stack:
            for kind, enabled, dtype in self.autocast:
                # No cache: casts of copies would be kept until the outermost autocast ends.
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False))
            output = model(*self.args, **self.kwargs)
        logits = read_logits(output)
        if logits is None:
            raise TypeError(f"the model returned {type(output).__name__} without logits when it was run again")
        return logits


class Recorder:
    """The calls of a model that its present gradients came from."""

    def __init__(self, model: nn.Module) -> None:
        self.calls: list[Recorded] = []
        self._model = model
        self._begun: Recorded | None = None
        self._arrived: dict[int, list[Recorded]] = {}  # by backward pass
        self._before: list[tuple[Tensor | None, int]] = []  # gradients when the backward pass began
        self._last: tuple[nn.Parameter, tuple[Tensor, int]] | None = None  # a gradient that the calls were counted for
        self._unread = ""  # what was returned instead of logits

    def watch(self, entrance: nn.Module, capture: Capture) -> None:
        """Put hooks where calls of the model come in; `capture` takes them out again, and tells when gradients are gone."""
        # First of all hooks: another one may change the arguments, and will do so again.
        before = partial(entrance.register_forward_pre_hook, _BeginHook(self), with_kwargs=True, prepend=True)
        capture.install(before)
        capture.install(partial(entrance.register_forward_hook, _EndHook(self)))
        capture.tell(self)

    # --- what the hooks do

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A forward of the whole model starts."""
        self._begun = None
        if not torch.is_grad_enabled() or compat.graph_task() != -1:
            return
        parameters = list(self._model.parameters())
        # Under functional_call, as when it is run again, it is another network that is called.
        if not compat.inside_functional_transform() and all(isinstance(p, nn.Parameter) for p in parameters):
            self._begun = Recorded.of(args, kwargs, {p.device.type for p in parameters})

    def end(self, output: Any) -> None:
        """It has run."""
        call, self._begun = self._begun, None
        if call is None:
            return
        logits = read_logits(output)
        if logits is None:
            self._unread = type(output).__name__
        elif logits.requires_grad:
            compat.behind_view(logits).register_hook(_ArrivalHook(self, call))

    def arrived(self, call: Recorded) -> None:
        """A gradient reached a call's output."""
        task = compat.graph_task()
        if task not in self._arrived:
            if self._last is not None and dropped(self._last[1], self._last[0].grad):
                self.drop()
            self._arrived[task] = []
            self._before = self._gradients()
            compat.when_backward_ends(lambda: self._ended(task))
        self._arrived[task].append(call)

    def _gradients(self) -> list[tuple[Tensor | None, int]]:
        gradients = [p.grad for p in self._model.parameters()]
        return [(g, 0 if g is None else compat.version_of(g)) for g in gradients]

    def _ended(self, task: int) -> None:
        """A backward pass is over: its calls count if it has added to a gradient."""
        calls, before = self._arrived.pop(task), self._before
        for p, (gradient, version), old in zip(self._model.parameters(), self._gradients(), before, strict=True):
            if gradient is not None and (gradient is not old[0] or version != old[1]):
                self.calls += [call for call in dict.fromkeys(calls) if call not in self.calls]
                self._last, self._unread = (p, (gradient, version)), ""
                return

    def drop(self) -> None:
        """The gradients are gone; a forward may be under way."""
        self.calls, self._last = [], None

    # --- what is made of it

    def check(self, who: str) -> None:
        """Refuse what cannot be run again as it was."""
        if not self.calls:
            if self._unread:
                raise TypeError(f"{who} reads the model's output as logits, but it returned {self._unread}")
            raise RuntimeError(
                f"{who} runs the model on the same batch again, and no call of the model itself came before these gradients: "
                "call the model that the optimizer was given, not parts of it, and do not close the optimizer before"
            )
        if not all(call.intact for call in self.calls):
            raise RuntimeError(
                f"{who} runs the model on the same batch again, but its arguments were changed in place since: leave them as "
                "they were until the step, or hand over a copy"
            )

    def again(self, index: int, values: Mapping[str, Tensor], work: Callable[[Tensor], Result]) -> Result:
        """What `work` makes of the output of a counted call for other values of the parameters.

        They stay in the model's place until the work is done, for a checkpoint asks for them in the backward pass.
        Buffers are copies: running averages do not know of it.
        """
        buffers = {f"model.{name}": buffer.detach().clone() for name, buffer in self._model.named_buffers()}
        own = {f"model.{name}": value for name, value in values.items()}
        with ExitStack() as stack:
            if any(compat.compiled_call(module) is not None for module in self._model.modules()):
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            return functional_call(_Held(self._model), {**buffers, **own}, (self.calls[index], work))


class _Held(nn.Module):
    """A model and what is done with its output, as one call."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, call: Recorded, work: Callable[[Tensor], Any]) -> Any:
        """Both."""
        return work(call.logits(self.model))


class _BeginHook(Hook):
    capture: Recorder

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        _begin(self.capture, args, kwargs)


class _EndHook(Hook):
    capture: Recorder

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        _end(self.capture, output)


class _ArrivalHook(Hook):
    capture: Recorder

    def __init__(self, recorder: Recorder, call: Recorded) -> None:
        super().__init__(recorder)
        self.call = call

    def __call__(self, g: Tensor) -> None:
        self.capture.arrived(self.call)


def _begin(recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    recorder.begin(args, kwargs)


def _end(recorder: Recorder, output: Any) -> None:
    recorder.end(output)


_begin = compat.out_of_graphs(_begin, BROKEN_GRAPH)
_end = compat.out_of_graphs(_end, BROKEN_GRAPH)
