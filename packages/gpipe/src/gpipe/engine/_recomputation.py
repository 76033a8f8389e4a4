"""Recompute the forward of a stage, or of a block (:mod:`gpipe.engine._block`).

A recomputation must find buffers, random numbers and autocast as its forward did. If a forward changes state that
cannot be restored, its graph is kept instead.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from torch import Tensor, nn

from ..checkpoint._compare import Sample, checks_all
from ..checkpoint._random import CellRNG
from ..checkpoint._state import Snapshot, State
from ..values._leaves import Activation, clone_leaves, versions

_log = logging.getLogger("gpipe")


class Before(NamedTuple):
    """The state before a forward.

    Attributes:
        spare: a copy of the inputs, if the layers may modify them in place.
    """

    inputs: Activation
    versions: list[int]
    spare: Activation | None
    snapshot: Snapshot


class Repeat(NamedTuple):
    """A forward that can be recomputed.

    Attributes:
        inputs: the inputs, with their values before the forward.
        random: the random numbers of the forward.
        sample: the part of its outputs that the recomputation is compared with.
    """

    inputs: Activation
    versions: list[int]
    snapshot: Snapshot
    random: CellRNG
    sample: Sample

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore buffers and random numbers for the recomputation.

        Raises:
            RuntimeError: the inputs, or state that cannot be restored, have changed since the forward.
        """
        if versions(self.inputs) != self.versions:
            raise RuntimeError(
                "the input of checkpointed layers was changed in place after their forward, and their recomputation "
                "needs it as it was; change a clone instead, or use checkpoint='never'"
            )
        changed = self.snapshot.find_changes()
        if changed:
            raise RuntimeError(
                f"{changed} changed between the forward and the backward of a checkpointed run, whose recomputation "
                "would now compute something else; change it after backward() (optimizer.step() comes last), or use "
                "checkpoint='never', also if the forward of a later micro-batch changes it"
            )
        with self.snapshot.restored(), self.random.repeated():
            yield


class Recomputation:
    """Recomputes the layers of a stage or block, for the lifetime of a pipe."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._state: State | None = None
        self._has_been_same = self._has_logged = self._has_looked = self._moves = False
        self._compares_all = self._compares_next = True

    def begin(self) -> None:
        """Begin a run. Layers and their state may have been replaced before it."""
        self._state = None
        self._compares_all = checks_all()
        self._compares_next = not self._has_been_same

    def before(self, inputs: Activation, *, may_change: bool) -> Before:
        """Record the state before a forward on ``inputs``, which it may modify in place."""
        # A forward may add attributes and buffers. The places of the state are then looked up again.
        if self._state is None or not self._state.is_complete:
            self._state = State(self.module)
        spare = clone_leaves(inputs) if may_change else None
        looks = (self._compares_all or not self._has_looked) and not self._moves
        return Before(inputs, versions(inputs), spare, Snapshot(self._state, sums=looks))

    def repeat(self, before: Before, outputs: Sequence[Tensor], random: CellRNG) -> Repeat | None:
        """Return the record for recomputing a finished forward; None if its graph must be kept."""
        # A generator takes 5 kB per layer and micro-batch. The recomputation creates the same ones again.
        random.forget()
        is_same = versions(before.inputs) == before.versions
        inputs = before.inputs if is_same else before.spare  # in-place layers have overwritten their input
        # Torch treats the ragged sizes of a recomputed nested tensor as different from the ones in its gradient.
        is_nested = any(tensor.is_nested for tensor in outputs)
        if self._changes_state(before.snapshot) or inputs is None or is_nested:
            return None
        whole, self._compares_next = self._compares_next or self._compares_all, False
        counts = before.versions if is_same else versions(inputs)
        return Repeat(inputs, counts, before.snapshot, random, Sample(outputs, whole=whole))

    def expect_same(self, repeat: Repeat, outputs: Sequence[Tensor]) -> None:
        """Raise RuntimeError if the ``outputs`` of a recomputation differ from its forward."""
        self._has_been_same = False  # stays False if the next line raises
        repeat.sample.expect(outputs)
        self._has_been_same = True

    def _changes_state(self, snapshot: Snapshot) -> bool:
        """Return whether a forward changes state that cannot be restored, and log this once.

        After one in-place change through ``.data``, every forward is assumed to make one.
        """
        changed = snapshot.find_changes()
        self._moves = self._moves or snapshot.moves()
        self._has_looked = True
        if changed and not self._has_logged:
            self._has_logged = True
            _log.warning("a checkpointed forward changes %s: its graph is kept instead of recomputed", changed)
        return self._moves or bool(changed)
