"""The path of torchgpipe to :class:`gpipe.DeferredBatchNorm`."""

from ._batchnorm import DeferredBatchNorm as DeferredBatchNorm
