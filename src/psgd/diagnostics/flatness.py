"""How flat a minimum is: fit a preconditioner where the model stands, and read ½ log det |H| off it.

The paper's dummy optimizer, which fits and does not step. For any model, whatever trained it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from psgd.diagnostics.operators import Operator, hessian_operator, preconditioned, trainable
from psgd.diagnostics.preserve import preserved
from psgd.diagnostics.reports import beside, tails
from psgd.diagnostics.spectral import Estimate, spectral_density
from psgd.group import Group, Point
from psgd.groups.direct_sum import DirectSum
from psgd.groups.named import lra
from psgd.groups.padded import Padded
from psgd.probes import generator, mix
from psgd.step_size import Normalized
from psgd.unit import real

_BALANCE_EVERY = 10


@dataclass(frozen=True)
class Flatness:
    """What `flatness` found; smaller is flatter."""

    loss: float
    log_det_q: float
    description_length: float
    """examples · loss − ½ log det P, in nats: data, and parameters."""
    misfit: Estimate
    """½ log det |P^½HP^½|: what −½ log det P lacks of ½ log det |H|, with its standard error over probes."""
    converged: bool
    """Whether the geometric mean of |λ| of P^½HP^½ is within `tol` of 1: whether −½ log det P may be trusted."""
    sharpest: tuple[float, ...]
    """The largest eigenvalues of P⁻¹ ≈ |H|."""
    flattest: tuple[float, ...]
    """The smallest."""
    group: Group
    q: Point

    @property
    def log_det_p(self) -> float:
        """log det P = 2 log det Q."""
        return 2 * self.log_det_q

    @property
    def half_log_det_h(self) -> float:
        """−½ log det P ≈ ½ log det |H|. The quantity of the paper's figure, whose axis says −log det P."""
        return -self.log_det_q

    @property
    def corrected(self) -> Estimate:
        """½ log det |H| with what the fit missed put back: right for any P, the surer the better P fits."""
        return Estimate(self.half_log_det_h + self.misfit.value, self.misfit.error)


def flatness(
    model: nn.Module,
    loss: Callable[[Any, Any], Tensor],
    data: Iterable[Any],
    group: Group | Padded | Callable[[tuple[int, ...]], Group] = lra(10),  # noqa: B008 - frozen
    *,
    batches: int = 8,
    steps: int = 500,
    probes: int = 8,
    precond_lr: float = 0.5,
    examples: float = 1.0,
    tol: float = 0.05,
    seed: int = 0,
) -> Flatness:
    """Fit a preconditioner to the Hessian at the model's parameters, which stay where they are.

    H is that of the mean of `loss(model, batch)` over the first `batches` batches of the data. Buffers, gradients,
    training modes and random numbers are left as they were. Where H is singular, −½ log det P keeps falling with
    more steps, and `misfit` says so.

    Args:
        model: in the mode, training or evaluation, that it is to be looked at in.
        loss: a function of the model and a batch.
        data: batches, as from a DataLoader.
        group: one for all parameters, or a rule from a tensor's shape to its own.
        batches: how many of them H is averaged over.
        steps: of the fit, each on `probes` new Hessian products.
        probes: of each step, which share one gradient.
        precond_lr: μ at the start; it falls to a hundredth.
        examples: how often the loss counts in the description length: the number of training examples for the
            paper's total cross entropy.
        tol: of `converged`.
        seed: of the probes.

    >>> model = nn.Linear(2, 1, bias=False)
    >>> x = torch.tensor([[3.0, 0.0], [0.0, 1.0]])  # H of ½ mean (xθ)² is diag(9, 1)/2
    >>> found = flatness(model, lambda model, x: model(x).square().mean() / 2, [x], steps=200)
    >>> round(found.half_log_det_h, 1), found.converged  # ½ log(9/4)
    (0.4, True)
    """
    params = trainable(model)
    with preserved(model, params):
        held = list(itertools.islice(data, batches))
        if not held:
            raise ValueError("flatness needs at least one batch, got none (is the loader exhausted?)")
        losses = [lambda batch=batch: loss(model, batch) for batch in held]
        hessian, whole = beside(hessian_operator(losses, model), joint(group, params))
        value = _mean_loss(losses)
        q = fit(hessian, whole, steps=steps, probes=probes, lr=precond_lr, seed=seed)
        density = spectral_density(preconditioned(hessian, whole, q), steps=20, seed=mix(seed, -1))
    misfit = density.sum(lambda values: values.abs().log() / 2)
    log_det = float(whole.logabsdet(q, hessian.n))
    ends = tails(whole, q, hessian.n, k=5)
    return Flatness(
        loss=value,
        log_det_q=log_det,
        description_length=examples * value - log_det,
        misfit=misfit,
        converged=abs(misfit.value) <= tol * hessian.n / 2,
        sharpest=tuple((1 / ends.smallest).tolist()),
        flattest=tuple((1 / ends.largest).tolist()),
        group=whole,
        q=q,
    )


def joint(group: Group | Padded | Callable[[tuple[int, ...]], Group], params: Sequence[Tensor]) -> Group | Padded:
    """Return one group for all parameters: of a rule, the direct sum over them."""
    if isinstance(group, (Group, Padded)):
        return group
    shapes = [tuple(real(p).shape) or (1,) for p in params]
    return DirectSum(tuple(real(p).numel() for p in params), tuple(group(shape) for shape in shapes))


def fit(hessian: Operator, group: Group, *, steps: int, probes: int, lr: float = 0.5, seed: int = 0) -> Point:
    """Fit P to |H|⁻¹ by the paper's steps of relative size μ, which falls to a hundredth.

    >>> from psgd import Diagonal
    >>> a = torch.tensor([1.0, 4.0])
    >>> fit(Operator(2, lambda x: a * x), Diagonal(), steps=100, probes=1)["d"].square().round(decimals=2)
    tensor([1.0000, 0.2500])
    """
    if steps < 1 or probes < 1:
        raise ValueError(f"a fit needs steps >= 1 and probes >= 1, got steps={steps} and probes={probes}")
    where: dict[str, Any] = {"generator": generator(seed, -1), "dtype": hessian.dtype, "device": hessian.device}
    q: Point | None = None
    for t in range(steps):
        v = torch.stack([hessian.normal(generator(seed, t, i)) for i in range(probes)])
        h = hessian(v)
        if q is None:  # the best multiple of I, where the group has that
            scale = (v.norm() / h.norm().clamp_min(torch.finfo(h.dtype).tiny)).sqrt()
            q = group.init(hessian.n, scale=scale if group.scalable else 1.0, **where)
        rate = lr * 0.01 ** (t / max(1, steps - 1))
        q = group.fit(q, v, h, lr=rate, coin=bool(mix(seed, t) & 1), rule=Normalized())
        q = group.balance(q) if t % _BALANCE_EVERY == _BALANCE_EVERY - 1 else q
    assert q is not None
    return q


def _mean_loss(losses: Sequence[Callable[[], Tensor]]) -> float:
    with torch.no_grad():
        return sum(float(one()) for one in losses) / len(losses)
