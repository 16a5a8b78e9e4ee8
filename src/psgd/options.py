"""The options of PSGD: what may be given, and what a checkpoint may hold of it."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from psgd.curvature import Curvature
from psgd.group import Group
from psgd.groups.padded import Padded
from psgd.schedule import Regular, Schedule
from psgd.step_size import StepSize

ParamGroup = dict[str, Any]

OBJECTS = ("group", "scope", "curvature", "rule", "precond_prob", "precond_dtype")
"""Options that may be objects: a checkpoint holds None in their place, and loading keeps the constructor's."""

WHOLE = ("curvature", "seed", "precond_prob", "max_rms", "max_norm", "max_value")
"""Options that hold for all param_groups."""

SHARED = ("precond_lr", "rule", "init_scale", "precond_dtype")
"""Options that hold for all param_groups with one preconditioner: with equal joint "group" and "scope"."""


def schedule(pg: ParamGroup) -> Schedule:
    """Return the schedule of `precond_prob`, which may be a number."""
    prob = pg["precond_prob"]
    return prob if isinstance(prob, Schedule) else Regular(prob)


def listed(params: Any) -> list[Any]:
    """Return the same parameters or param_groups, with lists where generators could be read only once."""
    if isinstance(params, Tensor):
        return [params]
    return [item | {"params": listed(item["params"])} if isinstance(item, dict) else item for item in params]


def tensors(params: Iterable[Any]) -> list[Tensor]:
    """Return the tensors of parameters, named parameters or param_groups."""
    found: list[Tensor] = []
    for item in params:
        if isinstance(item, dict):
            found += tensors(item["params"])
        else:
            found.append(item[1] if isinstance(item, tuple) else item)
    return found


def plain(value: Any) -> bool:
    """Whether an option goes into a checkpoint: numbers and tensors do, objects are the constructor's business."""
    return value is None or isinstance(value, (bool, int, float, Tensor))


def agree(options: ParamGroup, others: Iterable[ParamGroup]) -> None:
    """Raise a ValueError for a param_group with an option that would be ignored beside the others."""
    for other in others:
        for key in WHOLE:
            if options[key] != other[key]:
                raise ValueError(f"all param_groups need one {key}, got {other[key]} and {options[key]}")
        joint = isinstance(options["group"], (Group, Padded))
        if not joint or any(options[key] != other[key] for key in ("group", "scope")):
            continue
        for key in SHARED:
            if options[key] != other[key]:
                both = f"one {key}, got {other[key]} and {options[key]}"
                raise ValueError(f'param_groups with one preconditioner need {both}; a "scope" of its own separates it')


def structure(group: Any) -> int:
    """Return a number that tells groups of equal shapes apart, for checkpoints, which hold no strings.

    Addresses of functions change from process to process; damping and products are not of the state.
    """
    said = str(getattr(group, "__qualname__", group))
    return zlib.crc32(re.sub(r" at 0x[0-9a-fA-F]+|, (damping|products)=[^,)]*", "", said).encode())


def validate(options: ParamGroup) -> None:
    """Raise a ValueError for an option that cannot work."""
    lr = options["lr"]
    if isinstance(lr, Tensor):
        if lr.numel() != 1:
            raise ValueError("Tensor lr must be 1-element")
    if not lr >= 0:
        raise ValueError(f"PSGD needs lr >= 0, got {lr}")
    for key in ("weight_decay", "l2"):
        if not options[key] >= 0:
            raise ValueError(f"PSGD needs {key} >= 0, got {options[key]}")
    if not 0 <= options["momentum"] < 1:
        raise ValueError(f"PSGD needs 0 <= momentum < 1, got {options['momentum']}")
    if not 0 <= options["fresh"] <= 1:
        raise ValueError(f"PSGD needs 0 <= fresh <= 1, got {options['fresh']}")
    if not 0 < options["precond_lr"] < 1:
        raise ValueError(f"PSGD needs 0 < precond_lr < 1, got {options['precond_lr']}")
    for key in ("max_rms", "max_norm", "max_value", "init_scale"):
        if options[key] is not None and not options[key] > 0:
            raise ValueError(f"PSGD needs {key} > 0 or None, got {options[key]}")
    if not isinstance(options["curvature"], Curvature):
        raise ValueError(
            "curvature needs to be one of automatic, hessian, finite_difference, whiten, whiten_momentum, "
            f"got {options['curvature']!r}"
        )
    if not isinstance(options["rule"], StepSize):
        raise ValueError(f"rule needs to be a StepSize, as Smoothed() or Normalized(), got {options['rule']!r}")
    if options["precond_dtype"] is not None and not options["precond_dtype"].is_floating_point:
        raise ValueError(f"precond_dtype needs to be a floating-point dtype, got {options['precond_dtype']}")
    if not callable(options["group"]) and not isinstance(options["group"], (Group, Padded)):
        raise ValueError(f"group needs to be a Group or a rule from shape to group, got {options['group']!r}")
    schedule(options)
