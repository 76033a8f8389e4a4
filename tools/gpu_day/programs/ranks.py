"""Two processes, each with a stage on the same device, over host memory: the losses of one process."""

from __future__ import annotations

import os
import subprocess
import sys

import torch
import torch.distributed as dist

from gpipe import GPipe
from gpipe.distributed import Rank

from .common import SCHEDULES, head, mean_square, network, row, two_devices


def main() -> None:
    """Start both, or be one of them."""
    if "RANK" in os.environ:
        train()
        return
    module = ["-m", "tools.gpu_day.programs.ranks"]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *module]
    raise SystemExit(subprocess.run(launch).returncode)


def train() -> None:
    dist.init_process_group("gloo")
    device = two_devices()[0]
    torch.manual_seed(1)
    x = torch.randn(64, 256, device=device)
    rank = Rank(network(256), [4, 4], chunks=4, device=device, transport="host")
    pipe = GPipe(network(256), [4, 4], devices=[device] * 2, chunks=4)
    first = dist.get_rank() == 0
    if first:
        head("schedule", "loss of two processes", "of one")
    wrong = 0
    for schedule in SCHEDULES:
        losses = [
            each.step(x, loss_fn=mean_square, reduction="mean", schedule=schedule).item() for each in (rank, pipe)
        ]
        wrong = max(wrong, losses[0] != losses[1])
        if first:
            row(schedule, *losses)
    pipe.close()
    dist.destroy_process_group()
    raise SystemExit(wrong)


if __name__ == "__main__":
    main()
