"""A backend of torch.compile that counts."""

import torch
from torch import Tensor


class Graphs:
    """Counts the graphs it is given, and runs them eagerly."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> torch.fx.GraphModule:
        self.count += 1
        return graph
