"""The path of torchgpipe to :func:`blockpartition.solve`."""

from blockpartition import solve as solve
