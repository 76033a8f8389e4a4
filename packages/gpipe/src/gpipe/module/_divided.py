"""The layers of a pipe: registered under the names that they have in the model, and listed by partition."""

from __future__ import annotations

from typing import TypeVar

from torch import nn

from ..engine._pipeline import Pipeline
from ..schedule import checkpoint_stops
from ._choices import Choices, modes_of

Pipe = TypeVar("Pipe", bound="Divided")


class Divided(nn.Module):
    """The part of a pipe that holds its layers."""

    _balance: list[int]
    _checkpoint: Choices
    _partitions: nn.ModuleList
    _pipeline: Pipeline
    _mode_is_known = False
    """Whether the caller has chosen training or evaluation mode, or has been told of the mode that the model had."""

    def _take(self, partitions: nn.ModuleList) -> None:
        """Register the layers of ``partitions``, so that every name is the wrapped module's, whatever the balance."""
        for partition in partitions:
            self._modules.update(partition._modules)  # where a layer may have the name of an attribute
        # Not registered, hence past nn.Module.__setattr__: a second view of the same layers.
        self.__dict__["_partitions"] = partitions

    def train(self: Pipe, mode: bool = True) -> Pipe:
        super().train(mode)
        self.__dict__["_mode_is_known"] = True
        for container in (self._partitions, *self._partitions):
            container.training = mode
        return self

    @property
    def _numbers(self) -> list[int]:
        """The numbers, in the whole model, of the partitions in this process."""
        return [stage.index for stage in self._pipeline.stages]

    def _checkpoint_stops(self, microbatches: int) -> tuple[int, ...]:
        """For each partition of the model, the first micro-batch that is not checkpointed."""
        modes = modes_of(self._checkpoint) if self.training else "never"
        return checkpoint_stops(modes, microbatches, len(self._balance))
