"""How fast recurrent networks are: `python benchmarks/recurrent.py`, or with lengths, e.g. `… 32 112`.

Gradient, and gradient with Hessian product, of the delayed XOR's loss: ours (`psgd.experiments.recurrent`), autograd on
the plain loop, torch.compile of the plain loop, and torch's own nn.RNN and nn.LSTM (whose gates do not see the cell
state: less work than ours). Also a whole step of SGD, and of PSGD with the paper's settings. One thread. All variants
take turns, and the least CPU time counts, so that the ratios hold on a busy machine as well.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from psgd.experiments.methods import Loss
from psgd.experiments.recurrent import LSTM, RNN, PlainLSTM, PlainRNN
from psgd.experiments.xor import Config, sequences, start
from psgd.probes import generator

BATCH, HIDDEN, TURNS = 128, 30, 10


class Torch(nn.Module):
    """A module of torch, then one number."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self.out = module, nn.Linear(HIDDEN, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.module(x)[0][:, -1])


def gradient(net: nn.Module, x: Tensor, y: Tensor) -> Callable[[], object]:
    params = list(net.parameters())
    return lambda: torch.autograd.grad(F.binary_cross_entropy_with_logits(net(x), y), params)


def product(net: nn.Module, x: Tensor, y: Tensor) -> Callable[[], object]:
    params = list(net.parameters())
    v = [torch.randn_like(p) for p in params]

    def both() -> object:
        g = torch.autograd.grad(F.binary_cross_entropy_with_logits(net(x), y), params, create_graph=True)
        return torch.autograd.grad(g, params, v)

    return both


def compiled(net: nn.Module, x: Tensor, y: Tensor) -> tuple[Callable[[], object], Callable[[], object]]:
    """Both as whole functions: what torch.compile made cannot be differentiated twice."""
    params = {k: p.detach() for k, p in net.named_parameters()}
    v = {k: torch.randn_like(p) for k, p in params.items()}

    def loss(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(torch.func.functional_call(net, params, (x,)), y)

    grad = torch.func.grad(loss)

    def both(params: dict[str, Tensor], x: Tensor, y: Tensor, v: dict[str, Tensor]) -> object:
        g, pull = torch.func.vjp(lambda p: grad(p, x, y), params)
        return g, pull(v)

    grad, both = torch.compile(grad), torch.compile(both)
    return lambda: grad(params, x, y), lambda: both(params, x, y, v)


def step(config: Config, x: Tensor, y: Tensor) -> Callable[[], object]:
    model, stepper = start(config, 0)
    return lambda: stepper.step(Loss(model, x, y, F.binary_cross_entropy_with_logits))


def minima(variants: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Milliseconds of each."""
    for f in variants.values():
        f()
    best = dict.fromkeys(variants, float("inf"))
    for _ in range(TURNS):
        for name, f in variants.items():
            begin = time.process_time()
            f()
            best[name] = min(best[name], 1000 * (time.process_time() - begin))
    return best


def main(lengths: list[int]) -> None:
    print("| net | length | variant | gradient, ms | with product, ms | product, ours = 1 |")
    print("| --- | --- | --- | --- | --- | --- |")
    nets = {"rnn": (RNN, PlainRNN, nn.RNN), "lstm": (LSTM, PlainLSTM, nn.LSTM)}
    for name, (ours, plain, module) in nets.items():
        for length in lengths:
            x, y = sequences(length, BATCH, 0)
            found = {
                "ours": ours(2, HIDDEN, generator(0)),
                "plain loop": plain(2, HIDDEN, generator(0)),
                f"nn.{module.__name__}": Torch(module(2, HIDDEN, batch_first=True)),
            }
            variants = {}
            for label, net in found.items():
                variants |= {f"{label}/gradient": gradient(net, x, y), f"{label}/product": product(net, x, y)}
            if length <= 32:  # compiling takes minutes, and grows with the length
                begin = time.process_time()
                one, two = compiled(plain(2, HIDDEN, generator(0)), x, y)
                one(), two()
                print(f"(compiled in {time.process_time() - begin:.0f} s)", file=sys.stderr)
                variants |= {"torch.compile/gradient": one, "torch.compile/product": two}
                found["torch.compile"] = None
            variants |= {
                "step/gradient": step(Config("sgd", net=name, length=length), x, y),
                "step/product": step(Config("psgd-lra", net=name, length=length), x, y),
            }
            best = minima(variants)
            for label in [*found, "step"]:
                g, h = best[f"{label}/gradient"], best[f"{label}/product"]
                what = "a step, SGD and PSGD" if label == "step" else label
                print(
                    f"| {name} | {length} | {what} | {g:.2f} | {h:.2f} | {h / best['ours/product']:.2f} |", flush=True
                )


if __name__ == "__main__":
    torch.set_num_threads(1)
    main([int(n) for n in sys.argv[1:]] or [32, 55, 64, 112])
