"""torchgpipe's module path of :func:`blockpartition.solve`."""

from blockpartition import solve as solve
