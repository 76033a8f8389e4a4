"""Models of Hugging Face over several processes: as in one, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from packages.gpipe.tests.worlds import World

from gpipe import GPipe, flatten
from gpipe.distributed import Rank

from .labelled import BRANCHING, CASES, PACKED, batch_of, made

IN_ONE = partial(GPipe, devices=["cpu"] * 2)


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    opened = World(2)
    yield opened
    opened.close()


@pytest.mark.parametrize("name", CASES)
def test_a_model_over_two_processes_is_the_one_in_one(world: World, name: str):
    """On padded, unpadded and packed batches."""
    world.run(_expect_as_one, name)


def _expect_as_one(name: str) -> None:
    rank, one = (_pipe(make, name, "unpadded") for make in (Rank, IN_ONE))
    own, every = ([name for name, _ in pipe.named_parameters(remove_duplicate=False)] for pipe in (rank, one))
    assert own == [name for name in every if name in own]  # some, in the model's order
    assert every == [name for name, _ in _model(name).named_parameters(remove_duplicate=False)]
    # Micro-batches with and without padding differ in how the blocks are called.
    kind = "unpadded" if name in BRANCHING else "padded"
    _expect_steps_as_one(name, rank, one, [kind, "unpadded"])
    state = {name: value.clone() for name, value in rank.state_dict().items()}
    assert state.keys() <= _model(name).state_dict().keys()
    again = _pipe(Rank, name, "unpadded")
    again.load_state_dict(state)
    assert all(torch.equal(value, state[key]) for key, value in again.state_dict().items())
    output, whole = rank.eval()(**batch_of(name, 8, kind)), one.eval()(**batch_of(name, 8, kind))
    if dist.get_rank() == 1:
        for key, value in whole.items():
            torch.testing.assert_close(output[key], value)
    one.close()
    if name in PACKED:
        rank, one = (_pipe(make, name, "packed") for make in (Rank, IN_ONE))
        _expect_steps_as_one(name, rank, one, ["packed"])
        one.close()


def _pipe(make: Callable[..., Any], name: str, kind: str) -> Any:
    sample = batch_of(name, 2, kind)
    layers = len(flatten(_model(name), sample))
    return make(_model(name), [layers // 2, layers - layers // 2], sample=sample, chunks=4, checkpoint="always")


def _expect_steps_as_one(name: str, rank: Rank, one: GPipe, kinds: list[str]) -> None:
    optimizers = [torch.optim.AdamW(pipe.parameters(), 1e-3) for pipe in (rank, one)]
    counted = {"num_items_in_batch": 100} if name in ("GPT-2", "Llama", "OPT") else {}
    for seed, kind in enumerate(kinds):
        batch = {**batch_of(name, 8, kind), **(counted if seed else {})}
        losses = []
        for pipe in (rank, one):
            torch.manual_seed(seed)
            losses.append(pipe.step(**batch))
        assert torch.equal(*losses)
        expected = dict(one.named_parameters(remove_duplicate=False))
        for key, parameter in rank.named_parameters():
            torch.testing.assert_close(parameter.grad, expected[key].grad, rtol=0, atol=1e-7)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def _model(name: str) -> Any:
    return made(CASES[name][0])[0]
