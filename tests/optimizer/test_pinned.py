"""Losses of five settings, pinned in pinned.json: a release cannot drift silently.

A change of the method or of a default is made on purpose, with `python tests/optimizer/test_pinned.py` to pin it anew.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from toys import mlp, rosenbrock, train

from psgd import PSGD, Bernoulli, Dense, Normalized, XMat, affine, finite_difference, hessian, lra, whiten

FILE = Path(__file__).with_name("pinned.json")


def network(closure: bool = True, **options) -> list[float]:
    model = mlp(torch.float64)  # the rounding of float32 differs between machines, and grows
    return train(PSGD(model.parameters(), **options), model, 40, closure)[::4]


def valley() -> list[float]:
    x = torch.tensor([-1.0, 1.0], dtype=torch.float64, requires_grad=True)
    opt = PSGD([x], Dense(), lr=1.0, momentum=0.0, precond_prob=1.0, precond_lr=0.5, rule=Normalized())
    return [opt.step(lambda: rosenbrock(x)).item() for _ in range(40)][::4]


SETTINGS: dict[str, Callable[[], list[float]]] = {
    "defaults": network,
    "defaults, plain steps, affine, decoupled decay": lambda: network(
        closure=False, group=affine, weight_decay=0.1, curvature=whiten
    ),
    "finite differences, XMat, l2, by chance": lambda: network(
        group=XMat(), curvature=finite_difference, l2=0.01, precond_prob=Bernoulli(0.5), seed=3
    ),
    "the paper's lra": lambda: network(
        group=lra(2),
        curvature=hessian,
        rule=Normalized(),
        momentum=0.0,
        init_scale=1.0,
        max_rms=None,
        max_norm=1.0,
        precond_prob=1.0,
    ),
    "Rosenbrock": valley,
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_losses_are_those_that_were_pinned(setting):
    pinned = json.loads(FILE.read_text())["losses"][setting]
    assert SETTINGS[setting]() == pytest.approx(pinned, rel=1e-6, abs=1e-12)


def test_every_pinned_setting_is_tested():
    assert set(json.loads(FILE.read_text())["losses"]) == set(SETTINGS)


if __name__ == "__main__":
    content = {
        "regenerate on purpose with": "PYTHONPATH=src python tests/optimizer/test_pinned.py",
        "losses": {name: run() for name, run in SETTINGS.items()},
    }
    FILE.write_text(json.dumps(content, indent=1) + "\n")
