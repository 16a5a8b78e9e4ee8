"""Small problems with known curvature."""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from psgd.diagnostics.operators import Operator


def symmetric(eigenvalues: Tensor, seed: int = 0) -> Tensor:
    """A dense matrix with these eigenvalues."""
    n = len(eigenvalues)
    basis, _ = torch.linalg.qr(torch.randn(n, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64))
    return basis @ torch.diag(eigenvalues.double()) @ basis.mT


def operator(matrix: Tensor) -> Operator:
    """Its products alone."""
    return Operator(len(matrix), lambda x: x @ matrix.mT, matrix.dtype)


class Quadratic(nn.Module):
    """f(θ) = ½θᵀHθ, with a batch that counts how often it was looked at."""

    def __init__(self, hessian: Tensor):
        super().__init__()
        self.register_buffer("hessian", hessian.float())
        start = torch.randn(len(hessian), generator=torch.Generator().manual_seed(5))
        self.theta = nn.Parameter(start)

    def forward(self, scale):
        return scale * self.theta @ self.hessian @ self.theta / 2


def quadratic_loss(model, scale):
    return model(scale)


def network() -> nn.Module:
    """A network of 123 parameters in double precision, with a buffer that a forward pass would move."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 9), nn.BatchNorm1d(9), nn.Tanh(), nn.Linear(9, 6))
        return model.double()


def batches(count: int = 2) -> list[tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(1)
    return [
        (torch.randn(20, 4, generator=g, dtype=torch.float64), torch.randint(6, (20,), generator=g))
        for _ in range(count)
    ]


def loss(model, batch):
    return cross_entropy(model(batch[0]), batch[1])


def dense_hessian(model: nn.Module, data) -> Tensor:
    """The Hessian of the mean loss, by forward-over-reverse of torch.func on one flat vector."""
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    shapes = [p.shape for p in model.parameters() if p.requires_grad]
    theta = torch.cat([p.detach().reshape(-1) for p in model.parameters() if p.requires_grad])
    buffers = {name: b.clone() for name, b in model.named_buffers()}

    def value(flat):
        pieces = flat.split([s.numel() for s in shapes])
        params = {n: t.view(s) for n, t, s in zip(names, pieces, shapes, strict=True)}
        held = {name: b.clone() for name, b in buffers.items()}
        return sum(cross_entropy(torch.func.functional_call(model, params | held, (x,)), y) for x, y in data) / len(
            data
        )

    return torch.autograd.functional.hessian(value, theta)
