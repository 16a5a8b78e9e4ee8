"""What test_resume.py runs in processes of their own: `python resume_worker.py first|second DIRECTORY`."""

import itertools
import sys
from pathlib import Path

import torch
from toys import batches, mlp, regression, snapshot

from psgd import (
    PSGD,
    Bernoulli,
    Dense,
    Normalized,
    Quadratic,
    XMat,
    affine,
    automatic,
    band,
    finite_difference,
    hessian,
    kron,
    lra,
    whiten,
    whiten_momentum,
)

STOP, END = 13, 26  # beyond the first ten pairs and the first balancing
SOURCES = {
    "hessian": hessian,
    "finite difference": finite_difference,
    "whiten": whiten,
    "automatic": automatic,
}
OPTIONS = {
    **{name: {"group": lra(3), "curvature": source} for name, source in SOURCES.items()},
    "xmat": {"group": XMat(), "curvature": hessian},
    "affine": {"group": affine, "curvature": hessian},
    "dense, paper's rule": {"group": Dense(), "curvature": hessian, "rule": Normalized(), "momentum": 0.0},
    "kron": {"group": kron(), "curvature": whiten_momentum, "fresh": 0.1},
    "kron, products": {"group": kron(Quadratic()), "curvature": hessian},
    "band, constants inside": {"group": band(2), "curvature": whiten},
    "by chance": {"group": lra(2), "precond_prob": Bernoulli(0.5)},
    "low-precision q": {"group": lra(3), "precond_dtype": torch.bfloat16, "curvature": whiten},
    "decay and clipping": {
        "group": XMat(),
        "weight_decay": 0.1,
        "l2": 0.01,
        "max_norm": 0.5,
        "max_value": 0.1,
    },
}
CASES = [(name, dtype) for name in OPTIONS for dtype in ("float32", "bfloat16")]


def start(case):
    """Return (model, optimizer) as at the beginning of a script."""
    name, dtype = case
    model = mlp(getattr(torch, dtype), width=4)
    model.register_parameter("unused", torch.nn.Parameter(torch.ones(3, dtype=getattr(torch, dtype))))
    options = {"lr": 0.1, "precond_prob": 0.7, **OPTIONS[name]}
    return model, PSGD(model.parameters(), **options)


def advance(model, opt, begin, end):
    """Train from step `begin` to step `end`; one parameter takes part on every third step alone."""
    stream = itertools.islice(batches(model.unused.dtype), begin, end)
    for t, (x, y) in enumerate(stream, start=begin):
        loss = regression(model, x, y)
        opt.zero_grad()
        opt.step(lambda loss=loss, t=t: loss() + (model.unused.square().sum() if t % 3 == 0 else 0))


def main(part, directory):
    torch.set_num_threads(1)
    torch.manual_seed(0 if part == "first" else 12345)  # the user's seed must not matter
    for i, case in enumerate(CASES):
        model, opt = start(case)
        advance(model, opt, 0, STOP)
        if part == "first":
            torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, directory / f"{i}.checkpoint")
        advance(model, opt, STOP, END)
        torch.save(snapshot(opt), directory / f"{i}.{part}")
        if part == "second":
            model, opt = start(case)
            saved = torch.load(directory / f"{i}.checkpoint", weights_only=True)
            model.load_state_dict(saved["model"])
            opt.load_state_dict(saved["opt"])
            advance(model, opt, STOP, END)
            torch.save(snapshot(opt), directory / f"{i}.resumed")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
