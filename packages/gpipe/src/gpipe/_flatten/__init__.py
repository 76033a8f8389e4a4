"""Make a sequential model of one whose forward is written in Python, without tracing its operations.

The **blocks** of a model are the elements of its lists of layers; most parameters are in them. Everything else happens
before the first, or after the last, or between two such lists: in **segments**. A segment is the model's own forward in
which all that belongs elsewhere is replaced by a stand-in, up to the next list of blocks.
"""

from ._flatten import flatten as flatten

__all__ = ["flatten"]
