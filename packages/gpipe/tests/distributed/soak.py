"""Train on varying numbers of ranks, killed at random times: the losses match an uninterrupted run.

    python -m packages.gpipe.tests.distributed.soak [--steps 2000]

After each kill, all other ranks must raise an error that names the killed rank. Then a new set of 1 to 4 processes
resumes from the last checkpoint.
"""

from __future__ import annotations

import random
import re
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gpipe import GPipe
from gpipe.distributed import Rank, load, save

from ..soaking import run
from ..worlds import World, world

STAGES, EVERY, LIMIT = [2, 2, 2, 2], 5, 120.0
"""The number of layers per stage, the steps between two checkpoints, and the time limit for answers in seconds."""


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.Dropout(0.1))])


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Return the mini-batch of a step, and seed the random numbers of its dropouts."""
    torch.manual_seed(step)
    return torch.randn(8, 16), torch.randn(8, 16)


def unbroken(steps: int) -> tuple[list[float], dict[str, Tensor]]:
    """Return the losses, and the weights after the last step, of a pipe in one process."""
    pipe, losses = GPipe(model(), STAGES, devices=["cpu"] * 4, chunks=2), []
    optimizer = torch.optim.AdamW(pipe.parameters(), 1e-3)
    for step in range(steps):
        optimizer.zero_grad()
        losses.append(pipe.step(*batch(step), loss_fn=nn.functional.mse_loss).item())
        optimizer.step()
    return losses, pipe.state_dict()


def last_checkpoint(folder: str) -> int:
    return max([int(each.name) for each in Path(folder).glob("*") if each.name.isdigit()], default=0)


def train(folder: str, steps: int, log: str) -> None:
    """Resume from the last checkpoint, on any number of ranks. The first rank writes the losses to ``log``."""
    size, is_first = dist.get_world_size(), dist.get_rank() == 0
    rank = Rank(model(), STAGES, ranks=[j % size for j in range(4)], chunks=2)
    optimizer = torch.optim.AdamW(rank.parameters(), 1e-3)
    done = last_checkpoint(folder)
    if done:
        load(Path(folder, str(done)), rank, optimizer)
    with Path(log).open("w") as lines:
        for step in range(done, steps):
            optimizer.zero_grad()
            loss = rank.step(*batch(step), loss_fn=nn.functional.mse_loss)
            optimizer.step()
            if is_first:
                lines.write(f"{step} {loss.item().hex()}\n")
                lines.flush()
            if (step + 1) % EVERY == 0 or step + 1 == steps:
                save(Path(folder, str(step + 1)), rank, optimizer)
                if is_first and step + 1 > 2 * EVERY:
                    shutil.rmtree(Path(folder, str(step + 1 - 2 * EVERY)), ignore_errors=True)


class Attempt:
    """Processes that train until one of them is killed, or until all have finished."""

    def __init__(self, opened: World, folder: str, steps: int, log: Path) -> None:
        self.opened, self.log = opened, log
        opened.send(train, folder, steps, str(log))

    def kill(self, who: int, steps: int, seconds: float) -> bool:
        """Kill a rank after ``steps`` steps and ``seconds`` seconds. Return False if it finishes earlier."""
        process, end = self.opened.processes[who], time.monotonic() + LIMIT
        while not (self.log.exists() and self.log.read_text().count("\n") >= steps):
            if self.opened.connections[who].poll(0.01):
                return False
            assert time.monotonic() < end, f"fewer than {steps} steps in {LIMIT:g} s"
        if self.opened.connections[who].poll(seconds):
            return False
        process.kill()
        return True

    def expect_named(self, who: int) -> float:
        """Expect that all other ranks raise an error naming the killed one, and return how many seconds this took."""
        began = time.monotonic()
        for other in {*range(len(self.opened.processes))} - {who}:
            succeeded, text = self.opened.answer(other, LIMIT)
            assert not succeeded, f"rank {other} continued without rank {who}"
            assert re.search(rf"LostRankError: rank {who} has ended", text), text
        return time.monotonic() - began

    def expect_finished(self) -> None:
        for rank in range(len(self.opened.processes)):
            succeeded, text = self.opened.answer(rank, LIMIT)
            assert succeeded, text

    def expect_losses(self, expected: Sequence[float]) -> int:
        """Compare the losses bitwise, and return their number."""
        lines = [line.split() for line in self.log.read_text().splitlines(keepends=True) if line.endswith("\n")]
        for step, loss in lines:
            assert float.fromhex(loss) == expected[int(step)], f"step {step}: {loss} instead of {expected[int(step)]}"
        return len(lines)


def soak(steps: int, seed: int = 0, most: int = 4) -> None:
    rng, began = random.Random(seed), time.monotonic()
    expected, weights = unbroken(steps)
    sizes, waits, taken, kills = list[int](), list[float](), 0, 0
    with tempfile.TemporaryDirectory() as folder:
        is_finished = False
        while not is_finished:
            size = rng.randint(1, most)
            with world(size, LIMIT) as opened:
                attempt = Attempt(opened, folder, steps, Path(folder, f"{len(sizes)}.log"))
                who = rng.randrange(size)
                is_finished = not attempt.kill(who, rng.randint(1, 30), rng.uniform(0.0, 0.5))
                if is_finished:
                    attempt.expect_finished()
                else:
                    kills += 1
                    waits += [attempt.expect_named(who)] * (size > 1)
            sizes.append(size)
            taken += attempt.expect_losses(expected)
            print(f"{last_checkpoint(folder):>6} steps saved, {size} ranks, {kills} kills", flush=True)
        end = model()
        load(Path(folder, str(steps)), end)
        for name, value in end.state_dict().items():
            assert torch.equal(value, weights[name]), f"{name} differs from the uninterrupted run"
    changes = sum(a != b for a, b in pairwise(sizes))
    print(f"{steps} steps, {taken - steps} repeated; {kills} kills; {changes} changes of the number of ranks")
    if waits:
        print(f"all others raised an error after {statistics.median(waits):.1f} s, at most {max(waits):.1f} s")
    print(f"losses and weights match an uninterrupted run bitwise; {time.monotonic() - began:.0f} s in total")


def main(arguments: Sequence[str] | None = None) -> int:
    return run(soak, 2_000, arguments)


if __name__ == "__main__":
    sys.exit(main())
