"""Ranks use 1F1B for a loss of the model once the last rank has found out how its losses add up."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpipe.distributed import Rank

from ..model.losses import labelled
from ..model.test_convention import BY_ITEMS, OTHERS, Model
from .planted import expect_gradients

few = settings(max_examples=8, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])


@few
@given(
    loss=st.integers(0, len(BY_ITEMS) - 1) | st.integers(0, len(BY_ITEMS + OTHERS) - 1),
    batches=st.lists(st.tuples(st.integers(2, 7), st.integers(2, 9), st.integers(0, 9)), min_size=2, max_size=3),
    items=st.sampled_from([None, 11, 2.5]),
    chunks=st.integers(2, 4),
    size=st.sampled_from([2, 3]),
)
def test_later_steps_use_1f1b_if_losses_add_up(
    worlds, loss: int, batches: list[tuple[int, int, int]], items: Any, chunks: int, size: int
) -> None:
    """The first step computes the loss of the full batch. Each step has the plain model's loss and gradients."""
    worlds(size).run(_expect_as_plain, loss, batches, items, chunks)


def _expect_as_plain(loss: int, batches: list[tuple[int, int, int]], items: Any, chunks: int) -> None:
    torch.manual_seed(0)
    plain = Model((BY_ITEMS + OTHERS)[loss])
    rank = Rank(copy.deepcopy(plain), chunks=chunks)
    schedules = []
    for rows, length, kept in batches:
        inputs: dict[str, Any] = labelled(rows, length, kept, sure=2)
        if items is not None:
            inputs["num_items_in_batch"] = items
        expected = plain(**inputs)["loss"]
        expected.backward()
        for found in (rank.step(**inputs), rank.evaluate(**inputs)):
            torch.testing.assert_close(found, expected.detach(), rtol=1e-12, atol=1e-12)
        schedules.append(rank.last_schedule.name)
    expect_gradients(rank, plain)
    rank.close()
    later = "1f1b" if loss < len(BY_ITEMS) else "fill_drain"
    assert schedules[0] == "fill_drain"
    # If a micro-batch has no labels, a trial may not determine the convention.
    assert {*schedules[1:]} <= {later, "fill_drain"}
    assert {*schedules[1:]} == {later} or any(kept < rows for rows, _, kept in batches)


def test_named_schedule_requires_a_known_convention(worlds) -> None:
    worlds(2).run(_named)


def _named() -> None:
    rank = Rank(Model(BY_ITEMS[0]), chunks=2)
    inputs = labelled(4, 5, 3, sure=2)
    with pytest.raises(ValueError, match="not known how the losses of micro-batches add up"):
        rank.step(**inputs, schedule="1f1b")
    assert all(parameter.grad is None for parameter in rank.parameters())
    first = rank.step(**inputs)
    torch.testing.assert_close(rank.step(**inputs, schedule="1f1b"), first)
    rank.close()
