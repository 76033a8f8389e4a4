"""Let the hooks of parameters fire once a run, with the whole gradient, as they do in the plain model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn


class HeldHooks:
    """Takes the hooks of parameters away while their gradient grows from micro-batch to micro-batch."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._held = [_Held(parameter) for parameter in parameters if any(_hooks(parameter))]

    def fire(self) -> None:
        """Give them back, and accumulate the whole gradient in one go, past the hooks."""
        for held in self._take():
            gradient = held.give_back()
            if gradient is not None:
                torch.autograd.backward((held.parameter,), (gradient,))

    def drop(self) -> None:
        """Give them back; ``.grad`` is what it was before."""
        for held in self._take():
            held.give_back()

    def _take(self) -> list[_Held]:
        held, self._held = self._held, []
        return held


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
