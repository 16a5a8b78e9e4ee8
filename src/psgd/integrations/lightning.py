"""Newton steps in Lightning where `opt.step(closure)` does not hold every backward pass."""

from __future__ import annotations

import importlib
from typing import Any

from psgd.integrations.watch import Watch

try:
    Callback: Any = importlib.import_module("lightning.pytorch").Callback
except ImportError:  # so that tools can import this module without it
    Callback = object


class CurvatureCallback(Callback):  # type: ignore[misc]
    """Takes Hessian products from every backward pass: `Trainer(..., callbacks=[CurvatureCallback()])`.

    Automatic optimization needs it with `accumulate_grad_batches > 1`, where Lightning hands only the last
    micro-batch to `step`; manual optimization, where a step holds none. Elsewhere it does no harm.
    """

    def __init__(self) -> None:
        self._watch = Watch()

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        """Watch one backward pass."""
        self._watch.open(trainer.optimizers)

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        """Stop."""
        self._watch.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Stop where the pass failed."""
        self._watch.close()
