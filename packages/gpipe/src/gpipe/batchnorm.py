"""Alias for code written for torchgpipe: :class:`gpipe.DeferredBatchNorm`."""

from ._batchnorm import DeferredBatchNorm as DeferredBatchNorm
