"""Newton steps in an unmodified Hugging Face Trainer by `callbacks=[CurvatureCallback()]`, and diagnostics."""

from __future__ import annotations

import importlib
from typing import Any

from psgd.diagnostics.loggers import Logger
from psgd.integrations.watch import Watch, unwrapped

try:
    TrainerCallback: Any = importlib.import_module("transformers").TrainerCallback
except ImportError:  # so that tools can import this module without it
    TrainerCallback = object


class CurvatureCallback(TrainerCallback):  # type: ignore[misc]
    """Takes Hessian products from the Trainer's own backward passes, over all micro-batches of a step.

    The optimizer has to be PSGD, given by `optimizers=` or `optimizer_cls_and_kwargs=`. Without this callback it
    whitens gradients. Steps that do not update the preconditioner cost nothing.
    """

    def __init__(self) -> None:
        self._watch = Watch()

    def on_step_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        """Watch from the first micro-batch on (and first stop what an exception in an earlier run left open)."""
        self._watch.open([optimizer])

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Stop before the step."""
        self._watch.close()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Stop where training was stopped between micro-batches."""
        self._watch.close()


class DiagnosticsCallback(TrainerCallback):  # type: ignore[misc]
    """Logs the diagnostics of PSGD after each `every`-th step, to any logger.

    To the Trainer's own reports (W&B, TensorBoard, …):
    `trainer.add_callback(DiagnosticsCallback(lambda step, values: trainer.log(dict(values))))`.
    """

    def __init__(self, log: Logger, every: int = 100) -> None:
        if every < 1:
            raise ValueError(f"DiagnosticsCallback needs every >= 1, got {every}")
        self.log, self.every = log, every
        self._values: dict[str, float] = {}

    def on_optimizer_step(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        """Look at the step, while its gradients are there."""
        opt = unwrapped(optimizer)
        if opt is not None and state.is_world_process_zero and (state.global_step + 1) % self.every == 0:
            self._values = {f"psgd/{name}": value for name, value in opt.diagnostics().items()}

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Log what was seen, now that the step has its number."""
        if self._values:
            self.log(state.global_step, self._values)
            self._values = {}
