"""Tokens per second of `pipe.generate` and of the plain model, and the fraction of time each stage is busy.

All run greedily on the same devices with the same prompts, and produce the same tokens. A stage is busy while one of
its layers computes. Stages take turns, so that the fractions add up to at most one.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from gpipe import GPipe

from .measure import ratios, spread, turns
from .report import Report, Table

WORDS, LENGTH = 256, 32
PROMPTS = (1, 8)


def run(options: argparse.Namespace) -> Iterator[Report]:
    """GPT-2 and Llama of a small width on two stages of a CPU."""
    rounds = options.rounds or (1 if options.quick else 10)
    tokens = 4 if options.quick else 64
    caption = (
        f"`generate`, two stages, prompts of {LENGTH} tokens, {tokens} new tokens each, {rounds} rounds: medians, in "
        "brackets the quartiles"
    )
    headings = ("model", "prompts", "plain: tokens/s", "pipe: tokens/s", "pipe / plain", "stage 0 busy", "stage 1 busy")
    table = Table("models.md", "generate", caption, headings)
    for name, make in MODELS.items():
        model = make().eval()
        prompts = torch.randint(3, WORDS, (max(PROMPTS), LENGTH), generator=torch.Generator().manual_seed(0))
        pipe = GPipe(model, devices=["cpu", "cpu"], chunks=2)
        for number in PROMPTS:
            table.add(name, number, *_measured(model, pipe, prompts[:number], tokens, rounds))
        pipe.close()
    yield Report([table])


def _measured(model: Any, pipe: GPipe, prompts: Tensor, tokens: int, rounds: int) -> Iterator[str]:
    def rate(generate: Callable[..., Tensor]) -> tuple[float, Tensor]:
        start = time.perf_counter()
        found = generate(prompts, max_new_tokens=tokens, min_new_tokens=tokens, pad_token_id=0)
        return len(prompts) * tokens / (time.perf_counter() - start), found

    results = turns({"plain": lambda: rate(model.generate), "pipe": lambda: rate(pipe.generate)}, rounds, warmups=1)
    assert all(torch.equal(found, results["plain"][0][1]) for each in results.values() for _, found in each)
    plain, piped = ([speed for speed, _ in each] for each in results.values())
    yield spread(plain, 0)
    yield spread(piped, 0)
    yield spread(ratios(piped, plain))
    for share in _busy(pipe, model, lambda: rate(pipe.generate)):
        yield f"{share:.0%}"


def _busy(pipe: GPipe, model: nn.Module, program: Callable[[], object]) -> list[float]:
    """The share of the time in which each stage computes, in one call of ``program``."""
    stages = {parameter: j for j, partition in enumerate(pipe.partitions) for parameter in partition.parameters()}
    seconds = [0.0] * len(pipe.partitions)
    with ExitStack() as scope:
        for module, stage in _owned(model, stages):
            clock = _Clock(seconds, stage)
            scope.callback(module.register_forward_pre_hook(clock.begin).remove)
            scope.callback(module.register_forward_hook(clock.end).remove)
        start = time.perf_counter()
        program()
        total = time.perf_counter() - start
    return [each / total for each in seconds]


def _owned(module: nn.Module, stages: dict[nn.Parameter, int]) -> Iterator[tuple[nn.Module, int]]:
    """The outermost modules whose parameters are on one stage, with it."""
    for child in module.children():
        found = {stages[parameter] for parameter in child.parameters()}
        if len(found) == 1 and not isinstance(child, nn.ModuleList):  # which is not called
            yield child, found.pop()
        else:
            yield from _owned(child, stages)


class _Clock:
    """Module hooks that add the module's running time to its stage's total."""

    def __init__(self, seconds: list[float], stage: int) -> None:
        self._seconds, self._stage, self._start = seconds, stage, 0.0

    def begin(self, *_: object) -> None:
        self._start = time.perf_counter()

    def end(self, *_: object) -> None:
        self._seconds[self._stage] += time.perf_counter() - self._start


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(vocab_size=WORDS, n_embd=256, n_layer=8, n_head=4, bos_token_id=1, eos_token_id=2)
    )


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 8, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, **sizes))


MODELS = {"GPT-2": _gpt2, "Llama": _llama}
