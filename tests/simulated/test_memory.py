"""Peak memory of stages, measured by the simulated allocator."""

import torch
from torch import Tensor, nn

from gpipe import GPipe, inline

from .accelerator import device, limited

ROWS, WIDTH, LAYERS = 16, 32, 4
ACTIVATION = ROWS * WIDTH * 4
"""Bytes between two layers, for one micro-batch."""


def fits(chunks: int, schedule: str, size: int) -> bool:
    """Return whether a checkpointed step fits in ``size`` bytes more than parameters and the batch."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(2 * LAYERS)))
    pipe = GPipe(model, [LAYERS, LAYERS], devices=[device(0), device(1)], chunks=chunks, checkpoint="always")
    x, y = (torch.randn(chunks * ROWS, WIDTH).to(device(k)) for k in range(2))

    def step() -> None:
        pipe.zero_grad(set_to_none=False)
        with inline():  # how far the first stage is ahead must not depend on threads
            pipe.step(x, y, loss_fn=squared_error, reduction="sum", schedule=schedule)

    step()
    try:
        with limited(1, size):
            step()
    except torch.OutOfMemoryError:
        return False
    return True


def squared_error(output: Tensor, target: Tensor) -> Tensor:
    difference = output - target
    return (difference * difference).sum()


def test_checkpointed_peak_does_not_depend_on_chunks():
    """Under 1F1B, stage 1 of 2 holds one recomputed micro-batch, and at most the input of the next one."""
    enough = next(units * ACTIVATION for units in range(200) if fits(4, "1f1b", units * ACTIVATION))
    assert fits(32, "1f1b", enough)
    assert not fits(32, "fill_drain", enough)
