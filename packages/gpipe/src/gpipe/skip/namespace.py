"""torchgpipe's module path of :class:`gpipe.skip.Namespace`."""

from ._namespace import Namespace as Namespace
