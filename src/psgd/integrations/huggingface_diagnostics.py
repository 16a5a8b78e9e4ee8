"""`opt.diagnostics()` of a Hugging Face Trainer."""

from __future__ import annotations

import importlib
from typing import Any

from psgd.integrations.watch import unwrapped
from psgd.loggers import Logger

try:
    TrainerCallback: Any = importlib.import_module("transformers").TrainerCallback
except ImportError:  # so that tools can import this module without it
    TrainerCallback = object


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
