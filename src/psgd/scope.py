"""A scope: parameters that share one preconditioner, or equal ones that are moved side by side.

A scope has units, each with a point of its own; several equal units are `Blocks` of one group, stacked along the
leading axis of every leaf. The point, and what each parameter has of it in the state, are views of one storage.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Container, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from psgd.across import ALONE, Across
from psgd.group import Group, How, Point
from psgd.groups.blocks import Blocks
from psgd.groups.involution import Involution
from psgd.groups.padded import Padded
from psgd.points import overwrite, stacked, unstacked
from psgd.probes import generator, mix
from psgd.unit import Unit, real

if TYPE_CHECKING:
    from psgd.compiled import Compiled

State = Mapping[Tensor, dict[str, Any]]
Fit = Callable[[Any], Callable[..., Any]]
"""Which of a group's steps: `fit` or `whiten`."""

SCALE = ("level", "pairs")
"""What the initial scale is found from: the largest curvature met, and in how many pairs. By the units' first."""


class Scope:
    """A group's point over the concatenation of some units, in lockstep with their parameters' entries of the state."""

    compiled: Compiled | None = None
    across: Across = ALONE
    """What the mathematics of a group exchanges sums by."""
    shards: Across = ALONE
    """What the ranks that share the parameters agree by on whether all is finite."""

    def __init__(self, group: Group | Padded, units: Sequence[Unit], dtype: torch.dtype | None) -> None:
        self.kind = group
        self.params = [p for unit in units for p in unit.params]
        self.device = self.params[0].device
        self.hold(units)
        default = torch.float32
        for p in self.params:
            default = torch.promote_types(default, real(p).dtype)
        self.dtype = dtype or default
        self.point: Point = {}
        self.scale: dict[str, Tensor] = {}  # for each unit
        self.pair: tuple[Tensor, ...] | None = None  # (v, h) of the last fit, once somebody looks: see step_report
        self._ready: Point | None = None
        self._uses = math.inf
        """For how many uses that was made."""
        self.fresh = False
        """Whether the point was fitted in this step, and not used since: a function of the step alone."""
        self.settled = False
        """Whether the initial scale is known to have been found."""
        self._wanted = dtype or torch.float32
        self.installed: list[tuple[Tensor, Point]] = []  # the views in the state

    def hold(self, units: Sequence[Unit]) -> None:
        """Take these units, those of them that this rank moves."""
        self.units = list(units)
        self.group: Any = Blocks(units[0].n, self.kind) if len(units) > 1 else self.kind  # type: ignore[arg-type]
        self.held = [p for unit in self.units for p in unit.params]
        self.n = sum(unit.n for unit in self.units)
        self.whole = sum(unit.whole for unit in self.units)

    @property
    def parts(self) -> int:
        """Over how many ranks a unit is cut."""
        return 1

    # --- storage

    def create(self, state: State, scale: float, seed: int, index: int) -> None:
        """Start at Q = scale·I."""
        rng = generator(mix(seed, index), -2)
        self.point = self._start(scale, rng)
        self._install(state)

    def _start(self, scale: float, rng: torch.Generator) -> Point:
        return self.group.init(self.n, scale=scale, generator=rng, dtype=self.dtype, device=self.device)

    def check(self) -> None:
        """Raise a ValueError if the group has no points of this size or dtype."""
        if self.units:
            self._template()

    def restore(self, state: State) -> None:
        """Take the point from the per-parameter state, as after a load, a copy or a move."""
        try:
            template = self._template() if self.units else {}
        except ValueError as e:
            raise ValueError(f"the state was saved for another group: {e}") from e
        slices = [[state[p].get("q", {}) for p in unit.params] for unit in self.units]
        points = [u.gather(template, q, self.kind) for u, q in zip(self.units, slices, strict=True)]
        self.point = points[0] if len(points) == 1 else stacked(points)
        if isinstance(self.kind, Involution) and int(state[self.params[0]].get("parts", 1)) != self.parts:
            # entries have other partners now: forget the old ones, but keep the size of their rows
            a, b = self.point["a"], self.point["b"]
            a.copy_(torch.hypot(a, b))
            b.zero_()
        self._install(state)

    def _template(self) -> Point:
        return self.kind.init(self.units[0].n, dtype=self.dtype, device=torch.device("meta"))

    def intact(self, state: State, params: Sequence[Tensor]) -> bool:
        """Whether these are still the parameters, and the state still holds the views that were installed."""
        mine = dict(self.installed)
        return len(params) == len(mine) and all(p in mine and state[p].get("q") is mine[p] for p in params)

    def _install(self, state: State) -> None:
        points = [self.point] if len(self.units) == 1 else unstacked(self.point, len(self.units))
        views = [q for unit, point in zip(self.units, points, strict=True) for q in unit.slices(point)]
        mine = dict(zip(self.held, views, strict=True))
        self.installed, self._ready, self.settled = [(p, mine.get(p, {})) for p in self.params], None, False
        for p, q in self.installed:
            state[p]["q"] = q
        exact = torch.promote_types(self.dtype, torch.float32)
        firsts = {unit.params[0] for unit in self.units}
        for p in self.params:
            for key in SCALE if p not in firsts else ():
                state[p].pop(key, None)  # a copy that nobody moves would get into checkpoints
        if isinstance(self.kind, Involution):
            state[self.params[0]]["parts"] = torch.tensor(float(self.parts))
        for key in SCALE if self.units else ():
            known = [state[unit.params[0]].get(key, 0.0) for unit in self.units]
            values = [torch.as_tensor(t, dtype=exact, device=self.device) for t in known]
            self.scale[key] = torch.stack(values)
            for unit, value in zip(self.units, self.scale[key].unbind(), strict=True):
                state[unit.params[0]][key] = value

    # --- vectors

    def wide(self, p: Tensor) -> torch.dtype:
        """Return the dtype of p's averaged gradient: a low-precision Q must not coarsen it below p's own."""
        return torch.promote_types(self._wanted, real(p).dtype)

    def flat(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """Concatenate one tensor for each parameter that is held; None counts as zero."""
        rest, pieces = iter(tensors), []
        for unit in self.units:
            pieces += unit.flat(list(itertools.islice(rest, len(unit.params))), self.dtype)
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def gathered(self, found: Mapping[Tensor, Tensor]) -> Tensor:
        """Concatenate what was found for the parameters that are held; what is missing counts as zero."""
        return self.flat([found.get(p) for p in self.held])

    def split(self, x: Tensor) -> list[Tensor]:
        """Cut a flat vector into the shapes of the parameters that are held (complex ones as pairs of reals)."""
        return [t for unit, piece in zip(self.units, self.each(x), strict=True) for t in unit.split(piece)]

    def each(self, x: Tensor) -> Tensor:
        """View a flat vector as rows, one for each unit."""
        return x.view(len(self.units), -1)

    # --- what a step asks for

    def probing(self, grads: Container[Tensor]) -> bool:
        """Return whether whitening takes a probe: only its zeros tell which parameters of a unit had no gradient."""
        known = [[p in grads for p in unit.params] for unit in self.units]
        return self.group.probing or any(any(unit) and not all(unit) for unit in known)

    def precondition(
        self, x: Tensor, out: Tensor | None = None, pause: Callable[[], float] = lambda: math.inf
    ) -> Tensor:
        """P x, perhaps in `out`, which may be x; right after a fit, or in a pause of so many steps.

        What is compiled is always given the same.
        """
        if self._ready is None or (self._uses == 1 and not self.fresh):
            uses = math.inf if self.compiled else 1 if self.fresh else pause()
            self._ready, self._uses = self.group.ready(self.taken(), uses), uses
        point, self.fresh = self._ready, False
        if self.compiled and not self.group.in_pieces(point, x):
            return self.compiled((self.group, self.n, "precondition"), self.group.precondition, point, x)
        return self.group.precondition(point, x, out)

    def taken(self) -> Point:
        """Return the point, perhaps with what P x after the last fit took, as a step does, too; forget the latter."""
        ready, self._ready = self._ready, None
        return ready if ready is not None and self._uses == 1 else self.point

    def fitted(self, fit: Fit, point: Point, v: Tensor, h: Tensor, how: How) -> Point:
        """Return the point after a step on a pair."""
        move = fit(self.group)
        if not self.compiled or self.group.in_pieces(point, v, h):
            return move(point, v, h, lr=how.lr, coin=how.coin, rule=how.rule, out=how.out)
        lr = torch.as_tensor(how.lr, dtype=torch.promote_types(self.dtype, torch.float32), device=self.device)
        return self.compiled(
            (self.group, self.n, move.__name__), move, point, v, h, lr=lr, coin=how.coin, rule=how.rule
        )

    def balance(self, ok: Tensor) -> Callable[[], None]:
        """Begin to take other coordinates of the same Q, see `Group.balance`, and return what ends it, if `ok`."""
        return lambda: self.move(self.group.balance(self.point), ok.view(1))

    @property
    def free(self) -> bool:
        """Whether to look at a number takes no waiting."""
        return self.device.type == "cpu"

    @property
    def alone(self) -> bool:
        """Whether a step of the point may be written over it: one unit, where looking first is free."""
        return len(self.units) == 1 and self.free

    def scaled(self, factors: Tensor) -> Point:
        """Return the point with each unit's Q multiplied by its factor."""
        return self.group.scaled(self.point, factors if len(self.units) > 1 else factors[0])

    def move(self, new: Point, ok: Tensor) -> None:
        """Write a new point in place, or leave the old one for units where `ok` is false or the new is not finite."""
        self._ready = None
        overwrite(self.point, new, ok, len(self.units))
