"""Parameters in step: their gradients, averages and counters in one piece of memory each, so that a call serves all.

Most steps are alike: on a CPU, where every parameter has a gradient of one dtype and one momentum, only preconditioners
tell tensors apart. What is out of the ordinary goes parameter by parameter (`psgd.update`), over the same memory.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors
from torch.nn import Parameter

from psgd.options import ParamGroup
from psgd.probes import fill, mix
from psgd.scope import Scope, State

SMALL = 1 << 20
"""Entries of a vector that is kept for the next step."""


class Lockstep:
    """All parameters, in the order of their scopes; what the state holds of each is a view of what is here of all."""

    def __init__(self, scopes: Sequence[Scope], param_groups: Sequence[ParamGroup], state: State) -> None:
        self.scopes = list(scopes)
        self.params = [p for scope in scopes for p in scope.params]
        self.options = {p: pg for pg in param_groups for p in pg["params"]}
        self.dtype, self._beta, self._fresh = scopes[0].dtype, *_weights(param_groups[0])
        self._groups = [(pg, list(pg["params"])) for pg in param_groups]
        self._lengths, self._sizes = [scope.n for scope in scopes], [p.numel() for p in self.params]
        place = {p: i for i, p in enumerate(self.options)}
        self._places = [(place[p], scope.group.probing) for scope in scopes for p in scope.params]
        self._rng = torch.Generator()
        self._counters = torch.stack([state[p]["step"] for p in self.params])
        for p, counter in zip(self.params, self._counters.unbind(), strict=True):
            state[p]["step"] = counter
        if self._beta:
            self._mean = torch.cat([state[p]["momentum"].reshape(-1) for p in self.params])
            parts = self._mean.split(self._sizes)
            for p, part in zip(self.params, parts, strict=True):
                state[p]["momentum"] = part.view(p.shape)
            self._means = dict(zip(self.scopes, self._mean.split(self._lengths), strict=True))
        held = ((state[p], state[p].get("momentum") if self._beta else None) for p in self.params)
        self._held = [(mine, mine["q"], mine["step"], m) for mine, m in held]
        self._states = list(state.values())
        # Fresh memory costs more than what is done in it, where that is little: then it is kept.
        self._kept = torch.empty(sum(self._sizes), dtype=self.dtype) if sum(self._sizes) <= SMALL else None
        self._views = [] if self._kept is None else self._parts(self._kept)
        cuts = () if self._kept is None else self._kept.split(self._lengths)
        self._cuts = dict(zip(self.scopes, cuts, strict=False))
        self._ahead = torch.empty_like(self._kept) if self._kept is not None and self._fresh else None
        self._drawn: list[Tensor] = []  # a vector and its parts, from the first step that asks for probes

    def _parts(self, vector: Tensor) -> list[Tensor]:
        """Return the part of each parameter, in its shape."""
        return [t.view(p.shape) for t, p in zip(vector.split(self._sizes), self.params, strict=True)]

    @classmethod
    def of(cls, scopes: Sequence[Scope], param_groups: Sequence[ParamGroup], state: State) -> Lockstep | None:
        """Return all parameters, if they can be moved in step."""
        if torch.is_inference_mode_enabled() or not all(type(scope) is Scope and scope.free for scope in scopes):
            return None
        params, dtypes = [p for scope in scopes for p in scope.params], {scope.dtype for scope in scopes}
        beta, fresh = _weights(param_groups[0])
        fits = (
            dtypes < {torch.float32, torch.float64}
            and all(unit.plain for scope in scopes for unit in scope.units)
            and all(type(p) in (Tensor, Parameter) and {p.dtype} == dtypes for p in params)
            and all(scope.wide(p) == p.dtype for scope in scopes for p in scope.params)
            and all(_weights(pg) == (beta, fresh) for pg in param_groups)
            and not (beta and any("momentum" not in state[p] for p in params))
            and {p for pg in param_groups for p in pg["params"]} == set(params)
            and len(set(params)) == len(params)
        )
        return cls(scopes, param_groups, state) if fits else None

    def holds(self, param_groups: Sequence[ParamGroup], state: State) -> bool:
        """Whether these are still the parameters, and the state still has the views of them."""
        if len(param_groups) != len(self._groups):
            return False
        for pg, (mine, params) in zip(param_groups, self._groups, strict=True):
            same = pg is mine and len(pg["params"]) == len(params) and _weights(pg) == (self._beta, self._fresh)
            if not same or not all(map(operator.is_, pg["params"], params)):
                return False
        if len(state) != len(self._states) or not all(map(operator.is_, state.values(), self._states)):
            return False
        for found, q, step, m in self._held:
            if found.get("q") is not q or found.get("step") is not step:
                return False
            if m is not None and found.get("momentum") is not m:
                return False
        return True

    def gradients(self) -> Tensor | None:
        """Return all gradients end to end, to be written over; None if anything about them is out of the ordinary."""
        if any(pg["l2"] or pg["maximize"] for pg, _ in self._groups):
            return None
        return self.vector([p.grad for p in self.params], self._kept)

    def vector(self, tensors: Sequence[Tensor | None], out: Tensor | None = None) -> Tensor | None:
        """Return tensors of all parameters as one vector, a copy; None if one is missing or of another kind."""
        found = [t for t in tensors if type(t) is Tensor and t.dtype is self.dtype and t.layout is torch.strided]
        if len(found) < len(tensors):
            return None
        if out is not None:
            torch._foreach_copy_(self._views, found)
            return out
        flat = _flatten_dense_tensors(found)
        return flat.clone() if len(found) == 1 else flat

    def cut(self, vector: Tensor) -> dict[Scope, Tensor]:
        """Return the part of each scope."""
        if vector is self._kept:
            return self._cuts
        parts = vector.split(self._lengths) if len(self.scopes) > 1 else (vector,)
        return dict(zip(self.scopes, parts, strict=True))

    def probes(self, seed: int, iteration: int) -> Tensor:
        """Return v ~ N(0, I) as one vector: the same as drawn one by one; zero where nobody looks at it."""
        drawn, state = self._drawn, mix(seed, iteration)
        if not any(wanted for _, wanted in self._places):
            return torch.zeros(1, dtype=self.dtype).expand(sum(self._sizes))  # takes no memory
        if not drawn:
            v = torch.empty(sum(self._sizes), dtype=self.dtype)
            drawn = [v, *v.split(self._sizes)]
            self._drawn = [] if self._kept is None else drawn
        for part, (place, wanted) in zip(drawn[1:], self._places, strict=True):
            if wanted:
                fill(part, self._rng.manual_seed(mix(place, state=state)))
            else:
                part.zero_()
        return drawn[0]

    def averages(self, g: Tensor) -> dict[Scope, Tensor] | None:
        """m ← βm + (1−β)g, as a plain mean while that weighs g more; return m + fresh·(g − m).

        None while that weighs some parameters more than others.
        """
        if not self._beta:
            return self.cut(g)
        weights = {max(1 / (1 + count), 1 - self._beta) for count in set(self._counters.tolist())}
        if len(weights) > 1:
            return None
        self._mean.lerp_(g, *weights)
        if not self._fresh:
            return self._means
        return self.cut(torch.lerp(self._mean, g, self._fresh, out=self._ahead))

    def count(self) -> None:
        """Count a step of every parameter."""
        self._counters.add_(1)

    def moves(
        self, vector: Tensor, directions: Sequence[Tensor]
    ) -> Iterator[tuple[ParamGroup, list[Tensor], list[Tensor]]]:
        """Iterate over the param_groups, with their parameters and their parts of the directions; vector is for use."""
        for part, d in zip(self.cut(vector).values(), directions, strict=True):
            if part is not d:
                part.copy_(d)
        parts = self._views if vector is self._kept else self._parts(vector)
        if len(self._groups) == 1:
            yield self._groups[0][0], self.params, parts
            return
        steps = dict(zip(self.params, parts, strict=True))
        for pg, params in self._groups:
            yield pg, params, [steps[p] for p in params]


def _weights(pg: ParamGroup) -> tuple[float, float]:
    return pg["momentum"], pg["fresh"]
