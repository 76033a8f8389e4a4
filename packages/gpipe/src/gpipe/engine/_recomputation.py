"""What repeats a forward: of a whole stage (:mod:`gpipe.engine._cell`) or a block (:mod:`gpipe.engine._block`).

A recomputation must find everything as its forward did: buffers, random numbers, autocast. A forward that changes what
cannot be restored keeps its graph instead.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from ..checkpoint._compare import Sample, checks_all
from ..checkpoint._random import CellRNG
from ..checkpoint._state import Snapshot, State
from ..values._leaves import Activation, versions

_log = logging.getLogger("gpipe")


@dataclass
class RecomputationFacts:
    """What runs of a pipe have shown about recomputing some layers.

    Attributes:
        compared: whether a recomputation gave the same values as its forward.
        logged: whether it was logged that a forward keeps its graph.
    """

    compared: bool = False
    logged: bool = False


class Recomputation:
    """What all recomputed forwards of some layers share in a run."""

    def __init__(self, module: nn.Module, facts: RecomputationFacts) -> None:
        self._module = module
        self._facts = facts
        self._state: State | None = None
        self._compares_all = checks_all()
        self._compares = not facts.compared

    def look(self) -> Snapshot:
        # Layers may add attributes and buffers in a forward. Then their places are looked up again.
        if self._state is None or not self._state.is_complete:
            self._state = State(self._module)
        return Snapshot(self._state)

    def may_repeat(self, snapshot: Snapshot) -> bool:
        """After a forward: whether the state before it can be restored. If not, this is logged once."""
        changed = snapshot.changed()
        if changed and not self._facts.logged:
            self._facts.logged = True
            _log.warning("a checkpointed forward changes %s: its graph is kept instead of recomputed", changed)
        return not changed

    def sample(self, outputs: Sequence[Tensor]) -> Sample:
        compares, self._compares = self._compares, False
        return Sample(outputs, whole=compares or self._compares_all)

    def expect_same(self, sample: Sample, outputs: Sequence[Tensor]) -> None:
        self._facts.compared = False  # unless this returns
        sample.expect(outputs)
        self._facts.compared = True


class Repeatable:
    """A forward that is computed again before its backward, unless it turns out that it cannot be repeated.

    While either computes, :data:`current` has its random numbers, and says which of both it is.

    Attributes:
        inputs: the inputs as they were before the forward; None if its graph has to be kept.
    """

    __slots__ = ("_random", "_sample", "_shared", "_snapshot", "_versions", "inputs")
    _sample: Sample
    _snapshot: Snapshot
    _versions: list[int]

    def __init__(self, shared: Recomputation, random: CellRNG) -> None:
        self._shared = shared
        self._random = random
        self.inputs: Activation | None = None

    def first(self, compute: Callable[[], Activation], inputs: Activation, spare: Activation | None) -> Activation:
        """The outputs of ``compute``, which calls the layers with ``inputs``; ``spare`` is a copy of these."""
        before = versions(inputs)
        self._snapshot = self._shared.look()
        outputs = compute()
        # A generator takes 5 kB for each layer and micro-batch; the recomputation makes the same ones again.
        self._random.forget()
        # Layers that work in place have overwritten their input.
        source, counts = (inputs, before) if versions(inputs) == before else (spare, None)
        # Torch takes the lengths of a nested tensor in the recomputation for others than those of its gradient.
        is_nested = any(tensor.is_nested for tensor in outputs.tensors)
        if self._shared.may_repeat(self._snapshot) and source is not None and not is_nested:
            self.inputs, self._versions = source, counts or versions(source)
            self._sample = self._shared.sample(outputs.tensors)
        return outputs

    def again(self, compute: Callable[[], Activation]) -> Activation:
        """The outputs of ``compute``, which calls the layers as in the forward, under the settings of the forward."""
        assert self.inputs is not None
        if versions(self.inputs) != self._versions:
            raise RuntimeError(
                "the input of checkpointed layers was changed in place after their forward, and their recomputation "
                "needs it as it was; change a clone instead, or use checkpoint='never'"
            )
        changed = self._snapshot.changed()
        if changed:
            raise RuntimeError(
                f"{changed} changed between the forward and the backward of a checkpointed run, whose recomputation "
                "would now compute something else; change it after backward() (optimizer.step() comes last), or use "
                "checkpoint='never', also if the forward of a later micro-batch changes it"
            )
        with self._snapshot.restored(), self._random.repeated():
            outputs = compute()
            self._shared.expect_same(self._sample, outputs.tensors)
        return outputs
