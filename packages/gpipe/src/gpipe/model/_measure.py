"""Measure the seconds of a model's forward and backward, divided where it calls modules that may be blocks.

A clock is read whenever the forward of a copy calls a module that may be a block, even inside other blocks. Autograd
numbers the nodes of a forward in order, so the backward is divided at the same calls. The cost of a block is the time
from its call to the call of the next block, in the forward and in the backward. So a single measurement returns the
costs of coarse and fine blocks, including the operations between them.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from microbatch import map_tensors
from profiler.sandbox import copied
from streams import add_note, use_device

from .._torch import next_sequence_number
from ..engine._accumulate import nodes_below
from ..engine._loss_value import has_own_loss, own_loss
from ..module._inputs import Inputs
from ..timeline._record import Clock
from ..values._leaves import get_tensors
from ._blocks import Blocks
from ._cache import without_cache
from ._called import answered, answered_by
from ._generators import every_generator_restored
from ._pick import Pick


class Span(NamedTuple):
    """The part of a forward from the call of one module to the call of the next one.

    Attributes:
        block: the name of the module; None before the first call.
    """

    block: str | None
    seconds: float


Round = Sequence[Span]


def measure_rounds(
    model: nn.Module, blocks: Blocks, sample: Inputs, device: torch.device, pick: Pick, *, timeout: float = 1.0
) -> list[Round]:
    """Return rounds of forward and backward on a copy of ``model``, in training mode, for about ``timeout`` seconds.

    One round warms up, and at least one follows.

    Args:
        blocks: the modules whose calls divide a round. They may contain each other.
    """
    with every_generator_restored([device]), torch.inference_mode(False), torch.enable_grad(), use_device(device):
        copy = copied(model).to(device).train()
        named = dict(copy.named_modules(remove_duplicate=False))
        inputs = Inputs(*map_tensors(partial(_move, device), tuple(sample)))
        one = partial(_round, copy, {name: named[name] for name in blocks}, inputs, Clock(), device, pick)
        one()
        began, rounds = time.perf_counter(), list[Round]()
        while not rounds or time.perf_counter() - began < timeout:
            rounds.append(one())
    torch.clear_autocast_cache()
    return rounds


def compute_seconds(rounds: Sequence[Round], blocks: Blocks) -> list[float]:
    """Return the seconds of each block: the median of its times in all ``rounds``.

    Operations before the first block count for the first block, and operations between blocks for the previous one.
    """
    return [median(each) for each in zip(*(_seconds(spans, [*blocks]) for spans in rounds), strict=True)]


def _seconds(spans: Round, names: Sequence[str]) -> list[float]:
    index, at = {name: k for k, name in enumerate(names)}, 0
    found = [0.0] * len(names)
    for span in spans:
        at = max(at, index.get(span.block or "", 0))  # never an earlier block, as in stages
        found[at] += span.seconds
    return found


class _Calls:
    """Records when a forward calls its blocks, and the sequence number of the next autograd node at each call."""

    def __init__(self, now: Callable[[], Any]) -> None:
        self._now = now
        self.blocks: list[str | None] = []
        self.times: list[Any] = []
        self.numbers: list[int] = []
        self.note(None)

    def note(self, block: str | None) -> None:
        self.blocks.append(block)
        self.times.append(self._now())
        self.numbers.append(next_sequence_number())

    def call(self, stage: int, module: nn.Module, name: str, function: Any, args: Any, kwargs: Any) -> Any:
        self.note(name)
        return function(*args, **kwargs)


def _round(
    model: nn.Module, blocks: Mapping[str, nn.Module], inputs: Inputs, clock: Clock, device: torch.device, pick: Pick
) -> Round:
    now = partial(clock.now, device)
    with without_cache(model), answered(blocks, dict.fromkeys(blocks.values(), 0)):
        calls = _Calls(now)
        try:
            with answered_by(calls):
                output = pick(inputs.call(model))
        except Exception as error:
            add_note(error, f"{type(model).__name__} was called with the sample, to measure its blocks")
            raise
    calls.note(None)
    forward = [b() - a() for a, b in pairwise(calls.times)]
    backward = _backward(output, calls.numbers[:-1], now)
    model.zero_grad(set_to_none=True)
    return [Span(*each) for each in zip(calls.blocks, map(sum, zip(forward, backward, strict=True)), strict=False)]


def _backward(output: Any, numbers: Sequence[int], now: Callable[[], Any]) -> list[float]:
    """Return the seconds of the backward of each span of the forward."""
    found = [0.0] * len(numbers)
    loss = own_loss(output) if has_own_loss(output) else output
    roots = [tensor for tensor in get_tensors(loss) if tensor.requires_grad]
    passed: list[tuple[int, Any]] = []

    def enter(span: int, _: Any) -> None:
        if not passed or passed[-1][0] != span:
            passed.append((span, now()))

    for node in nodes_below(roots):
        if not hasattr(node, "variable"):  # the node of a leaf has no number
            node.register_prehook(partial(enter, max(0, bisect_right(numbers, node._sequence_nr()) - 1)))
    torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
    passed.append((0, now()))
    for (span, begin), (_, end) in pairwise(passed):
        found[span] += end() - begin()
    return found


def _move(device: torch.device, tensor: Tensor) -> Tensor:
    return tensor.detach().clone().to(device).requires_grad_(tensor.requires_grad)
