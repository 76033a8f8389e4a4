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
from operator import itemgetter

from torch import Tensor, nn

from microbatch import Batch

from ._aliases import Aliased, packed
from ._leaves import Activation
from ._memory import Region, cloned_together, has_own_storages, region, storage_id

OWN, KEPT, SEEN, PARTED = 0, 1, 2, 4


def ties_of(activation: Activation) -> Sequence[int]:
    """The ties of each tensor."""
    return activation.ties or [OWN] * len(activation.tensors)


def with_ties(activation: Activation, ties: Sequence[int]) -> Activation:
    """``activation`` with these ties in place of others."""
    return Activation(activation.value, activation.tensors, ties if any(ties) else ())


def flag_aliases(outputs: Activation, inputs: Activation, others: Sequence[tuple[Tensor, int]] = ()) -> Activation:
    """``outputs`` with the ties of their memory: those of ``inputs`` in it, of the ``others``, and to each other."""
    tensors = outputs.tensors
    sources = [*zip(inputs.tensors, inputs.ties, strict=False), *others]  # of inputs without ties none
    if has_own_storages(tensors, list(map(_first, sources))):
        return outputs
    return with_ties(outputs, [_tie(k, tensors, sources) for k in range(len(tensors))])


_first = itemgetter(0)


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
    if len(batches) < 2 or isinstance(batches[0].value, Tensor) or has_own_storages(batches[0].tensors):
        return False
    found = False
    furthest, owner = Region(0, 0, 0), 0
    for where, i in sorted((region(tensor), i) for i, batch in enumerate(batches) for tensor in batch):
        found = found or (i != owner and where.overlaps(furthest))
        if where.storage != furthest.storage or where.stop > furthest.stop:
            furthest, owner = where, i
    return found


def owned(activation: Activation) -> Activation:
    """``activation`` with clones of what somebody else keeps.

    Not of what somebody else may see: a clone would hide that the two belong together.
    """
    if KEPT not in activation.ties:
        return activation
    own = _cloned(activation, [tie == KEPT for tie in activation.ties])
    return with_ties(own, [OWN if tie == KEPT else tie for tie in activation.ties])


def _cloned(activation: Activation, which: Sequence[bool]) -> Activation:
    """``activation`` with clones of those tensors."""
    clones = iter(cloned_together([*compress(activation.tensors, which)]))
    chosen = zip(activation.tensors, which, strict=True)
    return activation.with_tensors([next(clones) if flag else tensor for tensor, flag in chosen])


def expect_unseen(activation: Activation, before: Sequence[int], after: Sequence[int]) -> None:
    """Raise RuntimeError if a tensor whose change others would see is at another version than before."""
    if any(tie & SEEN and a != b for tie, a, b in zip(activation.ties, before, after, strict=False)):
        raise RuntimeError(
            "the layers of this partition changed a tensor in place that shares its memory with another one from "
            "an earlier partition, whose gradient would be wrong; let them work on a clone, or put both into one "
            "partition"
        )


def joined(parts: Sequence[Activation]) -> Activation:
    """The activation of a tuple of the values of all ``parts``, packed where these share memory."""
    whole = tuple([part.value for part in parts])
    if not any(part.ties for part in parts):
        return Activation(whole)
    ties = [tie for part in parts for tie in ties_of(part)]
    value = packed(whole) if any(tie & SEEN for tie in ties) else whole
    return Activation(value, ties=_of_sources(value, ties) if isinstance(value, Aliased) else ties)


def _of_sources(value: Aliased, ties: Sequence[int]) -> list[int]:
    """The ties of the sources, given those of the tensors in ``value``."""
    found = [OWN] * len(value.sources)
    for source, tie in zip(value.used, ties, strict=True):
        found[source] |= tie
    return found


def divided(activation: Activation) -> list[Activation]:
    """An activation of each value in the tuple that ``activation`` is of."""
    parts = [Activation(value) for value in activation.value]
    if not activation.ties:
        return parts
    ties = iter(activation.ties)
    return [with_ties(part, [next(ties) for _ in part.tensors]) for part in parts]


def parted(activation: Activation) -> Activation:
    """``activation`` after a copy to another device: its memory is its own, but others still expect its changes."""
    if not activation.ties:
        return activation
    return with_ties(activation, [tie & ~KEPT | PARTED if tie & SEEN else OWN for tie in activation.ties])


def among(activation: Activation) -> Activation:
    """``activation`` with the ties among its own tensors only: nobody else is left who could see a change."""
    if not activation.ties:
        return activation
    return with_ties(activation, [SEEN if twin else OWN for twin in _twins(activation)])


def released(activation: Activation) -> Activation:
    """What comes out of the last stage, in memory that nobody else has to do with, and with the ties in it."""
    if not activation.ties:
        return activation
    pairs = zip(activation.ties, _twins(activation), strict=True)
    which = [bool(tie & KEPT or (tie and not twin)) for tie, twin in pairs]
    return with_ties(_cloned(activation, which), among(activation).ties)


def _twins(activation: Activation) -> list[bool]:
    """For each tensor, whether it shares memory with another one here, or may have done so on another device."""
    regions = [region(tensor) for tensor in activation.tensors]
    apart = sum(bool(tie & PARTED) for tie in activation.ties) > 1
    return [
        any(own.overlaps(other) for m, other in enumerate(regions) if m != k) or bool(apart and tie & PARTED)
        for k, (own, tie) in enumerate(zip(regions, activation.ties, strict=True))
    ]


def guarded(activation: Activation) -> Activation:
    """``activation`` for one who may work in place on it: torch refuses that where others would see the change."""
    if not activation.ties:
        return activation
    pairs = zip(activation.tensors, activation.ties, strict=True)
    return activation.with_tensors([unchangeable(tensor) if tie & SEEN else tensor for tensor, tie in pairs])


def unchangeable(tensor: Tensor) -> Tensor:
    """``tensor``, so that torch refuses to change it in place, if autograd would have to know of that."""
    # Torch lets nobody change one of several views that come from one operation.
    return tensor.unsqueeze(0).unbind(0)[0] if tensor.requires_grad else tensor


def given_state(module: nn.Module, outputs: Sequence[Tensor]) -> list[tuple[Tensor, int]]:
    """The parameters and buffers of ``module`` whose memory is in the ``outputs``, with their tie."""
    uncertain = [t for t in outputs if not t.requires_grad or t.is_leaf or t._is_view()]
    if not uncertain:  # as mostly: what was computed with gradients, and is no view, is in memory of its own
        return []
    given = set(map(storage_id, uncertain))
    return [(state, SEEN) for state in (*module.parameters(), *module.buffers()) if storage_id(state) in given]
