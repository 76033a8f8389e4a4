import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from microbatch import Batch, gather, scatter_views

from .strategies import Problem, flat_problems


@given(flat_problems())
def test_views_share_memory(problem: Problem) -> None:
    batches, _ = scatter_views(*problem)
    for i, source in enumerate(Batch(problem.value)):
        for batch in batches:
            assert batch[i].untyped_storage().data_ptr() == source.untyped_storage().data_ptr()


@given(st.lists(st.one_of(st.integers(0, 3), st.sampled_from(["source", "sync"])), max_size=12))
def test_after_sync_a_counter_has_moved_where_something_happened_and_nowhere_else(steps: list[Any]) -> None:
    x = torch.ones(4)
    batches, versions = scatter_views(x, 4)
    chunks = [batch.tensor for batch in batches]
    source, own = False, [False] * 4
    seen = [t._version for t in (x, *chunks)]
    for step in [*steps, "sync"]:
        if step == "source":
            x.add_(1)
            source = True
        elif step != "sync":
            chunks[step].add_(1)
            own[step] = True
        else:
            versions.sync()
            now = [t._version for t in (x, *chunks)]
            moved = [a != b for a, b in zip(seen, now, strict=True)]
            assert moved == [source or any(own), *(source or each for each in own)]
            seen, source, own = now, False, [False] * 4


OVERLAPPING: list[Callable[[Tensor], tuple[Tensor, ...]]] = [
    lambda x: (x, x),
    lambda x: (x, x[:, :2], x.detach()),
    lambda x: (x[:, 1:], x, x[:, :2]),
]


@pytest.mark.parametrize("value_of", OVERLAPPING)
@given(saved=st.integers(0, 2), changed=st.integers(0, 2), chunk=st.integers(0, 1))
def test_a_change_through_one_tensor_is_seen_by_all_that_share_its_memory(
    value_of: Callable[[Tensor], tuple[Tensor, ...]], saved: int, changed: int, chunk: int
) -> None:
    value = value_of(torch.randn(4, 3))
    saved, changed = saved % len(value), changed % len(value)
    batches, versions = scatter_views(value, 2)
    batch = batches[chunk]
    output = batch[saved] * torch.ones(1, requires_grad=True)
    batch[changed].mul_(0)
    versions.sync()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()
    before = [each._version for batch in batches for each in batch]
    versions.sync()
    assert before == [each._version for batch in batches for each in batch]


def test_an_in_place_layer_on_each_micro_batch_works() -> None:
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 2))
    x = torch.randn(6, 3)
    y = x.clone()
    batches, versions = scatter_views(x, 3)
    output = gather([batch.call(model) for batch in batches])
    versions.sync()
    grads = torch.autograd.grad(output.square().sum(), list(model.parameters()))
    plain = torch.autograd.grad(model(y).square().sum(), list(model.parameters()))
    torch.testing.assert_close(grads, plain)
    torch.testing.assert_close(x, y)


def test_a_source_and_its_graph_may_go_before_the_versions() -> None:
    saved = torch.ones(4)
    pointer = saved.untyped_storage()._weak_ref()
    source = torch.ones(4, requires_grad=True) * saved
    gone = weakref.ref(source)
    batches, versions = scatter_views(source, 2)
    part = batches[0].tensor.detach()
    versions.sync()
    del source, saved, batches
    assert gone() is None
    assert torch.UntypedStorage._expired(pointer)
    part.add_(1)
    versions.sync()


@given(st.sets(st.integers(0, 3)))
def test_a_part_that_nobody_used_has_a_gradient_of_zeros_if_another_has_one(used: set[int]) -> None:
    x = torch.ones(8, requires_grad=True)
    parts = [batch.tensor for batch in scatter_views(x, 4)[0]]
    sum([parts[i].sum() for i in used], start=torch.zeros((), requires_grad=True)).backward()
    expected = torch.tensor([float(i in used) for i in range(4)]).repeat_interleave(2)
    assert x.grad is None if not used else x.grad.equal(expected)
