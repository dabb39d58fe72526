"""Curvature as a file of tensors (safetensors) with a description in JSON beside them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn

from rkfac.curvature.damping import RULES, Damping
from rkfac.linalg import Diagonal, Energies, LowRank
from rkfac.operators.layer import Kronecker, Layer, Moments, Side, Units
from rkfac.operators.layout import layout_from

FORMAT = "rkfac-curvature-1"
KINDS: dict[str, type[Layer]] = {kind.kind: kind for kind in (Kronecker, Units, Moments)}
NAMES = {rule: name for name, rule in RULES.items()}
Shapes = dict[str, tuple[int, ...]]


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError(
            "curvature is saved as safetensors, which is not installed: pip install safetensors"
        ) from error
    return safetensors


def save(
    path: str | PathLike[str], layers: Mapping[str, Layer], shapes: Mapping[str, Any], left_out: Mapping[str, str]
) -> None:
    """All tensors of all layers, and what they mean."""
    found = _safetensors()
    tensors = {f"{name}:{key}": t for name, layer in layers.items() for key, t in layer.packed().items()}
    # A file holds no two views of one memory.
    tensors = {key: t.detach().clone(memory_format=torch.contiguous_format) for key, t in tensors.items()}
    about = {
        "layers": {name: _described(layer) for name, layer in layers.items()},
        "shapes": {name: list(shape) for name, shape in shapes.items()},
        "left_out": dict(left_out),
    }
    found.torch.save_file(tensors, path, metadata={"format": FORMAT, "curvature": json.dumps(about)})


def _described(layer: Layer) -> dict[str, Any]:
    rule = {**asdict(layer.rule), "name": NAMES[type(layer.rule)]}
    return {
        "kind": layer.kind,
        "parameters": list(layer.parameters),
        "layout": layer.layout.numbers(),
        "rule": rule,
        "damping": layer.damping,
        "samples": layer.samples,
        "learns": [layer.input.learns, layer.output.learns],
    }


def load(path: str | PathLike[str], model: nn.Module | None) -> tuple[dict[str, Layer], Shapes, dict[str, str]]:
    """What `save` was given; refuses other files, and files of another model."""
    found = _safetensors()
    with found.safe_open(path, framework="pt") as file:
        words = file.metadata() or {}
        if words.get("format") != FORMAT:
            raise ValueError(
                f"{path} holds no curvature of this kind: its format is {words.get('format')!r}, not {FORMAT!r}"
            )
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - it is no mapping
    about = json.loads(words["curvature"])
    shapes: Shapes = {name: tuple(shape) for name, shape in about["shapes"].items()}
    devices = {} if model is None else _devices(model, shapes, path)
    spoilt = [key for key, t in tensors.items() if t.is_floating_point() and not bool(torch.isfinite(t).all())]
    if spoilt:
        raise ValueError(f"{path} holds NaN or Inf in {spoilt[0]!r}")
    layers = {}
    for name, words_of in about["layers"].items():
        device = devices.get(words_of["parameters"][0], torch.device("cpu"))
        own = {key.rpartition(":")[2]: t.to(device) for key, t in tensors.items() if key.rpartition(":")[0] == name}
        try:
            layers[name] = _restored(name, words_of, own)
        except KeyError as error:
            raise ValueError(f"{path} is damaged: layer {name!r} lacks {error}") from error
    return layers, shapes, about["left_out"]


def _devices(model: nn.Module, shapes: Shapes, path: Any) -> dict[str, torch.device]:
    """Where the model's parameters are, if they are those of the file."""
    own = {name: tuple(p.shape) for name, p in model.named_parameters()}
    if own != shapes:
        wrong = next(name for name in [*own, *shapes] if own.get(name) != shapes.get(name))
        raise ValueError(
            f"{path} is of another model: {wrong!r} has the shape {shapes.get(wrong)} there and {own.get(wrong)} here"
        )
    return {name: p.device for name, p in model.named_parameters()}


def _restored(name: str, words: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Layer:
    layout = layout_from(words["layout"], tensors.get("order"))
    input, output = (
        _side({key.partition(".")[2]: t for key, t in tensors.items() if key.startswith(side + ".")}, learns)
        for side, learns in zip(("input", "output"), words["learns"], strict=True)
    )
    if layout.matrix_shape[-2:] != (output.low.dim, input.low.dim):
        raise ValueError(
            f"the saved factors of {name!r} are {output.low.dim} and {input.low.dim} wide, its matrix is {layout.matrix_shape}"
        )
    rule: Damping = RULES[words["rule"]["name"]](words["rule"]["relative_to"], words["rule"]["power"])
    more = {}
    if words["kind"] == Moments.kind:
        beyond = output.low.dim - output.low.rank, input.low.dim - input.low.rank
        more = {"moments": Energies(tensors["moments"], beyond, tensors["moments"].new_ones(()))}
    return KINDS[words["kind"]](
        name=name,
        parameters=tuple(words["parameters"]),
        layout=layout,
        rule=rule,
        damping=float(words["damping"]),
        samples=words["samples"],
        input=input,
        output=output,
        **more,
    )


def _side(tensors: Mapping[str, Tensor], learns: bool) -> Side:
    s, U = tensors["s"], tensors.get("U")
    if U is None:
        return Side(Diagonal(s), tensors["mean"], learns)
    if (*U.shape[:-2], U.shape[-1]) != tuple(s.shape):
        raise ValueError(f"a saved basis of shape {tuple(U.shape)} has eigenvalues of shape {tuple(s.shape)}")
    return Side(LowRank(U, s, tensors.get("tail")), tensors["mean"], learns)
