"""Hessian products of a loss whose graph is at hand, also where the user calls backward: intercepted there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from psgd.across import local, sharded

Gradients = list[Tensor | None]


def hvp(loss: Tensor, params: Sequence[Tensor], v: Sequence[Tensor]) -> tuple[Gradients, Gradients]:
    """Return (g, h): the gradient of the loss and the exact Hessian product h = Hv, by double backward.

    None stands for parameters that the loss does not reach. The loss keeps its graph.

    >>> x = torch.tensor([1.0, 2.0], requires_grad=True)
    >>> hvp((x**3).sum(), [x], [torch.tensor([1.0, 1.0])])[1]
    [tensor([ 6., 12.])]
    """
    g = torch.autograd.grad(loss, params, create_graph=True, allow_unused=True)
    return [None if gi is None else gi.detach() for gi in g], second(g, params, v)


def second(
    g: Sequence[Tensor | None], params: Sequence[Tensor], v: Sequence[Tensor], retain_graph: bool = True
) -> Gradients:
    """Return h = Hv from a gradient that has a graph of its own; None stands for parameters without gradient."""
    live = [(gi, vi) for gi, vi in zip(g, v, strict=True) if gi is not None and gi.requires_grad]
    found: Sequence[Tensor | None] = [None] * len(params)
    if live:
        outputs, probes = zip(*live, strict=True)
        found = torch.autograd.grad(outputs, params, probes, retain_graph=retain_graph, allow_unused=True)

    def product(gi: Tensor | None, hi: Tensor | None) -> Tensor | None:
        return None if gi is None else torch.zeros_like(gi) if hi is None else hi.detach()

    return [product(gi, hi) for gi, hi in zip(g, found, strict=True)]


class Intercept(TorchFunctionMode):
    """Watches for backward passes; with probes v it takes h = Hv from each before the user's own runs.

    Several backward passes (micro-batches) add up; `partial` says so if there were others before. A failed product
    is kept in `error`; the user's pass still runs.
    """

    def __init__(self, params: Sequence[Tensor], v: Sequence[Tensor] | None, scale: float = 1.0) -> None:
        super().__init__()
        self.params, self.v, self.scale = params, v, scale
        self.h: Gradients = [None] * len(params)
        self.g: Gradients = []  # of the last backward pass
        self.called, self.error = False, ""
        self.partial = ""
        self.suspects: set[str] = set()
        self.coarse: set[torch.dtype] = set()  # of few digits, in which something is computed
        self.answered: Tensor | None = None  # what was asked, if the ranks have told each other

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run func; before a backward pass, take the Hessian product."""
        kwargs = kwargs or {}
        if func in (torch.Tensor.backward, torch.autograd.backward):
            if not self.called and accumulated(self.params):
                self.partial = PARTIAL
            self.called = True
            if self.v and not self.error:
                self._take(*args, **{k: kwargs[k] for k in ("gradient", "grad_tensors") if k in kwargs})
        elif self.params:
            if torch.is_autocast_enabled(self.params[0].device.type):
                self.coarse.add(torch.get_autocast_dtype(self.params[0].device.type))
            # FSDP2 hands out weights in another dtype than their own
            self.coarse |= {t.dtype for t in args if isinstance(t, Tensor) and t.dtype in COARSE and t.requires_grad}
        return func(*args, **kwargs)

    def asked(self) -> Tensor:
        """Return what ranks with parts of the parameters sum for a difference: ‖θ‖², and which dtypes were met."""
        met = torch.tensor([dtype in self.coarse for dtype in COARSE], dtype=torch.float64)
        return torch.cat((squares(self.params)[None], met.to(self.params[0].device)))

    def _take(self, loss: Any, gradient: Any = None, *_: Any, grad_tensors: Any = None, retain: bool = True) -> None:
        outputs = [loss] if isinstance(loss, Tensor) else list(loss)
        weights = gradient if gradient is not None else grad_tensors
        weights = [weights] if isinstance(weights, Tensor) else weights
        found, error = suspects(outputs)
        self.suspects |= found
        try:
            if any(map(sharded, self.params)):
                error = "sharded parameters (FSDP2, DTensor) have no second derivatives"
            if error:
                raise RuntimeError(error)
            g = torch.autograd.grad(outputs, self.params, weights, create_graph=True, allow_unused=True)
            assert self.v is not None
            if self.suspects and "Error" in nodes([gi for gi in g if gi is not None]):
                raise RuntimeError("a function in this model is marked with @once_differentiable")
            self.g = [None if gi is None else gi.detach() for gi in g]
            for i, hi in enumerate(second(g, self.params, self.v, retain)):
                if hi is not None:
                    old, hi = self.h[i], hi if self.scale == 1 else hi / self.scale
                    self.h[i] = hi if old is None else old + hi
        except (RuntimeError, NotImplementedError) as e:
            self.error = str(e).strip().splitlines()[0]


COARSE = (torch.bfloat16, torch.float16)

PARTIAL = (
    "gradients were accumulated before, outside of opt.step(closure) and opt.curvature(), so that the product "
    "covers only a part of them; put every backward pass into `with opt.curvature():`"
)


def nodes(outputs: Sequence[Any]) -> dict[str, Any]:
    """Return the nodes of a graph, one for each name."""
    return {node.name().split("::")[-1]: node for node in walk(outputs)}


def walk(outputs: Sequence[Any]) -> Iterator[Any]:
    """Iterate over the nodes of a graph."""
    seen: set[Any] = set()
    stack = [t.grad_fn for t in outputs if isinstance(t, Tensor) and t.grad_fn is not None]
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            yield node
            stack.extend(next_node for next_node, _ in node.next_functions if next_node is not None)


def suspects(outputs: Sequence[Any]) -> tuple[set[str], str]:
    """Name the nodes whose second derivative may be silently wrong, custom ones and torch's weight_norm.

    Also say why, where it is known to be wrong.
    """
    found, error = nodes(outputs), ""
    sink = found.pop("_DDPSinkBackward", None)  # DDP's static graph counts backward passes, any of them
    if sink is not None and sink.ddp_weakref().static_graph:
        error = "DistributedDataParallel(static_graph=True) fails silently in a second derivative"
    if "CheckpointFunctionBackward" in found:
        error = "checkpoint(use_reentrant=True) hides parameters from a second derivative"
    custom = torch.autograd.function.BackwardCFunction
    return {n for n, node in found.items() if isinstance(node, custom) or n.startswith("WeightNorm")}, error


def squares(params: Sequence[Tensor]) -> Tensor:
    """‖θ‖², or this rank's share of it, where parameters are sharded: a part that is on k ranks counts 1/k."""
    place, shares = params[0].device, [1] * len(params)
    if any(map(sharded, params)):
        from psgd.distributed import copies

        shares = [copies(p, params) for p in params]
    parts = (local(p.detach()).abs().double().square().sum() / k for p, k in zip(params, shares, strict=True))
    return torch.stack([t.to(place) for t in parts]).sum()


def accumulated(params: Sequence[Tensor]) -> bool:
    """Whether gradients of earlier backward passes are there already."""
    there = [local(p.grad).any() for p in params if p.grad is not None]
    return bool(there) and bool(torch.stack([t.to(there[0].device) for t in there]).any())
