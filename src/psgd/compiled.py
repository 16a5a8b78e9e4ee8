"""`torch.compile` for what a preconditioner does on a step: pure functions of tensors whose shapes never change."""

from __future__ import annotations

import types
from collections.abc import Callable, Hashable
from typing import Any

import torch

from psgd.curvature import say


class Compiled:
    """Calls functions compiled, each of them once; or as they are, with one warning, where there is no compiler.

    >>> double = Compiled(backend="eager")
    >>> double("double", lambda x: 2 * x, torch.ones(2))
    tensor([2., 2.])
    """

    def __init__(self, **options: Any) -> None:
        self.options = {"dynamic": False, "fullgraph": True} | options
        self.failed = False
        self._made: dict[Hashable, Callable[..., Any]] = {}

    def __call__(self, key: Hashable, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return function(*args, **kwargs); `key` says which it is, and stays the same from step to step."""
        if self.failed:
            return function(*args, **kwargs)
        try:
            if key not in self._made:
                self._made[key] = torch.compile(_anew(function), **self.options)
            return self._made[key](*args, **kwargs)
        except Exception as e:  # a compiler fails in its own ways; what it was to compile is pure, and runs again
            self.failed = True
            say(f"PSGD goes on without torch.compile, which failed: {str(e).strip().splitlines()[0]}")
            return function(*args, **kwargs)


def _anew(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with code of its own: torch.compile gives up on code that it met in too many shapes."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    code = call.__code__.replace()
    return types.FunctionType(code, call.__globals__, call.__name__, call.__defaults__, call.__closure__)
