"""Which tensors share memory, and clones that share what their originals do."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gpipe.values._memory import clusters, extent, has_own_storages, is_dense, region


def views() -> st.SearchStrategy[Tensor]:
    """A tensor whose elements lie somewhere in a storage of 40 elements."""
    dimensions = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), max_size=3)
    return st.builds(_view, dimensions, st.integers(0, 9), st.booleans())


def _view(dimensions: list[tuple[int, int]], offset: int, wide: bool) -> Tensor:
    shape, stride = [size for size, _ in dimensions], [step for _, step in dimensions]
    return torch.arange(40, dtype=torch.int64 if wide else torch.int32).as_strided(shape, stride, offset)


def places(tensor: Tensor) -> set[int]:
    """The elements of the storage that are in ``tensor``, whose values are their numbers."""
    return set(tensor.flatten().tolist())


@given(views())
def test_a_region_holds_all_elements(tensor: Tensor):
    where, found = region(tensor), places(tensor)
    assert extent(tensor) == (max(found) - min(found) + 1 if found else 0)
    if found:
        assert (where.start, where.stop) == (min(found) * tensor.itemsize, (max(found) + 1) * tensor.itemsize)
    else:
        assert where.start == where.stop


@given(views())
def test_a_clone_of_what_is_dense_is_laid_out_alike(tensor: Tensor):
    dense = is_dense(tensor)
    assert not dense or len(places(tensor)) == tensor.numel() == extent(tensor)
    if dense and tensor.numel():
        sizes = [k for k, size in enumerate(tensor.shape) if size > 1]
        assert [tensor.clone().stride(k) for k in sizes] == [tensor.stride(k) for k in sizes]


WAYS = (
    lambda t: t,
    lambda t: t[5:9],
    lambda t: t[8:20:3],
    lambda t: t[20:38].view(3, 6).T,
    lambda t: t[4:8].view(torch.int32),
    lambda t: t[7:7],
)


def families() -> st.SearchStrategy[list[Tensor]]:
    """Views of two storages, some of them there twice."""
    chosen = st.lists(st.tuples(st.integers(0, 1), st.sampled_from(WAYS)), min_size=1, max_size=6)
    return st.tuples(chosen, st.data()).map(_family)


def _family(pair: tuple[list[tuple[int, Callable[[Tensor], Tensor]]], st.DataObject]) -> list[Tensor]:
    storages = [torch.arange(40.0), torch.arange(40.0)]
    found = [way(storages[k]) for k, way in pair[0]]
    return [found[k] for k in pair[1].draw(st.lists(st.integers(0, len(found) - 1), min_size=1, max_size=6))]


@given(families())
def test_clusters_hold_what_overlaps(tensors: list[Tensor]):
    found = clusters(tensors)
    assert sorted(map(id, tensors)) == sorted(id(each) for cluster in found for each in cluster)
    number = {id(tensor): k for k, cluster in enumerate(found) for tensor in cluster}
    for a, b in product(tensors, tensors):
        assert not region(a).overlaps(region(b)) or number[id(a)] == number[id(b)]
    assert not has_own_storages(tensors) or len(found) == len(tensors)
