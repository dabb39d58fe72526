"""The torch.optim.Optimizer shell around blocks: groups, periods, closure, gradient scaling, state_dict."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from rkfac import compat
from rkfac.curvature.block import Block, KroneckerBlock, Settings, TiedBlock, UnitBlock
from rkfac.curvature.capture import Capture, close_with
from rkfac.curvature.fisher import Likelihood
from rkfac.curvature.following import RowHook
from rkfac.curvature.hooks import full_precision
from rkfac.curvature.natural import NaturalHook, silence_others
from rkfac.curvature.sampled import SampledCapture
from rkfac.distributed import Company, cut_again, refuse_sharded
from rkfac.layers import Adapter, KroneckerAdapter, TiedAdapter, Uncovered, UnitAdapter, Use
from rkfac.optim import memory as saved_states
from rkfac.optim import portable
from rkfac.optim.adaptive import LevenbergMarquardt, Watch
from rkfac.optim.amp import loss_scale, scaler_of
from rkfac.optim.arguments import GROUP_RULES, check_group, check_power, refuse_lacking, refuse_whole
from rkfac.optim.collecting import begin, commit, notice_unseen, retire
from rkfac.optim.compiled import run_eagerly, unwrapped
from rkfac.optim.coverage import Choice, block_for, cover, owners_of, warn_of_little
from rkfac.optim.directing import Step
from rkfac.optim.gate import Gate
from rkfac.optim.knowing import Knowing
from rkfac.optim.moves import Move, Rules
from rkfac.optim.owner import model_of
from rkfac.optim.pinning import pin
from rkfac.optim.planning import planned
from rkfac.optim.refusals import refuse_alone, refuse_gradients, refuse_spread
from rkfac.optim.report_text import listed
from rkfac.optim.rows import OwnRows
from rkfac.optim.rules import GRAFTS, Rule
from rkfac.optim.scratch import Scratch
from rkfac.optim.stagger import turns


class CurvatureOptimizer(Knowing):
    """Preconditions the layers it covers and trains every other parameter by the fallback rule."""

    # Which block serves which kind of layer: what makes an optimizer of another mathematics.
    block_types: ClassVar[Mapping[type, Callable[..., Block | str]]] = {
        KroneckerAdapter: KroneckerBlock,
        TiedAdapter: TiedBlock,
        UnitAdapter: UnitBlock,
    }

    # Keywords of the base's constructor that mean nothing to a member of the family, and why; no group holds them.
    lacks: ClassVar[Mapping[str, str]] = {}

    # The rules of preconditioned layers, and of everything else, under graft=None.
    own_length: ClassVar[Rule] = GRAFTS[None]
    own_rest: ClassVar[Rule] = GRAFTS[None]

    def __init__(
        self,
        model: nn.Module | Iterable[Any] | None,
        params: Iterable[Any] | None,
        defaults: dict[str, Any],
        settings: Settings,
        *,
        choice: Choice,
        graft: str | None,
        fallback: str,
        likelihood: Likelihood | None,
        adaptive_damping: LevenbergMarquardt | None,
        grad_scaler: Any,
        process_group: Any = None,
        memory: str = "replicated",
    ) -> None:
        model, params = model_of(model, params, type(self).__name__)
        cut_again(model)
        refuse_sharded(model)
        self._settings = settings
        self._choice = choice
        self._graft, self._fallback = graft, fallback
        self._adaptive = adaptive_damping
        self._grad_scaler = grad_scaler
        self._gate = Gate(settings.max_failures)
        self._scratch = Scratch()
        self._step = 0
        self._taken = 0  # steps, by this object: a state that is loaded brings those of others
        self._stepped = 0.0  # when the last step ended, by the host's clock
        self._closed = False
        self._paused = False
        self._company = Company(model, process_group, memory)
        self._capture: Capture | None = None
        self._model = unwrapped(model)
        choice.check(self._model)
        super().__init__(list(model.parameters()) if params is None else params, defaults)
        self._blocks = {}
        self._reasons = {}
        self._fingerprint = saved_states.fingerprint(settings, likelihood, graft, fallback)
        if likelihood is None:
            self._capture = Capture(self._model)
        else:
            self._capture = SampledCapture(self._model, likelihood, settings.randomness)
        close_with(self, self._capture)
        run_eagerly(model, self._capture)
        self._extend()
        self._refuse_spread()
        warn_of_little(self._blocks, self._reasons, self._group_of)
        self._join()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies would share hooks and blocks with the original, or have none; torch's own way would break silently."""
        raise TypeError(
            f"{type(self).__name__} cannot be copied or pickled: it belongs to its model. Copy the model, build a new "
            "optimizer for it and hand over copy.deepcopy(optimizer.state_dict())"
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch; settings are checked."""
        check_group({**self.defaults, **param_group})
        refuse_lacking(type(self).__name__, param_group, self.lacks)
        refuse_whole(param_group, inspect.signature(type(self).__init__).parameters.keys() - self.defaults.keys())
        super().add_param_group(param_group)
        if self._capture is not None:
            self._extend()

    # --- other processes

    def _join(self) -> None:
        """Train together with whoever else is there, from the moment on that they appear."""
        found = self._company.newcomers(self._model)
        if found is None:
            return
        refuse_alone(type(self).__name__, self._blocks.values(), self._settings.randomness.seeded, found.size)
        self._company.join(found, dict(self._model.named_parameters()), self._described())
        self._settings.randomness.rank = found.rank
        assert self._capture is not None
        self._capture.when_counted = self._company.early.arrived
        self._set_apart(self._blocks.values())

    def _described(self) -> dict[str, Any]:
        """All that decides what is said to other processes, and when."""
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self.param_groups]
        return {
            **self._fingerprint,
            "eager_start": self._settings.eager_start,
            "warm_start": self._settings.warm_start,
            "randomness": self._settings.randomness.state_dict() if self._settings.randomness.seeded else "",
            "adaptive_damping": self._adaptive,
            "the optimizer": type(self).__name__,
            "its groups": groups,
            "parameters in its groups": [[self._names.get(id(p)) for p in g["params"]] for g in self.param_groups],
            "layers it covers": [(name, block.kind, block.ownable) for name, block in self._blocks.items()],
            "its steps": self._step,
        }

    def _refuse_spread(self) -> None:
        """Members and settings that need whole parameters, by name, where these are sharded."""
        asked = {
            'apply="backward"': self._settings.backward,
            'fisher="mc"': self._settings.sampled,  # whose own pass comes before fully_shard has the weights for one
            "adaptive_damping": self._adaptive is not None,
            "a GradScaler (grad_scaler=)": self._grad_scaler is not None,
            "a member that sees every step's gradients or remembers its steps": self._rule.remembers
            or any(block.learns for block in self._blocks.values()),
        }
        refuse_spread(type(self).__name__, self._model, self._all_parameters(), asked)

    def _set_apart(self, blocks: Iterable[Block]) -> None:
        """Tell blocks whether a gradient is the sum of what this process sees."""
        for block in blocks:
            block.alone = self._company.alone

    def _make_block(self, uses: Sequence[Use], adapter: Adapter) -> Block | Uncovered:
        """The block that serves a weight, or why none does."""
        made = block_for(uses, adapter, self.block_types, self._settings, type(self).__name__)
        why = self._choice.too_wide(made.widest(self._group(made))) if isinstance(made, Block) else ""
        return Uncovered(why) if why else made

    def _extend(self) -> None:
        """Give a block to every layer that can have one and has none yet."""
        assert self._capture is not None
        cut_again(self._model)
        self._regroup()
        found = cover(self._model, self._choice, self._make_block, self._all_parameters(), self._blocks)
        self._set_apart(found.blocks.values())
        for block in found.blocks.values():
            self._capture.attach(block)
            for use in block.uses:
                silence_others(use.module)
            if block.shows_rows:
                # The first hook of all: what it returns is the output that the others see.
                hook = NaturalHook(block) if self._settings.backward else RowHook(block)
                self._capture.install(partial(block.module.register_forward_hook, hook, with_kwargs=True, prepend=True))
        known = self._blocks | found.blocks
        # In the model's order, so that random numbers of a shared generator do not depend on when a layer joined.
        self._blocks = {name: known[name] for name in found.order if name in known}
        self._reasons = found.reasons
        self._names = {id(p): name for name, p in self._model.named_parameters()}
        self._plan()

    def _plan(self) -> None:
        """Decide what the coming step collects. Called after every step and whenever what decides it changes."""
        assert self._capture is not None
        self._regroup()
        self._planned: tuple[Any, ...] = self._deciding()
        # Who collects only for its refresh has turns in that as well; the others' are asked for when they refresh.
        turn = self._turns() if any(block.period == "inverse_every" for block in self._blocks.values()) else {}
        for block in self._blocks.values():
            if not self._company.alone:
                block.conform()
            first = block.weight.requires_grad and not block.observed
            # Frozen layers too: they may be thawed before the forward, and cost nothing while they are not.
            period = self._group(block)[block.period]
            brief = False
            if block.period == "inverse_every":
                due = self._settings.due(self._step, period, turn.get(block.name, 0))
            else:
                due, brief = self._settings.collects(self._step, period), self._settings.brief(self._step, period)
            due = block.pace.due if block.pace else due
            block.wanted = not block.retired and (first or due)
            block.brief = brief and not first and block.pace is None
            if not self._closed:
                self._capture.follow(block)
        self._activate()
        self._company.plan(self._blocks.values())

    def _regroup(self) -> None:
        self._group_of = {id(p): group for group in self.param_groups for p in group["params"]}

    def _deciding(self) -> tuple[Any, ...]:
        """What a plan depends on that may be changed by others between two steps."""
        blocks = self._blocks.values()
        return tuple((self._group(block)[block.period], block.weight.requires_grad) for block in blocks)

    def _activate(self) -> None:
        assert self._capture is not None
        wanted = any(block.wanted for block in self._blocks.values())
        self._capture.active = wanted and not self._closed and not self._paused

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch; statistics that came with the dropped gradients are dropped too."""
        super().zero_grad(set_to_none)
        if self._capture is not None:
            self._capture.drop()
            self._discard()
            for block in self._blocks.values():
                block.let_go()
            self._regroup()
            if self._planned != self._deciding():  # schedulers may have changed the periods since the step
                self._plan()

    def _discard(self) -> None:
        for block in self._blocks.values():
            if not block.pending.empty:
                block.discard()

    # --- the step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step: statistics, decompositions when due, preconditioned update. All of it or, on an error, no update."""
        if compat.called_by_distributed_checkpoint():
            return self._make_buffers()
        self._check_settings(closure)
        self._company.meet(self._model)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        scaler = scaler_of(self, self._grad_scaler)
        refuse_gradients(self._all_parameters(), scaler)
        assert self._capture is not None
        self._capture.check()
        with full_precision(p.device for p in self._all_parameters()):
            collecting = self._capture.active
            retire(self._blocks.values(), self._capture, partial(owners_of, self._model), collecting)
            begin(self._blocks.values())
            if self._settings.backward:
                self._company.agree_on_natural(self._blocks.values())
            spoilt = self._meet() if collecting else ()
            scale = loss_scale(scaler)
            commit(self._blocks.values(), self._group, scale, self._gate, self._company.world.size, spoilt)
            self._refresh()
            watch = self._watched()
            if self._settings.backward:
                pin(self._blocks.values(), self._group_of, self.state, GRAFTS[self._graft])
            self._update()
        if watch is not None and closure is not None:
            self._adapt(watch, loss, closure)
        self._step += 1
        self._taken += 1
        self._stepped = time.perf_counter()
        for block in self._blocks.values():
            if block.pace is not None:
                block.pace.tick()
        self._capture.forget()
        self._discard()
        self._plan()
        return loss

    def _make_buffers(self) -> None:
        """torch.distributed.checkpoint asks for a step without gradients, to have buffers to load into: no step is counted."""
        self._update()
        for buffers in self.state.values():
            for name, value in buffers.items():
                buffers[name] = torch.zeros_like(value) if isinstance(value, Tensor) else type(value)(0)

    def _meet(self) -> Sequence[str]:
        """Add up the statistics of all processes, and say what nobody saw; names of what is not finite somewhere."""
        assert self._capture is not None
        unseen = self._capture.unseen
        pooled = self._company.pool(self._blocks.values(), lambda block: not unseen(block))
        notice_unseen(self._blocks.values(), lambda b: not unseen(b) or b.name in pooled.seen, self._group)
        return pooled.spoilt

    def _check_settings(self, closure: Callable[[], Any] | None) -> None:
        """Schedulers and users write into the groups at any time; refuse nonsense before anything is touched."""
        assert self._capture is not None
        if self._capture.active or all(p.grad is None for p in self._all_parameters()):
            refuse_sharded(self._model, self._names)  # by somebody who came later
        self._join()
        if self._adaptive is not None and closure is None:
            raise RuntimeError("adaptive damping compares losses: call optimizer.step(closure)")
        for group in self.param_groups:
            check_group(group)
            if group["kl_clip"] != self.param_groups[0]["kl_clip"]:
                raise ValueError("kl_clip bounds all layers together, so it must be the same in every parameter group")
        check_power(self._settings.damping.power, self.param_groups[0]["kl_clip"], self._adaptive is not None)

    def _turns(self) -> dict[str, int]:
        """At which step of its period each layer is refreshed; at the first, where nothing is said."""
        return turns(self._blocks.values(), self._group) if self._settings.stagger else {}

    def _refresh(self) -> None:
        turn, asking = self._turns(), []
        for block in self._blocks.values():
            due = self._settings.due(self._step, self._group(block)["inverse_every"], turn.get(block.name, 0))
            due = block.pace.news if block.pace else due
            if block.observed and not block.retired and block.weight.requires_grad and block.asks(due):
                asking.append((block, self._group(block)))
        self._company.refresh(asking)

    @property
    def _rule(self) -> Rule:
        """How preconditioned layers move."""
        return self.own_length if self._graft is None else GRAFTS[self._graft]

    def _update(self) -> None:
        """All directions are made before any parameter moves: an error on the way leaves the model as it was."""
        blocks, groups = self._blocks.values(), self.param_groups
        rest = self.own_rest if self._graft is None and self._fallback == "sgd" else GRAFTS[self._fallback]
        rules = Rules(self._rule, rest, self._step)
        step = Step(OwnRows(self._all_parameters(), self.state), rules, self._gate, self._company.shards)
        moves = planned(blocks, groups, self._group_of, self._names, step, self._scratch)
        self._gate.report()
        self._take(moves, step)

    def _take(self, moves: Sequence[Move], step: Step) -> None:
        """Do what was planned."""
        for move in moves:
            move.apply(step.state, step.rules)

    # --- adaptive damping

    def _watched(self) -> Watch | None:
        """What the quadratic model is compared with later, on steps that adapt the damping."""
        if self._adaptive is None or (self._step + 1) % self._adaptive.every:
            return None
        return Watch([(b, self._group(b)) for b in self._blocks.values() if b.ready and not b.retired])

    def _adapt(self, watch: Watch, loss: Any, closure: Callable[[], Any]) -> None:
        assert self._adaptive is not None
        sign = -1.0 if self.param_groups[0].get("maximize") else 1.0  # maximising is minimising the negated loss
        predicted = watch.predicted(sign)
        with self._pause(), torch.enable_grad():
            after = closure()
        change = self._company.world.mean(float(after - loss), "how the loss has changed")
        for group in self.param_groups:
            group["damping"] = self._adaptive.adapted(group["damping"], sign * change, predicted)

    @contextmanager
    def _pause(self) -> Iterator[None]:
        """Nothing that the model does meanwhile is a training step."""
        self._paused = True
        self._activate()
        try:
            yield
        finally:
            self._paused = False
            self._activate()

    # --- memory

    def state_dict(self) -> dict[str, Any]:
        """torch's state plus the curvature: tensors, numbers and strings only, so that `weights_only=True` loads it.

        With memory="owned" all processes must ask for it, for each has a part of it alone.
        """
        with self._company.whole(self._blocks.values()):
            return self._state()

    def _state(self) -> dict[str, Any]:
        state = super().state_dict()
        state["curvature"] = {
            "format": saved_states.STATE_FORMAT,
            "fingerprint": dict(self._fingerprint),
            "step": self._step,
            "draws": self._draws,
            "wanted": [name for name, block in self._blocks.items() if block.wanted],
            "randomness": self._settings.randomness.state_dict(),
            "blocks": {name: block.state_dict() for name, block in self._blocks.items()},
        }
        if compat.called_by_distributed_checkpoint():
            return portable.inscribed(state, {n: b.weight for n, b in self._blocks.items()}, self.param_groups)
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume bit for bit, onto the model's devices. A state that does not fit is refused and changes nothing."""
        randomness = self._settings.randomness
        drawn, rewound = randomness.state_dict(), self._draws

        def rewind() -> None:
            randomness.load_state_dict(drawn)
            self._draws = rewound

        with saved_states.all_or_nothing(self, self._blocks, rewind):
            state_dict = portable.read(state_dict)
            own, beside = self._fingerprint, self._rule.beside
            curvature = saved_states.checked(state_dict, self._blocks, self.param_groups, own, beside)
            for name, block in self._blocks.items():
                block.load_state_dict(curvature["blocks"][name])
            randomness.load_state_dict(curvature["randomness"])
            self._draws = curvature["draws"]
            super().load_state_dict({key: value for key, value in state_dict.items() if key != "curvature"})
            for group in self.param_groups:
                if missing := (GROUP_RULES.keys() & self.defaults.keys()) - group.keys():  # torch adds some of its own
                    raise ValueError(f"a saved parameter group lacks {listed(sorted(missing))}")
                check_group(group)
        self._step = curvature["step"]
        self._plan()
        for name, block in self._blocks.items():  # what the interrupted run had planned, whatever was scheduled since
            block.wanted = name in curvature["wanted"]
        self._planned = ()  # a schedule that changed before it was saved is seen by the next zero_grad, as it would have been
        self._activate()

    @property
    def _draws(self) -> int:
        return self._capture.draws if isinstance(self._capture, SampledCapture) else 0

    @_draws.setter
    def _draws(self, draws: int) -> None:
        if isinstance(self._capture, SampledCapture):
            self._capture.draws = draws

    def close(self) -> None:
        """Remove the hooks; the optimizer can still step with the curvature it has."""
        self._closed = True
        if self._capture is not None:
            self._capture.close()

    @contextmanager
    def unhooked(self) -> Iterator[None]:
        """The model without the optimizer's hooks, for torch.jit.script, torch.export and other code that reads modules."""
        assert self._capture is not None
        with self._capture.unhooked():
            yield

    def sample_fisher(self, output: Tensor) -> None:
        """Draw targets from these logits, for models whose forward does not return the logits alone."""
        if not isinstance(self._capture, SampledCapture):
            raise RuntimeError("sample_fisher needs fisher='mc'")
        if self._capture.active:
            with torch.enable_grad():
                self._capture.draw_by_hand(output)
