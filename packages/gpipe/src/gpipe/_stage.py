"""A partition as the engine sees it: its layers, its device, and what its layers were seen to do."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import nn

from microbatch import Batch

from ._checkpoint import Buffers
from ._value import entered, versions


class Stage:
    """One partition on its device. It lives as long as its pipe, and so does what is learned about its layers."""

    def __init__(self, index: int, module: nn.Module, device: torch.device) -> None:
        self.index = index
        self.module = module
        self.device = device
        self._changes_input: dict[bool, bool] = {}

    def compute(self, inputs: Batch) -> Batch:
        """What the layers make of ``inputs``; they may work in place on them, although these are leaves."""
        if not self.may_change_input:
            return Batch(self.module(inputs.value))
        before = versions(inputs)
        output = Batch(self.module(entered(inputs).value))
        training = self.module.training
        self._changes_input[training] = self._changes_input.get(training, False) or versions(inputs) != before
        return output

    @property
    def may_change_input(self) -> bool:
        """Whether the layers work in place on what they get, in this training mode; true until somebody looked."""
        return self._changes_input.get(self.module.training, True)

    @cached_property
    def buffers(self) -> Buffers:
        """The buffers of the layers, and which of them a forward changes."""
        return Buffers(self.module)

    @property
    def layers(self) -> str:
        """The names of the first and the last layer."""
        names = [f"'{name}'" for name, _ in self.module.named_children()]
        return " to ".join(names if len(names) < 2 else (names[0], names[-1])) or "none"
