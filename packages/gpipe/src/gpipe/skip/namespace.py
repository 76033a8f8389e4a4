"""The path of torchgpipe to :class:`gpipe.skip.Namespace`."""

from ._namespace import Namespace as Namespace
