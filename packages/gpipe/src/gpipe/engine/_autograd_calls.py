"""Direct calls of autograd's engine, without checks that take longer than the backward of a small cell.

A root, and an end, is a tensor or a ``GradientEdge``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from streams import has_streams

from .._torch import run_backward

_alias = torch.ops.aten.alias

accumulate = partial(
    # Unreachable ends are allowed: a micro-batch need not use every parameter.
    run_backward,
    keep_graph=False,
    create_graph=False,
    inputs=(),
    allow_unreachable=True,
    accumulate_grad=True,
)
"""Add the gradients that flow from a tuple of roots, given their own gradients, to the ``.grad`` of all leaves."""


def accumulate_in(roots: Sequence[Any], gradients: Sequence[Tensor], ends: Sequence[Tensor]) -> None:
    accumulate(tuple(roots), tuple(gradients), inputs=tuple(ends))


def gradients(
    roots: Sequence[Any], gradients: Sequence[Tensor], ends: Sequence[Any], *, keep_graph: bool = True
) -> tuple[Tensor | None, ...]:
    # With ends, and without accumulating, autograd calls neither post-accumulate hooks nor AccumulateGrad nodes.
    found: tuple[Tensor | None, ...] = run_backward(
        tuple(roots), tuple(gradients), keep_graph, False, tuple(ends), True, accumulate_grad=False
    )
    return found


def accumulate_whole(gradients: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Add complete gradients to the ``.grad`` of leaves, and continue the backward from other roots.

    One backward, because hooks may wait for the gradients of several leaves; on this thread, where hooks may do
    anything. The gradients are ready on this thread's current streams.
    """
    roots, seeds = [*zip(*gradients, strict=True)] or [(), ()]
    if roots:
        with torch.autograd.set_multithreading_enabled(False):
            accumulate(tuple(_on_current_streams(roots)), seeds)


def _on_current_streams(roots: Sequence[Tensor]) -> list[Tensor]:
    """``roots``, behind nodes that belong to this thread's current streams, if they are on several devices.

    Autograd assumes that all gradients with which a backward begins are ready on the stream of the first device. A node
    on the gradient's own device waits for the stream that was current when the node was made.
    """
    if len({root.device for root in roots if has_streams(root.device)}) < 2:
        return list(roots)
    with torch.enable_grad():
        return [_alias(root) for root in roots]
