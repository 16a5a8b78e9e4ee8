"""What a preconditioner costs, said before the first step: state, operations, Hessian products."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from psgd.across import local
from psgd.arrangement import Member, together
from psgd.curvature import Whiten
from psgd.group import Group
from psgd.groups.diagonal import Diagonal, Scalar
from psgd.groups.involution import XMat
from psgd.groups.named import lra
from psgd.options import ParamGroup, schedule
from psgd.points import leaves
from psgd.unit import real


@dataclass(frozen=True)
class Row:
    """The cost of one scope: one parameter, or all that share a preconditioner."""

    name: str
    group: str
    entries: int
    state: int
    kept: int
    adam: int
    fit: float
    precondition: float


@dataclass(frozen=True)
class Plan:
    """Rows and totals; `print(plan)` shows the table.

    >>> import psgd
    >>> print(psgd.plan(nn.Linear(784, 10), psgd.Diagonal()))  # doctest: +ELLIPSIS
    scope      group       entries    state     Adam  ops/fit  ops/step
    2 tensors  Diagonal()    7,850  62.8 KB  62.8 KB ...
    state 62.8 KB, 1.00 × Adam's 62.8 KB; ... operations and 0.1 Hessian products per step
    """

    rows: tuple[Row, ...]
    prob: float

    @property
    def state(self) -> int:
        """Bytes of state in all."""
        return sum(row.state for row in self.rows)

    @property
    def kept(self) -> int:
        """Bytes of what P is applied by, where that is not Q itself: kept from one update to the next."""
        return sum(row.kept for row in self.rows)

    @property
    def adam(self) -> int:
        """Bytes that Adam would keep: two moments."""
        return sum(row.adam for row in self.rows)

    @property
    def operations(self) -> float:
        """Multiplications and additions per step, on average, besides those of the model."""
        return sum(row.precondition + self.prob * row.fit for row in self.rows)

    @property
    def hvps(self) -> float:
        """Hessian products (or second gradients) per step, on average."""
        return self.prob

    def __str__(self) -> str:
        head = ("scope", "group", "entries", "state", "Adam", "ops/fit", "ops/step")
        body = [
            (
                r.name,
                r.group,
                f"{r.entries:,}",
                _bytes(r.state),
                _bytes(r.adam),
                f"{r.fit:.2g}",
                f"{r.precondition:.2g}",
            )
            for r in self.rows
        ]
        widths = [max(len(row[i]) for row in (head, *body)) for i in range(len(head))]
        lines = [
            "  ".join(c.ljust(w) if i < 2 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
            for row in (head, *body)
        ]
        ratio = self.state / self.adam if self.adam else 0.0
        kept = f", and {_bytes(self.kept)} between updates" if self.kept else ""
        return "\n".join(
            [
                *(line.rstrip() for line in lines),
                f"state {_bytes(self.state)}, {ratio:.2f} × Adam's {_bytes(self.adam)}{kept}; "
                f"{self.operations:.2g} operations and {self.hvps:.2g} Hessian products per step",
            ]
        )


def plan(model: Any, group: Any = None, *, precond_prob: float = 0.1, momentum: float = 0.9) -> Plan:
    """Say what PSGD with this group will cost for a model, its parameters, or an optimizer's param_groups.

    Operations are counted on shapes alone, without data: every group is traced once on the meta device.

    >>> import psgd
    >>> costs = psgd.plan(nn.Linear(784, 10), psgd.Diagonal())
    >>> costs.state == costs.adam + 4  # d and the momentum, and the step-size memory
    True
    """
    found = members_of(model, group, {"precond_prob": precond_prob, "momentum": momentum})
    options, names = {m.param: m.options for m in found}, {m.param: m.name for m in found}
    rows, prob = [], 0.0
    for scope in together(found):
        pg, chosen = options[scope.params[0]], scope.group
        prob = sum(schedule(pg).due(t, 0) for t in range(10_000)) / 10_000
        point = chosen.init(scope.n, dtype=scope.dtype, device=torch.device("meta")) if scope.units else {}
        state = sum(t.numel() * t.element_size() for t in leaves(point))
        if pg["momentum"]:
            state += sum(real(local(p)).numel() * scope.wide(p).itemsize for p in scope.params)
        adam = 2 * sum(local(p).numel() * p.element_size() for p in scope.params)
        first = names[scope.params[0]]
        x = torch.empty(scope.n, dtype=scope.dtype, device="meta")
        move = chosen.whiten if isinstance(pg.get("curvature"), Whiten) else chosen.fit
        fit = _operations(functools.partial(move, point, x, x)) if point else 0.0
        ready = chosen.ready(point) if point else point
        stored = {id(t) for t in leaves(point)}
        kept = sum(t.numel() * t.element_size() for t in leaves(ready) if id(t) not in stored)
        precondition = _operations(functools.partial(chosen.precondition, ready, x)) if point else 0.0
        name = first if len(scope.params) == 1 else f"{len(scope.params)} tensors"
        if len(scope.units) > 1:
            name = f"{first} and {len(scope.units) - 1} alike"
        rows.append(Row(name, str(chosen), scope.n, state, kept, adam, fit, precondition))
    return Plan(tuple(rows), prob)


def richest(params: Iterable[Tensor], memory_budget: float) -> Group:
    """Return the richest joint group whose state, with momentum, fits a budget in bytes.

    >>> richest(nn.Linear(100, 10).parameters(), memory_budget=100_000)
    LowRank(rank=10) @ Diagonal()
    """
    params = list(params)
    candidates: list[Group] = [lra(r) for r in (100, 50, 20, 10, 5, 2, 1)] + [XMat(), Diagonal(), Scalar()]
    for group in candidates:
        if plan(params, group).state <= memory_budget:
            return group
    least = plan(params, Scalar()).state
    raise ValueError(f"memory_budget needs at least {least} bytes for these parameters, got {memory_budget:g}")


def members_of(model: Any, group: Any, options: ParamGroup) -> list[Member]:
    """List the trainable parameters with their options and names."""
    named: list[Any] = list(model.named_parameters() if isinstance(model, nn.Module) else model)
    if not named:
        raise ValueError("a plan needs parameters, got none")
    if not isinstance(named[0], dict):
        named = [options | {"params": named, "group": lra(10) if group is None else group}]
    found = []
    for pg in named:
        labels = pg.get("param_names") or [f"parameter {i}" for i in range(len(pg["params"]))]
        for item, label in zip(pg["params"], labels, strict=True):
            name, p = item if isinstance(item, tuple) else (label, item)
            if p.requires_grad and p.numel():
                found.append(Member(p, pg, name))
    return found


class _Counter(TorchDispatchMode):
    """Counts operations: two for each multiply-add of a matrix product, one for each entry that another op writes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        first = out[0] if isinstance(out, (tuple, list)) and out else out
        if not isinstance(first, Tensor):
            return out
        name = func.name()
        if name in ("aten::mm", "aten::bmm", "aten::addmm", "aten::mv", "aten::dot"):
            left = args[1] if name == "aten::addmm" else args[0]  # which comes after what the product is added to
            self.total += 2.0 * first.numel() * left.shape[-1]
        elif "linalg_solve" in name:  # by substitution, or with a factorization of each matrix
            matrix = args[0]
            factorization = 0 if "triangular" in name else 2 / 3 * matrix.numel() * matrix.shape[-1]
            self.total += factorization + 2.0 * first.numel() * matrix.shape[-1]
        elif "fft" in name:
            self.total += 5.0 * first.numel() * math.log2(max(2, first.shape[-1]))
        elif not getattr(func, "is_view", False):
            self.total += float(max([first.numel(), *(a.numel() for a in args if isinstance(a, Tensor))]))
        return out


def _operations(run: Any) -> float:
    with _Counter() as counter, torch.no_grad():
        run()
    return counter.total


def _bytes(count: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.3g} {unit}"
        count /= 1000
    raise AssertionError
