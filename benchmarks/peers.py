"""The optimizers that are compared: ours, torch's, and those of packages, all with their own default options.

Those of psgd-torch keep no average of gradients and bound no step: ours that do not, either, stand beside them.

Each is told before a step whether to update its preconditioner on it, so that "one step in ten" means the same for all,
whatever schedule it has of its own. Packages are imported when an optimizer is built: one that is absent, or fails,
is a contestant with an error.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

import psgd
from psgd.experiments.methods import unrounded

LR = 1e-6  # so small that nothing diverges; what it is makes no difference in time
NEVER = 10**9  # steps between two updates
RANK = 10

Loss = Callable[[], Tensor]

PACKAGES = ("psgd-torch", "heavyball", "kron-torch", "pytorch-optimizer")
"""Peers, beside torch itself."""


class Runner:
    """An optimizer at work on a model."""

    def __init__(self, optimizer: Any, model: nn.Module, due: Callable[[Any, bool], None] | None = None) -> None:
        self.optimizer, self.params, self._due = optimizer, list(model.parameters()), due
        self.updating = True

    def due(self, updating: bool) -> None:
        """Say whether the steps to come update the preconditioner."""
        self.updating = updating
        if self._due is not None:
            self._due(self.optimizer, updating)

    def step(self, gradients: Sequence[Tensor]) -> None:
        """Make a step on given gradients."""
        for p, g in zip(self.params, gradients, strict=True):  # each time: HeavyBall takes them away
            p.grad = g
        self.optimizer.step()

    def iterate(self, loss: Loss) -> None:
        """Make a whole iteration: evaluate the loss, its gradient, and step."""
        self.optimizer.zero_grad()
        loss().backward()
        self.optimizer.step()


class Closure(Runner):
    """An optimizer that evaluates and differentiates the loss itself: ours, and those of psgd-torch."""

    def iterate(self, loss: Loss) -> None:
        self.optimizer.step(loss)


class Curved(Runner):
    """AdaHessian: differentiates the gradient where it updates; on given gradients, takes them as Hessian products."""

    def step(self, gradients: Sequence[Tensor]) -> None:
        for p, g in zip(self.params, gradients, strict=True):
            p.grad = g
        self.optimizer.step(hessian=gradients if self.updating else None)

    def iterate(self, loss: Loss) -> None:
        found = torch.autograd.grad(loss(), self.params, create_graph=self.updating)
        for p, g in zip(self.params, found, strict=True):
            p.grad = g
        self.optimizer.step()
        self.optimizer.zero_grad()  # lest the graph stays


class Floor(Runner):
    """Plain SGD that takes a pair (v, h) where it would update, and does nothing with it: no step costs less."""

    def __init__(self, model: nn.Module, take: Callable[[Loss, Sequence[Tensor]], None]) -> None:
        super().__init__(torch.optim.SGD(model.parameters(), lr=LR), model)
        self.take = take

    def iterate(self, loss: Loss) -> None:
        if not self.updating:
            super().iterate(loss)
            return
        self.optimizer.zero_grad()
        self.take(loss, self.params)
        self.optimizer.step()


class Idle(torch.optim.Optimizer):
    """One whose step evaluates the gradient and does nothing with it."""

    def step(self, closure: Any = None) -> None:  # wrapped by torch, for its profiler and hooks
        self.evaluate(closure)

    def evaluate(self, closure: Any) -> None:
        """Evaluate the gradient."""
        for p in self.param_groups[0]["params"]:
            p.grad = None
        with torch.enable_grad():
            closure().backward()


class Evaluated(Runner):
    """The gradient alone: outside of a step, or inside of one."""

    def __init__(self, model: nn.Module, inside: bool) -> None:
        super().__init__(Idle(model.parameters(), {}), model)
        self.evaluate = self.optimizer.step if inside else self.optimizer.evaluate

    def iterate(self, loss: Loss) -> None:
        self.evaluate(loss)


GRADIENT, INSIDE = "floor: the gradient alone", "floor: the gradient alone, in a step of torch's Optimizer"


def exact_pair(loss: Loss, params: Sequence[Tensor]) -> None:
    """Take g and Hv by differentiating twice."""
    g = torch.autograd.grad(loss(), params, create_graph=True)
    torch.autograd.grad(g, params, [torch.randn_like(p) for p in params])
    for p, gi in zip(params, g, strict=True):
        p.grad = gi.detach()


class Replaced(TorchFunctionMode):
    """Hands other tensors to every function in place of some parameters."""

    def __init__(self, others: dict[Any, Tensor]) -> None:
        super().__init__()
        self.others = others

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        swap = lambda x: self.others.get(x, x) if isinstance(x, nn.Parameter) else x  # noqa: E731
        return func(*tree_map(swap, args), **tree_map(swap, kwargs or {}))


def forward_pair(loss: Loss, params: Sequence[Tensor]) -> None:
    """Take g and Hv by differentiating the gradient along v, forward over reverse."""
    with forward_ad.dual_level():
        duals = {p: forward_ad.make_dual(p, torch.randn_like(p)) for p in params}
        with Replaced(duals):
            value = loss()
        g = [forward_ad.unpack_dual(t) for t in torch.autograd.grad(value, list(duals.values()))]
    for p, gi in zip(params, g, strict=True):
        p.grad = gi.primal


def difference_pair(loss: Loss, params: Sequence[Tensor]) -> None:
    """Take g at θ + εv and at θ."""
    v = [1e-3 * torch.randn_like(p) for p in params]
    with torch.no_grad():
        torch._foreach_add_(params, v)
    moved = torch.autograd.grad(loss(), params)
    with torch.no_grad():
        torch._foreach_sub_(params, v)
    loss().backward()
    torch._foreach_sub([p.grad for p in params if p.grad is not None], list(moved))


class Compiled(Runner):
    """An optimizer that compiles its functions, or is kept from it: how is a global, set before each step."""

    def __init__(self, *args: Any, how: Callable[[], contextlib.AbstractContextManager[Any]]) -> None:
        super().__init__(*args)
        self.how = how

    def step(self, gradients: Sequence[Tensor]) -> None:
        with self.how():
            super().step(gradients)

    def iterate(self, loss: Loss) -> None:
        self.optimizer.zero_grad()
        loss().backward()
        with self.how():
            self.optimizer.step()


@dataclass(frozen=True)
class Contestant:
    """How to put an optimizer to work on a model."""

    name: str
    build: Callable[[nn.Module], Runner]
    families: tuple[str, ...] = ()
    """What it may be compared with: the same preconditioner, fitted to the same."""
    updates: bool = True
    """Whether it has a preconditioner that need not be updated on each step."""
    twice: bool = False
    """Whether it differentiates the loss twice, which fused attention cannot."""
    given: bool = True
    """Whether it makes steps on given gradients."""
    compiles: bool = False
    """Whether the first step takes a minute, for each shape of tensors."""

    @property
    def ours(self) -> bool:
        return self.name.startswith("psgd ")


# --- ours


BARE: dict[str, Any] = {"momentum": 0.0, "max_rms": None}
"""What psgd-torch does by default: no average of gradients, and no bound of a step."""


def ours(group: Any, curvature: Any, *, compiled: bool = False, **options: Any) -> Callable[[nn.Module], Runner]:
    """Return a builder of PSGD.

    With `Regular(0.1)` one step in ten would be due; here the turn says which, as for all others.
    """
    schedules = {True: psgd.Regular(1.0), False: psgd.Regular(1 / NEVER)}

    def due(optimizer: psgd.PSGD, updating: bool) -> None:
        for pg in optimizer.param_groups:
            pg["precond_prob"] = schedules[updating]

    def build(model: nn.Module) -> Runner:
        optimizer = psgd.PSGD(
            model.parameters(), group, lr=LR, curvature=curvature, precond_prob=schedules[True], model=model, **options
        )
        if compiled:
            optimizer.compile()  # type: ignore[attr-defined]
        return Closure(optimizer, model, due)

    return build


def our_contestants() -> list[Contestant]:
    groups = {
        "XMat": psgd.XMat(),
        f"lra({RANK})": psgd.lra(RANK),
        "kron": psgd.kron(),
        "kron along short axes": psgd.kron(max_skew=1.0),
        "kron in bfloat16": psgd.kron(psgd.Quadratic(), products=torch.bfloat16),
    }
    found = []
    for name, group in groups.items():
        family = name.replace("(", " ").split()[0].lower()
        coarse = "bfloat16" in name  # which no peer does by default: it is shown, and held against none
        whiten = psgd.whiten_momentum if family == "kron" else psgd.whiten
        for source, curvature in (
            ("hessian", psgd.hessian),
            ("finite difference", psgd.finite_difference),
            ("whitening", whiten),
        ):
            newton = source != "whitening"
            fitted = f"{family} {'Newton' if newton else 'whitening'}"
            for compiled in (False, True) if hasattr(psgd.PSGD, "compile") else (False,):
                label = f"psgd {name}, {source}" + ", compiled" * compiled
                build = ours(group, curvature, compiled=compiled)
                twice = source == "hessian"
                families = () if coarse else (fitted,)
                found.append(Contestant(label, build, families, twice=twice, given=not newton, compiles=compiled))
            if source != "hessian" and not coarse:
                bare = ours(group, curvature, **BARE)
                found.append(Contestant(f"psgd {name}, {source}, bare", bare, (f"{fitted}, bare",), given=not newton))
    return found


# --- torch


def of_torch(kind: type[torch.optim.Optimizer], **options: Any) -> Callable[[nn.Module], Runner]:
    return lambda model: Runner(kind(model.parameters(), lr=LR, **options), model)


# --- psgd-torch


def of_psgd_torch(kind: str, how: str, **options: Any) -> Callable[[nn.Module], Runner]:
    def due(optimizer: Any, updating: bool) -> None:
        optimizer.preconditioner_update_probability = float(updating)

    def build(model: nn.Module) -> Runner:
        make = getattr(importlib.import_module("psgd_torch"), kind)
        return Closure(make(list(model.parameters()), lr_params=LR, preconditioner_type=how, **options), model, due)

    return build


# --- heavyball


def of_heavyball(kind: str, compiled: bool, **options: Any) -> Callable[[nn.Module], Runner]:
    def due(optimizer: Any, updating: bool) -> None:
        optimizer.precond_schedule = float(updating)

    def build(model: nn.Module) -> Runner:
        package = importlib.import_module("heavyball")
        mode = "max-autotune-no-cudagraphs" if compiled else None  # the first is what it does by default

        def how() -> contextlib.AbstractContextManager[None]:
            package.utils.compile_mode = mode
            return contextlib.nullcontext()

        return Compiled(getattr(package, kind)(model.parameters(), lr=LR, **options), model, due, how=how)

    return build


# --- kron-torch


def of_kron_torch(compiled: bool) -> Callable[[nn.Module], Runner]:
    def due(optimizer: Any, updating: bool) -> None:
        for options in optimizer.param_groups:
            options["preconditioner_update_probability"] = 1.0 if updating else 1 / NEVER

    def build(model: nn.Module) -> Runner:
        package = importlib.import_module("kron_torch")
        optimizer = package.Kron(model.parameters(), lr=LR, preconditioner_update_probability=1.0)
        stance = "default" if compiled else "force_eager"
        return Compiled(optimizer, model, due, how=lambda: torch.compiler.set_stance(stance))

    return build


# --- pytorch_optimizer


def of_pytorch_optimizer(
    kind: str, due: Callable[[Any, bool], None], runner: type[Runner] = Runner, **options: Any
) -> Callable[[nn.Module], Runner]:
    def build(model: nn.Module) -> Runner:
        make = getattr(importlib.import_module("pytorch_optimizer"), kind)
        return runner(make(model.parameters(), lr=LR, **options), model, due)

    return build


def po_kron(optimizer: Any, updating: bool) -> None:
    for options in optimizer.param_groups:
        options["pre_conditioner_update_probability"] = 1.0 if updating else 1 / NEVER


def po_soap(optimizer: Any, updating: bool) -> None:
    for options in (*optimizer.param_groups, *optimizer.state.values()):  # the state copies it on the first step
        options["precondition_frequency"] = 1 if updating else NEVER


def po_shampoo(optimizer: Any, updating: bool) -> None:
    optimizer.preconditioning_compute_steps = 1 if updating else NEVER


def po_adahessian(optimizer: Any, updating: bool) -> None:
    optimizer.update_period = 1 if updating else NEVER


def muon(rounded: bool) -> Callable[[nn.Module], Runner]:
    """Return a builder of Muon, for matrices that are no embeddings, and its AdamW for the rest."""

    def build(model: nn.Module) -> Runner:
        kind = importlib.import_module("pytorch_optimizer").Muon
        embeddings = {m.weight for m in model.modules() if isinstance(m, nn.Embedding)}
        matrices = [p for p in model.parameters() if p.ndim >= 2 and p not in embeddings]
        rest = [p for p in model.parameters() if p.ndim < 2 or p in embeddings]
        groups = [{"params": matrices, "lr": LR, "use_muon": True}, {"params": rest, "lr": LR, "use_muon": False}]
        return Runner((kind if rounded else unrounded(kind))([g for g in groups if g["params"]]), model)

    return build


# --- what no optimizer can undercut


def floors() -> list[Contestant]:
    """Return what the gradient alone costs, and the pair alone, of each source."""
    pairs = {"hessian": exact_pair, "hessian, forward over reverse": forward_pair, "finite difference": difference_pair}
    return [
        *(
            Contestant(name, functools.partial(Evaluated, inside=inside), updates=False, given=False)
            for name, inside in ((GRADIENT, False), (INSIDE, True))
        ),
        *(
            Contestant(
                f"floor: the pair alone, {source}",
                functools.partial(Floor, take=take),
                twice=take is not difference_pair,
                given=False,
            )
            for source, take in pairs.items()
        ),
    ]


# --- all

KRON = ("kron whitening",)

PEERS = [
    Contestant("torch SGD", of_torch(torch.optim.SGD), updates=False),
    Contestant("torch SGD, fused", of_torch(torch.optim.SGD, fused=True), updates=False),
    Contestant("torch AdamW, fused", of_torch(torch.optim.AdamW, fused=True), updates=False),
    *(
        Contestant(
            f"psgd-torch {name}, {how}",
            of_psgd_torch(kind, how, **options),
            (f"{family} {how}, bare",),
            twice=how == "Newton",
            given=False,
        )
        for kind, name, family, options in (
            ("XMat", "XMat", "xmat", {}),
            ("LRA", f"LRA({RANK})", "lra", {"rank_of_approximation": RANK}),
            ("Affine", "Affine", "kron", {}),
            ("Kron", "Kron", "kron", {}),
        )
        for how in ("Newton", "whitening")
    ),
    *(
        Contestant(
            f"heavyball {name}" + ", eager" * (not compiled),
            of_heavyball(kind, compiled, **options),
            families,
            compiles=compiled,
        )
        for kind, name, families, options in (
            ("PSGDLRA", f"PSGDLRA({RANK})", ("lra whitening",), {"rank": RANK}),
            ("PSGDKron", "PSGDKron", KRON, {}),
            ("SOAP", "SOAP", KRON, {}),
        )
        for compiled in (True, False)
    ),
    *(
        Contestant("kron-torch Kron" + ", eager" * (not compiled), of_kron_torch(compiled), KRON, compiles=compiled)
        for compiled in (True, False)
    ),
    Contestant("pytorch_optimizer Kron", of_pytorch_optimizer("Kron", po_kron), KRON),
    Contestant("pytorch_optimizer SOAP", of_pytorch_optimizer("SOAP", po_soap), KRON),
    Contestant("pytorch_optimizer Shampoo", of_pytorch_optimizer("Shampoo", po_shampoo)),
    Contestant("pytorch_optimizer AdaHessian", of_pytorch_optimizer("AdaHessian", po_adahessian, Curved), twice=True),
    Contestant("pytorch_optimizer Muon", muon(rounded=True), updates=False),
    Contestant("pytorch_optimizer Muon, float32", muon(rounded=False), updates=False),
]


def contestants() -> list[Contestant]:
    """Return all, plain SGD first."""
    return PEERS[:1] + our_contestants() + PEERS[1:]
