"""Which parameters have a node in autograd that somebody keeps, to have hooks on it.

A parameter accumulates its gradient in a node that lives as long as a graph with the parameter in it, or as somebody
else who holds it. ``DistributedDataParallel`` does, to be called when the gradient is there. Such hooks cannot be seen,
nor taken away; but the node need not run before the gradient is whole.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from torch import Tensor
from torch.autograd.graph import get_gradient_edge


def kept(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Those of ``parameters`` whose nodes live between two runs: of hooks, or of a graph that is still to be used."""
    # A node holds its parameter, so most are told by a look at a counter.
    several = [p for p in parameters if p._use_count() > 1 and p.requires_grad]  # type: ignore[attr-defined]
    return [p for p in dict.fromkeys(several) if _is_kept(p)]  # each once, though stages may share it


def _is_kept(parameter: Tensor) -> bool:
    """Whether the node is still the one that was marked, after we have let it go."""
    if _MARK not in _metadata(parameter):
        _metadata(parameter)[_MARK] = True
        return _MARK in _metadata(parameter)
    return True


_MARK = "gpipe: seen before"


def _metadata(parameter: Tensor) -> dict[str, object]:
    return cast("dict[str, object]", get_gradient_edge(parameter).node.metadata)
