"""Detect layers that replay CUDA graphs, which a pipeline cannot run.

Every replay overwrites the outputs and saved tensors of the previous micro-batch, while a pipeline still needs them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn


def expect_no_graphs(block: nn.Module, device: torch.device, partition: int) -> None:
    for name, module in block.named_modules() if device.type == "cuda" else ():
        if _is_graphed(module) or any(map(_has_graphs, _compilers(module))):
            raise ValueError(
                f"{name!r} of partition {partition} replays a CUDA graph (torch.compile or "
                "torch.cuda.make_graphed_callables), so the next micro-batch would overwrite tensors that this one "
                "still needs; use torch.compile(mode='default' or 'max-autotune-no-cudagraphs'), or the plain layer"
            )


def _is_graphed(module: nn.Module) -> bool:
    return getattr(vars(module).get("forward"), "__module__", None) == "torch.cuda.graphs"


def _compilers(module: nn.Module) -> Iterator[Any]:
    """Yield the compilers of a module, as stored by ``torch.compile(module)`` and ``module.compile()``."""
    context = vars(module).get("dynamo_ctx")
    if context is not None:
        yield context.callback
    for cell in getattr(getattr(module, "_compiled_call_impl", None), "__closure__", None) or ():
        yield cell.cell_contents


def _has_graphs(compiler: Any) -> bool:
    while compiler is not None:
        config = getattr(compiler, "config", None)
        if getattr(compiler, "compiler_name", None) == "cudagraphs":
            return True
        if isinstance(config, dict) and config.get("triton.cudagraphs"):
            return True
        compiler = getattr(compiler, "_torchdynamo_orig_backend", None)
    return False
