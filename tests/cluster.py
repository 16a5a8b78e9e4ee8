"""Real process groups: a scenario on so many ranks of this machine, and what each of them returned."""

import os
import shutil
import sys
import time
from datetime import timedelta
from functools import partial
from multiprocessing import set_forkserver_preload
from pathlib import Path

import torch
from filelock import FileLock
from torch import distributed as dist
from torch.multiprocessing import start_processes

# A server imports once what every rank needs, and forks them: an import takes longer than most scenarios.
set_forkserver_preload(["psgd", "torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.distributed.tensor"])
PATIENCE = timedelta(seconds=120)  # ranks that disagree on what comes next would wait for half an hour


def _work(rank, world, folder, scenario):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", timeout=PATIENCE, rank=rank, world_size=world)
    torch.save(scenario(rank, world), f"{folder}/{rank}.part")
    os.rename(f"{folder}/{rank}.part", f"{folder}/{rank}.pt")
    while not all(os.path.exists(f"{folder}/{other}.pt") for other in range(world)):  # they may still need us
        time.sleep(0.01)
    # Taking a process group down may abort, or hang (torch 2.13, once in some hundred times), and is not our subject.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def shared_folder(tmp_path_factory) -> Path:
    """Return a folder that all workers of pytest share."""
    mine = tmp_path_factory.getbasetemp()
    return mine.parent if os.environ.get("PYTEST_XDIST_WORKER") else mine


def ranks(tmp_path_factory, world, scenario, name):
    """Run a scenario, once for all tests and workers, and return the results rank by rank."""
    folder = shared_folder(tmp_path_factory) / f"{name}-{world}"
    with FileLock(f"{folder}.lock"):
        if not (folder / "done").exists():
            shutil.rmtree(folder, ignore_errors=True)  # of a worker that ran out of time
            folder.mkdir()
            work = partial(_work, world=world, folder=str(folder), scenario=scenario)
            start_processes(work, nprocs=world, start_method="forkserver")
            (folder / "done").touch()
    return [torch.load(folder / f"{rank}.pt") for rank in range(world)]
