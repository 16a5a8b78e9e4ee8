"""How white preconditioners make gradients: why some methods train a small GPT so much better than others.

    ./run python benchmarks/whiteness.py results/bench/whiteness --data ../shared/data

Each method trains the GPT of `shakespeare-tuned` for a while, at its tuned numbers. Then the network stands still, and
gradients of many batches are preconditioned by what has been learned so far. An ideal P makes all entries of Pg equally
large; how large they really are is told by quantiles of their root mean squares, over the median, for all entries that
ever have a gradient. Of AdamW, P is one over the root of its second moments.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from psgd.experiments import provenance, shakespeare
from psgd.experiments import shakespeare_tuned as experiment
from psgd.experiments.gpt import GPT
from psgd.experiments.methods import Loss
from psgd.probes import generator

METHODS: Sequence[str] = ("adamw", "psgd-kron", "psgd-lra", "psgd-xmat")
QUANTILES = (0.01, 0.05, 0.5, 0.95, 0.99)


def measured(method: str, iterations: int, batches: int, base: dict[str, Any]) -> dict[str, Any]:
    """Train, and return quantiles of the root mean squares of the entries of Pg, over their median."""
    config = experiment.Config(**base | {"method": method} | experiment.numbers(method))
    _, train, _, vocabulary = shakespeare.task(config)
    shape = {key: getattr(config, key) for key in ("block", "width", "layers", "heads")}
    model = GPT(vocabulary, generator(0), **shape)
    stepper = config.stepper(model, 0)
    peaks = [options["lr"] for options in stepper.optimizer.param_groups]

    def loss(i: int) -> Loss:
        chosen = shakespeare.batch(train, config, 0, i)
        return Loss(model, chosen[:, :-1], chosen[:, 1:], shakespeare.surprise)

    for i in range(1, iterations + 1):
        for options, peak in zip(stepper.optimizer.param_groups, peaks, strict=True):
            options["lr"] = peak * shakespeare.annealed(i, config)
        stepper.step(loss(i))
    params, apply = list(model.parameters()), preconditioner(stepper.optimizer)
    total: list[Tensor] = [torch.zeros_like(p, dtype=torch.float64) for p in params]
    seen: list[Tensor] = [torch.zeros_like(p, dtype=torch.bool) for p in params]
    for i in range(iterations + 1, iterations + batches + 1):
        g = list(torch.autograd.grad(loss(i)(), params))
        for t, s, x, y in zip(total, seen, g, apply(params, g), strict=True):
            t += y.double().square()
            s |= x != 0
    sizes = torch.cat([t[s] for t, s in zip(total, seen, strict=True)]).sqrt()
    sizes /= sizes.median()
    order = sizes.sort().values
    found = [float(order[round(q * (len(order) - 1))]) for q in QUANTILES]
    return {"quantiles": found, "entries": len(order), "updates": stepper.optimizer.param_groups[0].get("updates", 0)}


def preconditioner(optimizer: Any) -> Callable[[list[Tensor], list[Tensor]], list[Tensor]]:
    """Return P of an optimizer, as a function of parameters and gradients."""

    @torch.no_grad()
    def apply(params: list[Tensor], g: list[Tensor]) -> list[Tensor]:
        if isinstance(optimizer, torch.optim.AdamW):
            return [x / (optimizer.state[p]["exp_avg_sq"].sqrt() + 1e-8) for p, x in zip(params, g, strict=True)]
        found, given = {}, dict(zip(params, g, strict=True))
        for scope in optimizer._scopes():
            y = scope.precondition(scope.gathered(given).clone())
            found |= dict(zip(scope.held, scope.split(y), strict=True))
        return [found[p] for p in params]

    return apply


def main(arguments: list[str] | None = None) -> None:
    """Measure all, and write it to a folder."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--data", type=Path, help="where data sets are")
    parser.add_argument("--iterations", type=int, default=200)
    parser.add_argument("--batches", type=int, default=100)
    parser.add_argument("--quick", action="store_true", help="seconds, without data")
    asked = parser.parse_args(arguments)
    if asked.data:
        os.environ["PSGD_DATA"] = str(asked.data)
    torch.set_num_threads(1)
    base = vars(shakespeare.TINY) if asked.quick else vars(shakespeare.Config(**experiment.LONG))
    iterations, batches = (4, 3) if asked.quick else (asked.iterations, asked.batches)
    about = provenance.describe(iterations=iterations, batches=batches, quantiles=QUANTILES)
    methods = {method: measured(method, iterations, batches, base) for method in METHODS}
    asked.out.mkdir(parents=True, exist_ok=True)
    (asked.out / "whiteness.json").write_text(json.dumps(about | {"methods": methods}, indent=1) + "\n")


if __name__ == "__main__":
    main()
