"""Synchronize the version counters of a tensor and its views after in-place changes."""

from collections.abc import Sequence
from operator import attrgetter

from torch import Tensor
from torch.autograd.graph import increment_version


class Versions:
    """Informs autograd when a tensor that `scatter_views` split, or one of its micro-batches, was modified in place.

    Autograd detects a modified tensor by its version counter. Micro-batches have their own counters, so changes of the
    source are not counted in them, and their changes are not counted in the source, until `sync` is called. It is not
    thread-safe: no other thread may use the tensors during the call.

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

        This object keeps references to all of them, so pass a detached alias of the source, which keeps no graph alive.

        Args:
            source: the tensor that was split.
            chunks: its parts.
        """
        if not source.is_inference():  # inference tensors have no version counter, and autograd never saves them
            self._ties.append(_Tie(source, chunks))

    def sync(self) -> None:
        """Count a change of a source also in its chunks, and a change of a chunk also in its source.

        Sources that are the same tensor, or views of it, share a counter, so a change of one counts for all. Call this
        method before the backward, which then raises if autograd has saved a tensor that was modified.
        """
        for tie in self._ties:
            source, chunks = tie.seen
            if [*map(_version, tie.chunks)] != chunks:
                # In-place operations may have connected them to a graph; detach them, to keep no graph alive.
                tie.chunks = [chunk.detach() for chunk in tie.chunks]
                increment_version(tie.source)
                tie.seen = source + 1, [*map(_version, tie.chunks)]
        # In a second loop, because several sources may share a counter.
        for tie in self._ties:
            if tie.source._version != tie.seen[0]:
                increment_version(tie.chunks)
                tie.seen = tie.source._version, [*map(_version, tie.chunks)]


class _Tie:
    """A source and its chunks, with their versions at the last synchronization."""

    __slots__ = ("chunks", "seen", "source")

    def __init__(self, source: Tensor, chunks: Sequence[Tensor]) -> None:
        self.source = source
        self.chunks = chunks
        self.seen = source._version, [0] * len(chunks)


_version = attrgetter("_version")
