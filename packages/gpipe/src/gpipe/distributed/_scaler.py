""":class:`GradScaler`: scale float16 losses, and skip a step on all ranks if the gradients of one overflow."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from ._calls import gradient_norm
from ._rank import Rank


class GradScaler(torch.amp.GradScaler):
    """A ``torch.amp.GradScaler`` for a :class:`Rank`: if gradients overflow on any rank, all ranks skip the step.

    All ranks call the same methods in the same order, with one optimizer each.
    Only the rank of the last stage calls :meth:`scale`, in its ``loss_fn``.

    Args:
        rank: the rank that has the parameters of the optimizer.
        options: options of ``torch.amp.GradScaler``, such as ``init_scale``, equal on all ranks.

    >>> scaler = GradScaler(rank)  # doctest: +SKIP
    >>> rank.step(x, y, loss_fn=lambda output, y: scaler.scale(loss_fn(output, y)))  # doctest: +SKIP
    >>> scaler.unscale_(optimizer)  # doctest: +SKIP
    >>> rank.clip_grad_norm_(1.0)  # doctest: +SKIP
    >>> scaler.step(optimizer)  # doctest: +SKIP
    >>> scaler.update()  # doctest: +SKIP
    """

    def __init__(self, rank: Rank, **options: Any) -> None:
        device = next((p.device for p in rank.parameters()), torch.device("cpu"))
        super().__init__(device.type, **options)
        self._rank = rank
        # A rank may have no gradients at all. Torch's scaler then raises an error, because it has checked nothing.
        self._found = nn.Parameter(torch.zeros((), device=device))
        self._finder = SGD([self._found], lr=0.0)
        self._overflows: bool | None = None  # whether any rank has an overflow; None until it is known in a step
        self.scale(torch.zeros((), device=device))  # creates the scale, even on ranks without a loss

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the gradients of ``optimizer`` by the scale, and check whether any rank has an overflow.

        Args:
            optimizer: the optimizer of this rank.
        """
        if not self.is_enabled():
            return
        norm = gradient_norm(self._rank, "GradScaler.unscale_")
        self._overflows = not norm.isfinite()
        # NaN on all ranks if the norm is not finite, else 0.
        self._found.grad = (norm * 0.0).to(self._found.device)
        super().unscale_(self._finder)
        super().unscale_(optimizer)

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Call ``optimizer.step`` unless any rank has an overflow.

        Args:
            optimizer: the optimizer of this rank. It is not called if no parameter has a gradient.
            args, kwargs: the arguments of ``optimizer.step``.

        Returns:
            The result of ``optimizer.step``, or None if it was not called.
        """
        if self.is_enabled() and self._overflows is None:
            self.unscale_(optimizer)
        if self._overflows or not any(p.grad is not None for group in optimizer.param_groups for p in group["params"]):
            return None
        return super().step(optimizer, *args, **kwargs)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Update the scale, equally on all ranks: lower after an overflow, higher after many steps without one.

        Args:
            new_scale: a scale to set instead.
        """
        super().update(new_scale)
        self._overflows = None
