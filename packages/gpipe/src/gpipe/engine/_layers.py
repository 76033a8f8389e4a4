"""The layers of a stage in one run: calls them for its cells, and records what they do."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..skip._store import Key, routed
from ..values._aliases import packed, unpacked
from ..values._constants import expect_plain
from ..values._leaves import Activation, Arguments, as_nonleaf, versions
from ..values._sharing import expect_unseen, given_state
from ._stage import Stage
from ._tensor_hooks import TensorHooks

_log = logging.getLogger("gpipe")


class Layers:
    """The layers of a stage, as the cells of one run call them.

    Layers may have been changed between two runs. So each run observes them anew in its first micro-batch; only
    the facts of the stage are kept from run to run.

    Args:
        stage: the stage.

    Attributes:
        stage: the same.
        may_change_input: whether the layers change their input in place; True until the first forward has shown it.
        given: parameters and buffers whose memory the outputs of the first forward share, with their tie.
    """

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.given: list[tuple[Tensor, int]] = []
        self.may_change_input = True
        self._changes_input = stage.facts.changes_late
        self._seen_outputs = False
        self._looks_for_hooks = False
        self._module = stage.module
        self._is_direct = stage.is_direct

    def compute(self, inputs: Activation) -> Activation:
        """The output of the layers for ``inputs``, which are leaves; the layers may still change them in place."""
        if self.may_change_input:
            return self._compute_first(inputs)
        before = versions(inputs) if inputs.ties else []  # tensors without ties are used by this stage alone
        value = inputs.value
        try:
            if self._is_direct and isinstance(value, Tensor):  # most stages; saves two calls
                output = self._module(value)
                output = output if isinstance(output, Tensor) else self._packed(output)
            else:
                output = self._call(value)
        except RuntimeError as error:
            if "leaf Variable that requires grad" in str(error):
                raise self._late_change() from error
            raise
        if before and before != (after := versions(inputs)):
            self._expect_untied(inputs, before, after)
        return Activation(output)

    def _compute_first(self, inputs: Activation) -> Activation:
        """Like :meth:`compute`, for the first micro-batch of a run, or if the layers are known to change their input in
        place.
        """
        before = versions(inputs)
        call = self._call_looking_for_hooks if self._looks_for_hooks else self._call
        outputs = Activation(call(as_nonleaf(inputs).value))
        after = versions(inputs)
        if after != before:
            expect_unseen(inputs, before, after)
        if not self._seen_outputs:
            self.given = given_state(self._module, outputs.tensors)
            self._seen_outputs = True
        # The version counter of an inference tensor does not count.
        if after != before or not any(map(Tensor.is_inference, inputs.tensors)):
            self._changes_input = self.may_change_input = self._changes_input or after != before
        return outputs

    def _expect_untied(self, inputs: Activation, before: Sequence[int], after: Sequence[int]) -> None:
        """Raise if a tensor has changed that other stages or the caller use too."""
        if any(tie and a != b for tie, a, b in zip(inputs.ties, before, after, strict=True)):
            raise self._late_change()

    def _late_change(self) -> RuntimeError:
        self.stage.facts.changes_late = True
        return RuntimeError(
            "the layers of this partition changed their input in place on this micro-batch but not on the first, by "
            "which a run decides whether they need a copy; run again, since the pipe knows now, or let them work on a "
            "clone"
        )

    def _call_looking_for_hooks(self, value: Any) -> Any:
        with TensorHooks() as hooks:  # this takes time, and only a split backward needs it
            output = self._call(value)
        self._looks_for_hooks = False
        self.stage.facts.hooks[self._module.training] = hooks.seen
        return output

    def _call(self, value: Any) -> Any:
        """The output of the layers for ``value``, with skips from and to other stages."""
        if self._is_direct:
            return self._layers(value)
        store: dict[Key, Any] = {}  # one store for each cell: a failed cell's skips are freed with it
        if self.stage.pops:
            value, *skips = unpacked(value)
            store.update(zip(self.stage.pops, map(unpacked, skips), strict=True))
        with routed(store):
            output = self._layers(value)
        return (output, *[store.pop(key) for key in self.stage.stashes]) if self.stage.stashes else output

    def _layers(self, value: Any) -> Any:
        value = value if isinstance(value, Tensor) else unpacked(value)
        output = self._module(*value.args, **value.kwargs) if isinstance(value, Arguments) else self._module(value)
        return output if isinstance(output, Tensor) else self._packed(output)

    def _packed(self, output: Any) -> Any:
        """``output``, which is not a single tensor, in the form that goes to the next stage."""
        expect_plain(output, self.stage.index)
        return packed(output)

    def look_for_hooks(self) -> None:
        """In the next forward, check for hooks that layers put on tensors, unless known for this training mode."""
        self._looks_for_hooks = self._module.training not in self.stage.facts.hooks

    @property
    def may_split(self) -> bool:
        """Whether the backward may be split. A hook on a tensor where the parts meet would be called by both."""
        return not self.stage.facts.hooks.get(self._module.training)

    def runs_whole(self) -> None:
        """Warn, once, that the backward of this stage cannot be split."""
        if not self.stage.facts.runs_whole:
            self.stage.facts.runs_whole = True
            _log.warning(
                "the backward of partition %d cannot be split into inputs and weights; it runs whole",
                self.stage.index,
            )
