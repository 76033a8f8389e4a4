"""Stages that do nothing, for what the engine itself costs."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gpipe import GPipe

ROW = torch.ones(1, 1)


def pipe(stages: int, microbatches: int, checkpoint: str = "never") -> GPipe:
    layers = nn.Sequential(*(nn.Identity() for _ in range(stages)))
    return GPipe(layers, [1] * stages, devices=["cpu"] * stages, chunks=microbatches, checkpoint=checkpoint)


def rows(microbatches: int) -> Tensor:
    """One row a micro-batch."""
    return torch.ones(microbatches, 1, requires_grad=True)


class Loop:
    """As many multiplications as there are cells, one after the other."""

    def __init__(self, stages: int, microbatches: int) -> None:
        self._stages, self._rows = stages, rows(microbatches).detach().chunk(microbatches)

    def forward(self) -> list[Tensor]:
        return [self._through(row) for row in self._rows]

    def _through(self, row: Tensor) -> Tensor:
        y = row.detach().requires_grad_()
        for _ in range(self._stages):
            y = y * 1
        return y
