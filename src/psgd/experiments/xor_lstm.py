"""Delayed XOR with an LSTM: the paper's table of success rates, the other half of `xor`.

The paper's rates for lengths 32, 55, 64, 112: PSGD LRA 1 1 1 1; AdaHessian 1 1 0.8 0; Shampoo 1 0.8 0.6 0;
Hessian-free 1 0.6 0 0; K-FAC, SGD, AdaBelief, Adan 1 0 0 0; Apollo never. Rates are tuned for the LSTM, at length 32.

The cpu preset has 2,000 iterations, as tuning has, and one seed for all but PSGD. Hessian-free is not in it: many
second derivatives of the LSTM's loop in every iteration take longer there than all other methods together.
"""

from __future__ import annotations

import dataclasses

from psgd.experiments import xor
from psgd.experiments.experiment import Preset
from psgd.experiments.xor import Config, lrs, plots, remarks, run, score, seeds, seeds_for, tables

__all__ = [
    "TITLE",
    "Config",
    "cells",
    "lrs",
    "plots",
    "remarks",
    "run",
    "score",
    "seeds",
    "seeds_for",
    "tables",
    "tuning",
]

TITLE = "Delayed XOR, LSTM"

BUDGET = 2000
"""Iterations on a CPU, and in trials of rates."""


def cells(preset: Preset) -> list[Config]:
    """Return one for each method and length, all of one budget."""
    found = [
        dataclasses.replace(config, net="lstm", lr=xor.learning_rate(config.method, "xor-lstm"))
        for config in xor.cells(preset)
    ]
    if preset == "cpu":
        return [dataclasses.replace(config, iterations=BUDGET) for config in found if config.method != "hessian-free"]
    return found


def tuning(method: str) -> Config:
    """Return a shorter run of length 32."""
    return dataclasses.replace(xor.tuning(method), net="lstm", iterations=BUDGET)
