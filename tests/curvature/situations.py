"""The situations of the Hessian-product matrix: small models, each with a loss, in float32 or for reference.

A situation is a function of the dtype. In float64 it leaves out what only float32 can do (compilation, autocast),
so that a central difference of its gradients is a reference for every other way to a Hessian product.
"""

import contextlib
import warnings

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from psgd import PSGD

F32, F64 = torch.float32, torch.float64


class Recorder(PSGD):
    """PSGD that keeps (θ, v, h) of every update, as dictionaries by parameter; h is None if it whitened."""

    def _update(self, due, v, h, out):
        self.__dict__.setdefault("pairs", []).append(({p: p.detach().clone() for p in v}, v, h))
        super()._update(due, v, h, out)


class Lambda(nn.Module):
    def __init__(self, function, **modules):
        super().__init__()
        self.function = function
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x):
        return self.function(self, x)


def regression(make, inputs=(16, 6), outputs=3, context=contextlib.nullcontext):
    """A situation: mean square error of a model on fixed random data."""

    def situation(dtype):
        torch.manual_seed(0)
        model = make().to(dtype)
        x, y = torch.randn(inputs).to(dtype), torch.randn(inputs[0], outputs).to(dtype)

        def loss():
            with context() if dtype == F32 else contextlib.nullcontext():
                return F.mse_loss(model(x).float() if dtype == F32 else model(x), y)

        return model, loss

    return situation


def net(activation=nn.Tanh, wrap=lambda m: m, hidden=8):
    return nn.Sequential(wrap(nn.Linear(6, hidden)), activation(), wrap(nn.Linear(hidden, 3)))


def conv():
    return nn.Sequential(
        nn.Unflatten(1, (1, 6, 6)),
        nn.Conv2d(1, 3, 3),
        nn.GELU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(12, 3),
    )


def recurrent(cell):
    def run(self, x):
        return self.out(self.cell(x.unflatten(1, (3, 2)))[0][:, -1])

    return lambda: Lambda(run, cell=cell(2, 5, batch_first=True), out=nn.Linear(5, 3))


def embedding(cls):
    def run(self, x):
        words = (x * 3).long().clamp(-4, 4) + 4
        e = self.table(words)
        return self.out(torch.tanh(e if e.ndim == 2 else e.mean(1)))

    return lambda: Lambda(run, table=cls(9, 4), out=nn.Linear(4, 3))


def attention():
    def run(self, x):
        q = self.into(x.unflatten(1, (3, 2)))
        return self.out(F.scaled_dot_product_attention(*q.unsqueeze(1).chunk(3, -1)).flatten(1))

    return Lambda(run, into=nn.Linear(2, 12), out=nn.Linear(12, 3))


def checkpointed(use_reentrant):
    def run(self, x):
        return self.out(checkpoint(self.body, x.requires_grad_(use_reentrant), use_reentrant=use_reentrant))

    return lambda: Lambda(run, body=nn.Sequential(nn.Linear(6, 8), nn.Tanh()), out=nn.Linear(8, 3))


class OnceCube(torch.autograd.Function):
    """x³ whose backward is cut from the graph."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * g


class CtxCube(torch.autograd.Function):
    """x³ that keeps a detached tensor on ctx: its second derivative is silently zero."""

    @staticmethod
    def forward(ctx, x):
        ctx.x = x.detach()
        return x**3

    @staticmethod
    def backward(ctx, g):
        return 3 * ctx.x**2 * g


class GoodCube(OnceCube):
    """x³ as it should be."""

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * g


def cube(function):
    class Cube(nn.Module):
        def forward(self, x):
            return function.apply(x)

    return Cube


def distances(self, x):
    return torch.cdist(self.into(x), self.centres)


def with_centres():
    model = Lambda(distances, into=nn.Linear(6, 4))
    model.centres = nn.Parameter(torch.randn(3, 4))
    return model


def ctc(dtype):
    torch.manual_seed(0)
    model = nn.Linear(4, 5).to(dtype)
    x, target = torch.randn(7, 2, 4).to(dtype), torch.randint(1, 5, (2, 3))
    lengths, ends = torch.full((2,), 7), torch.full((2,), 3)
    return model, lambda: F.ctc_loss(F.log_softmax(model(x), -1), target, lengths, ends)


def margin(dtype):
    torch.manual_seed(0)
    model = net().to(dtype)
    x = torch.randn(16, 6).to(dtype)
    return model, lambda: F.multi_margin_loss(model(x), torch.arange(16) % 3, p=2)


def old_weight_norm(module):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.utils.weight_norm(module)


def spectral(dtype, vectors=None):
    """Spectral norm, whose power iteration keeps vectors in buffers and advances them in every evaluation."""

    def first(linear):
        return parametrizations.spectral_norm(linear) if linear.in_features == 6 else linear

    model, loss = regression(lambda: net(wrap=first))(dtype)
    norm = model[0].parametrizations.weight[0]

    def same_vectors(*_):
        norm._v.copy_(vectors)

    if vectors is not None:
        norm.register_forward_pre_hook(same_vectors)
    return model, loss


def compiled(backend):
    def situation(dtype):
        model, _ = regression(net)(dtype)
        forward = torch.compile(model, backend=backend) if dtype == F32 else model
        x, y = torch.randn(16, 6).to(dtype), torch.randn(16, 3).to(dtype)
        return model, lambda: F.mse_loss(forward(x), y)

    return situation


def bf16():
    return torch.autocast("cpu", torch.bfloat16)


EXACT = {
    "mlp": regression(net),
    "hardswish": regression(lambda: net(nn.Hardswish)),
    "relu": regression(lambda: net(nn.ReLU, hidden=32), inputs=(64, 6)),
    "conv": regression(conv, inputs=(16, 36)),
    "layer norm": regression(lambda: nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.SiLU(), nn.Linear(8, 3))),
    "group norm": regression(lambda: nn.Sequential(nn.Linear(6, 8), nn.GroupNorm(2, 8), nn.Tanh(), nn.Linear(8, 3))),
    "batch norm": regression(lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))),
    "gru": regression(recurrent(nn.GRU)),
    "rnn": regression(recurrent(nn.RNN)),
    "lstm": regression(recurrent(nn.LSTM)),
    "embedding": regression(embedding(nn.Embedding)),
    "checkpoint": regression(checkpointed(use_reentrant=False)),
    "save_on_cpu": regression(net, context=torch.autograd.graph.save_on_cpu),
    "sdpa math": regression(attention, context=lambda: sdpa_kernel(SDPBackend.MATH)),
    "custom function": regression(lambda: net(cube(GoodCube))),
}

# name: (situation, what the one warning says)
FINITE_DIFFERENCE = {
    "compile aot_eager": (compiled("aot_eager"), "double backward|donated buffers"),
    "checkpoint reentrant": (regression(checkpointed(use_reentrant=True)), "use_reentrant"),
    "sdpa flash": (regression(attention), "scaled_dot_product_flash_attention"),
    "embedding bag": (regression(embedding(nn.EmbeddingBag)), "embedding_bag"),
    "ctc": (ctc, "ctc_loss"),
    "cdist": (regression(with_centres), "cdist"),
    "hardsigmoid": (regression(lambda: net(nn.Hardsigmoid)), "hardsigmoid"),
    "margin loss": (margin, "multi_margin_loss"),
    "once_differentiable": (regression(lambda: net(cube(OnceCube))), "once_differentiable"),
    "tensor on ctx": (regression(lambda: net(cube(CtxCube))), "disagree"),
    "old weight_norm": (regression(lambda: net(wrap=old_weight_norm)), "disagree"),
    "weight_norm": (regression(lambda: net(wrap=parametrizations.weight_norm)), "disagree"),
}


def reference(situation, theta, v):
    """Hv in float64 by a central difference of gradients, at the parameters theta."""
    model, loss = situation(F64)
    params = [p for p in model.parameters() if p.requires_grad]

    def gradient(eps):
        for p, t, vi in zip(params, theta.values(), v.values(), strict=True):
            p.data.copy_(t.double() + eps * vi.double())
        model.zero_grad()
        loss().backward()
        return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in params]

    eps = 1e-6
    return [(a - b) / (2 * eps) for a, b in zip(gradient(eps), gradient(-eps), strict=True)]


def error(h, expected):
    """‖h − expected‖/‖expected‖ over all parameters."""
    difference = [(a.double() - b).square().sum() for a, b in zip(h, expected, strict=True)]
    return (sum(difference) / sum(b.square().sum() for b in expected)).sqrt().item()


def cosine(h, expected):
    """The cosine between h and expected over all parameters."""
    h, expected = (torch.cat([t.double().flatten() for t in ts]) for ts in (h, expected))
    return torch.cosine_similarity(h, expected, 0).item()


def trained(situation, steps=4, **options):
    """A Recorder after some automatic steps, with a closure that returns the loss."""
    model, loss = situation(F32)
    opt = Recorder(model.parameters(), lr=0.05, model=model, **options)
    for _ in range(steps):
        opt.step(loss)
    return opt
