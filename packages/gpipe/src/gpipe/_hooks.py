"""Let gradients grow out of sight until they are whole.

The hooks of a parameter fire once a run, with the whole gradient, as they do in the plain model. And a gradient that
can only be scaled at the end is not mixed with one that was there before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn


class HeldGradients:
    """Takes ``.grad`` and the hooks of parameters away while their gradient grows from micro-batch to micro-batch.

    Args:
        parameters: those of a stage.
        every: hold all of them; else only those with hooks.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], *, every: bool = False) -> None:
        self._held = [_Held(parameter) for parameter in parameters if every or any(_hooks(parameter))]

    def give_back(self) -> list[tuple[nn.Parameter, Tensor | None]]:
        """Let ``.grad`` and the hooks be as before; the parameters with what has grown meanwhile."""
        held, self._held = self._held, []
        return [(each.parameter, each.give_back()) for each in held]


def release(held: Iterable[HeldGradients], scale: float = 1.0) -> None:
    """Give all back, and add to each ``.grad`` in one go, past the hooks, ``scale`` times what has grown."""
    grown = [pair for each in held for pair in each.give_back()]
    whole = [(p, g if scale == 1.0 else g.mul_(scale)) for p, g in grown if g is not None]
    if whole:  # in one backward: some hooks wait for the gradients of several parameters
        torch.autograd.backward([parameter for parameter, _ in whole], [gradient for _, gradient in whole])


class _Held:
    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter = parameter
        self._grad, parameter.grad = parameter.grad, None
        # Autograd looks into these dicts whenever it would call a hook, so emptying them is enough.
        self._hooks = [(hooks, dict(hooks)) for hooks in _hooks(parameter)]
        for hooks, _ in self._hooks:
            hooks.clear()

    def give_back(self) -> Tensor | None:
        gradient, self.parameter.grad = self.parameter.grad, self._grad
        for hooks, own in self._hooks:
            hooks.update(own)
        return gradient


def _hooks(parameter: nn.Parameter) -> Iterator[dict[int, Any]]:
    """The dicts of hooks that are called when a gradient arrives, and when it has been accumulated."""
    for hooks in (parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None)):
        if hooks:
            yield hooks
