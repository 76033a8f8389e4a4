"""torchgpipe's module path of :class:`gpipe.DeferredBatchNorm`."""

from ._batchnorm import DeferredBatchNorm as DeferredBatchNorm
