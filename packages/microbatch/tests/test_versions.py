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
def test_sync_propagates_version_counters(steps: list[Any]) -> None:
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
def test_modifying_shared_memory_is_detected(
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


def test_in_place_layers_work_on_views() -> None:
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


def test_versions_do_not_keep_source_alive() -> None:
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
def test_unused_view_gets_zero_gradient(used: set[int]) -> None:
    x = torch.ones(8, requires_grad=True)
    parts = [batch.tensor for batch in scatter_views(x, 4)[0]]
    sum([parts[i].sum() for i in used], start=torch.zeros((), requires_grad=True)).backward()
    expected = torch.tensor([float(i in used) for i in range(4)]).repeat_interleave(2)
    assert x.grad is None if not used else x.grad.equal(expected)
