"""Batch norm whose running statistics are those of the whole mini-batch, although it sees micro-batches."""

from __future__ import annotations

from typing import Any, ClassVar, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import batch_norm
from torch.nn.modules.batchnorm import SyncBatchNorm, _BatchNorm, _LazyNormBase

from ._checkpoint import is_recomputing
from ._place import microbatch

Module = TypeVar("Module", bound=nn.Module)


class DeferredBatchNorm(_BatchNorm):
    """Normalises each micro-batch by its own statistics, and updates the running ones once a mini-batch.

    After the last micro-batch ``running_mean`` and ``running_var`` are what the plain layer would have made of the
    whole mini-batch, with the unbiased variance; ``num_batches_tracked`` counts mini-batches. A recomputation updates
    nothing.

    Inside a pipe the last micro-batch is the one that really is the last. Elsewhere it is every ``chunks``-th forward.

    Args:
        chunks: micro-batches of a mini-batch, where no pipe says it.
        others: as ``torch.nn.BatchNorm2d``.
    """

    recomputes_without_buffers: ClassVar[bool] = True

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        chunks: int = 1,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats=True, device=device, dtype=dtype)
        self.chunks = chunks
        self._reset_seen()

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """As batch norm: ``input`` of shape (N, C) or (N, C, ...)."""
        self._check_input_dim(input)
        if not self.training:
            return batch_norm(input, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)
        if not is_recomputing():
            with torch.no_grad():
                self._see(input)
        return batch_norm(input, None, None, self.weight, self.bias, True, 0.0, self.eps)

    @classmethod
    def convert_deferred_batch_norm(cls, module: Module, chunks: int = 1) -> Module:
        """``module`` with every batch norm that tracks statistics replaced by a deferred one, also inside of it.

        Parameters, running statistics and ``training`` are taken over. ``SyncBatchNorm``, lazy layers, and those that
        track nothing stay as they are. Returns ``module`` itself unless it is a batch norm.
        """
        if isinstance(module, DeferredBatchNorm):
            module.chunks = chunks
            return module
        if isinstance(module, _BatchNorm) and not isinstance(module, (SyncBatchNorm, _LazyNormBase)):
            return cast(Module, cls._like(module, chunks)) if module.track_running_stats else module
        for name, child in module.named_children():
            module._modules[name] = cls.convert_deferred_batch_norm(child, chunks)
        return module

    @classmethod
    def _like(cls, norm: _BatchNorm, chunks: int) -> DeferredBatchNorm:
        deferred = cls(norm.num_features, norm.eps, norm.momentum, norm.affine, chunks, device="meta")
        deferred._parameters.update(norm._parameters)
        deferred._buffers.update(norm._buffers)
        deferred.training = norm.training
        return deferred

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002
        if input.dim() < 2:
            raise ValueError(f"expected an input of at least 2 dimensions (N, C, ...); got shape {tuple(input.shape)}")

    def _reset_seen(self) -> None:
        self._forwards = 0
        self._count = 0
        self._mean: Tensor | None = None
        self._deviation: Tensor | None = None

    def _see(self, input: Tensor) -> None:  # noqa: A002
        i, m = microbatch() or (self._forwards % self.chunks, self.chunks)
        if i == 0:  # also after a mini-batch that failed half-way
            self._reset_seen()
        self._merge(input)
        self._forwards += 1
        if i == m - 1:
            self._commit()

    def _merge(self, input: Tensor) -> None:  # noqa: A002
        """Add ``input`` to what this mini-batch has shown, by the formula of Chan, Golub and LeVeque (1979)."""
        rows = input.transpose(0, 1).flatten(1).to(torch.promote_types(input.dtype, torch.float32))
        count, mean = rows.shape[1], rows.mean(1)
        deviation = (rows - mean[:, None]).square_().sum(1)
        if self._mean is None or self._deviation is None:
            self._count, self._mean, self._deviation = count, mean, deviation
            return
        total = self._count + count
        delta = mean - self._mean
        self._deviation = self._deviation + deviation + delta.square() * (self._count * count / total)
        self._mean = self._mean + delta * (count / total)
        self._count = total

    def _commit(self) -> None:
        assert self._mean is not None
        assert self._deviation is not None
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        weight = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(self._mean.to(self.running_mean.dtype), weight)
        self.running_var.lerp_((self._deviation / max(self._count - 1, 1)).to(self.running_var.dtype), weight)
        self._reset_seen()
