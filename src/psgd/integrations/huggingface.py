"""Newton steps in an unmodified Hugging Face Trainer: `Trainer(..., callbacks=[CurvatureCallback()])`."""

from __future__ import annotations

import importlib
from typing import Any

from psgd.integrations.watch import Watch

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
