"""Straight into autograd's engine, past the checks of ``torch.autograd.backward`` and ``grad``.

The checks take longer than the backward of a small cell, and the gradients here come from other cells and have the
right shapes. A root, and an end, is a tensor or a ``GradientEdge``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_run = torch.autograd.Variable._execution_engine.run_backward


def accumulate(roots: Sequence[Any], gradients: Sequence[Tensor], ends: Sequence[Tensor] = ()) -> None:
    """Add what flows from ``roots`` to the ``.grad`` of ``ends``, or of all leaves if there are none."""
    _run(tuple(roots), tuple(gradients), False, False, tuple(ends), True, accumulate_grad=True)


def gradients(
    roots: Sequence[Any], gradients: Sequence[Tensor], ends: Sequence[Any], *, keep_graph: bool = True
) -> tuple[Tensor | None, ...]:
    """What flows from ``roots`` to ``ends``; None where nothing does."""
    found: tuple[Tensor | None, ...] = _run(
        tuple(roots), tuple(gradients), keep_graph, False, tuple(ends), True, accumulate_grad=False
    )
    return found
