"""What repeats a forward: all forwards of some layers in a run that will be computed again before their backward.

The layers are those of a whole stage (:mod:`gpipe.engine._cell`) or a block of its layers
(:mod:`gpipe.engine._block`). A recomputation must find everything as its forward did: buffers, attributes, training
flags, hooks, autocast. What cannot be restored is compared, and raises an error that names it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from streams import Context

from .._current import setting
from .._torch import backward_id
from ..checkpoint._compare import Extent, Sample, checks_all
from ..checkpoint._hook_snapshot import HookSnapshot
from ..checkpoint._random import CellRNG
from ..checkpoint._state import Snapshot, State, StateFacts, StateGuard, Training
from ..values._leaves import Activation, versions


@dataclass
class RecomputationFacts:
    """What runs have shown about recomputing some layers. Lives with the pipe; every run reads and extends it.

    Attributes:
        state: which of their buffers and attributes forwards change.
        compared: the training modes in which a whole recomputation was compared with its forward.
    """

    state: StateFacts = field(default_factory=StateFacts)
    compared: frozenset[Training] = frozenset()


class Recomputation:
    """What all recomputed forwards of some layers share in a run.

    Args:
        module: the layers.
        device: their device.
        facts: what runs have shown about recomputing them.
        context: the context (grad mode, autocast and so on) of the caller of the forward.
    """

    def __init__(self, module: nn.Module, device: torch.device, facts: RecomputationFacts, context: Context) -> None:
        self._module = module
        self._on_cpu = device.type == "cpu"
        self._facts = facts
        self._context = context
        self._state = State(module, facts.state)
        self._training: Training | None = None
        self._compares_all = False
        self._compares = False
        self._grounds: StateGuard | None = None
        self._hooks: HookSnapshot | None = None
        self._change = ""
        self._looked = False

    def remember(self) -> Snapshot:
        """The state of the layers before a forward."""
        if self._training is None:
            self._state.begin()
            self._training = self._state.training
            self._compares_all = checks_all()
        return self._state.remember(self._training)

    def settle(self, remembered: Snapshot) -> bool:
        """After a forward: whether a recomputation can repeat it, given the state of the layers."""
        repeatable = self._state.settle(remembered)
        self._facts.state = self._state.facts
        if self._grounds is None:
            self._grounds = StateGuard(remembered)
        return repeatable

    def finish(self) -> None:
        """All forwards of all stages are done; the caller may now change the layers before the backward."""
        self._hooks = HookSnapshot(self._module)

    def begin(self) -> None:
        """The backward begins; no stage computes yet."""
        self._state.facts = self._facts.state  # other runs may have begun and ended since the forward
        if self._hooks is not None:
            self._change = self._hooks.change()

    def sample(self, outputs: Sequence[Tensor]) -> Sample:
        """A sample of the ``outputs`` of a forward, with which its recomputation is compared."""
        whole = self._compares_all or not (self._compares or self._training in self._facts.compared)
        self._compares = True
        # Elsewhere than on the CPU, the host would have to wait for the values.
        return Sample(outputs, Extent.ALL if whole else Extent.SOME if self._on_cpu else Extent.SHAPES)

    @contextmanager
    def repeated(self, remembered: Snapshot, random: CellRNG, sample: Sample) -> Iterator[None]:
        """A context in which the calling thread computes a forward again, as it was.

        Args:
            remembered: the state before the forward.
            random: the random numbers that it has drawn.
            sample: of its outputs.
        """
        self._expect_unchanged()
        with (
            self._context.applied(),
            # A block is computed again inside of a backward, where layers must not draw; here they may.
            setting(recomputing=True, rng=random, graph_task=backward_id()),
            self._state.restored(remembered, still=sample.whole),
            random.repeated(),
        ):
            yield

    def expect_same(self, sample: Sample, outputs: Sequence[Tensor]) -> None:
        """Raise RuntimeError if a recomputation has given other ``outputs`` than its forward."""
        assert self._training is not None
        try:
            with self._context.applied():  # autocast decides how far values may differ
                sample.expect(outputs)
        except RuntimeError:
            self._state.forget()
            self._facts.state, self._facts.compared = self._state.facts, frozenset()
            raise
        self._facts.compared |= {self._training}

    def _expect_unchanged(self) -> None:
        """Raise if training flags, hooks or modules have changed, or tensors whose changes are not counted."""
        if self._state.training != self._training:
            raise RuntimeError(
                "train() or eval() was called between the forward and the backward of a checkpointed run, whose "
                "recomputation would now compute something else; call it after backward(), or use checkpoint='never'"
            )
        if self._change:
            raise RuntimeError(
                f"{self._change} between the forward and the backward of a checkpointed run, whose recomputation would "
                "now give other gradients; do that after backward(), or use checkpoint='never'"
            )
        if self._grounds is not None and not self._looked:
            self._state.expect_same(self._grounds)
            self._looked = True  # what replaces tensors without a trace is the caller, between forward and backward


class Repeatable:
    """A forward that is computed again before its backward, unless it turns out that it cannot be repeated.

    Args:
        shared: what it shares with other forwards of the same layers.
        random: its random numbers.

    Attributes:
        inputs: the inputs as they were before the forward; None if it cannot be repeated, and its graph has to be kept.
        nested: whether there are nested tensors among the outputs.
    """

    __slots__ = ("_random", "_remembered", "_sample", "_shared", "_versions", "inputs", "nested")
    _remembered: Snapshot
    _sample: Sample
    _versions: list[int]

    def __init__(self, shared: Recomputation, random: CellRNG) -> None:
        self._shared = shared
        self._random = random
        self.inputs: Activation | None = None
        self.nested = False

    def first(self, compute: Callable[[], Activation], inputs: Activation, spare: Activation | None) -> Activation:
        """The outputs of the layers.

        Args:
            compute: calls the layers with ``inputs``.
            inputs: their inputs.
            spare: a copy of the inputs, in case the layers change them in place.
        """
        before = versions(inputs)
        self._remembered = self._shared.remember()
        with setting(checkpointing=True, rng=self._random):
            outputs = compute()
        self._random.forget()
        source = inputs if versions(inputs) == before else spare
        # Also if there is no source: what this forward has changed counts for the next ones.
        if self._shared.settle(self._remembered) and source is not None:
            self.inputs, self._versions = source, versions(source)
            self._sample = self._shared.sample(outputs.tensors)
            self.nested = self._sample.nested
        return outputs

    def again(self, compute: Callable[[], Activation]) -> Activation:
        """The outputs of ``compute``, which calls the layers as in the forward, with ``inputs``."""
        assert self.inputs is not None
        if versions(self.inputs) != self._versions:
            raise RuntimeError(
                "the input of checkpointed layers was changed in place after their forward, and their recomputation "
                "needs it as it was; change a clone instead, or use checkpoint='never'"
            )
        with self._shared.repeated(self._remembered, self._random, self._sample):
            outputs = compute()
        self._shared.expect_same(self._sample, outputs.tensors)
        return outputs
