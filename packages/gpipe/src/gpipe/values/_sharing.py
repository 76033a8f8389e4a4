"""Memory that a tensor on its way from stage to stage shares with something outside of its value.

Tensors of one value that share memory are sent as one tensor and its views (:mod:`gpipe.values._aliases`). For memory
that is shared with anything else each tensor has a tie, which is sent with it:

- ``OWN``: nothing else uses the memory.
- ``KEPT``: the memory must stay as it is, because a checkpointed cell or the caller needs it. A layer that works in
  place gets a clone.
- ``SEEN``: a change would be visible elsewhere: through a skip, through a tensor that could not be sent as a view, or
  to the layer that owns this parameter or buffer. In-place work is refused, because autograd would not see the change
  there.

Of several ties the largest counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from operator import itemgetter

from torch import Tensor, nn

from microbatch import Batch

from ._leaves import Activation
from ._memory import cloned_together, groups, has_own_storages, storage_id

OWN, KEPT, SEEN = 0, 1, 2


def ties_of(activation: Activation) -> Sequence[int]:
    """The tie of each tensor."""
    return activation.ties or [OWN] * len(activation.tensors)


def with_ties(activation: Activation, ties: Sequence[int]) -> Activation:
    """``activation`` with these ties instead of its own."""
    return Activation(activation.value, activation.tensors, ties if any(ties) else ())


def flag_aliases(outputs: Activation, inputs: Activation, others: Sequence[tuple[Tensor, int]] = ()) -> Activation:
    """``outputs`` with ties for the memory that they share; ``SEEN`` where it is with each other.

    Args:
        outputs: of a stage.
        inputs: of the stage; an output in the memory of one of them gets its tie.
        others: more tensors, with the tie that an output in their memory gets.
    """
    tensors = outputs.tensors
    sources = [*zip(inputs.tensors, inputs.ties, strict=False), *others]  # inputs without ties are left out
    if has_own_storages(tensors, list(map(_first, sources))):
        return outputs
    count, ties = len(tensors), [OWN] * len(tensors)
    for group in groups([*tensors, *map(_first, sources)]):
        own = [k for k in group if k < count]
        found = [sources[k - count][1] for k in group if k >= count]
        for k in own:
            ties[k] = SEEN if len(own) > 1 else max(found, default=OWN)
    return with_ties(outputs, ties)


_first = itemgetter(0)


def overlap(batches: Sequence[Batch]) -> bool:
    """Whether batches share memory with each other, as those of ``(x[1:], x[:-1])`` do."""
    if len(batches) < 2 or isinstance(batches[0].value, Tensor) or has_own_storages(batches[0].tensors):
        return False
    owners = [i for i, batch in enumerate(batches) for _ in batch]
    return any(owners[group[0]] != owners[group[-1]] for group in groups([t for batch in batches for t in batch]))


def owned(activation: Activation) -> Activation:
    """``activation`` with clones of tensors that are ``KEPT``.

    Those that are ``SEEN`` are not cloned: changing a clone would go unnoticed where it has to be refused.
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
    if any(tie == SEEN and a != b for tie, a, b in zip(activation.ties, before, after, strict=False)):
        raise RuntimeError(
            "the layers of this partition changed a tensor in place that shares its memory with another one from "
            "an earlier partition, whose gradient would be wrong; let them work on a clone, or put both into one "
            "partition"
        )


def joined(parts: Sequence[Activation]) -> Activation:
    """One activation, whose value is the tuple of the values of ``parts``."""
    whole = Activation(tuple([part.value for part in parts]))
    return with_ties(whole, [tie for part in parts for tie in ties_of(part)])


def divided(activation: Activation) -> list[Activation]:
    """The inverse of :func:`joined`: one activation for each value in the tuple."""
    parts = [Activation(value) for value in activation.value]
    ties = iter(ties_of(activation))
    return [with_ties(part, [next(ties) for _ in part.tensors]) for part in parts]


def parted(activation: Activation) -> Activation:
    """``activation`` after a copy: it shares no memory, but changes that others would have to see remain refused."""
    if not activation.ties:
        return activation
    return with_ties(activation, [tie if tie == SEEN else OWN for tie in activation.ties])


def released(activation: Activation) -> Activation:
    """The output of the last stage, with clones of all that shares memory with anything else."""
    return parted(_cloned(activation, list(map(bool, activation.ties)))) if activation.ties else activation


def guarded(activation: Activation) -> Activation:
    """``activation`` so that torch refuses in-place changes of its ``SEEN`` tensors."""
    if not activation.ties:
        return activation
    pairs = zip(activation.tensors, activation.ties, strict=True)
    return activation.with_tensors([unchangeable(tensor) if tie == SEEN else tensor for tensor, tie in pairs])


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
