"""examples/train_gpt.py under torchrun: a rank dies while a checkpoint is written; the run ends as if it had not."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

ROOT = Path(__file__).parents[2]
SIZES = "--steps 9 --every 3 --batch 4 --width 16 --block 16".split()

DIES = """
import os, signal, sys
sys.path.insert(0, {examples!r})
import train_gpt

save, first = train_gpt.dcp.save, os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"

def interrupted(state, checkpoint_id):
    if first and checkpoint_id.name.startswith("step-6"):
        checkpoint_id.mkdir(exist_ok=True)
        (checkpoint_id / "half.distcp").write_bytes(b"half of it")
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
    save(state, checkpoint_id=checkpoint_id)

train_gpt.dcp.save = interrupted
seen = []
train_gpt.main(after=seen.append)
if os.environ["RANK"] == "0":
    print("steps", *seen)
"""


def torchrun(script, folder, sharding, *options):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *options]
    command += [str(script), "--out", str(folder), "--sharding", sharding, *SIZES]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}:{os.environ.get('PYTHONPATH', '')}"}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, check=False)


def weights(folder, step, to):
    dcp_to_torch_save(folder / f"step-{step}", to)
    return torch.load(to, weights_only=False)["model"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("sharding", ["ddp", "fsdp"])
def test_a_run_that_lost_a_rank_ends_as_one_that_did_not(sharding, tmp_path):
    smooth = torchrun(ROOT / "examples" / "train_gpt.py", tmp_path / "smooth", sharding)
    assert smooth.returncode == 0, smooth.stderr
    script = tmp_path / "dies.py"
    script.write_text(DIES.format(examples=str(ROOT / "examples")))
    rough = torchrun(script, tmp_path / "rough", sharding, "--max-restarts", "1")
    assert rough.returncode == 0, rough.stderr
    assert "steps 4 5 6 7 8 9" in rough.stdout  # from the last whole checkpoint on
    assert sorted(f.name for f in (tmp_path / "rough").iterdir()) == ["step-6", "step-9"]
    mine, theirs = (weights(tmp_path / name, 9, tmp_path / f"{name}.pt") for name in ("rough", "smooth"))
    assert mine.keys() == theirs.keys() and len(mine) > 5
    assert all(torch.equal(mine[k], theirs[k]) for k in mine)


def test_a_dead_rank_ends_the_others(tmp_path):
    script = tmp_path / "dies.py"
    script.write_text(DIES.format(examples=str(ROOT / "examples")))
    result = torchrun(script, tmp_path / "out", "fsdp")
    assert result.returncode != 0 and "SIGKILL" in result.stderr
    assert [f.name for f in (tmp_path / "out").glob("step-*") if f.suffix != ".part"] == ["step-3"]
