"""Call the autograd engine directly, without checks that take longer than a small cell's backward.

Roots and ends are tensors or ``GradientEdge`` objects.
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
    # Ends may be unreachable, because a micro-batch need not use every parameter.
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
    # With ends and without accumulation, autograd calls neither post-accumulate hooks nor AccumulateGrad nodes.
    found: tuple[Tensor | None, ...] = run_backward(
        tuple(roots), tuple(gradients), keep_graph, False, tuple(ends), True, accumulate_grad=False
    )
    return found


def accumulate_whole(gradients: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Add complete gradients to the ``.grad`` of leaves, and continue the backward from other roots.

    This is a single backward, because hooks may wait for the gradients of several leaves. It runs on this thread,
    because hooks may do anything. The gradients are ready on this thread's current streams.
    """
    roots, seeds = [*zip(*gradients, strict=True)] or [(), ()]
    if roots:
        with torch.autograd.set_multithreading_enabled(False):
            accumulate(tuple(_on_current_streams(roots)), seeds)


def _on_current_streams(roots: Sequence[Tensor]) -> list[Tensor]:
    """Return ``roots``, behind nodes that belong to this thread's current streams if they are on several devices.

    Autograd assumes that the initial gradients of a backward are ready on the first device's stream. A node on the
    gradient's own device waits for the stream that was current when the node was created.
    """
    if len({root.device for root in roots if has_streams(root.device)}) < 2:
        return list(roots)
    with torch.enable_grad():
        return [_alias(root) for root in roots]
