"""Processes that torchrun restarts after one of them has exited."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.long]

PROGRAM = """
import json, os, signal, sys
from pathlib import Path
import torch
import torch.distributed as dist
from torch import nn
from gpipe.distributed import Rank, load, save

folder, ends = Path(sys.argv[1]), sys.argv[2] == "ends"
store, me, size = next(dist.rendezvous("env://"))
store = dist.PrefixStore("attempt " + os.environ["TORCHELASTIC_RESTART_COUNT"], store)
dist.init_process_group("gloo", store=store, rank=me, world_size=size)
torch.manual_seed(0)
rank = Rank(nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.Linear(4, 1)), [2, 1], chunks=2)
optimizer = torch.optim.AdamW(rank.parameters(), lr=0.1)
done = max([int(each.name) for each in folder.glob("*") if each.name.isdigit()], default=0)
if done:
    load(folder / str(done), rank, optimizer)
for step in range(done, 4):
    torch.manual_seed(step)
    x = torch.randn(8, 4)
    optimizer.zero_grad()
    if ends and dist.get_rank() == 1 and step == 2 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    loss = rank.step(x, loss_fn=lambda output: output.square().mean())
    optimizer.step()
    save(folder / str(step + 1), rank, optimizer)
    if dist.get_rank() == 0:
        (folder / f"{step}.loss").write_text(json.dumps(loss.item()))
dist.destroy_process_group()
"""


def test_restarted_run_matches_an_uninterrupted_run(tmp_path: Path) -> None:
    found = [_losses(tmp_path, how) for how in ("ends", "goes on")]
    assert len(found[0]) == 4
    assert found[0] == found[1]


def _losses(tmp_path: Path, how: str) -> list[float]:
    folder, program = tmp_path / how.replace(" ", "-"), tmp_path / "train.py"
    folder.mkdir()
    program.write_text(PROGRAM)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "--max-restarts", "2", str(program), str(folder), how]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (tmp_path / "log").open("w") as log:  # not a pipe, which a leftover process would keep open
        ended = subprocess.run(command, stdout=log, stderr=log, check=False, env=environment)
    assert ended.returncode == 0, (tmp_path / "log").read_text()
    return [json.loads((folder / f"{step}.loss").read_text()) for step in range(4)]
