"""Who else has to do with the memory of a tensor that goes to a stage.

Inside one value, tensors that share memory travel together (:mod:`gpipe.values._aliases`). What they share with others
is a tie, which goes with them from stage to stage:

- ``KEPT``: somebody needs the memory as it is, such as a checkpointed cell, or the caller. Whoever wants to work in
  place on it takes a clone.
- ``SEEN``: a change would be seen elsewhere, by a skip on its way to another stage, or by the layer whose parameter or
  buffer it is. Whoever works in place on it is refused, since the others could not differentiate the change.
- ``PARTED``: the same, but it has been copied to another device, away from those with which it shared memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

from torch import Tensor, nn

from microbatch import Batch

from ._aliases import Aliased, packed
from ._leaves import SharedBatch, map_batch
from ._memory import Region, cloned_together, has_own_storages, region, storage_id

OWN, KEPT, SEEN, PARTED = 0, 1, 2, 4


def ties_of(batch: Batch) -> Sequence[int]:
    """The ties of each tensor."""
    return batch.ties if isinstance(batch, SharedBatch) else [OWN] * len(batch)


def with_ties(batch: Batch, ties: Sequence[int]) -> Batch:
    """``batch`` with these ties in place of others."""
    return SharedBatch(batch.value, ties) if any(ties) else Batch(batch.value)


def flag_aliases(outputs: Batch, inputs: Batch, others: Sequence[tuple[Tensor, int]] = ()) -> Batch:
    """``outputs`` with the ties of their memory: those of ``inputs`` in it, of the ``others``, and to each other."""
    if isinstance(outputs.value, Tensor) and not others and type(inputs) is Batch:
        return outputs
    tensors = list(outputs)
    sources = [*zip(inputs, ties_of(inputs), strict=True), *others]
    if has_own_storages(tensors) and {storage_id(s) for s, _ in sources}.isdisjoint(map(storage_id, tensors)):
        return outputs
    return with_ties(outputs, [_tie(k, tensors, sources) for k in range(len(tensors))])


def _tie(k: int, tensors: Sequence[Tensor], sources: Sequence[tuple[Tensor, int]]) -> int:
    """The ties of tensor number ``k``."""
    own = region(tensors[k])
    found = OWN
    for source, tie in sources:
        found |= tie if own.overlaps(region(source)) else OWN
    others = (other for n, other in enumerate(tensors) if n != k)
    return found | (SEEN if any(own.overlaps(region(other)) for other in others) else OWN)


def overlap(batches: Sequence[Batch]) -> bool:
    """Whether there is memory of one batch in another, as of ``x[1:]`` and ``x[:-1]`` in several micro-batches."""
    if len(batches) < 2 or has_own_storages(list(batches[0])):
        return False
    found = False
    furthest, owner = Region(0, 0, 0), 0
    for where, i in sorted((region(tensor), i) for i, batch in enumerate(batches) for tensor in batch):
        found = found or (i != owner and where.overlaps(furthest))
        if where.storage != furthest.storage or where.stop > furthest.stop:
            furthest, owner = where, i
    return found


def owned(batch: Batch) -> Batch:
    """``batch`` with clones of what somebody else keeps.

    Not of what somebody else may see: a clone would hide that the two belong together.
    """
    if not isinstance(batch, SharedBatch) or KEPT not in batch.ties:
        return batch
    own = _cloned(batch, [tie == KEPT for tie in batch.ties])
    return with_ties(own, [OWN if tie == KEPT else tie for tie in batch.ties])


def _cloned(batch: Batch, which: Sequence[bool]) -> Batch:
    """``batch`` with clones of those tensors."""
    chosen, flags = iter(cloned_together([*compress(batch, which)])), iter(which)
    return map_batch(batch, lambda tensor: next(chosen) if next(flags) else tensor)


def expect_unseen(batch: Batch, before: Sequence[int], after: Sequence[int]) -> None:
    """Raise RuntimeError if a tensor whose change others would see is at another version than before."""
    if any(tie & SEEN and a != b for tie, a, b in zip(ties_of(batch), before, after, strict=True)):
        raise RuntimeError(
            "the layers of this partition changed a tensor in place that shares its memory with another one from "
            "an earlier partition, whose gradient would be wrong; let them work on a clone, or put both into one "
            "partition"
        )


def joined(parts: Sequence[Batch]) -> Batch:
    """One batch of a tuple of the values of all ``parts``, packed where these share memory."""
    whole = tuple([part.value for part in parts])
    if not any(isinstance(part, SharedBatch) for part in parts):
        return Batch(whole)
    ties = [tie for part in parts for tie in ties_of(part)]
    value = packed(whole) if any(tie & SEEN for tie in ties) else whole
    return SharedBatch(value, _of_sources(value, ties) if isinstance(value, Aliased) else ties)


def _of_sources(value: Aliased, ties: Sequence[int]) -> list[int]:
    """The ties of the sources, given those of the tensors in ``value``."""
    found = [OWN] * len(value.sources)
    for source, tie in zip(value.used, ties, strict=True):
        found[source] |= tie
    return found


def divided(batch: Batch) -> list[Batch]:
    """A batch for each value in the tuple that ``batch`` is."""
    parts = [Batch(value) for value in batch.value]
    if not isinstance(batch, SharedBatch):
        return parts
    ties = iter(batch.ties)
    return [with_ties(part, [next(ties) for _ in part]) for part in parts]


def parted(batch: Batch) -> Batch:
    """``batch`` after it was copied to another device: its memory is its own, but others still expect its changes."""
    if not isinstance(batch, SharedBatch):
        return batch
    return with_ties(batch, [tie & ~KEPT | PARTED if tie & SEEN else OWN for tie in batch.ties])


def among(batch: Batch) -> Batch:
    """``batch`` with the ties among its own tensors only: nobody else is left who could see a change."""
    if not isinstance(batch, SharedBatch):
        return batch
    return with_ties(batch, [SEEN if twin else OWN for twin in _twins(batch)])


def released(batch: Batch) -> Batch:
    """What comes out of the last stage, in memory that nobody else has to do with, and with the ties in it."""
    if not isinstance(batch, SharedBatch):
        return batch
    which = [bool(tie & KEPT or (tie and not twin)) for tie, twin in zip(batch.ties, _twins(batch), strict=True)]
    return with_ties(_cloned(batch, which), ties_of(among(batch)))


def _twins(batch: SharedBatch) -> list[bool]:
    """For each tensor, whether it shares memory with another one here, or may have done so on another device."""
    regions = [region(tensor) for tensor in batch]
    apart = sum(bool(tie & PARTED) for tie in batch.ties) > 1
    return [
        any(own.overlaps(other) for m, other in enumerate(regions) if m != k) or bool(apart and tie & PARTED)
        for k, (own, tie) in enumerate(zip(regions, batch.ties, strict=True))
    ]


def guarded(batch: Batch) -> Batch:
    """``batch`` for one who may work in place on it: torch refuses that where others would see the change."""
    ties = iter(ties_of(batch))
    return map_batch(batch, lambda tensor: unchangeable(tensor) if next(ties) & SEEN else tensor)


def unchangeable(tensor: Tensor) -> Tensor:
    """``tensor``, so that torch refuses to change it in place, if autograd would have to know of that."""
    # Torch lets nobody change one of several views that come from one operation.
    return tensor.unsqueeze(0).unbind(0)[0] if tensor.requires_grad else tensor


def given_state(module: nn.Module, outputs: Batch) -> list[tuple[Tensor, int]]:
    """The parameters and buffers of ``module`` whose memory is in the ``outputs``, with their tie."""
    given = {storage_id(tensor) for tensor in outputs if not _is_computed(tensor)}
    if not given:
        return []
    return [(state, SEEN) for state in (*module.parameters(), *module.buffers()) if storage_id(state) in given]


def _is_computed(tensor: Tensor) -> bool:
    """Whether ``tensor`` is surely no parameter, buffer or view of one: a quick answer for what most layers give."""
    return tensor.requires_grad and not tensor.is_leaf and not tensor._is_view()
