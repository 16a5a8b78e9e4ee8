"""An experiment for tests of the frame: a noisy descent of a parabola, with all that can go wrong on request."""

from __future__ import annotations

import math
import os
import signal
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from psgd.experiments.experiment import Preset, Record, Result, State
from psgd.experiments.show import Line, Plot, Table, spread

TITLE = "Tiny"


@dataclass(frozen=True)
class Config:
    method: str = "sgd"
    lr: float = 0.1
    steps: int = 20
    pause: float = 0.0  # seconds per step
    clip: float = math.inf


def cells(preset: Preset) -> list[Config]:
    steps = {"quick": 5, "cpu": 20, "paper": 100}[preset]
    return [Config(method, steps=steps) for method in ("sgd", "momentum")]


def seeds(preset: Preset) -> range:
    return range({"quick": 2, "cpu": 3, "paper": 10}[preset])


def run(config: Config, seed: int, state: State | None = None) -> Iterator[Record]:
    x, m = (state["x"], state["m"]) if state else (torch.ones(3), torch.zeros(3))
    for step in range(state["step"] + 1 if state else 0, config.steps):
        time.sleep(config.pause)
        trace(config, step, seed)
        gradient = x + torch.randn(3)  # of the global generator, as some baselines do
        m = 0.9 * m + gradient if config.method == "momentum" else gradient
        x = x - config.lr * m
        loss = 0.5 * x.square().sum()
        now = {"step": step, "x": x.clone(), "m": m.clone()}
        yield Record(step, {"loss": loss, "path": x.tolist()}, lambda now=now: now)


def trace(config: Config, step: int, seed: int) -> None:
    """Keep a list of all steps that were made, in any process, and misbehave where the method says so."""
    if step == 0 and "TINY_PIDS" in os.environ:
        with open(os.environ["TINY_PIDS"], "a") as file:
            file.write(f"{os.getpid()}\n")
    if "TINY_TRACE" not in os.environ:
        return
    with open(os.environ["TINY_TRACE"], "a+") as file:
        file.seek(0)
        before = file.read().splitlines()
        this = f"{config.method} {seed} {step}"
        file.write(this + "\n")
    if config.method == "raises" and step == 3:
        raise RuntimeError("on purpose")
    if config.method == "dies" and step == 3 and this not in before:  # only once
        os.kill(os.getpid(), signal.SIGKILL)
    if config.method == "warns":
        warnings.warn("mind the step", stacklevel=1)


def tables(results: Sequence[Result]) -> list[Table]:
    methods = dict.fromkeys(r.config.method for r in results)
    rows = [[m, spread([r.last("loss") for r in results if r.config.method == m])] for m in methods]
    return [Table("Last loss", ["method", "loss"], rows)]


def plots(results: Sequence[Result]) -> list[Plot]:
    marks = [Line(f"{r.config.method} {r.seed}", r.series("step"), r.series("loss")) for r in results]
    return [Plot("Loss", "step", "loss", marks, y_log=True)]


def remarks(results: Sequence[Result]) -> str:
    return f"There are {len(results)} results."


def tuning(method: str) -> Any:
    return Config(method)


def score(result: Result) -> float:
    last = result.records[-1]["loss"]
    return math.inf if last is None else last
