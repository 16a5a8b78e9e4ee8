"""Newton steps in Lightning where `opt.step(closure)` does not hold every backward pass, and diagnostics."""

from __future__ import annotations

import importlib
from typing import Any

from psgd.diagnostics.loggers import Logger
from psgd.integrations.watch import Watch, unwrapped

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


class DiagnosticsCallback(Callback):  # type: ignore[misc]
    """Logs the diagnostics of every PSGD after each `every`-th step: `Trainer(callbacks=[DiagnosticsCallback()])`.

    They go to the trainer's loggers as "psgd/cosine" and so on, unless another logger is given. A second optimizer's
    are named "psgd1/…". Steps between cost nothing.
    """

    def __init__(self, log: Logger | None = None, every: int = 100) -> None:
        if every < 1:
            raise ValueError(f"DiagnosticsCallback needs every >= 1, got {every}")
        self._log, self.every, self._seen = log, every, 0  # Lightning sets an attribute `log` of its own

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Look at the step that has just been made, if there was one."""
        step = trainer.global_step
        if step == self._seen or step % self.every or not trainer.is_global_zero:
            return
        self._seen, found = step, [unwrapped(o) for o in trainer.optimizers]
        values: dict[str, float] = {}
        for i, opt in enumerate(opt for opt in found if opt is not None):
            values |= {f"psgd{i or ''}/{name}": value for name, value in opt.diagnostics().items()}
        if self._log is not None:
            self._log(step, values)
        else:
            for logger in trainer.loggers:
                logger.log_metrics(values, step)
