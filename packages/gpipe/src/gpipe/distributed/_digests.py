"""Digests of the mini-batch that each rank was given, so that ranks with different rows raise an error.

The inputs are read on the rank of the first stage, and the target on the rank of the last one. If each rank has its own
``DistributedSampler``, inputs of one mini-batch would be trained on targets of another. Numbers, strings, and the
digest of a tensor on the CPU are known at once, and compared before the run. A digest of a tensor on an accelerator is
computed there, and compared at the end of the run, so that the host does not wait.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from microbatch import flatten, leaf_paths, unwrap
from streams import CPUStream, current_stream, record_event, wait_event

SAMPLE: Final = 4096
"""The approximate number of elements that a digest covers. Tensors with up to twice as many are covered in full."""


COUNT: Final = 64
"""The maximum number of numbers and strings per argument that ranks compare."""

_PLAIN = (bool, int, float, complex, str, bytes)


class Digest(NamedTuple):
    """The properties of a tensor, number or string that ranks compare.

    Attributes:
        shape: None for a number or string.
        dtype: the name of the type of a number or string.
        value: a hash of the elements, or a text with the value; None if it is not known, or not known yet.
    """

    shape: tuple[int, ...] | None
    dtype: str
    value: int | str | None

    def differs(self, other: Digest) -> bool:
        are_known = self.value is not None and other.value is not None
        return self[:2] != other[:2] or (are_known and self.value != other.value)


class Digests:
    """The digests of all tensors in ``given``, and of the first :data:`COUNT` numbers and strings in each argument.

    Other objects are not compared.

    Args:
        given: the arguments of a call, by the names used in error messages.

    Attributes:
        known: the digests by path. Those of tensors on accelerators have no value yet.
    """

    def __init__(self, given: Mapping[str, Any]) -> None:
        self.known: dict[str, Digest] = {}
        self._pending: dict[str, tuple[Tensor, Any]] = {}
        for root, value in given.items():
            value, _ = unwrap(value, root=root)
            leaves, paths = flatten(value)[0], leaf_paths(value, root)
            count = 0
            for path, leaf in zip(paths, leaves, strict=True):
                if isinstance(leaf, Tensor):
                    self._add(path, leaf)
                elif type(leaf) in _PLAIN and count < COUNT:
                    count += 1
                    self.known[path] = Digest(None, type(leaf).__name__, _shorten(repr(leaf)))

    def _add(self, path: str, tensor: Tensor) -> None:
        value = None
        if _has_elements(tensor):
            with torch.no_grad():
                found = _hash(tensor)
                value = _read_hash(found)
                if value is None:
                    there = found.to("cpu", non_blocking=True)  # pinned memory
                    self._pending[path] = there, record_event(current_stream(found.device))
        self.known[path] = Digest(tuple(tensor.shape), str(tensor.dtype), value)

    def late(self, first: Mapping[str, Digest]) -> dict[str, Digest]:
        """Return the digests to compare at the end of a run: those that this rank, or the ``first`` one, did not know.

        Args:
            first: the digests that the rank of the first stage has announced.
        """
        for path, (value, event) in self._pending.items():
            wait_event(CPUStream, event)
            self.known[path] = self.known[path]._replace(value=int(value))
        wanted = {path for path, digest in first.items() if digest.value is None} | {*self._pending}
        self._pending = {}
        return {path: digest for path, digest in self.known.items() if path in wanted}


def _has_elements(tensor: Tensor) -> bool:
    is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    return is_plain and not (tensor.is_meta or tensor.is_quantized or tensor.is_nested or not tensor.numel())


def _read_hash(hashed: Tensor) -> int | None:
    return int(hashed) if hashed.device.type == "cpu" else None


def _hash(tensor: Tensor) -> Tensor:
    """Return a hash of the bytes of a sample of elements, on the tensor's device."""
    data = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    if data.numel() > 2 * SAMPLE:
        data = data[:: data.numel() // SAMPLE | 1]  # an odd step does not always meet the same column
    size = min(data.element_size(), 8)  # a complex128 is two numbers
    numbers = data.contiguous().view(_INTEGERS[size]).to(torch.int64)
    return (numbers * _weights(len(numbers), numbers.device)).sum()  # overflow wraps around


def _shorten(text: str) -> str:
    return text if len(text) <= _LONG else f"{text[:_LONG]}… ({hashlib.sha256(text.encode()).hexdigest()[:12]})"


_LONG: Final = 64  # characters
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@lru_cache(maxsize=64)
def _weights(count: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        found = torch.arange(1, count + 1, dtype=torch.int64, device=device) * _ODD
        return (found ^ (found >> 29)) * _ODD | 1


_ODD: Final = -7046029254386353131  # 2**64 divided by the golden ratio, as an int64


def different_rows(reports: Iterable[tuple[int, Mapping[str, Digest]]]) -> ValueError | None:
    """Return the error for a value that is not equal on all ranks that have it; None if there is none.

    Args:
        reports: ranks and their digests. A rank may occur more than once.
    """
    first: dict[str, tuple[int, Digest]] = {}
    for rank, digests in reports:
        for path, digest in digests.items():
            other_rank, other = first.setdefault(path, (rank, digest))
            if other.value is None and not digest.differs(other):
                first[path] = rank, digest
            if digest.differs(other):
                difference = _difference(path, (other_rank, other), (rank, digest))
                return ValueError(f"the ranks of a pipe got different mini-batches: {difference}")
    return None


def _difference(path: str, one: tuple[int, Digest], other: tuple[int, Digest]) -> str:
    (rank, digest), (other_rank, other_digest) = one, other
    if digest.shape is None or other_digest.shape is None:
        return (
            f"{path} is {_text(digest)} on rank {rank}, but {_text(other_digest)} on rank {other_rank}; pass "
            "the same numbers and strings on all ranks, or None where an argument is not needed"
        )
    has = "has other values than that"
    if digest[:2] != other_digest[:2]:
        has = f"has {_text(digest)}, but {_text(other_digest)}"
    return (
        f"{path} of rank {rank} {has} of rank {other_rank}, so inputs would be trained with the targets of "
        f"other rows; {_REMEDY}"
    )


def _text(digest: Digest) -> str:
    if digest.shape is None:
        return str(digest.value)
    return f"shape {digest.shape} and dtype {digest.dtype.removeprefix('torch.')}"


_REMEDY = (
    "iterate over the same rows on all ranks of a pipe, as with the same seed and no sampler per process "
    "(DistributedSampler(..., num_replicas=<number of pipes>, rank=<index of this pipe>), no "
    "accelerator.prepare(loader)), read them on one rank with gpipe.distributed.broadcast_batches, or pass None "
    "where an argument is not needed"
)
