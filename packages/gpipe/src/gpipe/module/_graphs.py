"""Detect CUDA graphs in layers. A pipeline refuses them, since they would give wrong results.

A graph writes its outputs, and what its backward needs, into the same memory at each replay. In a pipeline, a layer
computes the next micro-batch while the results of the last one are still needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

_DEPTH = 8
"""The depth of wrappers around a compiler that is searched; torch has about three."""


def expect_no_graphs(block: nn.Module, device: torch.device, partition: int) -> None:
    """Raise ValueError, naming the layer, if one below ``block`` replays a CUDA graph on ``device``."""
    if device.type != "cuda":
        return
    for name, module in block.named_modules():
        how = _graph_of(module)
        if how is not None:
            raise ValueError(
                f"{name!r} of partition {partition} replays a CUDA graph ({how}), whose memory the next micro-batch "
                "would overwrite while this one is still needed; " + _WAY_OUT
            )


_WAY_OUT = "use torch.compile without CUDA graphs (mode='default' or 'max-autotune-no-cudagraphs'), or the plain layer"


def _graph_of(module: nn.Module) -> str | None:
    """How a call of ``module`` replays a graph; None if it does not."""
    if getattr(vars(module).get("forward"), "__module__", None) == "torch.cuda.graphs":
        return "torch.cuda.make_graphed_callables"
    if any(map(_has_graphs, _compilers(module))):
        return "torch.compile with CUDA graphs"
    return None


def _compilers(module: nn.Module) -> Iterator[Any]:
    """The compilers of a module, as ``torch.compile(module)`` and ``module.compile()`` keep them."""
    context = vars(module).get("dynamo_ctx")
    if context is not None:
        yield context.callback
    compiled = getattr(module, "_compiled_call_impl", None)
    for cell in getattr(compiled, "__closure__", None) or ():
        if hasattr(cell.cell_contents, "_torchdynamo_orig_backend"):
            yield cell.cell_contents


def _has_graphs(compiler: Any) -> bool:
    for _ in range(_DEPTH):
        if getattr(compiler, "compiler_name", None) == "cudagraphs" or _config(compiler).get("triton.cudagraphs"):
            return True
        compiler = getattr(compiler, "_torchdynamo_orig_backend", None)
    return False


def _config(compiler: Any) -> dict[str, Any]:
    config = getattr(compiler, "config", None)
    return config if isinstance(config, dict) else {}
