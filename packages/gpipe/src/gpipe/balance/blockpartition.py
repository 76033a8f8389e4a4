"""Alias for code written for torchgpipe: :func:`blockpartition.solve`."""

from blockpartition import solve as solve
