"""What a checkpoint holds of PSGD: tensors and numbers by parameter, each in its own dtype, and no objects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from psgd.across import taken
from psgd.curvature import finite_difference, hessian, whiten
from psgd.options import OBJECTS, ParamGroup, plain, structure
from psgd.unit import placed

STATE_VERSION = 1
SOURCES = (None, hessian, finite_difference, whiten)
"""Sources of curvature, as numbers in a checkpoint."""


def saved(pg: ParamGroup, settled: Any) -> ParamGroup:
    """Return a param_group without objects, but with all keys: distributed checkpoints ask for each of them."""
    return {k: None if k in OBJECTS and not plain(v) else v for k, v in pg.items()} | {
        "settled": SOURCES.index(settled),
        "structure": structure(pg["group"]),
    }


def check(loaded: Sequence[ParamGroup], objects: Sequence[ParamGroup]) -> None:
    """Raise a ValueError for param_groups of a later version, or of another group."""
    for pg, mine in zip(loaded, objects, strict=False):
        if pg.get("version", STATE_VERSION) > STATE_VERSION:
            raise ValueError(f"this psgd reads state version {STATE_VERSION}, got version {pg['version']}")
        if pg.get("structure") not in (None, structure(mine["group"])):
            raise ValueError(f"the state was saved for another group than {mine['group']}")


def restored(state: dict[str, Any], p: Tensor) -> dict[str, Any]:
    """Return a parameter's state as it was saved: torch knows only the parameter's dtype, and casts to that."""
    state = _copied(state, p.device)
    if "momentum" in state:  # from one process to many, or back
        state["momentum"] = placed(p, taken(state["momentum"], p))
    state["step"] = torch.as_tensor(state.get("step", 0.0), dtype=torch.float32, device=p.device)
    return state


def _copied(value: Any, device: torch.device) -> Any:
    if isinstance(value, dict):
        return {k: _copied(v, device) for k, v in value.items()}
    return value.detach().to(device, copy=True) if isinstance(value, Tensor) else value
