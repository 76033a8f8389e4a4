"""In-place changes of a tensor and of the parts that share its memory."""

from collections.abc import Sequence
from operator import attrgetter

from torch import Tensor
from torch.autograd.graph import increment_version


class Versions:
    """Tells autograd when a tensor that `scatter_views` cut, or a micro-batch of it, was changed in place.

    Autograd detects a changed tensor by its version counter. Micro-batches have counters of their own: changes of the
    source are not counted in micro-batches, nor theirs in the source, until `sync` is called. Not thread-safe: no other
    thread may use the tensors meanwhile.

    >>> import torch
    >>> from microbatch import scatter_views
    >>> x = torch.zeros(4)
    >>> (a, b), versions = scatter_views(x, 2)
    >>> _ = x.add_(1)
    >>> a.tensor._version
    0
    >>> versions.sync(); a.tensor._version
    1
    """

    def __init__(self) -> None:
        self._ties: list[_Tie] = []

    def add(self, source: Tensor, chunks: Sequence[Tensor]) -> None:
        """Track `chunks`, which are new and share the memory of `source`.

        This object refers to all of them. So pass a detached alias of the source, which refers to no graph.

        Args:
            source: the tensor that was cut.
            chunks: its parts.
        """
        if not source.is_inference():  # inference tensors have no version counter, and autograd never saves them
            self._ties.append(_Tie(source, chunks))

    def sync(self) -> None:
        """Count a change of a source as a change of its chunks, and a change of a chunk as one of its source.

        Sources that are one tensor, or views of one, have one counter: a change through one is a change of them all.
        Call it before the backward, which then raises where autograd has saved a tensor that was changed.
        """
        for tie in self._ties:
            source, chunks = tie.seen
            if [*map(_version, tie.chunks)] != chunks:
                # In-place operations may have connected them to a graph, which would be kept.
                tie.chunks = [chunk.detach() for chunk in tie.chunks]
                increment_version(tie.source)
                tie.seen = source + 1, [*map(_version, tie.chunks)]
        # After all sources, of which some may have the same counter.
        for tie in self._ties:
            if tie.source._version != tie.seen[0]:
                increment_version(tie.chunks)
                tie.seen = tie.source._version, [*map(_version, tie.chunks)]


class _Tie:
    """A source and its chunks, with the versions that both had when they were last in step."""

    __slots__ = ("chunks", "seen", "source")

    def __init__(self, source: Tensor, chunks: Sequence[Tensor]) -> None:
        self.source = source
        self.chunks = chunks
        self.seen = source._version, [0] * len(chunks)


_version = attrgetter("_version")
