"""Check, before a joint operation, that all ranks got valid and identical arguments."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, Final

import torch
from torch import nn

from ._errors import RemoteError, format_error
from ._object_exchange import ObjectExchange, Report

METHOD: Final = "the method that is called"
"""The entry of a report that announces the call that the report belongs to."""


class Agreement:
    """The values that ranks compare and exchange in one synchronization.

    Attributes:
        must_match: values that must be equal on all ranks, keyed by the names used in error messages.
        sent: the values that this rank sends to the others.
        received: the values sent by each rank, in rank order. Set by the synchronization.
    """

    def __init__(self) -> None:
        self.must_match: dict[str, Any] = {}
        self.sent: dict[str, Any] = {}
        self.received: list[dict[str, Any]] = []


@contextmanager
def agreement(meeting: ObjectExchange, method: str = "Rank") -> Iterator[Agreement]:
    """Run a block on each rank, and synchronize all ranks at its end: if it fails on one rank, all ranks raise.

    Ranks that did not fail themselves raise RemoteError. All ranks raise ValueError if values of ``must_match`` differ,
    or if another rank is in a different call or part of a call, which ``method`` names.
    The call is decorated with :func:`defer_signals`, and the block is in :func:`allow_signals`, so that interrupts are
    raised in such blocks, or after the call.
    """
    found, error = Agreement(), None
    try:
        yield found
    except BaseException as failed:  # an interrupt too: other ranks wait for this one
        error = failed
    report = {METHOD: method, "must_match": found.must_match, "sent": found.sent}
    reports = meeting.all_gather(report if error is None else {METHOD: method, "error": format_error(error)})
    if error is not None:
        raise error
    members = meeting.groups.members
    expect_same(reports, members, METHOD)
    for k, each in enumerate(reports):
        if "error" in each:
            raise RemoteError(f"rank {members[k]} failed: {each['error']}") from None
    first = reports[0]["must_match"]
    for k, each in enumerate(reports):
        if (other := disagreement(first, each["must_match"], members[0], members[k])) is not None:
            raise other
    found.received = [each["sent"] for each in reports]


def disagreement(first: dict[str, Any], other: dict[str, Any], rank: int, other_rank: int) -> ValueError | None:
    """Return the error for a value of ``rank`` in ``first`` that is different in ``other``; None if all are equal."""
    for name, expected in first.items():
        if other.get(name) != expected:
            return ValueError(
                f"the ranks disagree: {name} is {expected!r} on rank {rank}, but {other.get(name)!r} on rank "
                f"{other_rank}; pass the same on all ranks" + _SEED * name.startswith("the checksum")
            )
    return None


def expect_same(reports: Sequence[Report], members: Sequence[int], name: str) -> None:
    """Raise ValueError unless the entry ``name`` is equal in the reports of all ``members``."""
    for k, report in enumerate(reports):
        error = disagreement({name: reports[0].get(name)}, report, members[0], members[k])
        if error is not None:
            raise error


_SEED = ": call torch.manual_seed() before the model is created, or load a checkpoint into it first"


def describe_model(module: nn.Module) -> dict[str, Any]:
    """Return the properties of a model that ranks compare: layers, tensors, and the version of torch."""
    return {
        "layers of the model": _digest((name, type(layer).__qualname__) for name, layer in module.named_children()),
        "parameters and buffers of the model": _digest(
            (name, tuple(tensor.shape), str(tensor.dtype), tensor.requires_grad)
            for name, tensor in chain(module.named_parameters(), module.named_buffers())
        ),
        "version of torch": torch.__version__,
    }


def checksums(module: nn.Module) -> dict[str, int]:
    """Return the sum of the bytes of each parameter and buffer, by a name for error messages."""
    with torch.no_grad():
        return {
            f"the checksum of {name!r}": _checksum(tensor)
            for name, tensor in chain(module.named_parameters(), module.named_buffers())
            if not hasattr(tensor, "placements")  # each replica has a different shard
        }


def _checksum(tensor: Any) -> int:
    if tensor.is_meta:
        return 0
    data = tensor.detach().to_dense().reshape(-1).contiguous()
    return int(data.view(torch.uint8).sum(dtype=torch.int64))


def _digest(facts: Iterator[tuple[Any, ...]]) -> str:
    listed = list(facts)
    return f"{len(listed)} of digest {hashlib.sha256(repr(listed).encode()).hexdigest()[:12]}"
