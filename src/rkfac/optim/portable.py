"""The state as torch.distributed.checkpoint wants it: everything that is known of a parameter stands beside its buffers.

It reads `state` and `param_groups` and nothing else, and fills a new optimizer's own state with what was saved, which must
have as many entries and tensors of the same shape. A layer's curvature, whose shapes change with its rank, is therefore one
text beside the buffers of its weight: what torch.save makes of it, in letters, a third larger than its numbers.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

LAYER, REST = "curvature", "rkfac"  # the keys: of a layer, and of what belongs to no layer


def inscribed(
    state: dict[str, Any], weights: Mapping[str, nn.Parameter], groups: list[dict[str, Any]]
) -> dict[str, Any]:
    """A state with its curvature in `state`; `weights` are those of the layers by name."""
    parameters = [p for group in groups for p in group["params"]]
    number = {id(p): index for index, p in enumerate(parameters)}
    curvature = dict(state["curvature"])
    layers = curvature.pop("blocks")
    by_parameter = {index: dict(entry) for index, entry in state["state"].items()}
    # Frozen parameters have no entry when a state is loaded.
    curvature["blocks"] = {name: layer for name, layer in layers.items() if not weights[name].requires_grad}
    for name, layer in layers.items():
        if name in curvature["blocks"]:
            continue
        by_parameter.setdefault(number[id(weights[name])], {})[LAYER] = _text({"name": name, "state": layer})
    first = next((i for i, p in enumerate(parameters) if p.requires_grad), 0)
    by_parameter.setdefault(first, {})[REST] = _text(curvature)
    return {"state": by_parameter, "param_groups": state["param_groups"]}


def read(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """And back; a state of the ordinary form stays as it is."""
    entries = state.get("state") if isinstance(state, Mapping) else None
    if not isinstance(entries, Mapping) or "curvature" in state:
        return state
    if not any(isinstance(entry, Mapping) and REST in entry for entry in entries.values()):
        return state
    names = [name for group in state["param_groups"] for name in group["params"]]
    number = {name: index for index, name in enumerate(names)}
    rest: dict[str, Any] = {}
    layers: dict[str, Any] = {}
    by_parameter: dict[int, Any] = {}
    for key, entry in entries.items():
        entry = dict(entry)
        if LAYER in entry:
            layer = _object(entry.pop(LAYER))
            layers[layer["name"]] = layer["state"]
        if REST in entry:
            rest = _object(entry.pop(REST))
            layers |= rest.pop("blocks")
        if entry:
            by_parameter[number[key]] = entry
    at = iter(range(len(names)))
    groups = [{**group, "params": [next(at) for _ in group["params"]]} for group in state["param_groups"]]
    return {"state": by_parameter, "param_groups": groups, "curvature": {**rest, "blocks": layers}}


def _text(value: Any) -> str:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return base64.b64encode(buffer.getvalue()).decode("ascii")


def _object(text: Any) -> Any:
    if not isinstance(text, str):
        raise ValueError(f"a layer's saved curvature is a {type(text).__name__} and no text")
    return torch.load(io.BytesIO(base64.b64decode(text)), map_location="cpu", weights_only=True)
