"""Train a small GPT on the characters of a text, on as many processes as torchrun starts, and survive their death.

    torchrun --nproc-per-node 2 --max-restarts 3 examples/train_gpt.py --sharding fsdp --out /tmp/gpt

`--sharding ddp` keeps all of the model on every rank, `--sharding fsdp` a part of it. Started again, or restarted by
torchrun when a rank has died, it goes on from the last checkpoint, also on another number of ranks: steps depend on the
seed and on the step's number alone.
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from psgd import PSGD, lra
from psgd.experiments.gpt import GPT

KEPT = 2
"""How many checkpoints stay: one that is being written, and the one before."""


def options(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--text", type=Path, default=Path(__file__).parent.parent / "README.md")
    parser.add_argument("--out", type=Path, required=True, help="a folder for checkpoints")
    parser.add_argument("--sharding", choices=("ddp", "fsdp"), default="ddp")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=50, help="steps between checkpoints")
    parser.add_argument("--batch", type=int, default=16, help="sequences of all ranks together")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--block", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


class Checkpoints:
    """Folders step-1, step-2, …, each of them whole: one is written under another name, and renamed at the end."""

    def __init__(self, folder: Path, model: nn.Module, optimizer: PSGD) -> None:
        self.folder, self.model, self.optimizer = folder, model, optimizer
        folder.mkdir(parents=True, exist_ok=True)

    def found(self) -> list[int]:
        """Return the steps that were saved, in order."""
        return sorted(int(f.name.removeprefix("step-")) for f in self.folder.glob("step-*") if f.suffix != ".part")

    def save(self, step: int) -> None:
        """Write what this step has come to."""
        part = self.folder / f"step-{step}.part"
        model, optimizer = get_state_dict(self.model, self.optimizer)
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=part)
        if dist.get_rank() == 0:
            part.rename(self.folder / f"step-{step}")
            for old in self.found()[:-KEPT]:
                shutil.rmtree(self.folder / f"step-{old}")
        dist.barrier()

    def load(self) -> int:
        """Go back to the last one, and return its step; 0 if there is none."""
        if dist.get_rank() == 0:
            for part in self.folder.glob("step-*.part"):  # somebody died while writing it
                shutil.rmtree(part)
        dist.barrier()
        if not self.found():
            return 0
        step = self.found()[-1]
        model, optimizer = get_state_dict(self.model, self.optimizer)
        state = {"model": model, "optimizer": optimizer}
        dcp.load(state, checkpoint_id=self.folder / f"step-{step}")
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        return step


def connect() -> None:
    """Join the others that torchrun started.

    What they tell each other has the number of the restart to its name: on the store that outlives them, a new rank
    would otherwise read where a dead one could be reached, and fail.
    """
    rank, world, attempt = (int(os.environ.get(k, 0)) for k in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"))
    hosts = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), world, hosts)
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=dist.PrefixStore(f"attempt {attempt}", store), rank=rank, world_size=world)


def main(argv: Sequence[str] | None = None, after: Callable[[int], None] = lambda step: None) -> None:
    """Train, and call `after` with the number of each step that was made."""
    connect()
    try:
        train(options(argv), after)
        gc.collect()  # DDP's end waits for the process group, which must be there
    finally:
        dist.destroy_process_group()


def train(o: argparse.Namespace, after: Callable[[int], None]) -> None:
    """Make all steps that are left."""
    rank, world = dist.get_rank(), dist.get_world_size()
    if o.batch % world:
        raise ValueError(f"--batch needs to be a multiple of the {world} ranks, got {o.batch}")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    raw = o.text.read_text(encoding="utf-8")
    letters = {letter: i for i, letter in enumerate(sorted(set(raw)))}
    text = torch.tensor([letters[letter] for letter in raw])

    start = torch.Generator().manual_seed(o.seed)
    model: nn.Module = GPT(len(letters), start, block=o.block, width=o.width, layers=2, heads=4).to(device)
    if o.sharding == "fsdp":
        for layer in model.layers:  # type: ignore[union-attr]
            fully_shard(layer)
        fully_shard(model)
    else:
        model = DistributedDataParallel(model)
    optimizer = PSGD(model.parameters(), lra(5), lr=o.lr, seed=o.seed)
    checkpoints = Checkpoints(o.out, model, optimizer)

    def batch(step: int) -> Tensor:
        rng = torch.Generator().manual_seed(o.seed * 1_000_003 + step)
        where = torch.randint(len(text) - o.block - 1, (o.batch,), generator=rng)
        return torch.stack([text[i : i + o.block + 1] for i in where.tolist()]).chunk(world)[rank].to(device)

    for step in range(checkpoints.load() + 1, o.steps + 1):
        examples = batch(step)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(examples[:, :-1]).flatten(0, 1), examples[:, 1:].flatten())  # noqa: B023
            loss.backward()
            return loss

        loss = optimizer.step(closure).detach()
        if step % o.every == 0 or step == o.steps:
            dist.all_reduce(loss)
            if rank == 0:
                print(f"step {step}: loss {float(loss) / world:.4f}", flush=True)
            checkpoints.save(step)
        after(step)


if __name__ == "__main__":
    main()
