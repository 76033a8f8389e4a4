"""Memory that a tensor on its way from stage to stage shares with something outside of its value.

Tensors of one value that share memory are sent together (:mod:`gpipe.values._aliases`). For memory that is shared with
anything else, each tensor has flags, called its ties, which are sent with it:

- ``KEPT``: the memory must stay as it is, because a checkpointed cell or the caller needs it. A layer that works in
  place gets a clone.
- ``SEEN``: a change would be visible elsewhere: to a skip on its way to another stage, or to the layer that owns this
  parameter or buffer. In-place work is refused, because autograd would not see the change there.
- ``PARTED``: was ``SEEN``, and then copied to another device, so that the memory is shared no more.
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
    """The ties of each tensor; zeros if there are none."""
    return activation.ties or [OWN] * len(activation.tensors)


def with_ties(activation: Activation, ties: Sequence[int]) -> Activation:
    """``activation`` with these ties instead of its own."""
    return Activation(activation.value, activation.tensors, ties if any(ties) else ())


def flag_aliases(outputs: Activation, inputs: Activation, others: Sequence[tuple[Tensor, int]] = ()) -> Activation:
    """``outputs`` with ties for the memory that they share; ``SEEN`` where it is with each other.

    Args:
        outputs: of a stage.
        inputs: of the stage; an output in the memory of one of them gets its ties.
        others: more tensors, with the ties that an output in their memory gets.
    """
    tensors = outputs.tensors
    sources = [*zip(inputs.tensors, inputs.ties, strict=False), *others]  # inputs without ties are left out
    if has_own_storages(tensors, list(map(_first, sources))):
        return outputs
    return with_ties(outputs, [_tie(k, tensors, sources) for k in range(len(tensors))])


_first = itemgetter(0)


def _tie(k: int, tensors: Sequence[Tensor], sources: Sequence[tuple[Tensor, int]]) -> int:
    """The ties of ``tensors[k]``."""
    own = region(tensors[k])
    found = OWN
    for source, tie in sources:
        found |= tie if own.overlaps(region(source)) else OWN
    others = (other for n, other in enumerate(tensors) if n != k)
    return found | (SEEN if any(own.overlaps(region(other)) for other in others) else OWN)


def overlap(batches: Sequence[Batch]) -> bool:
    """Whether batches share memory with each other, as those of ``(x[1:], x[:-1])`` do."""
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
    """``activation`` with clones of tensors that are ``KEPT`` and no more.

    Those that are ``SEEN`` too are not cloned: changing a clone would go unnoticed where it has to be refused.
    """
    if KEPT not in activation.ties:
        return activation
    own = _cloned(activation, [tie == KEPT for tie in activation.ties])
    return with_ties(own, [OWN if tie == KEPT else tie for tie in activation.ties])


def _cloned(activation: Activation, which: Sequence[bool]) -> Activation:
    """``activation`` with clones of the tensors whose flag in ``which`` is true."""
    clones = iter(cloned_together([*compress(activation.tensors, which)]))
    chosen = zip(activation.tensors, which, strict=True)
    return activation.with_tensors([next(clones) if flag else tensor for tensor, flag in chosen])


def expect_unseen(activation: Activation, before: Sequence[int], after: Sequence[int]) -> None:
    """Raise RuntimeError if the version of a ``SEEN`` tensor has changed."""
    if any(tie & SEEN and a != b for tie, a, b in zip(activation.ties, before, after, strict=False)):
        raise RuntimeError(
            "the layers of this partition changed a tensor in place that shares its memory with another one from "
            "an earlier partition, whose gradient would be wrong; let them work on a clone, or put both into one "
            "partition"
        )


def joined(parts: Sequence[Activation]) -> Activation:
    """One activation, whose value is the tuple of the values of ``parts``; packed if these share memory."""
    whole = tuple([part.value for part in parts])
    if not any(part.ties for part in parts):
        return Activation(whole)
    ties = [tie for part in parts for tie in ties_of(part)]
    value = packed(whole) if any(tie & SEEN for tie in ties) else whole
    return Activation(value, ties=_of_sources(value, ties) if isinstance(value, Aliased) else ties)


def _of_sources(value: Aliased, ties: Sequence[int]) -> list[int]:
    """The ties of the sources of ``value``, from the ties of its tensors."""
    found = [OWN] * len(value.sources)
    for source, tie in zip(value.used, ties, strict=True):
        found[source] |= tie
    return found


def divided(activation: Activation) -> list[Activation]:
    """The inverse of :func:`joined`: one activation for each value in the tuple."""
    parts = [Activation(value) for value in activation.value]
    if not activation.ties:
        return parts
    ties = iter(activation.ties)
    return [with_ties(part, [next(ties) for _ in part.tensors]) for part in parts]


def parted(activation: Activation) -> Activation:
    """``activation`` after a copy to another device: no memory is shared, but in-place changes are still refused."""
    if not activation.ties:
        return activation
    return with_ties(activation, [tie & ~KEPT | PARTED if tie & SEEN else OWN for tie in activation.ties])


def among(activation: Activation) -> Activation:
    """``activation`` with ties only between its own tensors, once everything else that shared memory is gone."""
    if not activation.ties:
        return activation
    return with_ties(activation, [SEEN if twin else OWN for twin in _twins(activation)])


def released(activation: Activation) -> Activation:
    """The output of the last stage, with clones of what is shared outside of it, and ties between its own tensors."""
    if not activation.ties:
        return activation
    pairs = zip(activation.ties, _twins(activation), strict=True)
    which = [bool(tie & KEPT or (tie and not twin)) for tie, twin in pairs]
    return with_ties(_cloned(activation, which), among(activation).ties)


def _twins(activation: Activation) -> list[bool]:
    """For each tensor, whether it shares memory with another one in ``activation``, or may have before a copy."""
    regions = [region(tensor) for tensor in activation.tensors]
    apart = sum(bool(tie & PARTED) for tie in activation.ties) > 1
    return [
        any(own.overlaps(other) for m, other in enumerate(regions) if m != k) or bool(apart and tie & PARTED)
        for k, (own, tie) in enumerate(zip(regions, activation.ties, strict=True))
    ]


def guarded(activation: Activation) -> Activation:
    """``activation`` so that torch refuses in-place changes of its ``SEEN`` tensors."""
    if not activation.ties:
        return activation
    pairs = zip(activation.tensors, activation.ties, strict=True)
    return activation.with_tensors([unchangeable(tensor) if tie & SEEN else tensor for tensor, tie in pairs])


def unchangeable(tensor: Tensor) -> Tensor:
    """``tensor`` so that torch refuses to change it in place if it requires grad."""
    # torch refuses in-place changes of a view that came from an operation with several outputs, such as unbind.
    return tensor.unsqueeze(0).unbind(0)[0] if tensor.requires_grad else tensor


def given_state(module: nn.Module, outputs: Sequence[Tensor]) -> list[tuple[Tensor, int]]:
    """The parameters and buffers of ``module`` that share memory with ``outputs``, each with the tie ``SEEN``."""
    uncertain = [t for t in outputs if not t.requires_grad or t.is_leaf or t._is_view()]
    if not uncertain:  # the usual case: a result with a graph that is no view has memory of its own
        return []
    given = set(map(storage_id, uncertain))
    return [(state, SEEN) for state in (*module.parameters(), *module.buffers()) if storage_id(state) in given]
