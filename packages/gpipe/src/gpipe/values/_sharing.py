"""Track the memory that a tensor shares while it is sent from stage to stage.

Each tensor has a mark, which is sent with it and describes what else uses its memory:

- ``OWN``: nothing else uses the memory.
- ``PRESERVED``: a checkpointed cell or the caller needs the memory unchanged. Layers that modify it get a clone.
- ``SHARED``: a change would be visible elsewhere: through another tensor of the value, a skip, or the layer that owns
  this parameter or buffer. In-place changes raise an error, because autograd would not see the change there.

The largest of several marks counts. Tensors with one storage count as sharing memory, even if they do not overlap.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from microbatch import Batch, gather, map_tensors

from ._leaves import Activation, clone, storage_id, versions

OWN, PRESERVED, SHARED = 0, 1, 2


def get_marks(activation: Activation) -> Sequence[int]:
    return activation.marks or [OWN] * len(activation.tensors)


def with_marks(activation: Activation, marks: Sequence[int]) -> Activation:
    return Activation(activation.value, activation.tensors, marks if any(marks) else ())


def flag_aliases(outputs: Activation, inputs: Activation, others: Sequence[tuple[Tensor, int]] = ()) -> Activation:
    """Return ``outputs`` of a stage with marks for the memory they share: ``SHARED`` if it is with each other.

    Args:
        inputs: the inputs of the stage; an output in the memory of an input gets its mark.
        others: more tensors, each with the mark for an output in its memory.
    """
    sources: dict[int, int] = {}
    marked = [*zip(inputs.tensors, inputs.marks, strict=False), *others]  # inputs may have no marks
    for tensor, mark in marked:
        storage = storage_id(tensor)
        sources[storage] = max(mark, sources.get(storage, OWN))
    own = [*map(storage_id, outputs.tensors)]
    if len(set(own)) == len(own) and sources.keys().isdisjoint(own):
        return outputs
    return with_marks(outputs, [SHARED if own.count(storage) > 1 else sources.get(storage, OWN) for storage in own])


def clone_preserved(activation: Activation) -> Activation:
    """Clone the ``PRESERVED`` tensors of ``activation``. ``SHARED`` ones keep their marks."""
    if PRESERVED not in activation.marks:
        return activation
    pairs = zip(activation.tensors, activation.marks, strict=True)
    own = activation.with_tensors([clone(tensor) if mark == PRESERVED else tensor for tensor, mark in pairs])
    return as_copied(own)


def copy_uncounted(activation: Activation) -> list[tuple[Tensor, Tensor]]:
    """Return the ``SHARED`` inference tensors, which have no version counters, each with a copy to compare."""
    pairs = zip(activation.tensors, activation.marks, strict=False)
    return [(tensor, tensor.clone()) for tensor, mark in pairs if mark == SHARED and tensor.is_inference()]


def refuse_shared_changes(
    who: str, activation: Activation, before: Sequence[int], uncounted: Sequence[tuple[Tensor, Tensor]]
) -> None:
    """Raise RuntimeError if ``who`` has modified a ``SHARED`` tensor in place.

    Args:
        who: the layers that may have done it, as the subject of the message.
        before: the versions of all tensors at the beginning.
        uncounted: the result of :func:`copy_uncounted` at the beginning.
    """
    shared = [mark == SHARED for mark in activation.marks]
    counted = any(flag and a != b for flag, a, b in zip(shared, before, versions(activation), strict=False))
    if counted or any(_differs(tensor, copy) for tensor, copy in uncounted):
        raise RuntimeError(
            f"{who} changed a tensor in place that shares its memory with another tensor, which may already be on a "
            "different stage, and whose gradient would be wrong; change a clone, or put all layers that use it into "
            "one partition"
        )


def _differs(a: Tensor, b: Tensor) -> bool:
    return bool(((a != b) & ((a == a) | (b == b))).any())


def join_activations(parts: Sequence[Activation]) -> Activation:
    whole = Activation(tuple([part.value for part in parts]))
    return with_marks(whole, [mark for part in parts for mark in get_marks(part)])


def divide_activation(activation: Activation) -> list[Activation]:
    """Invert :func:`join_activations`: return one activation per value in the tuple."""
    parts = [Activation(value) for value in activation.value]
    marks = iter(get_marks(activation))
    return [with_marks(part, [next(marks) for _ in part.tensors]) for part in parts]


def as_copied(activation: Activation) -> Activation:
    """Return ``activation`` with the marks of a copy: ``PRESERVED`` becomes ``OWN``, and ``SHARED`` stays.

    Nothing uses the memory of the copy, but in the plain model a change of a ``SHARED`` tensor is visible elsewhere.
    """
    if not activation.marks:
        return activation
    return with_marks(activation, [mark if mark == SHARED else OWN for mark in activation.marks])


def guard_shared(activation: Activation) -> Activation:
    """Replace ``SHARED`` tensors that require grad by views whose in-place changes torch rejects."""
    if not activation.marks:
        return activation
    pairs = zip(activation.tensors, activation.marks, strict=True)
    return activation.with_tensors([unchangeable(tensor) if mark == SHARED else tensor for tensor, mark in pairs])


def unchangeable(tensor: Tensor) -> Tensor:
    # torch forbids in-place changes of a view returned by an operation with several outputs, such as unbind.
    return tensor.unsqueeze(0).unbind(0)[0] if tensor.requires_grad else tensor


def find_shared_state(module: nn.Module, outputs: Sequence[Tensor]) -> list[tuple[Tensor, int]]:
    """Return the tensors of ``module`` that share memory with ``outputs``, each with the mark ``SHARED``."""
    uncertain = [t for t in outputs if not t.requires_grad or t.is_leaf or t._is_view()]
    if not uncertain:  # the usual case: results of operations that are not views have their own memory
        return []
    given = set(map(storage_id, uncertain))
    held = [value for each in module.modules() for value in vars(each).values() if isinstance(value, Tensor)]
    state = (*module.parameters(), *module.buffers(), *held)
    return [(tensor, SHARED) for tensor in state if not is_lazy(tensor) and storage_id(tensor) in given]


def gather_outputs(outputs: Sequence[Activation], batches: Sequence[Batch], spec: Any = None) -> Any:
    """Gather the last stage's micro-batch outputs into the output of the mini-batch.

    Tensors that share memory in every micro-batch no longer do after they are concatenated. In the plain model, an
    in-place change of one would change the others, so changes of those that require grad raise an error in torch.
    """
    if len(outputs) == 1:
        outputs = [guard_shared(outputs[0])]
    whole = gather(map(Batch, map(_value, outputs), map(_rows, batches)), spec)
    if len(outputs) == 1 or SHARED not in chain.from_iterable(map(_marks, outputs)):
        return whole
    shared = iter([SHARED in marks for marks in zip(*map(get_marks, outputs), strict=True)])
    return map_tensors(lambda tensor: unchangeable(tensor) if next(shared) else tensor, whole)


def gather_activation(outputs: Sequence[Activation], batches: Sequence[Batch], spec: Any = None) -> Activation:
    """Gather the outputs into one activation, whose graph leads to the graphs of the micro-batches."""
    if len(outputs) == 1:
        return outputs[0]
    whole = Activation(gather(map(Batch, map(_value, outputs), map(_rows, batches)), spec))
    return with_marks(whole, [SHARED * (SHARED in marks) for marks in zip(*map(get_marks, outputs), strict=True)])


_value, _rows, _marks = attrgetter("value"), attrgetter("rows"), attrgetter("marks")
