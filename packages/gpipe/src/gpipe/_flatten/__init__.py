"""Make a sequence of layers from a model whose ``forward`` is written in Python, without tracing its operations.

The **blocks** of a model are the elements of its lists of layers. All other computations are before the first block,
after the last, or between two such lists: in **segments**. A segment is the model's own forward, up to the next list of
blocks, in which everything that belongs to other layers is replaced by placeholders.
"""
