"""A small GPT: characters in, logits of the next characters out."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel


class GPT(nn.Module):
    """A transformer as GPT-2 is, but without biases and dropout; the embedding of characters is also the last layer.

    Matrices start as N(0, 0.02²); those that end a residual branch are smaller by √(2·layers).

    >>> gpt = GPT(65, torch.Generator().manual_seed(0))
    >>> gpt(torch.zeros(2, 128, dtype=torch.int64)).shape, sum(p.numel() for p in gpt.parameters())
    (torch.Size([2, 128, 65]), 812288)
    """

    def __init__(
        self,
        vocabulary: int,
        generator: torch.Generator,
        *,
        block: int = 128,
        width: int = 128,
        layers: int = 4,
        heads: int = 4,
    ) -> None:
        super().__init__()
        self.characters = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(block, width)
        self.layers = nn.Sequential(*(Layer(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width, bias=False)
        with torch.no_grad():
            for name, p in self.named_parameters():
                if p.ndim == 2:
                    ends = name.endswith(("attention.out.weight", "mlp.2.weight"))
                    p.copy_(torch.randn(p.shape, generator=generator) * 0.02 / (2 * layers if ends else 1) ** 0.5)

    def forward(self, text: Tensor) -> Tensor:
        """Return logits (batch, time, vocabulary) for text (batch, time)."""
        x = self.characters(text) + self.positions.weight[: text.shape[1]]
        return F.linear(self.norm(self.layers(x)), self.characters.weight)


class Layer(nn.Module):
    """x + attention, then x + a perceptron, each of a normalized x."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width, bias=False)
        self.attention = Attention(width, heads)
        self.mlp_norm = nn.LayerNorm(width, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width, bias=False), nn.GELU(), nn.Linear(4 * width, width, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return as many vectors."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Attention(nn.Module):
    """Attention of several heads to what came before."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return as many vectors."""
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def twice_differentiable() -> AbstractContextManager[None]:
    """Let attention be computed by plain products: torch's fused kernels have no second derivative.

    On a CPU with a block of 128 this takes 3 % more time for a gradient.

    >>> q = torch.ones(1, 1, 2, 4, requires_grad=True)
    >>> with twice_differentiable():
    ...     loss = F.scaled_dot_product_attention(q, q, q, is_causal=True).square().sum()
    >>> (g,) = torch.autograd.grad(loss, q, create_graph=True)
    >>> torch.autograd.grad(g.sum(), q)[0].shape
    torch.Size([1, 1, 2, 4])
    """
    return sdpa_kernel(SDPBackend.MATH)
