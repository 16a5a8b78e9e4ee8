"""Draw the pictures of docs/diagnostics.md: `./run python docs/make_diagnostics_page.py`, about three minutes."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import psgd
from psgd.diagnostics import pictures
from psgd.diagnostics.flatness import flatness
from psgd.diagnostics.landscape import loss_along, sharpest_and_flattest
from psgd.diagnostics.operators import hessian_operator, inverse_operator, preconditioned
from psgd.diagnostics.spectral import spectral_density

HERE = Path(__file__).parent / "diagnostics"
Batch = tuple[Tensor, Tensor]


def spirals(examples: int, seed: int) -> Batch:
    """Two classes on two arms of a noisy spiral."""
    g = torch.Generator().manual_seed(seed)
    turn, arm = 2 * math.pi * torch.rand(examples, generator=g), torch.arange(examples) % 2
    angle = turn + math.pi * arm
    x = (turn[:, None] / 2) * torch.stack((angle.cos(), angle.sin()), 1)
    return x + 0.2 * torch.randn(examples, 2, generator=g), arm


def network(seed: int) -> nn.Module:
    """354 parameters."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2))


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the cross entropy with a small L2 penalty, without which H would be singular."""
    return cross_entropy(model(batch[0]), batch[1]) + 5e-4 * sum(p.square().sum() for p in model.parameters())


def train(model: nn.Module, opt: torch.optim.Optimizer, data: Batch, steps: int) -> list[dict[str, float]]:
    """Train on batches of 100; return the diagnostics of every tenth step, if there are any."""
    rows, g = [], torch.Generator().manual_seed(0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, steps)
    for step in range(steps):
        some = torch.randint(len(data[0]), (100,), generator=g)

        def closure(some: Tensor = some) -> Tensor:
            opt.zero_grad()
            value = loss(model, (data[0][some], data[1][some]))
            value.backward()
            return value

        opt.step(closure)
        schedule.step()
        if step % 10 == 9 and isinstance(opt, psgd.PSGD):
            rows.append({"step": step + 1} | opt.diagnostics())
    return rows


def error(model: nn.Module, batch: Batch) -> float:
    """Return the share of wrong answers."""
    with torch.no_grad():
        return float((model(batch[0]).argmax(-1) != batch[1]).double().mean())


def main() -> None:
    """Draw everything."""
    HERE.mkdir(exist_ok=True)
    data, test = spirals(400, 0), spirals(4000, 1)
    model = network(0)
    rows = train(model, newton(model), data, 2000)
    n = sum(p.numel() for p in model.parameters())
    save(pictures.eigenvalue_dynamics(rows, n), "dynamics")

    found = flatness(model, loss, [data], steps=1000)
    hessian = hessian_operator(lambda: loss(model, data), model)
    before = spectral_density(hessian, steps=n)  # small enough to go all the way
    after = spectral_density(preconditioned(hessian, found.group, found.q), steps=n)
    save(pictures.spectra(before, after), "spectra")

    sharp, flat = sharpest_and_flattest(found.group, found.q, n)
    model_of_h, t = inverse_operator(found.group, found.q, n), torch.linspace(-1.5, 1.5, 61)
    lines = {"sharpest": sharp, "flattest": flat}
    profiles = {name: loss_along(model, lambda: loss(model, data), e, t) for name, e in lines.items()}
    expected = {name: float(e @ model_of_h(e)) for name, e in lines.items()}
    save(pictures.directions(t, profiles, expected), "directions")

    group, g = psgd.band(4), torch.Generator().manual_seed(0)
    near = (torch.arange(16)[:, None] - torch.arange(16)).abs()
    h = torch.where(near < 4, (-0.6) ** near * (1 + torch.rand(16, generator=g)), 0.0)
    h, q = h @ h.mT, group.init(16, generator=g)
    for _ in range(400):
        v = torch.randn(4, 16, generator=g)
        q = group.fit(q, v, v @ h, lr=0.2)
    save(pictures.matrices(group, q, 16), "matrices")

    pairs: tuple[list, list] = ([], [])
    for seed in range(8):
        for points, make in zip(pairs, (adam, newton), strict=True):
            one = network(seed)
            train(one, make(one), data, 1000)
            seen = flatness(one, loss, [data], steps=300)
            points.append((seen.loss, seen.half_log_det_h, error(one, test)))
    save(pictures.flatness_pairs(*pairs), "pairs")


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """Adam at a rate that suits this problem."""
    return torch.optim.Adam(model.parameters(), lr=0.01)


def newton(model: nn.Module) -> torch.optim.Optimizer:
    """PSGD with the paper's group."""
    return psgd.PSGD(model.parameters(), psgd.lra(10), lr=0.3, precond_prob=1.0, precond_lr=0.3)


def save(figure: object, name: str) -> None:
    """Write one picture."""
    figure.savefig(HERE / f"{name}.png")  # type: ignore[attr-defined]


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
