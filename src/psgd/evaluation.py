"""One evaluation of the user's loss: watched, with a Hessian product taken on the way, or repeated at θ + εv."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from psgd.across import local, sharded, taken
from psgd.interception import COARSE, Gradients, Intercept, squares, walk


class Evaluation:
    """One call of a closure, of either kind: it returns the loss, or it also runs backward itself."""

    def __init__(self, closure: Callable[[], Any], params: Sequence[Tensor], model: nn.Module | None) -> None:
        self.closure, self.params, self.model = closure, params, model
        self.out: Any = None
        self._before: Gradients = []
        self.gradient: Gradients = []
        self._rng: list[Tensor] = []
        self._buffers: list[tuple[Tensor, Tensor]] = []
        self.seen: Intercept  # by `first`
        self.earlier: Intercept | None = None  # products of micro-batches before this one

    def plain(self, memory: dict[str, Any]) -> None:
        """Evaluate loss and gradient alone; `memory` knows whether the last closure left gradients alone."""
        if not memory.get("aside"):  # a hook tells best: a closure without backward may still call zero_grad
            seen: list[int] = []
            with _hooked(self.params, lambda i, _: seen.append(i)):
                self._call()
            memory["aside"] = not seen
            if not seen:
                self._backward()
            return
        before = [(p, g, 0 if g is None else g._version) for p in self.params for g in (p.grad,)]
        self._call()
        memory["aside"] = all(p.grad is g and (g is None or g._version == version) for p, g, version in before)
        if memory["aside"]:
            del before  # the memory of old gradients is for the new ones
            self._backward()
        elif not any(_reached(p.grad, g, version) for p, g, version in before):
            after = [p.grad for p in self.params]
            try:
                self._backward()
            except RuntimeError:  # the graph is gone: a backward pass was there, and left zeros
                for p, g in zip(self.params, after, strict=True):
                    p.grad = g

    def first(self, v: Sequence[Tensor] | None, *, repeatable: bool = True) -> None:
        """Evaluate under watch, taking h = Hv where v is given (see `seen`); so that `difference` can repeat it."""
        self._before = [None if p.grad is None or not repeatable else p.grad.clone() for p in self.params]
        self._rng, self._buffers = rng_states(self.params), _contents(self.model)
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
        rng, out, eps = rng_states(self.params), self.out, shrink * self._epsilon()
        try:
            with torch.no_grad():
                for p, vi, g in zip(self.params, v, self._before, strict=True):
                    local(p).add_(vi * eps.to(p.device))
                    p.grad = None if g is None else g.clone()
                for buffer, was in self._buffers:  # the same evaluation again: spectral_norm's vectors enter it
                    buffer.copy_(was)
            set_rng_states(self.params, self._rng)
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
            set_rng_states(self.params, rng)
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
            set_rng_states(self.params, self._rng)
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
            loss.backward()


def _reached(grad: Tensor | None, was: Tensor | None, version: int) -> bool:
    """Whether a backward pass left this gradient, for sure: zero_grad alone leaves none, or zeros."""
    if grad is None or (grad is was and grad._version == version):
        return False
    return grad is not was or bool(local(grad).any())


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


def _contents(model: nn.Module | None) -> list[tuple[Tensor, Tensor]]:
    return [] if model is None else [(b, b.clone()) for b in model.buffers()]


def _devices(params: Sequence[Tensor]) -> list[torch.device]:
    return sorted({p.device for p in params if p.device.type != "cpu"}, key=str)


def rng_states(params: Sequence[Tensor]) -> list[Tensor]:
    """Return the states of the global generators that a loss of these parameters may draw from."""
    return [torch.get_rng_state(), *(torch.get_device_module(d).get_rng_state(d) for d in _devices(params))]


def set_rng_states(params: Sequence[Tensor], states: Sequence[Tensor]) -> None:
    """Put them back."""
    torch.set_rng_state(states[0])
    for device, state in zip(_devices(params), states[1:], strict=True):
        torch.get_device_module(device).set_rng_state(state, device)
