"""A job in a process of its own: `train` runs 12 steps and saves after 6, `resume` loads that file and goes on."""

import sys
from pathlib import Path
from typing import Any

import torch
from toys import batches, mlp, regression

import psgd
from psgd import PSGD, XMat, affine, finite_difference, hessian, lra, whiten

HALF, ALL = 6, 12
EVERY_OTHER = {"lr": 0.05, "precond_prob": 0.5, "precond_lr": 0.3}
SETTINGS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    f"{curvature}-{name}-{dtype}": (dtype, {"group": group, "curvature": curvature, **EVERY_OTHER})
    for dtype in (torch.float32, torch.bfloat16)
    for curvature in (hessian, finite_difference, whiten)
    for name, group in {"lra": lra(2), "xmat": XMat(), "affine": affine}.items()
} | {
    "automatic": (torch.float32, {"group": lra(2), **EVERY_OTHER}),
    "bfloat16 Q": (torch.float32, {"group": lra(2), "precond_dtype": torch.bfloat16, **EVERY_OTHER}),
    "float32 Q": (torch.bfloat16, {"group": lra(2), "precond_dtype": torch.float32, **EVERY_OTHER}),
    "Bernoulli": (torch.float32, EVERY_OTHER | {"precond_prob": psgd.Bernoulli(0.5), "momentum": 0.0}),
}


def run(name: str, file: Path, start: int) -> list[torch.Tensor]:
    """Make the steps from `start` on, having loaded what was saved then; save half-way."""
    dtype, options = SETTINGS[name]
    model = mlp(dtype)
    opt = PSGD(model.parameters(), **options)
    if start:
        saved = torch.load(file, weights_only=True)
        model.load_state_dict(saved["model"])
        opt.load_state_dict(saved["opt"])
    for step, (x, y) in zip(range(ALL), batches(dtype), strict=False):
        if step < start:
            continue
        if options.get("curvature") is whiten:
            opt.zero_grad()
            regression(model, x, y)().backward()
            opt.step()
        else:
            opt.step(regression(model, x, y))
        if step + 1 == HALF and not start:
            torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, file)
    return [p.detach() for p in model.parameters()]


if __name__ == "__main__":
    what, seed, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    torch.manual_seed(seed)  # the optimizer must not care
    start = {"train": 0, "resume": HALF}[what]
    final = {name: run(name, folder / f"{i}.pt", start) for i, name in enumerate(SETTINGS)}
    torch.save(final, folder / f"{what}.final")
