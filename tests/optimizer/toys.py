"""Small problems with known answers, and a few ways to look at an optimizer."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from psgd import PSGD

EVERY_STEP = {"momentum": 0.0, "precond_prob": 1.0, "max_rms": None}
"""The bare method: no averaging, no clipping, an update of Q on each step."""


def spectrum(*eigenvalues: float, seed: int = 0) -> Tensor:
    """Return a symmetric float64 matrix with these eigenvalues in a random basis."""
    rng = torch.Generator().manual_seed(seed)
    n = len(eigenvalues)
    basis = torch.linalg.qr(torch.randn(n, n, generator=rng, dtype=torch.float64)).Q
    return basis @ torch.tensor(eigenvalues, dtype=torch.float64).diag() @ basis.mT


def magnitude(h: Tensor) -> Tensor:
    """Return |H|, the matrix with the absolute eigenvalues."""
    values, basis = torch.linalg.eigh(h)
    return basis @ values.abs().diag() @ basis.mT


def quadratic(h: Tensor, *params: Tensor) -> Callable[[], Tensor]:
    """Return θ ↦ ½θᵀHθ over the concatenation of the parameters."""

    def loss() -> Tensor:
        x = torch.cat([p.reshape(-1) for p in params])
        return 0.5 * x @ h.to(x) @ x

    return loss


def rosenbrock(x: Tensor) -> Tensor:
    """Return (1 − x₀)² + 100(x₁ − x₀²)²."""
    return (1 - x[0]) ** 2 + 100 * (x[1] - x[0] ** 2) ** 2


def preconditioner(opt: PSGD, *params: Tensor) -> Tensor:
    """Return the dense P of the scope that holds these parameters, from the state that a checkpoint would hold."""
    places = ((s, i) for s in opt._scopes() for i, unit in enumerate(s.units) if unit.params[0] is params[0])
    scope, i = next(places)
    eye = torch.eye(scope.n, dtype=scope.dtype)
    whole = torch.stack([scope.group.precondition(scope.point, e) for e in eye]).double()
    size = scope.units[i].n
    return whole[i * size : (i + 1) * size, i * size : (i + 1) * size]


def cosine(a: Tensor, b: Tensor) -> float:
    """Return the cosine of the angle between two vectors."""
    return float(nn.functional.cosine_similarity(a.flatten().double(), b.flatten().double(), 0))


def mlp(dtype: torch.dtype = torch.float32, width: int = 5) -> nn.Module:
    """Return a small smooth network, the same each time."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 3)).to(dtype)


def batches(dtype: torch.dtype = torch.float32) -> Iterator[tuple[Tensor, Tensor]]:
    """Iterate over an endless stream of regression data, the same each time."""
    rng = torch.Generator().manual_seed(1)
    while True:
        x = torch.randn(16, 4, generator=rng).to(dtype)
        yield x, torch.stack((x.sum(-1), x.prod(-1), x[:, 0] * x[:, 1]), -1)


def regression(model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], Tensor]:
    """Return a closure that returns the loss, without backward."""
    return lambda: nn.functional.mse_loss(model(x), y)


def train(opt: PSGD, model: nn.Module, steps: int, closure: bool = True) -> list[float]:
    """Train on the stream, by closures or by plain steps, and return the losses."""
    losses, dtype = [], next(model.parameters()).dtype
    for _, (x, y) in zip(range(steps), batches(dtype), strict=False):
        loss = regression(model, x, y)
        if closure:
            out = opt.step(loss)
        else:
            opt.zero_grad()
            out = loss()
            out.backward()
            opt.step()
        losses.append(out.item())
    return losses


def snapshot(opt: PSGD) -> list[Any]:
    """Return a copy of the parameters and of all state, in order."""
    found: list[Any] = []

    def walk(value: Any) -> None:
        if isinstance(value, dict):
            for key in sorted(value):
                walk(value[key])
        else:
            found.append(value.detach().clone() if isinstance(value, Tensor) else value)

    for pg in opt.param_groups:
        for p in pg["params"]:
            walk(p)
            walk(opt.state.get(p, {}))
    return found


def same(a: Any, b: Any) -> bool:
    """Whether two snapshots (or tensors, or lists of them) agree in every bit."""
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    return bool(a == b)
