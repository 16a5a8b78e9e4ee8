"""Where the pairs (v, h) come from: exact Hessian products, finite differences, or the gradient itself.

The choice is one of the objects `automatic`, `hessian`, `finite_difference`, `whiten`.
"""

from __future__ import annotations

import math
import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from psgd.across import sharded
from psgd.evaluation import Evaluation, total
from psgd.interception import PARTIAL, Gradients, Intercept
from psgd.unit import real

Memory = dict[str, Any]


class Curvature(ABC):
    """A source of pairs. `memory` belongs to one optimizer: what was found out, what was said."""

    @abstractmethod
    def pair(self, evaluation: Evaluation, v: Sequence[Tensor], memory: Memory) -> Gradients | None:
        """Evaluate the closure and return h, or None where it gives no second-order information."""

    @abstractmethod
    def accept(self, seen: Intercept, memory: Memory) -> Gradients | None:
        """Return what was intercepted outside a closure, or None."""

    @property
    def newton(self) -> bool:
        """Whether the user asked for second-order information by name."""
        return True


@dataclass(frozen=True)
class Hessian(Curvature):
    """h = Hv exactly, by double backward. Raises where the model does not support it."""

    def pair(self, evaluation: Evaluation, v: Sequence[Tensor], memory: Memory) -> Gradients | None:
        evaluation.first(v, repeatable=False)
        return self.accept(evaluation.seen, memory)

    def accept(self, seen: Intercept, memory: Memory) -> Gradients | None:
        if not seen.called:
            return None
        consult(seen)
        if seen.error:
            raise RuntimeError(
                f"curvature=hessian needs a model that can be differentiated twice, got: {seen.error}. "
                "curvature=finite_difference (with a closure) and curvature=whiten do not need it."
            )
        complain(seen, memory)
        memory["in_use"] = hessian
        return average(seen.h, seen.params)


@dataclass(frozen=True)
class FiniteDifference(Curvature):
    """h = (g(θ + εv) − g(θ))/ε: two evaluations of the closure with the same random numbers."""

    def pair(self, evaluation: Evaluation, v: Sequence[Tensor], memory: Memory) -> Gradients | None:
        evaluation.first(None)
        if not evaluation.seen.called:
            return None
        complain(evaluation.seen, memory)
        memory["in_use"] = finite_difference
        return evaluation.difference(v)

    def accept(self, seen: Intercept, memory: Memory) -> Gradients | None:
        return None  # without a closure there is nothing to evaluate again


@dataclass(frozen=True)
class Whiten(Curvature):
    """h = g: P tends to (E[ggᵀ])^(−½). No second derivative, no second evaluation."""

    def pair(self, evaluation: Evaluation, v: Sequence[Tensor], memory: Memory) -> Gradients | None:
        evaluation.plain(memory)
        return None

    def accept(self, seen: Intercept, memory: Memory) -> Gradients | None:
        return None

    @property
    def newton(self) -> bool:
        return False


@dataclass(frozen=True)
class WhitenMomentum(Whiten):
    """h = m, the averaged gradient: P m then has entries of size one, and lr is the size of a step."""


# A network may start on a kink: where biases are zero, blank parts of the input sit on those of the ReLUs, and a
# difference of any ε crosses them. One step later it is off them; a wrong product stays wrong.
_DOUBTS = 3


@dataclass(frozen=True)
class Automatic(Curvature):
    """Exact if that agrees with a finite difference (cosine > 0.9), else finite differences, else whitening.

    Models with custom functions, or torch's weight_norm, whose second derivative is wrong, have to agree within
    6 %. What it settles on, and why, is said in one warning, unless it is the exact product.
    """

    def pair(self, evaluation: Evaluation, v: Sequence[Tensor], memory: Memory) -> Gradients | None:
        settled: Curvature | None = memory.get("settled")
        if settled is whiten:
            return whiten.pair(evaluation, v, memory)
        evaluation.first(None if settled is finite_difference else v)
        seen = evaluation.seen
        if not seen.called:
            return None
        consult(seen)
        if seen.partial:
            return self._settle(whiten, seen.partial, memory, None)
        if settled is finite_difference:
            return self._settle(finite_difference, "", memory, evaluation.difference(v))
        exact = None if seen.error else average(seen.h, seen.params)
        if settled is hessian and exact is not None:  # a model may lose its second derivatives on the way
            return self._settle(hessian, "", memory, exact)
        try:
            difference = evaluation.difference(v)
            if exact is None:
                self._demand_repeatable(evaluation, v, difference)
                return self._settle(finite_difference, seen.error, memory, difference)
            compare, enough = (similarity, 0.998) if seen.suspects else (cosine, 0.9)
            agreement = compare(exact, difference)
            if norm(exact) == norm(difference) == 0:  # nothing to compare
                return exact
            if not math.isfinite(agreement):  # the optimizer skips this step; it says nothing about the model
                memory["in_use"] = hessian
                return exact
            for shrink in (0.1, 0.01, 0.001):
                # a kink (ReLU, max-pooling) on the way spoils a right product; a wrong one fails for every ε
                if agreement <= enough:
                    agreement = compare(exact, evaluation.difference(v, shrink))
            if agreement <= enough:
                self._demand_repeatable(evaluation, v, difference)
        except RuntimeError as e:
            why = f"the loss cannot be evaluated twice ({str(e).strip().splitlines()[0]})"
            if exact is not None and not seen.suspects:
                return self._settle(hessian, "", memory, exact)
            return self._settle(whiten, f"{seen.error or 'unverified second derivatives'}, and {why}", memory, None)
        if agreement > enough:
            return self._settle(hessian, "", memory, exact)
        memory["doubts"] = memory.get("doubts", 0) + 1
        if memory["doubts"] < _DOUBTS and not seen.suspects:
            memory["in_use"] = finite_difference
            return difference
        why = f"the second derivatives of this model disagree with finite differences (cosine {agreement:.3f})"
        return self._settle(finite_difference, why, memory, difference)

    def accept(self, seen: Intercept, memory: Memory) -> Gradients | None:
        if not seen.called or memory.get("settled") is whiten:
            return None
        consult(seen)
        if seen.partial:
            return self._settle(whiten, seen.partial, memory, None)
        if seen.error or (seen.suspects and memory.get("settled") is not hessian):
            doubt = "second derivatives that cannot be verified here: " + ", ".join(sorted(seen.suspects))
            return self._settle(whiten, seen.error or doubt, memory, None)
        return self._settle(hessian, "", memory, average(seen.h, seen.params))

    @property
    def newton(self) -> bool:
        return False

    @staticmethod
    def _demand_repeatable(evaluation: Evaluation, v: Sequence[Tensor], difference: Gradients) -> None:
        """Raise if the closure has another gradient at the same θ, as one that draws its own batch."""
        noise = evaluation.difference([torch.zeros_like(t) for t in v])
        found = [norm(t) ** 2 for t in (noise, difference, evaluation.gradient)]
        if any(map(sharded, evaluation.params)):
            found = total(torch.tensor(found, dtype=torch.float64), evaluation.params).tolist()
        noise_, difference_, gradient = map(math.sqrt, found)
        # two draws may be alike by chance: they are, besides, held against the gradient, which should not change
        if not noise_ <= min(0.1 * difference_, gradient):
            raise RuntimeError("the closure returns another gradient when it is called again")

    @staticmethod
    def _settle(on: Curvature, why: str, memory: Memory, h: Gradients | None) -> Gradients | None:
        memory["settled"] = memory["in_use"] = on
        if why:
            name = {finite_difference: "finite differences", whiten: "gradient whitening"}[on]
            say(f"PSGD uses {name}, since exact Hessian products fail: {why}")
        return h


automatic, hessian, finite_difference, whiten = Automatic(), Hessian(), FiniteDifference(), Whiten()
whiten_momentum = WhitenMomentum()


def complain(seen: Intercept, memory: Memory) -> None:
    """Say once that the product is not that of the whole gradient."""
    if seen.partial and not memory.get("complained"):
        memory["complained"] = True
        say(f"PSGD takes a wrong Hessian product: {seen.partial}")


def say(message: str) -> None:
    """Warn at the line of the user's code that led here, past the frames of this package and of torch."""
    frame, level = sys._getframe(), 1
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in ("psgd", "torch"):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


def _products(a: Gradients, b: Gradients) -> tuple[float, float, float]:
    both = [(real(x).double(), real(y).double()) for x, y in zip(a, b, strict=True) if x is not None and y is not None]
    ab, aa, bb = (sum((p[i] * p[j]).sum().item() for p in both) for i, j in ((0, 1), (0, 0), (1, 1)))
    return ab, aa, bb


def cosine(a: Gradients, b: Gradients) -> float:
    """Return the cosine between two lists of tensors; 1 if both vanish."""
    ab, aa, bb = _products(a, b)
    return 1.0 if aa == bb == 0 else ab / max((aa * bb) ** 0.5, 1e-300)


def similarity(a: Gradients, b: Gradients) -> float:
    """Return 1 − ‖a − b‖²/(‖a‖² + ‖b‖²): like the cosine, but the lengths count."""
    ab, aa, bb = _products(a, b)
    return 1.0 if aa == bb == 0 else 2 * ab / (aa + bb)


def norm(a: Gradients) -> float:
    """Return the norm of a list of tensors."""
    return math.sqrt(sum(real(x).double().square().sum().item() for x in a if x is not None))


def parallel() -> bool:
    """Whether this is one of several ranks."""
    dist = torch.distributed
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def consult(seen: Intercept) -> None:
    """Let every rank know what one of them met: all have to take the same path."""
    if parallel() and seen.params:
        flags = torch.tensor([bool(seen.error), bool(seen.suspects), bool(seen.partial)], dtype=torch.float64)
        if any(map(sharded, seen.params)):  # what a difference will ask for travels with them
            flags = total(torch.cat((flags.to(seen.params[0].device), seen.asked())), seen.params)
            seen.answered = flags[3:]
        else:
            flags = flags.to(seen.params[0].device, torch.float32)
            torch.distributed.all_reduce(flags)
        failed, doubtful, partial = flags[:3].tolist()
        seen.partial = seen.partial or (PARTIAL if partial else "")
        seen.error = seen.error or ("another rank met an error" if failed else "")
        seen.suspects = seen.suspects or ({"a function on another rank"} if doubtful else set())


def average(h: Gradients, params: Sequence[Tensor]) -> Gradients:
    """Average h over the ranks of a data-parallel job, in one exchange: each has the product of its own batch alone."""
    if not parallel():
        return h
    everywhere = [torch.zeros_like(p) if t is None else t for t, p in zip(h, params, strict=True)]
    alike: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for i, t in enumerate(everywhere):
        alike.setdefault((t.dtype, t.device), []).append(i)
    found: Gradients = [None] * len(everywhere)
    for some in alike.values():
        flat = torch.cat([everywhere[i].reshape(-1) for i in some])
        torch.distributed.all_reduce(flat)
        flat /= torch.distributed.get_world_size()
        for i, part in zip(some, flat.split([everywhere[i].numel() for i in some]), strict=True):
            found[i] = part.view(everywhere[i].shape)  # in new memory: all entries of h may be one number
    return found
