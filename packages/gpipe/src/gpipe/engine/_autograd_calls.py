"""Straight into autograd's engine, past the checks of ``torch.autograd.backward`` and ``grad``.

The checks take longer than the backward of a small cell, and the gradients here come from other cells and have the
right shapes. A root, and an end, is a tensor or a ``GradientEdge``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from streams import has_streams

_alias = torch.ops.aten.alias
_run = torch.autograd.Variable._execution_engine.run_backward


accumulate = partial(
    _run, keep_graph=False, create_graph=False, inputs=(), allow_unreachable=True, accumulate_grad=True
)
"""Add what flows from a tuple of roots, given one of their gradients, to the ``.grad`` of all leaves."""


def accumulate_in(roots: Sequence[Any], gradients: Sequence[Tensor], ends: Sequence[Tensor]) -> None:
    """Add what flows from ``roots`` to the ``.grad`` of ``ends``."""
    accumulate(tuple(roots), tuple(gradients), inputs=tuple(ends))


def gradients(
    roots: Sequence[Any], gradients: Sequence[Tensor], ends: Sequence[Any], *, keep_graph: bool = True
) -> tuple[Tensor | None, ...]:
    """What flows from ``roots`` to ``ends``; None where nothing does."""
    found: tuple[Tensor | None, ...] = _run(
        tuple(roots), tuple(gradients), keep_graph, False, tuple(ends), True, accumulate_grad=False
    )
    return found


def accumulate_whole(roots: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """Add whole gradients to the ``.grad`` of leaves, and let others flow on to theirs, all in one backward.

    In one, because hooks may wait for the gradients of several leaves. On this thread, where hooks may do as they like.
    The gradients are ready on this thread's current streams.
    """
    with torch.autograd.set_multithreading_enabled(False):
        accumulate(tuple(_on_current_streams(roots)), tuple(gradients))


def _on_current_streams(roots: Sequence[Tensor]) -> list[Tensor]:
    """``roots`` by way of nodes that belong to this thread's current streams, if they are on several devices.

    Autograd takes all gradients that a backward begins with to be ready on one stream, of the first of their devices.
    Leaves on other devices would add theirs without waiting. A node of its own device takes a gradient from the stream
    that was current when it was made.
    """
    if not _on_several(roots):
        return list(roots)
    with torch.enable_grad():
        return [_alias(root) for root in roots]


def _on_several(roots: Sequence[Tensor]) -> bool:
    return len({root.device for root in roots if has_streams(root.device)}) > 1
