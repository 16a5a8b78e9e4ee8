"""What the callbacks share: a watch over backward passes that opens in one hook and closes in another."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

from psgd.optimizer import PSGD


def unwrapped(optimizer: Any) -> PSGD | None:
    """Return the PSGD inside a framework's wrappers, or None if there is none."""
    while optimizer is not None and not isinstance(optimizer, PSGD):
        optimizer = getattr(optimizer, "optimizer", None)
    return optimizer


class Watch:
    """Keeps `opt.curvature()` open for some optimizers between two hooks; opening and closing twice does no harm."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()

    def open(self, optimizers: Iterable[Any]) -> None:
        """Enter `curvature` of every optimizer that is a PSGD, with the GradScaler of its wrapper."""
        self.close()
        found = [(unwrapped(o), getattr(o, "scaler", None)) for o in optimizers]
        if not any(opt for opt, _ in found):
            raise TypeError("CurvatureCallback needs psgd.PSGD as the optimizer")
        for opt, scaler in found:
            if opt is not None:
                self._stack.enter_context(opt.curvature(scaler))

    def close(self) -> None:
        """Leave them."""
        self._stack.close()
