"""What computing a forward again needs: that of a whole stage, or of a block (:mod:`gpipe.engine._block`).

A recomputation must find everything as its forward did: buffers, random numbers, autocast. A forward that changes what
cannot be restored keeps its graph instead.
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
    """What is there before a forward.

    Attributes:
        spare: a copy of the inputs, if the layers may change them in place.
        sums: of what tensors of the layers hold, if a change of that would leave no other trace.
    """

    inputs: Activation
    versions: list[int]
    spare: Activation | None
    snapshot: Snapshot
    sums: dict[int, Tensor] | None


class Repeat(NamedTuple):
    """What one forward needs to be computed again.

    Attributes:
        inputs: as they were before the forward.
        random: the random numbers of the forward.
        sample: what is compared of its outputs.
    """

    inputs: Activation
    versions: list[int]
    snapshot: Snapshot
    random: CellRNG
    sample: Sample

    @contextmanager
    def restored(self) -> Iterator[None]:
        """A context for the recomputation, with buffers and random numbers as the forward found them.

        Raises:
            RuntimeError: the inputs, or what cannot be restored, have changed since.
        """
        if versions(self.inputs) != self.versions:
            raise RuntimeError(
                "the input of checkpointed layers was changed in place after their forward, and their recomputation "
                "needs it as it was; change a clone instead, or use checkpoint='never'"
            )
        changed = self.snapshot.changed()
        if changed:
            raise RuntimeError(
                f"{changed} changed between the forward and the backward of a checkpointed run, whose recomputation "
                "would now compute something else; change it after backward() (optimizer.step() comes last), or use "
                "checkpoint='never', also if the forward of a later micro-batch changes it"
            )
        with self.snapshot.restored(), self.random.repeated():
            yield


class Recomputation:
    """The layers of a stage or block as far as they are recomputed, for the life of a pipe."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._state: State | None = None
        self._has_been_same = self._has_logged = self._moves = False
        self._compares_all = self._compares_next = True

    def begin(self) -> None:
        """Begin a run, before which layers and their state may have been replaced."""
        self._state = None
        self._compares_all = checks_all()
        self._compares_next = not self._has_been_same

    def before(self, inputs: Activation, *, may_change: bool) -> Before:
        """Look at the state before a forward with ``inputs``, which it may change in place."""
        # Layers may add attributes and buffers in a forward. Then their places are looked up again.
        if self._state is None or not self._state.is_complete:
            self._state = State(self.module)
        spare = clone_leaves(inputs) if may_change else None
        snapshot = Snapshot(self._state)
        sums = snapshot.sums() if self._compares_next and not self._moves else None
        return Before(inputs, versions(inputs), spare, snapshot, sums)

    def repeat(self, before: Before, outputs: Sequence[Tensor], random: CellRNG) -> Repeat | None:
        """After the forward: what its recomputation needs; None if its graph has to be kept."""
        # A generator takes 5 kB for each layer and micro-batch; the recomputation makes the same ones again.
        random.forget()
        is_same = versions(before.inputs) == before.versions
        inputs = before.inputs if is_same else before.spare  # layers that work in place have overwritten their input
        # Torch takes the lengths of a nested tensor in the recomputation for others than those of its gradient.
        is_nested = any(tensor.is_nested for tensor in outputs)
        if self._changes_state(before) or inputs is None or is_nested:
            return None
        whole, self._compares_next = self._compares_next or self._compares_all, False
        counts = before.versions if is_same else versions(inputs)
        return Repeat(inputs, counts, before.snapshot, random, Sample(outputs, whole=whole))

    def expect_same(self, repeat: Repeat, outputs: Sequence[Tensor]) -> None:
        """Raise RuntimeError if a recomputation has given other ``outputs`` than its forward."""
        self._has_been_same = False  # unless this returns
        repeat.sample.expect(outputs)
        self._has_been_same = True

    def _changes_state(self, before: Before) -> bool:
        """Whether a forward changes what cannot be restored. This is logged once.

        What it changes through ``.data`` is looked for once, until a recomputation has given what its forward did.
        """
        changed = before.snapshot.changed()
        if not changed and before.sums is not None:
            changed = before.snapshot.moved(before.sums)
            self._moves = bool(changed)
        if changed and not self._has_logged:
            self._has_logged = True
            _log.warning("a checkpointed forward changes %s: its graph is kept instead of recomputed", changed)
        return self._moves or bool(changed)
