"""Batch norm that normalizes each micro-batch but updates its running statistics once per mini-batch."""

from __future__ import annotations

import copy
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import batch_norm
from torch.nn.modules.batchnorm import SyncBatchNorm, _BatchNorm, _LazyNormBase

from ._current import current
from ._hooks import hook_kinds


class Moments:
    """The count, and per channel the mean and squared deviation, of the inputs so far.

    Attributes:
        forwards: the number of forwards, counted outside pipes only.
        count: the number of values per channel.
        mean: the mean of each channel, of shape (C,), in float32 or a wider dtype.
        microbatches: the indices of the micro-batches so far, counted inside pipes only.
    """

    def __init__(self) -> None:
        self.microbatches: set[int] = set()
        self.forwards = 0
        self.count = 0
        self.mean = torch.zeros(())
        self._deviation = torch.zeros(())

    @property
    def variance(self) -> Tensor:
        """The unbiased variance of each channel, of shape (C,)."""
        return self._deviation / max(self.count - 1, 1)

    def add(self, input: Tensor) -> None:  # noqa: A002
        """Add the statistics of ``input``, of shape (N, C, ...), by the formula of Chan, Golub and LeVeque (1979).

        An empty ``input`` changes nothing.
        """
        rows = input.transpose(0, 1).flatten(1).to(torch.promote_types(input.dtype, torch.float32))
        count = rows.shape[1]
        if not count:
            return
        mean = rows.mean(1)
        deviation = (rows - mean[:, None]).square_().sum(1)
        if not self.count:
            self.count, self.mean, self._deviation = count, mean, deviation
            return
        total = self.count + count
        delta = mean - self.mean
        self._deviation = self._deviation + deviation + delta.square() * (self.count * count / total)
        self.mean = self.mean + delta * (count / total)
        self.count = total


MiniBatchStatistics = dict["DeferredBatchNorm", list[Moments]]
"""The statistics of a stage's deferred batch norms for one mini-batch, until the stage's last forward has finished.

They belong to the run and not to the layers, so a failed run drops them. A layer that is called k times per forward has
k moments and is updated k times, as in the plain model.
"""


def commit(statistics: MiniBatchStatistics) -> None:
    """Update the running statistics, after the last forward of a mini-batch."""
    with torch.no_grad():
        for layer, calls in statistics.items():
            for moments in calls:
                layer.update(moments)


Module = TypeVar("Module", bound=nn.Module)


class DeferredBatchNorm(_BatchNorm):
    """Batch norm that normalizes each micro-batch, and updates its running statistics once per mini-batch.

    After the last forward of a mini-batch, ``running_mean`` and ``running_var`` equal the plain layer's on the full
    mini-batch, and ``num_batches_tracked`` counts mini-batches. A layer that is called k times per forward is updated
    k times. Recomputations and empty micro-batches add nothing to the statistics.

    Args:
        chunks: the number of micro-batches per mini-batch, for use outside pipes: every ``chunks``-th forward ends a
            mini-batch. In a pipe, the last forward of the stage ends it.
        others: the arguments of ``torch.nn.BatchNorm2d``.
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
        self._seen = Moments()

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """Normalize a micro-batch, and add its statistics to the mini-batch's.

        Args:
            input: a tensor of shape (N, C) or (N, C, ...).

        Returns:
            A tensor of the same shape.

        Raises:
            ValueError: ``input`` has fewer than two dimensions.
        """
        self._check_input_dim(input)
        if not self.training:
            return batch_norm(input, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)
        with torch.no_grad():
            self._see(input)
        return batch_norm(input, None, None, self.weight, self.bias, True, 0.0, self.eps)

    @classmethod
    def convert_deferred_batch_norm(cls, module: Module, chunks: int = 1) -> Module:
        """Replace every batch norm in ``module`` that tracks statistics by a deferred one with the same state.

        ``SyncBatchNorm``, lazy layers, and layers that track no statistics are not replaced.

        Args:
            module: the module, which is modified in place unless it is a batch norm itself.
            chunks: the number of micro-batches per mini-batch, for use outside pipes.

        Returns:
            ``module``, or the deferred batch norm that replaces it.

        Raises:
            ValueError: a batch norm has hooks, parametrizations or a custom forward. Then nothing is replaced.
        """
        for each in module.modules():
            if is_replaced(each):
                _expect_plain(each)
        return cast(Module, cls._convert(module, chunks))

    @classmethod
    def _convert(cls, module: nn.Module, chunks: int) -> nn.Module:
        if isinstance(module, DeferredBatchNorm):
            module.chunks = chunks
            return module
        if is_replaced(module):
            return cls._like(cast(_BatchNorm, module), chunks)
        for name, child in module.named_children():
            module._modules[name] = cls._convert(child, chunks)
        return module

    @classmethod
    def _like(cls, norm: _BatchNorm, chunks: int) -> DeferredBatchNorm:
        kind = next((kind for plain, kind in _KINDS.items() if isinstance(norm, plain) and issubclass(kind, cls)), cls)
        deferred = kind(norm.num_features, norm.eps, norm.momentum, norm.affine, chunks, device="meta")
        deferred._parameters.update(norm._parameters)
        deferred._buffers.update(norm._buffers)
        deferred.training = norm.training
        return deferred

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002
        if input.dim() < 2:
            raise ValueError(f"expected an input of at least 2 dimensions (N, C, ...); got shape {tuple(input.shape)}")

    def _see(self, input: Tensor) -> None:  # noqa: A002
        work = current.work
        if work.microbatch is None:
            self._see_alone(input)
        elif work.statistics is not None:
            calls = work.statistics.setdefault(self, [])
            moments = next((each for each in calls if work.microbatch not in each.microbatches), None)
            if moments is None:
                moments = Moments()
                calls.append(moments)
            moments.microbatches.add(work.microbatch)
            moments.add(input)

    def _see_alone(self, input: Tensor) -> None:  # noqa: A002
        seen = copy.copy(self._seen)  # not in place: a check of a model restores the attributes that it changed
        seen.add(input)
        seen.forwards += 1
        if seen.forwards >= self.chunks:
            self.update(seen)
            seen = Moments()
        self._seen = seen

    def update(self, seen: Moments) -> None:
        """Update the running statistics from a mini-batch. An empty one only increments ``num_batches_tracked``.

        Args:
            seen: the count, mean and squared deviation of the mini-batch.
        """
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        if not seen.count:
            return
        weight = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(seen.mean.to(self.running_mean.dtype), weight)
        self.running_var.lerp_(seen.variance.to(self.running_var.dtype), weight)


# Subclasses, because code that freezes or configures batch norms finds them with isinstance.
class DeferredBatchNorm1d(DeferredBatchNorm, nn.BatchNorm1d):
    pass


class DeferredBatchNorm2d(DeferredBatchNorm, nn.BatchNorm2d):
    pass


class DeferredBatchNorm3d(DeferredBatchNorm, nn.BatchNorm3d):
    pass


_KINDS: dict[type, type[DeferredBatchNorm]] = {
    nn.BatchNorm1d: DeferredBatchNorm1d,
    nn.BatchNorm2d: DeferredBatchNorm2d,
    nn.BatchNorm3d: DeferredBatchNorm3d,
}


def is_replaced(module: nn.Module) -> bool:
    special = isinstance(module, (SyncBatchNorm, _LazyNormBase, DeferredBatchNorm))
    return isinstance(module, _BatchNorm) and not special and module.track_running_stats


def _expect_plain(norm: nn.Module) -> None:
    """Raise ValueError if ``norm`` computes something that a deferred batch norm would not."""
    if hook_kinds(norm) or norm._modules or type(norm).forward is not _BatchNorm.forward:
        raise ValueError(
            f"a {type(norm).__name__} with hooks, parametrizations or a custom forward cannot be replaced by a "
            "DeferredBatchNorm, which would lose them; replace it in the model's code"
        )
