"""Models of Hugging Face over several processes: as in one, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from packages.gpipe.tests.worlds import World

from gpipe import GPipe, flatten
from gpipe.distributed import Rank

from .families import FAMILIES


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    opened = World(2)
    yield opened
    opened.close()


@pytest.mark.parametrize("name", ["GPT-2", "Llama", "OPT"])
def test_a_model_over_two_processes_is_the_one_in_one(world: World, name: str):
    world.run(_expect_as_one, name)


def _expect_as_one(name: str) -> None:
    ids = torch.randint(64, (8, 16), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[3, 10:] = 0  # so that micro-batches differ in how the blocks are called
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.where(mask > 0, -100)}
    sample = {key: value[:2] for key, value in batch.items()}
    layers = len(flatten(_model(name), sample))
    options: dict[str, Any] = {"sample": sample, "chunks": 4, "checkpoint": "always"}
    balance = [layers // 2, layers - layers // 2]
    rank = Rank(_model(name), balance, **options)
    one = GPipe(_model(name), balance, devices=["cpu"] * 2, **options)
    own, every = ([name for name, _ in pipe.named_parameters(remove_duplicate=False)] for pipe in (rank, one))
    assert own == [name for name in every if name in own]  # some, in the model's order
    assert every == [name for name, _ in _model(name).named_parameters(remove_duplicate=False)]
    optimizers = [torch.optim.AdamW(pipe.parameters(), 1e-3) for pipe in (rank, one)]
    for seed, items in ((0, {}), (1, {"num_items_in_batch": 100})):
        losses = []
        for pipe in (rank, one):
            torch.manual_seed(seed)
            losses.append(pipe.step(**batch, **items))
        assert torch.equal(*losses)
        expected = dict(one.named_parameters(remove_duplicate=False))
        for key, parameter in rank.named_parameters():
            torch.testing.assert_close(parameter.grad, expected[key].grad, rtol=0, atol=1e-7)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    state = {name: value.clone() for name, value in rank.state_dict().items()}
    assert state.keys() <= _model(name).state_dict().keys()
    again = Rank(_model(name), balance, **options)
    again.load_state_dict(state)
    assert all(torch.equal(value, state[key]) for key, value in again.state_dict().items())
    output, whole = rank.eval()(**batch), one.eval()(**batch)
    if dist.get_rank() == 1:
        torch.testing.assert_close(output.loss, whole.loss)
        torch.testing.assert_close(output.logits, whole.logits)
    one.close()


def _model(name: str) -> Any:
    return FAMILIES[name].make()
