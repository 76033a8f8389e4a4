"""Small models, and the results of training steps."""

import copy
from collections.abc import Callable, Iterable
from itertools import product
from typing import Any

import pytest
import torch
from packages.gpipe.tests.layers import Pop, Stash, running, squares
from torch import Tensor, nn

from gpipe import GPipe, LossSum
from gpipe.schedule import Schedule, zero_bubble

from .placements import backward_streams, devices, forward_streams

WIDTH, ROWS = 8, 8
MODES = ("never", "except_last", "always")
"""Modes with and without recomputation; "offload" is in test_saved.py."""

HOWS = ("call", "fill_drain", "1f1b", "interleaved", "zero_bubble")
"""Ways to train a pipe: a call and the caller's backward, or a step of a schedule."""

SCHEDULED = ("call", "fill_drain", "1f1b", "zero_bubble")
"""Ways that work with any number of stages on any devices."""

OF_ALL = (None, "fill_drain", "F0 F1 F2 C B1 B2 B0")
"""Schedules that compute a full-batch loss once; the last one is the program of each stage, without C."""


def some_of(*sides: Iterable[Any], every: int = 11) -> list[Any]:
    """Return the product of ``sides`` as test parameters, most of them marked long.

    Every element of a side is in the short form as well, unless a side's length is a multiple of ``every``.
    """
    cases = enumerate(product(*sides))
    return [pytest.param(*case, marks=[pytest.mark.long] if k % every else []) for k, case in cases]


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH, dtype=torch.float64)


def model() -> nn.Sequential:
    """Six layers with a skip, the same in every call."""
    torch.manual_seed(0)
    return nn.Sequential(linear(), Stash(), linear(), nn.GELU(), Pop(), linear())


def rows() -> Tensor:
    return torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def balance(layers: int, stages: int) -> list[int]:
    """Return the most even balance, with the remainder on the first stage."""
    return [layers - (stages - 1) * (layers // stages), *[layers // stages] * (stages - 1)]


def piped(plain: nn.Sequential, placement: str, mode: str = "except_last", **options: Any) -> GPipe:
    """A pipe of a copy of ``plain``."""
    places = devices(placement)
    return GPipe(
        copy.deepcopy(plain), balance(len(plain), len(places)), devices=places, chunks=3, checkpoint=mode, **options
    )


def reduction_of(loss_fn: Callable[..., Any]) -> str | None:
    """Return the reduction to pass for the losses of micro-batches, if required."""
    return "sum" if loss_fn is squares else None


def counted_squares(output: Tensor, target: Any = None) -> LossSum:
    """Return the same with a count per micro-batch; the counts add up to one."""
    return LossSum(squares(output), torch.full((), len(output) / ROWS, device=output.device))


def whole_squares(output: Tensor, target: Any = None) -> Tensor:
    """Compute the same loss from the full output. Without a declared reduction, it is computed once."""
    centered = output - output.mean(0)
    return centered.square().sum() + len(output) * output.mean(0).square().sum()


def trained(
    module: nn.Module,
    x: Tensor,
    how: str | Schedule | None = "call",
    streams: str = "default",
    loss_fn: Callable[..., Any] = squares,
) -> list[Tensor]:
    """Gradients of the input and of all parameters, as the caller reads them after a step, on the CPU."""
    with forward_streams(streams):
        leaf = x.detach().clone().requires_grad_()
        if how == "call":
            loss = squares(module(leaf))
            with backward_streams(streams):
                module.zero_grad(set_to_none=False)
                loss.backward()
                return _read(module, leaf)
        module.zero_grad(set_to_none=False)
        schedule = split(module) if how == "zero_bubble" else written(module) if how == OF_ALL[-1] else how
        module.step(leaf, loss_fn=loss_fn, reduction=reduction_of(loss_fn), schedule=schedule)
        return _read(module, leaf)


def split(pipe: GPipe) -> Schedule:
    """Zero bubble with all backwards split; by its name only those are that take long."""
    microbatches = min(pipe.chunks, ROWS)
    stops = {"never": 0, "except_last": microbatches - 1, "always": microbatches, "offload": 0}
    stop = stops[pipe.checkpoint] if isinstance(pipe.checkpoint, str) else 0
    return zero_bubble(microbatches, len(pipe.balance), stop)


def written(pipe: GPipe) -> Schedule:
    """The last of :data:`OF_ALL`."""
    lines = [" ".join(f"{word}@{j}" for word in OF_ALL[-1].split()) for j in range(len(pipe.balance))]
    return Schedule.parse("\n".join([*(line.replace(f"C@{j} ", "") for j, line in enumerate(lines[:-1])), lines[-1]]))


def _read(module: nn.Module, leaf: Tensor) -> list[Tensor]:
    used = [tensor.grad * 1 for tensor in (leaf, *module.parameters()) if tensor.requires_grad]
    return [tensor.cpu() for tensor in used]


def expected(plain: nn.Module, x: Tensor) -> list[Tensor]:
    return trained(copy.deepcopy(plain), x)


def assert_trains_like(
    plain: nn.Sequential,
    pipe: GPipe,
    how: str | None,
    streams: str,
    *,
    inline: bool = False,
    loss_fn: Callable[..., Any] = squares,
) -> None:
    """Both of two steps give what a step of the plain model does; the second finds gradients to add to."""
    x = rows()
    wanted = expected(plain, x)
    there = x.to(pipe.devices[0])
    with running(inline):
        for _ in range(2):
            torch.testing.assert_close(trained(pipe, there, how, streams, loss_fn), wanted)
    pipe.close()
