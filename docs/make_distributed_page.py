"""Write docs/distributed.md: its words, and what `psgd.share` says of large models.

`./run python docs/make_distributed_page.py`; tests/distributed/test_share.py compares the formulas with real ranks.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import psgd

GROUPS = {
    "`Diagonal()`": psgd.Diagonal(),
    "`XMat()`": psgd.XMat(),
    "`lra(10)`": psgd.lra(10),
    "`kron()`": psgd.kron(),
}
RANKS = (8, 64, 256, 1024)


def decoder(width: int, layers: int, keys: int, hidden: int, tied: bool = False) -> list[nn.Parameter]:
    """Return the tensors of a transformer of Llama's shapes, without memory."""
    layer = [(width, width), (keys, width), (keys, width), (width, width), (hidden, width), (hidden, width)]
    layer += [(width, hidden), (width,), (width,)]
    words = [(128_256, width)] * (1 if tied else 2)
    shapes = [*words, *layer * layers, (width,)]
    return [nn.Parameter(torch.empty(shape, device="meta")) for shape in shapes]


MODELS = {
    "1 B": decoder(2048, 16, 512, 8192, tied=True),
    "70 B": decoder(8192, 80, 1024, 28_672),
}

HEAD = """# More than one process

<!-- Written by docs/make_distributed_page.py: edit that, then `./run python docs/make_distributed_page.py`. -->

PSGD needs torch.distributed alone. What ranks do together are the steps of one process on the whole batch: tests
compare the weights after 50 steps, on 2 and 4 real processes. With exact products and with whitening they differ by
less than 1e-5 in float32 (3e-5 for `kron` over shards), and 1e-12 in float64 (DDP). Finite differences divide what the
order of a sum changes in a gradient by ε: they are held to 1e-7 in float64 and to 5e-4 in float32 (up to 1.3e-4 was
seen, of weights that moved by 0.8). A step in which any rank meets a number that is not finite is skipped by all.

## DDP

Wrap the model, and hand its parameters to `PSGD` as ever. Probes are a function of the seed and the step, so ranks draw
the same without talking; exact products are averaged in one all-reduce, and then the ordinary backward pass averages
the gradient. Weights stay bitwise equal, whatever the ranks' own seeds. `find_unused_parameters`,
`gradient_as_bucket_view` and `no_sync` accumulation work with exact products; `static_graph` has no second backward
pass, and gets finite differences, which need a closure. A closure that clips its own gradients spoils finite
differences; exact products do not mind.

## FSDP2

`fully_shard` the model, then make the optimizer. Mixed precision and a mesh with replicas are fine. There are no second
derivatives under FSDP2: `automatic` takes finite differences if there is a closure, else whitening, and says so once.
Which group you choose decides how the ranks share it:

- **One group for all parameters** (`Diagonal()`, `XMat()`, `Butterfly()`, `lra(r)`): each rank holds the rows of its
  own entries, as DTensors placed as the parameters, and ranks exchange small sums: r-vectors, r×r matrices, maxima.
  `XMat` and `Butterfly` pair the entries that a rank holds, so that they have nothing to exchange; by that, their steps
  depend on the number of ranks.
- **A rule for each tensor** (`kron()`, or any function from a shape to a group): each tensor belongs to one rank, which
  alone holds its factors. Tensors are dealt out by cost, the largest first, each to the rank that has least to do. In a
  step the parts of the averaged gradient (and of the pair, if it is another vector) go to the owners, and the parts of
  P m come back, in one exchange each.

Other joint groups raise a `ValueError` that says what to take instead. `diagnostics()` and the `Adaptive` schedule want
to see all of a preconditioner, and do so, too.

On another number of ranks, `XMat` and `Butterfly` forget the pairs that were, and keep their sizes. DDP is taken to
cover all ranks. FSDP2's offloading of parameters to the CPU has not been tried, nor has anything on GPUs.

Tensor parallelism: joint groups work on what `ColwiseParallel` makes, rules on `RowwiseParallel`, too. A tensor that is
split along two axes at once (FSDP2 over tensor parallelism) is refused.

## Checkpoints

`torch.distributed.checkpoint` saves on some ranks and loads on others, in another number, or in one process:

```python
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

parameters, state = get_state_dict(model, opt)
dcp.save({"model": parameters, "optimizer": state}, checkpoint_id=folder)
```

With as many ranks as before, the steps go on bitwise; otherwise within 1e-5 (not for `XMat` and `Butterfly`, whose
pairs change). A `torch.save` of one process loads as
well, by `opt.load_state_dict` on every rank. What only an owner holds is not part of `full_state_dict=True`, which
collects DTensors alone: use distributed checkpoints with `kron()`.
[examples/train_gpt.py](../examples/train_gpt.py) writes checkpoints that survive the death of a rank at any moment:

```sh
torchrun --nproc-per-node 2 --max-restarts 3 examples/train_gpt.py --sharding fsdp --out /tmp/gpt
```

## What it costs

n entries on R ranks, in numbers of 4 bytes; the averaged gradient, n/R, is counted. A ring sends 2b(R − 1)/R from each
rank to sum b bytes, and of a vector that goes from all to its owners a rank sends n/R · (R − 1)/R.

| group | state of a rank | summed in a step | with an update of Q | travels | with an update | collectives |
|---|---|---|---|---|---|---|
| `Diagonal()` | 2n/R | 3 | 5 | – | – | 1, 2 |
| `XMat()`, `Butterfly()` | 3n/R | 3 | 5 | – | – | 1, 2 |
| `lra(r)` | (2r + 2)n/R | 2r + 3 | 2r² + 7r + 11 | – | – | 3, 6 |
| a rule | n/R + factors it owns | 1 | 1 | 2n | 3n; 2n with `whiten_momentum` | 3, 3 |

Updates by finite differences take one collective more, of a few numbers, and `automatic` takes another at its first
update, to ask whether the closure can be repeated; with `Diagonal` and `XMat` the first ten updates take one more. So
`lra`, the most talkative, has 3 collectives in a step and at most 7 in one with an update. A bound `max_norm` takes one
more with a rule. While an owner moves its tensors, it holds m, h and P m of them whole: n/R numbers each, on average.
The table is `psgd.share(model, group, ranks=R)`, which a test holds against the bytes that real ranks hold and send:
they are equal where the ranks divide the first dimension of every tensor.

"""

TAIL = """
What the table shows: joint groups add nothing to the network's load. A rule sends 2/(3R) of what FSDP2 sends by itself
in a step without an update, and R⁻¹ of it with one. But it stops shrinking where there are more ranks than tensors,
since no tensor has two owners: {tensors} tensors of the larger model are matrices.
"""


def size(count: float) -> str:
    """Write bytes.

    >>> size(1500)
    '1.5 KB'
    """
    for unit in ("B", "KB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"


def predictions() -> str:
    """Return what share says of the models, as a table."""
    rows = [
        "| model | group | ranks | state of a rank | sent in a step | with an update | by FSDP2 itself |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, params in MODELS.items():
        for label, group in GROUPS.items():
            for ranks in RANKS:
                s = psgd.share(params, group, ranks=ranks)
                cells = (name, label, f"{ranks:,}", size(s.state), size(s.sent), size(s.sent_due), size(s.model))
                rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def page() -> str:
    """Return the page."""
    counts = ", ".join(f"{name} is {sum(p.numel() for p in params) / 1e9:.2f}·10⁹" for name, params in MODELS.items())
    models = f"Predictions for transformers of Llama's shapes ({counts} parameters), all in float32:\n\n"
    tensors = sum(p.ndim > 1 for p in MODELS["70 B"])
    return HEAD + models + predictions() + TAIL.format(tensors=tensors)


if __name__ == "__main__":
    Path(__file__).with_name("distributed.md").write_text(page(), encoding="utf-8")
