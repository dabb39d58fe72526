"""KLD-WRM's wake: the last networks, and inner steps down their exact divergences from where a step has ended.

From there on a few steps of SGD with momentum minimise

    g_k^T s + 1/2 s^T B_k s + weight / lr Dbar(theta),   s = theta - theta_k,

over what the curvature covers. Dbar folds the symmetric divergences between the network and the last ones on the batch at
hand, oldest first: Dbar <- rho Dbar + (1 - rho) D_i. All of it is done on copies, and the parameters have moved as a whole or,
on an error, not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rkfac.curvature.block import Proximal
from rkfac.curvature.fisher import Likelihood
from rkfac.curvature.randomness import Randomness, repeated
from rkfac.curvature.replay import Recorder
from rkfac.layers.base import statistics_dtype
from rkfac.optim.arguments import AT_LEAST_ONE, BELOW_ONE, CLIP, COUNT, NOT_NEGATIVE, POSITIVE
from rkfac.optim.clip import within
from rkfac.optim.gate import Gate, moderate
from rkfac.optim.moves import Group, Move, Preconditioned, Rules, State, Target
from rkfac.optim.past import STILL

NAME = "the inner steps"
WHO = "variant='qe'"
MISFIT = "the saved state does not fit this optimizer:"
Network = Mapping[str, Tensor]  # trained parameters by name


@dataclass(frozen=True)
class InnerSteps:
    """How `KLDWRM(variant="qe")` goes on after the step that "q" would take; what is not given is as published.

    steps             of SGD, each one forward and one backward pass; 0: "q"
    lr                in units of the parameter's own
    momentum          of the inner steps alone: each step begins without any
    networks          whose divergences count, the present one included; steps are those of "q" until there are so many
    weight            of the divergences; 1 is the model's own, the published code divides by 660 and does not say why
    clip              largest RMS of a parameter's inner gradient, before momentum; None: off
    """

    steps: int = 7
    lr: float = 0.1
    momentum: float = 0.5
    networks: int = 3
    weight: float = 1 / 660
    clip: float | None = 2.0

    def __post_init__(self) -> None:
        COUNT("inner.steps", self.steps)
        POSITIVE("inner.lr", self.lr)
        BELOW_ONE("inner.momentum", self.momentum)
        AT_LEAST_ONE("inner.networks", self.networks)
        NOT_NEGATIVE("inner.weight", self.weight)
        CLIP("inner.clip", self.clip)


class Wake:
    """The last networks of one model, and the steps that look back at them."""

    def __init__(
        self,
        model: nn.Module,
        inner: InnerSteps,
        likelihood: Likelihood,
        loss_average: str,
        recorder: Recorder,
        randomness: Randomness,
    ) -> None:
        self._model = model
        self._inner = inner
        self._likelihood = likelihood
        self._loss_average = loss_average
        self._recorder = recorder
        self._randomness = randomness
        self._networks: list[Network] = []  # before the present one, oldest first

    def take(self, moves: Sequence[Move], state: State, rules: Rules, gate: Gate) -> None:
        """Do what was planned, and go on from there once enough networks are known."""
        now = {name: p.detach().clone() for name, p in self._model.named_parameters() if p.requires_grad}
        self._networks = [network for network in self._networks if _fits(network, self._model)]
        layers = [layer for layer in map(_Layer.of, moves) if layer is not None]
        if layers and len(self._networks) == self._inner.networks - 1:
            devices = {p.device for p in self._model.parameters()}
            with repeated(self._randomness.generator("inner", rules.step), devices) as again:
                # Before anything moves: what cannot be evaluated is refused here.
                distance = self._distance([*self._networks, now], again) if self._inner.weight else None
                with _all_or_nothing(moves, state):
                    for move in moves:
                        move.apply(state, rules)
                    self._go_on(layers, state, rules, gate, now, distance)
        else:
            for move in moves:
                move.apply(state, rules)
        known = [*self._networks, now]
        self._networks = known[max(0, len(known) - self._inner.networks + 1) :]

    def _distance(self, networks: Sequence[Network], again: Callable[[], None]) -> _Distance:
        self._recorder.check(WHO)
        return _Distance(self._model, self._recorder, self._likelihood, self._loss_average, networks, again)

    def _go_on(
        self,
        layers: Sequence[_Layer],
        state: State,
        rules: Rules,
        gate: Gate,
        now: Network,
        distance: _Distance | None,
    ) -> None:
        """The inner steps, from where the parameters are now."""
        names = {id(p): name for name, p in self._model.named_parameters()}
        for layer in layers:
            layer.begin(names, now)
        pieces = [piece for layer in layers for piece in layer.pieces.values()]
        own = {piece.name: piece.theta for piece in pieces}
        asked: dict[float, list[str]] = {}  # by the rho of their group
        for piece in pieces:
            asked.setdefault(float(piece.target.group["factor_decay"]), []).append(piece.name)
        # Copies of what stays where it is: a forward may change its parameters, as embeddings with max_norm do.
        rest = {
            name: p.detach().clone() for name, p in self._model.named_parameters() if name in now and name not in own
        }
        for _ in range(self._inner.steps):
            pulls = {} if distance is None else distance.gradients({**rest, **own}, asked)
            for layer in layers:
                layer.step(pulls, self._inner)
        facts = [fact for layer in layers for fact in layer.finished(state)]
        finite = torch.stack([fact.to(facts[0].device) for fact in facts]).all()
        passed = gate.passes(NAME, finite)
        gate.report(deeper=3)
        if passed is not False:
            for layer in layers:
                layer.write(state, rules, passed)

    # --- memory

    def state_dict(self) -> list[dict[str, Tensor]]:
        """The networks."""
        return [dict(network) for network in self._networks]

    def checked(self, saved: Any) -> list[Network]:
        """Networks of a saved state, copied to where the model is; refuses what does not fit or is not finite."""
        if not isinstance(saved, list) or len(saved) > self._inner.networks - 1:
            raise ValueError(f"{MISFIT} it holds no list of up to {self._inner.networks - 1} networks")
        return [self._restored(network) for network in saved]

    def _restored(self, network: Any) -> Network:
        parameters = dict(self._model.named_parameters())
        if not isinstance(network, Mapping) or not parameters.keys() >= network.keys():
            raise ValueError(f"{MISFIT} a network has parameters that the model has not")
        restored = {}
        for name, value in network.items():
            p = parameters[name]
            if not isinstance(value, Tensor) or value.shape != p.shape or value.dtype != p.dtype:
                raise ValueError(f"{MISFIT} {name} of a network is no tensor like the model's")
            if not bool(torch.isfinite(value).all()):
                raise ValueError(f"{MISFIT} {name} of a network holds NaN or Inf")
            restored[name] = value.detach().to(p.device, copy=True)
        return restored

    def go_on_from(self, networks: Sequence[Network]) -> None:
        """Of a saved state, checked."""
        self._networks = list(networks)


def _fits(network: Network, model: nn.Module) -> bool:
    """Whether it is a network of this model still: a layer may have been exchanged, and all that was known of it is gone."""
    parameters = dict(model.named_parameters())
    return all(name in parameters and value.shape == parameters[name].shape for name, value in network.items())


class _Distance:
    """Dbar on the batch at hand, and its gradient."""

    def __init__(
        self,
        model: nn.Module,
        recorder: Recorder,
        likelihood: Likelihood,
        loss_average: str,
        networks: Sequence[Network],
        again: Callable[[], None],
    ) -> None:
        self._model, self._recorder, self._likelihood, self._again = model, recorder, likelihood, again
        self._loss_average = loss_average
        self._terms = 0
        self._seen = [self._outputs(network) for network in networks]  # of each call
        try:
            self._terms = sum(self._targets(logits) for logits in self._seen[-1])
        except ValueError as error:
            raise ValueError(f"{WHO} cannot read the model's output: {error}") from error

    def _targets(self, logits: Tensor) -> int:
        """What the divergence is a mean over, as the curvature is."""
        if self._loss_average == "tokens" and logits.ndim > 2 and not self._likelihood.at_positions:
            raise ValueError(
                f"its shape is {tuple(logits.shape)}, and which of it are positions that the loss averages over is not known: "
                "flatten them into the first dimension inside of the model, or use loss_average='batch'"
            )
        return self._likelihood.terms(logits)

    def _values(self, network: Network) -> dict[str, Tensor]:
        """All parameters of a network: what was not trained is what it is in the model."""
        return {
            name: network.get(name, p).detach().to(p.device, p.dtype).requires_grad_(p.requires_grad)
            for name, p in self._model.named_parameters()
        }

    def _outputs(self, network: Network) -> list[Tensor]:
        values = self._values({name: value.clone() for name, value in network.items()})
        self._again()
        with torch.enable_grad():  # what has a gradient is how logits are told from other outputs
            calls = range(len(self._recorder.calls))
            return [self._recorder.again(index, values, lambda logits: logits.detach()) for index in calls]

    def gradients(self, theta: Network, asked: Mapping[float, Sequence[str]]) -> dict[str, Tensor]:
        """Of Dbar, for the parameters that are asked for under each rho; call by call, as the batch was."""
        values, found = self._values(theta), dict[str, Tensor]()
        self._again()

        def work(index: int, logits: Tensor) -> None:
            apart = [self._likelihood.divergence(logits, seen[index]) for seen in self._seen]
            for number, (rho, names) in enumerate(asked.items(), 1):
                folded = torch.zeros_like(apart[0])
                for D in apart:
                    folded = rho * folded + (1 - rho) * D
                if not folded.requires_grad:
                    continue
                more = number < len(asked)
                gradients = torch.autograd.grad(
                    folded / self._terms, [values[name] for name in names], allow_unused=True, retain_graph=more
                )
                for name, gradient in zip(names, gradients, strict=True):
                    if gradient is not None:
                        gradient = gradient.to(statistics_dtype(gradient))
                        found[name] = found[name] + gradient if name in found else gradient

        with torch.enable_grad():
            for index in range(len(self._recorder.calls)):
                try:
                    self._recorder.again(index, values, partial(work, index))
                except RuntimeError as error:
                    if "use_reentrant" not in str(error):
                        raise
                    raise RuntimeError(
                        f"{WHO} cannot differentiate a reentrant checkpoint: pass use_reentrant=False to "
                        "torch.utils.checkpoint"
                    ) from error
        return found


@dataclass(eq=False)
class _Piece:
    """A parameter on its way."""

    name: str
    target: Target
    start: Tensor  # where the step began
    end: Tensor  # where it ended
    theta: Tensor  # where the parameter is now
    buffer: Tensor

    @property
    def lr(self) -> float:
        return float(self.target.group["lr"])


class _Layer:
    """A layer that goes on after its step."""

    def __init__(self, move: Preconditioned, block: Proximal) -> None:
        self.block = block
        self._move = move
        self._group = move.moving[0].group  # the weight's: without it a layer makes no step
        self.pieces: dict[int, _Piece] = {}  # by their place among the layer's parameters
        self._products: dict[int, Tensor] = {}  # F times what the inner steps added, over lr

    @classmethod
    def of(cls, move: Move) -> _Layer | None:
        """None for what no curvature covers, and for what stands still."""
        if not isinstance(move, Preconditioned) or not isinstance(move.block, Proximal):
            return None
        return cls(move, move.block) if any(_moves(target.group) for target in move.moving) else None

    def begin(self, names: Mapping[int, str], now: Network) -> None:
        """The step has been taken."""
        for index, target in enumerate(self._move.targets):
            if target is None or not _moves(target.group):
                continue
            p, name = target.parameter.detach(), names[id(target.parameter)]
            dtype = statistics_dtype(p)
            theta, zero = p.to(dtype, copy=True), torch.zeros_like(p, dtype=dtype)
            self.pieces[index] = _Piece(name, target, now[name].to(dtype), theta.clone(), theta, zero)

    def _whole(self, changes: Mapping[int, Tensor]) -> tuple[Tensor, ...]:
        """Changes of all parameters of the layer; what does not move is where it was."""
        parameters = enumerate(self.block.parameters)
        return tuple(
            changes[index] if index in changes else torch.zeros_like(p, dtype=statistics_dtype(p))
            for index, p in parameters
        )

    def step(self, pulls: Mapping[str, Tensor], inner: InnerSteps) -> None:
        """One inner step, unless the layer's own step was refused: its direction is then zero times itself."""
        changes = {index: piece.theta - piece.start for index, piece in self.pieces.items()}
        curved = self.block.of_batch(self._whole(changes), self._group)
        for index, piece in self.pieces.items():
            gradient = piece.target.gradient.to(piece.theta.dtype) + curved[index].to(piece.theta.dtype)
            if piece.name in pulls:
                gradient = gradient.add(pulls[piece.name], alpha=inner.weight / piece.lr)
            refused = torch.as_tensor(self._move.factor, device=gradient.device) == 0
            gradient = within(gradient, inner.clip).masked_fill(refused, 0.0)
            piece.buffer.mul_(inner.momentum).add_(gradient)
            piece.theta.sub_(piece.buffer, alpha=inner.lr * piece.lr)

    def finished(self, state: State) -> Iterator[Tensor]:
        """Whether what has become of it is finite, in facts on the device."""
        changes = {index: piece.theta - piece.end for index, piece in self.pieces.items()}
        products = self.block.multiply(self._whole(changes), self._group)
        for index, piece in self.pieces.items():
            p = piece.target.parameter
            self._products[index] = (products[index] / piece.lr).to(state[p]["past"].dtype)
            yield torch.isfinite(piece.theta.to(p.dtype)).all()
            yield torch.as_tensor(moderate(self._products[index], False), device=p.device)

    def write(self, state: State, rules: Rules, passed: bool | Tensor) -> None:
        """Move the parameters to where the copies are, and tell the rule."""
        for index, piece in self.pieces.items():
            p, product = piece.target.parameter, self._products[index]
            keep = torch.as_tensor(passed, device=p.device)
            p.copy_(torch.where(keep, piece.theta.to(p.dtype), p))
            rules.covered.went_on(state[p], torch.where(keep, product, torch.zeros_like(product)))


def _moves(group: Group) -> bool:
    return float(group["lr"]) > STILL


@contextmanager
def _all_or_nothing(moves: Sequence[Move], state: State) -> Iterator[None]:
    """Put parameters and their buffers back when something fails on the way."""
    kept = []
    for target in (target for move in moves for target in move.moving):
        p = target.parameter
        buffers = {key: value.clone() if isinstance(value, Tensor) else value for key, value in state[p].items()}
        kept.append((p, p.detach().clone(), buffers))
    try:
        yield
    except BaseException:
        for p, value, buffers in kept:
            p.copy_(value)
            for key, before in buffers.items():
                if isinstance(before, Tensor):
                    state[p][key].copy_(before)
                else:
                    state[p][key] = before
        raise
