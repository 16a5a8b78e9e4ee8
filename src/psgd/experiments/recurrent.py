"""Recurrent networks with fast, exact Hessian products.

Autograd makes a node for every operation of every time step, and as many again for a second derivative. Here a whole
recurrence is one node, and its backward pass is another, whose own backward pass is the Hessian product (Pearlmutter's
R-operator). What is recurrent are three plain loops of a few operations per step: the states, their tangents, and
their adjoints, which serve twice: for the gradient, and with other sources for its tangent.

Tensors are features × batch, so that gates and states are contiguous blocks: inputs are (time, features, batch).
`benchmarks/recurrent.py` compares this with autograd on a loop, torch.compile and torch's own modules.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from psgd.probes import generator  # noqa: F401 - for the examples

Kept = tuple[Tensor, ...]
"""What a cell keeps of every step for its derivatives."""


@dataclass(frozen=True)
class Cell(ABC):
    """One time step: z = W(x, s, 1), then a new state s′ = φ(z, s), entry by entry. Steps are stacked in front.

    In names, r is the tangent of what follows, and g the adjoint: the gradient of the result by what follows.
    The states s, rs and gs have one entry more than there are steps: the first is before step 0.
    """

    hidden: int
    """The size of the output, which is the first part of the state."""

    @property
    @abstractmethod
    def states(self) -> int:
        """The size of the state."""

    @property
    @abstractmethod
    def gates(self) -> int:
        """The size of z."""

    @abstractmethod
    def run(self, w: Tensor, a: Tensor, s: Tensor) -> Kept:
        """Fill s[1:], a part of a = (x, s, 1)."""

    @abstractmethod
    def tangent(self, w: Tensor, kept: Kept, rz: Tensor, rs: Tensor) -> None:
        """Fill rs[1:]; add w rs to rz, which holds what does not come from rs. Here w is the part of W for s."""

    @abstractmethod
    def adjoint(self, w: Tensor, kept: Kept, gs: Tensor, gz: Tensor) -> None:
        """Add to gs and gz what comes from later steps; they hold what does not."""

    @abstractmethod
    def bend(self, kept: Kept, s: Tensor, rs: Tensor, rz: Tensor, gs: Tensor, rgs: Tensor, rgz: Tensor) -> None:
        """Add to rgs and rgz the adjoints times the tangent of the derivatives of φ."""


@dataclass(frozen=True)
class Tanh(Cell):
    """s′ = tanh z, the plain recurrent network; keeps 1 − s′²."""

    @property
    def states(self) -> int:
        return self.hidden

    @property
    def gates(self) -> int:
        return self.hidden

    def run(self, w: Tensor, a: Tensor, s: Tensor) -> Kept:
        z = torch.empty_like(s[0])
        for now, new in steps(a[:-1], s[1:]):
            torch.mm(w, now, out=z)
            torch.tanh(z, out=new)
        return (1 - s[1:].square(),)

    def tangent(self, w: Tensor, kept: Kept, rz: Tensor, rs: Tensor) -> None:
        for slope, z, old, new in steps(*kept, rz, rs[:-1], rs[1:]):
            z.addmm_(w, old)
            torch.mul(slope, z, out=new)

    def adjoint(self, w: Tensor, kept: Kept, gs: Tensor, gz: Tensor) -> None:
        back = w.t().contiguous()
        for slope, z, old, new in reversed(steps(*kept, gz, gs[:-1], gs[1:])):
            z.addcmul_(slope, new)
            old.addmm_(back, z)

    def bend(self, kept: Kept, s: Tensor, rs: Tensor, rz: Tensor, gs: Tensor, rgs: Tensor, rgz: Tensor) -> None:
        rgz.addcmul_(s[1:] * rs[1:], gs[1:], value=-2)


@dataclass(frozen=True)
class Gated(Cell):
    """(i, f, g, o) = σ(z), c′ = f c + i(2g − 1), h′ = o tanh c′, with the state (h, c); 2σ(2z) − 1 = tanh z.

    Keeps the gates y, their factors m = (2g − 1, c, 2i, tanh c′) in dc′ and dh′, k = m σ′(z), and ∂h′/∂c′.
    Many small operations: one step fits into the cache, all steps together do not.
    """

    @property
    def states(self) -> int:
        return 2 * self.hidden

    @property
    def gates(self) -> int:
        return 4 * self.hidden

    def run(self, w: Tensor, a: Tensor, s: Tensor) -> Kept:
        y = s.new_empty(len(s) - 1, 4, self.hidden, s.shape[-1])
        m, k, q = torch.empty_like(y), torch.empty_like(y), torch.empty_like(y[:, 0])
        z = s.new_empty(self.gates, s.shape[-1])
        for now, y_, m_, k_, q_, (_, c), (new_h, new_c) in steps(
            a[:-1], y, m, k, q, self._split(s[:-1]), self._split(s[1:])
        ):
            torch.mm(w, now, out=z)
            torch.sigmoid(z.view_as(y_), out=y_)
            i, f, g, o = y_.unbind()
            torch.mul(g, 2, out=m_[0]).sub_(1)
            m_[1].copy_(c)
            torch.mul(i, 2, out=m_[2])
            torch.mul(f, c, out=new_c).addcmul_(i, m_[0])
            tanh = torch.tanh(new_c, out=m_[3])
            torch.mul(o, tanh, out=new_h)
            torch.addcmul(o, new_h, tanh, value=-1, out=q_)
            torch.addcmul(y_, y_, y_, value=-1, out=k_).mul_(m_)
        return y, m, k, q

    def tangent(self, w: Tensor, kept: Kept, rz: Tensor, rs: Tensor) -> None:
        y, _, k, q = kept
        product = torch.empty_like(k[0])
        for y_, k_, q_, z, old, (h, c) in steps(y, k, q, rz, rs[:-1], self._split(rs[1:])):
            z.addmm_(w, old)
            torch.mul(k_, z.view_as(k_), out=product)
            torch.sum(product[:3], 0, out=c).addcmul_(y_[1], old[self.hidden :])
            torch.addcmul(product[3], q_, c, out=h)

    def adjoint(self, w: Tensor, kept: Kept, gs: Tensor, gz: Tensor) -> None:
        y, _, k, q = kept
        back = w.t().contiguous()
        for y_, k_, q_, z, old, (h, c) in reversed(steps(y, k, q, gz, gs[:-1], self._split(gs[1:]))):
            c.addcmul_(q_, h)
            gates = z.view_as(k_)
            gates[:3].addcmul_(k_[:3], c)
            gates[3].addcmul_(k_[3], h)
            old.addmm_(back, z)
            old[self.hidden :].addcmul_(y_[1], c)

    def bend(self, kept: Kept, s: Tensor, rs: Tensor, rz: Tensor, gs: Tensor, rgs: Tensor, rgz: Tensor) -> None:
        y, m, _, _ = kept
        rm = torch.empty_like(m[0])
        parts = (self._split(t) for t in (s[1:], rs[:-1], rs[1:], gs[1:], rgs[:-1], rgs[1:]))
        for y_, m_, z, gates, (h, _), (_, rc), (_, rc1), (gh, gc), (_, rgc), (_, rgc1) in steps(y, m, rz, rgz, *parts):
            slope = torch.addcmul(y_, y_, y_, value=-1)
            ry = slope * z.view_as(y_)
            torch.mul(ry[2], 2, out=rm[0])
            rm[1].copy_(rc)
            torch.mul(ry[0], 2, out=rm[2])
            flat = 1 - m_[3].square()
            rtanh = torch.mul(flat, rc1, out=rm[3])
            rk = torch.mul(rm, slope).addcmul_(m_, torch.addcmul(ry, ry, y_, value=-2))
            gates = gates.view_as(rk)
            gates[:3].addcmul_(rk[:3], gc)
            gates[3].addcmul_(rk[3], gh)
            rgc1.addcmul_(flat.mul_(ry[3]).addcmul_(h, rtanh, value=-2), gh)
            rgc.addcmul_(ry[1], gc)

    def _split(self, s: Tensor) -> Tensor:
        """View states as (h, c) along an axis of their own."""
        return s.unflatten(1, (2, self.hidden))


def steps(*stacked: Tensor) -> list[tuple[Tensor, ...]]:
    """Return the tensors of every time step."""
    return list(zip(*(t.unbind() for t in stacked), strict=True))


class Recurrence(Function):
    """The last output of a cell after a sequence, as a function of W."""

    @staticmethod
    def forward(ctx: Any, cell: Cell, x: Tensor, w: Tensor) -> Tensor:
        """Run from the state 0."""
        time, features, batch = x.shape
        a = x.new_zeros(time + 1, features + cell.states + 1, batch)
        a[:-1, :features], a[:, -1] = x, 1
        s = a[:, features:-1]
        with torch._C.DisableTorchFunction():  # PSGD watches a forward pass, at some µs for each operation
            kept = cell.run(w, a, s)
        ctx.cell, ctx.last = cell, None
        ctx.save_for_backward(w, a, *kept)
        return s[-1, : cell.hidden].clone()

    @staticmethod
    def backward(ctx: Any, delta: Tensor) -> Any:
        """Return the gradient by W; there is none by x.

        PSGD asks twice: with a graph, for the product, and without. The second time it is known.
        """
        if ctx.last is not None and not torch.is_grad_enabled() and delta.equal(ctx.last[0]):
            return None, None, ctx.last[1]
        grad = gradient(ctx.cell, delta, *ctx.saved_tensors)
        ctx.last = delta.detach().clone(), grad.detach().clone()
        return None, None, grad


class Gradient(Function):
    """The gradient of ⟨δ, Recurrence(W)⟩ by W, as a function of δ and W, on which depends all that was kept."""

    @staticmethod
    def forward(ctx: Any, cell: Cell, delta: Tensor, w: Tensor, a: Tensor, *kept: Tensor) -> Tensor:
        """Run the adjoints."""
        state = slice(-cell.states - 1, -1)
        gs, gz = torch.zeros_like(a[:, state]), a.new_zeros(len(a) - 1, cell.gates, a.shape[-1])
        gs[-1, : cell.hidden] = delta
        cell.adjoint(w[:, state], kept, gs, gz)
        ctx.cell = cell
        ctx.save_for_backward(w, a, gs, gz, *kept)
        return torch.bmm(gz, a[:-1].mT).sum(0)

    @staticmethod
    def backward(ctx: Any, v: Tensor) -> Any:
        """Return the gradients of ⟨v, Gradient(δ, W)⟩: the tangent of the output, and the Hessian product."""
        cell: Cell = ctx.cell
        w, a, gs, gz, *kept = ctx.saved_tensors
        state = slice(-cell.states - 1, -1)
        s, ws, vs = a[:, state], w[:, state], v[:, state]
        rs, rz = torch.zeros_like(s), v @ a[:-1]
        cell.tangent(ws, tuple(kept), rz, rs)
        rgs, rgz = torch.zeros_like(s), torch.zeros_like(gz)
        torch.matmul(vs.t(), gz, out=rgs[:-1])
        cell.bend(tuple(kept), s, rs, rz, gs, rgs, rgz)
        cell.adjoint(ws, tuple(kept), rgs, rgz)
        product = torch.bmm(rgz, a[:-1].mT).sum(0)
        product[:, state] += torch.bmm(gz, rs[:-1].mT).sum(0)
        return None, rs[-1, : cell.hidden].clone(), product, None, *(None for _ in kept)


recurrence: Callable[[Cell, Tensor, Tensor], Tensor] = Recurrence.apply
gradient: Callable[..., Tensor] = Gradient.apply


class RNN(nn.Module):
    """h ← tanh(W_x x + W_h h + b) from h = 0 along a sequence, then one number, w·h + b′.

    W_h starts as a random orthogonal matrix, W_x and w as 0.1·N(0, 1), the biases as 0.

    >>> RNN(2, 30, generator(0))(torch.zeros(128, 32, 2)).shape
    torch.Size([128, 1])
    """

    def __init__(self, features: int, hidden: int, rng: torch.Generator) -> None:
        super().__init__()
        self.step, self.out = nn.Linear(features + hidden, hidden), nn.Linear(hidden, 1)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(0.1 * torch.randn(p.shape, generator=rng) if p.dim() == 2 else torch.zeros(p.shape))
            self.step.weight[:, features:] = torch.linalg.qr(torch.randn(hidden, hidden, generator=rng)).Q

    @property
    def cell(self) -> Cell:
        """What a step does."""
        return Tanh(self.step.out_features)

    def forward(self, x: Tensor) -> Tensor:
        """Return a number for each sequence; x is (batch, time, features)."""
        w = torch.cat((self.step.weight, self.step.bias[:, None]), 1)
        h = recurrence(self.cell, x.permute(1, 2, 0), w)
        return self.out(h.t())


class LSTM(nn.Module):
    """An LSTM whose gates also see the cell state, from the state 0 along a sequence, then one number.

    All gates are in one matrix. Weights and biases start as 0.1·N(0, 1), the forget gate's bias 1 larger, and those
    of g twice as large, for its sigmoid is used as 2σ(2z) − 1 = tanh z.

    >>> LSTM(2, 30, generator(0))(torch.zeros(128, 32, 2)).shape
    torch.Size([128, 1])
    """

    def __init__(self, features: int, hidden: int, rng: torch.Generator) -> None:
        super().__init__()
        self.step, self.out = nn.Linear(features + 2 * hidden, 4 * hidden), nn.Linear(hidden, 1)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(0.1 * torch.randn(p.shape, generator=rng))
            self.step.bias[hidden : 2 * hidden] += 1
            for p in self.step.parameters():
                p[2 * hidden : 3 * hidden] *= 2

    @property
    def cell(self) -> Cell:
        """What a step does."""
        return Gated(self.out.in_features)

    forward = RNN.forward


class PlainRNN(RNN):
    """The same by autograd, layer by layer, for methods that look at layers (K-FAC)."""

    def forward(self, x: Tensor) -> Tensor:
        """Return a number for each sequence; x is (batch, time, features)."""
        h = x.new_zeros(len(x), self.out.in_features)
        for now in x.unbind(1):
            h = torch.tanh(self.step(torch.cat((now, h), 1)))
        return self.out(h)


class PlainLSTM(LSTM):
    """The same by autograd, layer by layer, for methods that look at layers (K-FAC)."""

    def forward(self, x: Tensor) -> Tensor:
        """Return a number for each sequence; x is (batch, time, features)."""
        h = c = x.new_zeros(len(x), self.out.in_features)
        for now in x.unbind(1):
            i, f, g, o = torch.sigmoid(self.step(torch.cat((now, h, c), 1))).chunk(4, 1)
            c = f * c + i * (2 * g - 1)
            h = o * torch.tanh(c)
        return self.out(h)
