"""The torch.optim.Optimizer shell around blocks: groups, periods, closure, gradient scaling, state_dict, report."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from rkfac.curvature.block import Block, LayerDirection, Settings
from rkfac.curvature.capture import Capture, close_with, full_precision
from rkfac.curvature.fisher import Likelihood
from rkfac.curvature.kronecker_block import KroneckerBlock
from rkfac.optim import memory, update
from rkfac.optim.adaptive import LevenbergMarquardt, Watch
from rkfac.optim.amp import loss_scale
from rkfac.optim.arguments import check_group
from rkfac.optim.coverage import cover, refuse_sharded, unwrapped
from rkfac.optim.report import LayerReport, Spectra, covered_layer, listed, spectra, uncovered_layer


class CurvatureOptimizer(torch.optim.Optimizer):
    """Preconditions the layers it covers and trains every other parameter by the fallback rule."""

    # GradScaler then hands over its scale instead of unscaling itself: the statistics carry the same factor.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        model: nn.Module,
        params: Iterable[Any] | None,
        defaults: dict[str, Any],
        settings: Settings,
        *,
        include: tuple[str, ...],
        exclude: tuple[str, ...],
        max_factor_dim: int,
        fallback: str,
        likelihood: Likelihood | None,
        adaptive_damping: LevenbergMarquardt | None,
        grad_scaler: Any,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise ValueError(f"model must be an nn.Module, got {type(model).__name__}; parameters go into params=")
        refuse_sharded(model)
        self._settings = settings
        self._fallback = fallback
        self._adaptive = adaptive_damping
        self._grad_scaler = grad_scaler
        self._step = 0
        self._closed = False
        self._paused = False
        self._capture: Capture | None = None
        super().__init__(list(model.parameters()) if params is None else params, defaults)
        self._model = unwrapped(model)
        self._compiled = self._model is not model or self._model._compiled_call_impl is not None
        self._cover = partial(cover, self._model, settings, include, exclude, max_factor_dim)
        self._blocks: dict[str, Block] = {}
        self._capture = Capture(model, likelihood, settings.generator)
        close_with(self, self._capture)
        self._extend()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies would share hooks and blocks with the original, or have none; torch's own way would break silently."""
        raise TypeError(
            f"{type(self).__name__} cannot be copied or pickled: it belongs to its model. Copy the model, build a new "
            "optimizer for it and hand over optimizer.state_dict()"
        )

    def _all_parameters(self) -> list[nn.Parameter]:
        return [p for group in self.param_groups for p in group["params"]]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch; settings are checked."""
        check_group({**self.defaults, **param_group})
        super().add_param_group(param_group)
        if self._capture is not None:
            self._extend()

    def _extend(self) -> None:
        """Give a block to every layer that can have one and has none yet."""
        assert self._capture is not None
        found = self._cover(self._all_parameters(), self._blocks.keys())
        for block in found.blocks.values():
            self._capture.attach(block.module, block)
        if self._compiled and found.blocks:
            torch.compiler.reset()  # graphs traced before do not look for new hooks: they must be traced again
        known = self._blocks | found.blocks
        # In the model's order, so that random numbers do not depend on when a layer joined.
        self._blocks = {name: known[name] for name, _ in self._model.named_modules() if name in known}
        self._reasons = found.reasons
        self._plan()

    def _plan(self) -> None:
        """Decide what the coming step collects. Called after every step and whenever groups change."""
        self._group_of = {id(p): group for group in self.param_groups for p in group["params"]}
        for block in self._blocks.values():
            block.wanted = self._step % self._group(block)["factor_every"] == 0 or not block.observed
        self._activate()

    def _activate(self) -> None:
        assert self._capture is not None
        wanted = any(block.wanted for block in self._blocks.values())
        self._capture.active = wanted and not self._closed and not self._paused

    def _group(self, block: Block) -> dict[str, Any]:
        return self._group_of.get(id(block.weight), self.param_groups[0])

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch; statistics that came with the dropped gradients are dropped too."""
        super().zero_grad(set_to_none)
        if self._capture is None:
            return
        if not self._settings.sampled:
            self._discard()
        self._plan()  # schedulers may have changed the periods since the step

    def _discard(self) -> None:
        for block in self._blocks.values():
            block.discard()

    # --- the step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step: statistics, decompositions when due, preconditioned update."""
        self._check_settings(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._refuse_sparse()
        assert self._capture is not None
        self._capture.require_sampled()
        scaled = loss_scale(self, self._all_parameters(), self._grad_scaler, self._settings.sampled)
        if scaled is None:
            self._discard()
            return loss
        with full_precision(p.device for p in self._all_parameters()):
            self._commit(scaled if isinstance(scaled, Tensor) else None)
            self._refresh()
            watch = self._watched()
            self._update()
        if watch is not None and closure is not None:
            self._adapt(watch, loss, closure)
        self._step += 1
        self._plan()
        return loss

    def _check_settings(self, closure: Callable[[], Any] | None) -> None:
        """Schedulers and users write into the groups at any time; refuse nonsense before anything is touched."""
        if self._adaptive is not None and closure is None:
            raise RuntimeError("adaptive damping compares losses: call optimizer.step(closure)")
        for group in self.param_groups:
            check_group(group)
            if group["kl_clip"] != self.param_groups[0]["kl_clip"]:
                raise ValueError("kl_clip bounds all layers together, so it must be the same in every parameter group")

    def _refuse_sparse(self) -> None:
        """Before anything is touched."""
        if any(p.grad is not None and p.grad.is_sparse for p in self._all_parameters()):
            raise RuntimeError("sparse gradients are not supported: build nn.Embedding with sparse=False")

    def _commit(self, loss_scale: Tensor | None) -> None:
        """Pending statistics enter the averages, unless they hold NaN or Inf. One synchronisation a statistics step."""
        waiting = [(block, size) for block in self._blocks.values() if (size := block.pending_size()) is not None]
        if not waiting:
            return
        device = waiting[0][1].device
        sizes = torch.stack([size.to(device=device, dtype=torch.float64) for _, size in waiting]).tolist()
        refused = []
        for (block, _), size in zip(waiting, sizes, strict=True):
            if math.isfinite(size):
                block.commit(self._group(block), loss_scale)
            else:
                refused.append(block.name)
                block.discard()
        if refused:
            warnings.warn(f"statistics with NaN or Inf were left out for {listed(refused)}", stacklevel=4)

    def _refresh(self) -> None:
        for block in self._blocks.values():
            due = self._step % self._group(block)["inverse_every"] == 0
            first = not block.ready and block.failures == 0
            if block.observed and (due or first):
                block.refresh(self._group(block))

    def _update(self) -> None:
        active = [b for b in self._blocks.values() if b.ready and b.weight.requires_grad and b.weight.grad is not None]
        covered = {id(p) for block in active for p in block.parameters}
        bound = self.param_groups[0]["kl_clip"]
        if bound is None:
            for block in active:  # one layer at a time: its direction is gone before the next one's is made
                direction, clip = self._direction(block)
                self._apply(block, direction, clip)
        else:
            made = [(block, *self._direction(block)) for block in active]
            if made:
                terms = [_kl_term(direction, clip, self._group(block)["lr"]) for block, direction, clip in made]
                device = terms[0].device
                whole = update.kl_clip((t.to(device) for t in terms), bound)
                for block, direction, clip in made:
                    share = whole.to(block.weight.device)
                    self._apply(block, direction, share if clip is None else clip * share)
        rule = update.FALLBACKS[self._fallback]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None or id(p) in covered:
                    continue
                plain = rule(self.state[p], p.grad, group)
                update.decay(p, group, self._step)
                p.add_(plain, alpha=_signed(group) * group["fallback_scale"])

    def _direction(self, block: Block) -> tuple[LayerDirection, Tensor | None]:
        group = self._group(block)
        direction = block.direction(group)
        size = sum(p.numel() for p in block.parameters)
        return direction, update.rms_clip(direction.squared_norm, size, group["update_clip"])

    def _apply(self, block: Block, direction: LayerDirection, clip: Tensor | None) -> None:
        block.clip = clip
        for index, p in enumerate(block.parameters):
            group = self._group_of.get(id(p))
            if group is None or p.grad is None:
                continue
            update.decay(p, group, self._step)
            if group["momentum"]:
                buffer = update.momentum_buffer(self.state[p], p, group["momentum"])
                block.add(direction, index, buffer, clip, 1.0)
                p.add_(buffer, alpha=_signed(group))
            else:
                block.add(direction, index, p, clip, _signed(group))

    # --- adaptive damping

    def _watched(self) -> Watch | None:
        """What the quadratic model is compared with later, on steps that adapt the damping."""
        if self._adaptive is None or (self._step + 1) % self._adaptive.every:
            return None
        return Watch([(block, self._group(block)) for block in self._blocks.values() if block.ready])

    def _adapt(self, watch: Watch, loss: Any, closure: Callable[[], Any]) -> None:
        assert self._adaptive is not None
        sign = -1.0 if self.param_groups[0].get("maximize") else 1.0  # maximising is minimising the negated loss
        predicted = watch.predicted(sign)
        self._paused = True
        self._activate()
        try:
            with torch.enable_grad():
                after = closure()
        finally:
            self._paused = False
        for group in self.param_groups:
            group["damping"] = self._adaptive.adapted(group["damping"], sign * float(after - loss), predicted)

    # --- memory

    def state_dict(self) -> dict[str, Any]:
        """torch's state plus the curvature: tensors, numbers and strings only, so that `weights_only=True` loads it."""
        state = super().state_dict()
        state["curvature"] = {
            "format": memory.STATE_FORMAT,
            "step": self._step,
            "wanted": [name for name, block in self._blocks.items() if block.wanted],
            "generator": self._settings.generator.get_state(),
            "blocks": {name: block.state_dict() for name, block in self._blocks.items()},
        }
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume bit for bit, onto the model's devices. A state that does not fit is refused and changes nothing."""
        curvature = memory.checked(state_dict, self._blocks, self.param_groups)
        with memory.all_or_nothing(self._blocks, self._settings.generator):
            step, wanted = int(curvature["step"]), set(curvature["wanted"])
            for name, block in self._blocks.items():
                block.load_state_dict(curvature["blocks"][name])
            self._settings.generator.set_state(curvature["generator"].cpu())
            super().load_state_dict({key: value for key, value in state_dict.items() if key != "curvature"})
        self._step = step
        self._plan()
        for name, block in self._blocks.items():  # what the interrupted run had planned, whatever was scheduled since
            block.wanted = name in wanted
        self._activate()

    def close(self) -> None:
        """Remove the hooks; the optimizer can still step with the curvature it has."""
        self._closed = True
        if self._capture is not None:
            self._capture.close()

    # --- what it knows

    def sample_fisher(self, output: Tensor) -> None:
        """Draw targets from these logits, for models whose forward does not return the logits alone."""
        if not self._settings.sampled or self._capture is None:
            raise RuntimeError("sample_fisher needs fisher='mc'")
        self._capture.sample(output)

    def report(self) -> list[LayerReport]:
        """One record a layer: what it keeps and costs, or why it is left to the fallback rule."""
        covered = [covered_layer(block, self._group(block)) for block in self._blocks.values()]
        return covered + [uncovered_layer(name, module, why) for name, (module, why) in self._reasons.items()]

    def spectrum(self, name: str) -> Spectra:
        """Exact eigenvalues of a layer's two running factors, descending."""
        return spectra(self._blocks, name)

    def __repr__(self) -> str:
        kron = sum(isinstance(block, KroneckerBlock) for block in self._blocks.values())
        units = len(self._blocks) - kron
        covered = sum(p.numel() for block in self._blocks.values() for p in block.parameters)
        total = sum(p.numel() for p in self._all_parameters() if not isinstance(p, UninitializedParameter))
        first = {k: v for k, v in self.param_groups[0].items() if k not in ("params", "param_names")}
        lines = [
            f"{type(self).__name__}(",
            f"  {kron} Kronecker layers and {units} unit-wise layers hold {covered:,} of {total:,} parameters;",
            f"  the rest trains by {self._fallback!r}" + (f" ({listed(self._reasons)})" if self._reasons else ""),
            f"  {self._settings.decomposition!r}, damping {self._settings.damping_rule}, step {self._step}",
            "  " + ", ".join(f"{k}={v}" for k, v in first.items()),
            ")",
        ]
        return "\n".join(lines)


def _signed(group: Mapping[str, Any]) -> float:
    """-lr, or +lr when the objective is maximised."""
    return float(group["lr"]) if group.get("maximize") else -float(group["lr"])


def _kl_term(direction: LayerDirection, clip: Tensor | None, lr: float) -> Tensor:
    term = lr**2 * direction.inner
    return term if clip is None else term * clip
