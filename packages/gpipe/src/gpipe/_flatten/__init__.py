"""Make a sequence of layers from a model whose ``forward`` is written in Python, without tracing its operations.

The **blocks** of a model are the elements of its lists of layers, or other modules that it calls. All else is computed
before the first block, after the last, or between two: in **segments**. A segment is the model's own forward, up to the
next blocks that are called with nothing computed between them, in which everything that belongs to other layers is
replaced by placeholders.
"""
