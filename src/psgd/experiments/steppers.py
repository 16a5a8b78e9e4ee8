"""How optimizers are used alike, whatever they need: `stepper.step(loss)` evaluates, moves, and counts the cost."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import vector_to_parameters
from torch.optim import Optimizer

import psgd
from psgd.probes import mix


@dataclass(frozen=True)
class Loss:
    """The loss of a model on one batch, called without arguments; methods that need more look inside.

    >>> loss = Loss(nn.Identity(), torch.tensor([3.0]), torch.tensor([1.0]), nn.functional.mse_loss)
    >>> loss()
    tensor(4.)
    """

    model: nn.Module
    inputs: Any
    targets: Any
    criterion: Callable[[Any, Any], Tensor]

    def __call__(self) -> Tensor:
        """Evaluate it, with a graph."""
        return self.criterion(self.model(self.inputs), self.targets)


class Stepper(Protocol):
    """An optimizer in use."""

    gradients: int
    """Gradients of one batch that were evaluated so far."""
    products: int
    """Hessian (or Gauss-Newton) products that were evaluated so far."""

    @property
    def optimizer(self) -> Optimizer:
        """Of which schedulers set the lr."""

    def step(self, loss: Callable[[], Tensor]) -> Tensor:
        """Evaluate, move, and return the loss before the move, detached."""

    def state_dict(self) -> dict[str, Any]:
        """Return what resuming needs, counters included."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume."""


class Plain:
    """Steps of an ordinary optimizer: one gradient, then `step()`."""

    def __init__(self, optimizer: Optimizer, seed: int = 0) -> None:
        self.optimizer, self.gradients, self.products = optimizer, 0, 0
        self.seed = seed

    def step(self, loss: Callable[[], Tensor]) -> Tensor:
        """Make one."""
        value = self.evaluate(loss)
        self.optimizer.step()
        return value

    def evaluate(self, loss: Callable[[], Tensor]) -> Tensor:
        """Evaluate the loss and its gradient."""
        self.optimizer.zero_grad()
        value = loss()
        value.backward()
        self.gradients += 1
        return value.detach()

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state, and the counters."""
        return {"optimizer": self.optimizer.state_dict(), "gradients": self.gradients, "products": self.products}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.gradients, self.products = state["gradients"], state["products"]


class Dated(Plain):
    """Steps of an optimizer that was written for an older torch, and is warned about it."""

    def step(self, loss: Callable[[], Tensor]) -> Tensor:
        """Make one."""
        value = self.evaluate(loss)
        with quiet():
            self.optimizer.step()
        return value


class Noisy(Plain):
    """Steps of an optimizer that draws from the global generator: HeavyBall's PSGD draws its probes there."""

    def step(self, loss: Callable[[], Tensor]) -> Tensor:
        """Make one."""
        value = self.evaluate(loss)
        with noise(self.seed, self.gradients), quiet():  # which it is not about rates that change
            self.optimizer.step()
        return value


class Preconditioned(Plain):
    """Steps of PSGD through a closure: exact Hessian products on due steps, unless it whitens."""

    optimizer: psgd.PSGD

    def step(self, loss: Callable[[], Tensor]) -> Tensor:
        """Make one."""
        before = self.optimizer.param_groups[0]["updates"]
        value = self.optimizer.step(loss)
        self.gradients += 1
        if self.optimizer.source in (psgd.hessian, psgd.finite_difference):
            self.products += self.optimizer.param_groups[0]["updates"] - before
        return value.detach()


class Repeated(Plain):
    """Steps of an optimizer that evaluates the gradient as often as it likes, as L-BFGS does."""

    def step(self, loss: Callable[[], Tensor]) -> Tensor:
        """Make one."""
        values: list[Tensor] = []

        def closure() -> float:
            values.append(self.evaluate(loss))
            return float(values[-1])

        self.optimizer.step(closure)
        return values[0]


class Curved(Plain):
    """Steps of an optimizer that differentiates the gradient: AdaHessian, with one random probe."""

    def evaluate(self, loss: Callable[[], Tensor]) -> Tensor:
        """Evaluate the loss and its gradient, and keep the graph of the gradient."""
        value = loss()
        found = parameters(self.optimizer)
        for p, g in zip(found, torch.autograd.grad(value, found, create_graph=True), strict=True):
            p.grad = g
        self.gradients += 1
        return value.detach()

    def step(self, loss: Callable[[], Tensor]) -> Tensor:
        """Make one."""
        value = self.evaluate(loss)
        with noise(self.seed, self.gradients):
            self.optimizer.step()
        self.products += 1
        self.optimizer.zero_grad()  # lest parameters keep the graph alive
        return value


class Perturbed(Plain):
    """Steps of an optimizer that takes the gradient elsewhere: SAM goes uphill first."""

    def step(self, loss: Callable[[], Tensor]) -> Tensor:
        """Make one."""
        value = self.evaluate(loss)
        self.optimizer.step(lambda: float(self.evaluate(loss)))
        return value


class KFAC(Plain):
    """Steps along the natural gradient, whose Fisher matrix is Kronecker-factored by curvlinops.

    The labels are drawn from the model (the true Fisher matrix), the factors are averaged over steps, and their
    damping is that of Martens and Grosse (2015). A layer that is applied many times, as in a recurrent network,
    gets the mean over its inputs and the sum over its outputs, as curvlinops does within one application.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, seed: int = 0, *, damping: float, average: float, every: int
    ) -> None:
        super().__init__(optimizer, seed)
        self.model, self.damping, self.average, self.every = model, damping, average, every
        self.factors: dict[str, dict[str, Tensor]] = {}
        self.inverse: Any = None
        self.steps = 0

    def step(self, loss: Callable[[], Tensor]) -> Tensor:
        """Make one."""
        if not isinstance(loss, Loss):
            raise ValueError(f"K-FAC needs a Loss, which has a model and a batch, got {type(loss).__name__}")
        value = self.evaluate(loss)
        found = parameters(self.optimizer)
        try:
            with quiet():  # about factors that are inverted again in float64
                if self.steps % self.every == 0 or self.inverse is None:
                    self.invert(loss, refresh=self.steps % self.every == 0)
                directions = self.inverse @ [p.grad for p in found]
        except RuntimeError:  # of torch.linalg, or of drawing labels: it has diverged
            return value * torch.nan
        for p, g in zip(found, directions, strict=True):
            p.grad = g
        self.optimizer.step()
        self.steps += 1
        return value

    def invert(self, loss: Loss, refresh: bool) -> None:
        """Average the factors with those of a batch, and set up their inverse."""
        curvlinops = imported("curvlinops", "curvlinops-for-pytorch")
        operator = curvlinops.KFACLinearOperator(
            self.model,
            likelihood(loss.criterion),
            parameters(self.optimizer),
            [(loss.inputs, loss.targets)],
            seed=mix(self.seed, self.steps) >> 1,
            check_deterministic=False,
            separate_weight_and_bias=False,
            num_data=len(loss.targets),
            num_per_example_loss_terms=1,
            batch_size_fn=len,
        )
        with applications(self.model) as applied:
            operator.compute_kronecker_factors()
        self.gradients += refresh
        # the average starts as a plain mean, as Martens and Grosse have it
        kept = min(1 - 1 / (self.steps // self.every + 1), self.average) if refresh else 1.0
        fresh = {key: operator.state_dict()[key] for key in ("input_covariances", "gradient_covariances")}
        for key, covariances in fresh.items():
            for layer, covariance in covariances.items():
                if key == "input_covariances":
                    covariance /= applied[layer]
                if self.factors:
                    covariance.lerp_(self.factors[key][layer], kept)
        self.factors = fresh
        self.inverse = curvlinops.KFACInverseLinearOperator(operator, damping=self.damping, use_heuristic_damping=True)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the optimizer, the factors and the counters."""
        return {**super().state_dict(), "factors": self.factors, "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume."""
        super().load_state_dict(state)
        self.factors, self.steps, self.inverse = state["factors"], state["steps"], None


def likelihood(criterion: Callable[[Any, Any], Tensor]) -> nn.Module:
    """Return the loss module of a criterion of torch that is a negative log-likelihood, averaged over a batch.

    >>> likelihood(F.cross_entropy)
    CrossEntropyLoss()
    """
    known: dict[Any, type[nn.Module]] = {
        F.cross_entropy: nn.CrossEntropyLoss,
        F.binary_cross_entropy_with_logits: nn.BCEWithLogitsLoss,
        F.mse_loss: nn.MSELoss,
    }
    for function, kind in known.items():
        if criterion is function or isinstance(criterion, kind):
            return kind()
    raise ValueError(f"the criterion must be one of {', '.join(f.__name__ for f in known)}, got {criterion}")


@contextmanager
def applications(model: nn.Module) -> Iterator[dict[str, int]]:
    """Count how often each layer is applied."""
    counts: dict[str, int] = {}

    def counter(name: str) -> Callable[..., None]:
        def count(*_: Any) -> None:
            counts[name] = counts.get(name, 0) + 1

        return count

    handles = [module.register_forward_hook(counter(name)) for name, module in model.named_modules()]
    try:
        yield counts
    finally:
        for handle in handles:
            handle.remove()


TINY = torch.finfo(torch.float64).tiny


class HessianFree(Plain):
    """Truncated Newton steps of scipy: conjugate gradients on Hv, inside a trust region whose radius is the lr.

    On each batch the region starts at that radius and shrinks until a step is accepted. Directions of negative
    curvature are followed to the boundary.
    """

    def __init__(self, optimizer: Optimizer, seed: int = 0) -> None:
        super().__init__(optimizer, seed)
        self.minimize = imported("scipy.optimize", "scipy").minimize

    def step(self, loss: Callable[[], Tensor]) -> Tensor:
        """Make one."""
        found = parameters(self.optimizer)
        start = flat(found)
        radius = float(self.optimizer.param_groups[0]["lr"])
        here: Any = None
        graph: list[Tensor] = []
        values: list[Tensor] = []

        def place(x: Any) -> None:
            nonlocal here, graph
            if here is None or (x != here).any():
                vector_to_parameters(torch.from_numpy(x).to(found[0]), found)
                here, graph = x.copy(), []

        def value(x: Any) -> float:
            place(x)
            with torch.no_grad():
                values.append(loss())
            return float(values[-1])

        def gradient(x: Any) -> Any:
            place(x)
            if not graph:
                graph.extend(torch.autograd.grad(loss(), found, create_graph=True))
                self.gradients += 1
            return flat(graph)

        def product(x: Any, v: Any) -> Any:
            gradient(x)
            self.products += 1
            parts = torch.from_numpy(v).to(found[0]).split([p.numel() for p in found])
            directions = [part.view_as(p) for part, p in zip(parts, found, strict=True)]
            h = torch.autograd.grad(graph, found, directions, retain_graph=True)
            return flat(h)

        def moved(x: Any) -> None:
            if (x != start).any():
                raise StopIteration

        result = self.minimize(
            value,
            start,
            jac=gradient,
            hessp=product,
            method="trust-ncg",
            callback=moved,
            options={"initial_trust_radius": radius, "max_trust_radius": 2 * radius, "gtol": TINY, "maxiter": 8},
        )
        place(result.x)
        self.optimizer.step()  # moves nothing for want of gradients, but schedulers look for it
        return values[0]


def parameters(optimizer: Optimizer) -> list[Tensor]:
    """Return what an optimizer moves."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def flat(tensors: Sequence[Tensor]) -> Any:
    """Return tensors as one array of numpy."""
    return torch.cat([t.detach().reshape(-1) for t in tensors]).double().numpy()


@contextmanager
def noise(*numbers: int) -> Iterator[None]:
    """Make the global RNG a function of the numbers, for packages that draw from it; afterwards it is as before."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(mix(*numbers) >> 1)
        yield


@contextmanager
def quiet() -> Iterator[None]:
    """Ignore warnings of packages."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


WITHOUT_DEPENDENCIES = {
    "curvlinops-for-pytorch": (
        "curvlinops-for-pytorch backpack-for-pytorch einconv einops linear-operator opt-einsum unfoldnd"
    ),
    "heavyball": "heavyball opt-einsum",
}
"""What to install with --no-deps, as ./run does: these ask for much that is not used, torchvision among it."""


def imported(module: str, package: str) -> Any:
    """Import a module of a package that is needed only here, or say what is missing and how to install it."""
    try:
        with quiet():  # about what packages do on import, deprecated in this torch
            return importlib.import_module(module)
    except ImportError as e:
        how = "pip install 'psgd[experiments]'"
        if package in WITHOUT_DEPENDENCIES:
            how += f" && pip install --no-deps {WITHOUT_DEPENDENCIES[package]}"
        missing = e.name or module
        message = f"this method needs the package {package}, but the module {missing} cannot be imported: {how}"
        raise ImportError(message) from e
