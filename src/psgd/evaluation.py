"""One evaluation of the user's loss: watched, with a Hessian product taken on the way, or repeated at θ + εv."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from psgd.across import local, sharded, taken

Gradients = list[Tensor | None]


def hvp(loss: Tensor, params: Sequence[Tensor], v: Sequence[Tensor]) -> tuple[Gradients, Gradients]:
    """Return (g, h): the gradient of the loss and the exact Hessian product h = Hv, by double backward.

    None stands for parameters that the loss does not reach. The loss keeps its graph.

    >>> x = torch.tensor([1.0, 2.0], requires_grad=True)
    >>> hvp((x**3).sum(), [x], [torch.tensor([1.0, 1.0])])[1]
    [tensor([ 6., 12.])]
    """
    g = torch.autograd.grad(loss, params, create_graph=True, allow_unused=True)
    return [None if gi is None else gi.detach() for gi in g], _second(g, params, v)


def _second(
    g: Sequence[Tensor | None], params: Sequence[Tensor], v: Sequence[Tensor], retain_graph: bool = True
) -> Gradients:
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
            if not self.called and _accumulated(self.params):
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
            for i, hi in enumerate(_second(g, self.params, self.v, retain)):
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


class Evaluation:
    """One call of a closure, of either kind: it returns the loss, or it also runs backward itself."""

    def __init__(self, closure: Callable[[], Any], params: Sequence[Tensor], model: nn.Module | None) -> None:
        self.closure, self.params, self.model = closure, params, model
        self.out: Any = None
        self._before: Gradients = []
        self.gradient: Gradients = []
        self._rng: list[Tensor] = []
        self._buffers: list[tuple[Tensor, Tensor]] = []
        self.seen = Intercept(params, None)
        self.earlier: Intercept | None = None  # products of micro-batches before this one

    def plain(self) -> None:
        """Evaluate loss and gradient alone."""
        reached: list[int] = []  # a hook tells best: a closure without backward may still call zero_grad
        with _hooked(self.params, lambda i, _: reached.append(i)):
            self._call()
        if not reached:
            self._backward()

    def first(self, v: Sequence[Tensor] | None, *, repeatable: bool = True) -> None:
        """Evaluate under watch, taking h = Hv where v is given (see `seen`); so that `difference` can repeat it."""
        self._before = [None if p.grad is None or not repeatable else p.grad.clone() for p in self.params]
        self._rng, self._buffers = _rng(self.params), _contents(self.model)
        self.seen = Intercept(self.params, v)
        self.gradient = self._run(self.seen)
        if not self.seen.partial:  # the closure starts a gradient of its own
            self.earlier = None
        elif self.earlier is not None and self.earlier.called and not self.earlier.partial:
            self.seen.partial = self.earlier.error
            self.seen.error = self.seen.error or self.earlier.error

    def difference(self, v: Sequence[Tensor], shrink: float = 1.0) -> Gradients:
        """Return h = (g(θ + εv) − g(θ))/ε after `first`, and leave everything as `first` left it.

        `shrink` makes ε smaller than its best value for smooth losses.
        """
        kept = [(p.grad, None if p.grad is None else p.grad.clone()) for p in self.params]
        theta = [p.detach().clone() for p in self.params]
        buffers = _contents(self.model)
        rng, out, eps = _rng(self.params), self.out, shrink * self._epsilon()
        try:
            with torch.no_grad():
                for p, vi, g in zip(self.params, v, self._before, strict=True):
                    local(p).add_(vi * eps.to(p.device))
                    p.grad = None if g is None else g.clone()
                for buffer, was in self._buffers:  # the same evaluation again: spectral_norm's vectors enter it
                    buffer.copy_(was)
            _set_rng(self.params, self._rng)
            g1 = self._run(Intercept(self.params, None))
        finally:
            with torch.no_grad():
                for p, t in zip(self.params, theta, strict=True):
                    p.copy_(t)
                for p, (grad, content) in zip(self.params, kept, strict=True):
                    p.grad = grad  # the same object: DDP's buckets and the user's references stay valid
                    if grad is not None and content is not None:
                        grad.copy_(content)
                for buffer, was in buffers:
                    buffer.copy_(was)
            torch.clear_autocast_cache()
            _set_rng(self.params, rng)
            self.out = out
        # subtracted in the gradient's own dtype: a cast before it would destroy h
        pairs = zip(g1 or [None] * len(self.gradient), self.gradient, strict=True)
        return [None if b is None or a is None else (b - a) / eps.to(b.device) for b, a in pairs]

    def _epsilon(self) -> Tensor:
        """√(machine ε of the dtype that computes) · rms(θ), the balance of rounding and truncation."""
        coarse, found = self.seen.coarse, self.seen.answered
        if any(map(sharded, self.params)):  # ranks must agree
            found = total(self.seen.asked(), self.params) if found is None else found
            coarse = {dtype for dtype, met in zip(COARSE, found[1:].tolist(), strict=True) if met}
        machine = max(torch.finfo(dtype).eps for dtype in (*coarse, *(p.dtype for p in self.params)))
        square = squares(self.params) if found is None else found[0]
        rms = (square / max(1, sum(p.numel() for p in self.params))) ** 0.5
        return math.sqrt(machine) * torch.as_tensor(rms).clamp_min(0.03).float()  # zero-initialized weights: a floor

    def _call(self) -> None:
        torch.clear_autocast_cache()  # under a user's autocast it holds casts of other weights
        self.out = self.closure()

    def _run(self, mode: Intercept) -> Gradients:
        with torch.enable_grad(), _captured(self.params) as grads, mode:
            self._call()
            if not mode.called and not self._gradient_of_the_product(mode):
                self._backward()
        found = [p.grad if g is None else g for g, p in zip(grads, self.params, strict=True)] if mode.called else []
        return [None if g is None else taken(g, p) for g, p in zip(found, self.params, strict=False)]

    @property
    def _loss(self) -> Any:
        return self.out[0] if isinstance(self.out, (tuple, list)) and self.out else self.out

    def _gradient_of_the_product(self, mode: Intercept) -> bool:
        """Put the gradient that the product was taken from into .grad, if a backward pass would do nothing else."""
        loss, ours = self._loss, set(self.params)
        hooks = any(len(p._post_accumulate_grad_hooks or ()) > 1 for p in self.params)  # one is our own
        if not mode.v or hooks or not isinstance(loss, Tensor) or _distributed():
            return False
        if loss.numel() != 1 or not ours.issuperset(n.variable for n in walk([loss]) if hasattr(n, "variable")):
            return False
        with torch._C.DisableTorchFunction():
            mode._take(loss, retain=False)  # else whoever keeps the loss would keep its graph
        if mode.error:  # half of the graph may be gone: evaluate again, as it was
            _set_rng(self.params, self._rng)
            with torch.no_grad():
                for buffer, was in self._buffers:
                    buffer.copy_(was)
            self._call()
            return False
        mode.called = True
        for p, g in zip(
            self.params, mode.g, strict=True
        ):  # copied, for two may be one tensor, or all entries one number
            p.grad = None if g is None else torch.empty_like(p).copy_(g)
        return True

    def _backward(self) -> None:
        loss = self._loss
        if self.params and isinstance(loss, Tensor) and loss.requires_grad:
            for p in self.params:
                p.grad = None
            with torch.enable_grad():
                loss.backward()


def squares(params: Sequence[Tensor]) -> Tensor:
    """‖θ‖², or this rank's share of it, where parameters are sharded: a part that is on k ranks counts 1/k."""
    place, shares = params[0].device, [1] * len(params)
    if any(map(sharded, params)):
        from psgd.distributed import copies

        shares = [copies(p, params) for p in params]
    parts = (local(p.detach()).abs().double().square().sum() / k for p, k in zip(params, shares, strict=True))
    return torch.stack([t.to(place) for t in parts]).sum()


def total(t: Tensor, params: Sequence[Tensor]) -> Tensor:
    """Return the sum of t over the ranks that these parameters are on."""
    from psgd.distributed import summed

    return summed(t, params)


def _distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


@contextlib.contextmanager
def _captured(params: Sequence[Tensor]) -> Iterator[Gradients]:
    """Collect each accumulated gradient before a closure can clip it."""
    found: Gradients = [None] * len(params)
    if _distributed():
        yield found  # there .grad is final only after the reduction
        for i, p in enumerate(params):
            found[i] = None if p.grad is None else p.grad.clone()
        return

    def keep(i: int, leaf: Tensor) -> None:
        found[i] = None if leaf.grad is None else leaf.grad.detach().clone()

    with _hooked(params, keep):
        yield found


@contextlib.contextmanager
def _hooked(params: Sequence[Tensor], hook: Callable[[int, Tensor], None]) -> Iterator[None]:
    """Call hook(i, p) whenever a gradient is accumulated in parameter i."""
    handles = [
        p.register_post_accumulate_grad_hook(functools.partial(hook, i))
        for i, p in enumerate(params)
        if p.is_leaf and p.requires_grad
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _accumulated(params: Sequence[Tensor]) -> bool:
    """Whether gradients of earlier backward passes are there already."""
    there = [local(p.grad).any() for p in params if p.grad is not None]
    return bool(there) and bool(torch.stack([t.to(there[0].device) for t in there]).any())


def _contents(model: nn.Module | None) -> list[tuple[Tensor, Tensor]]:
    return [] if model is None else [(b, b.clone()) for b in model.buffers()]


def _devices(params: Sequence[Tensor]) -> list[torch.device]:
    return sorted({p.device for p in params if p.device.type != "cpu"}, key=str)


def _rng(params: Sequence[Tensor]) -> list[Tensor]:
    return [torch.get_rng_state(), *(torch.get_device_module(d).get_rng_state(d) for d in _devices(params))]


def _set_rng(params: Sequence[Tensor], states: Sequence[Tensor]) -> None:
    torch.set_rng_state(states[0])
    for device, state in zip(_devices(params), states[1:], strict=True):
        torch.get_device_module(device).set_rng_state(state, device)
