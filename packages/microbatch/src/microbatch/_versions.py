"""What was changed in place, on both sides of a cut."""

from collections.abc import Sequence
from operator import attrgetter

from torch import Tensor
from torch.autograd.graph import increment_version


class Versions:
    """Carries in-place changes between the source of a `scatter_views` and its micro-batches.

    Autograd finds a changed tensor by its version counter. The chunks have counters of their own, so that a change of
    one is none of its siblings; hence the chunks do not see a change of the source, nor it theirs, until `sync`.
    Not thread-safe: call it while no other thread uses the tensors.
    """

    def __init__(self) -> None:
        self._ties: list[_Tie] = []

    def add(self, source: Tensor, chunks: Sequence[Tensor]) -> None:
        """Watch `chunks`, which are new and share the memory of `source`.

        All are kept as they are. So `source` is best a detached alias: it counts with its tensor, holds no graph, and
        still counts when the tensor itself is dropped.

        Args:
            source: what was cut.
            chunks: what it was cut into.
        """
        if not source.is_inference():  # inference tensors count nothing: autograd never saves them
            self._ties.append(_Tie(source, chunks))

    def sync(self) -> None:
        """Count a change of a source as a change of its chunks, and a change of a chunk as one of its source.

        Call it after the work that may change chunks, and before the backward that must not meet a changed source:
        backward then fails exactly where autograd saved what was changed.
        """
        for tie in self._ties:
            tie.sync()


_version = attrgetter("_version")


class _Tie:
    __slots__ = ("_chunks", "_seen", "_source")

    def __init__(self, source: Tensor, chunks: Sequence[Tensor]) -> None:
        self._source = source
        self._chunks = chunks
        self._seen = source._version, (0,) * len(chunks)

    def sync(self) -> None:
        source, chunks = self._seen
        source_moved = self._source._version != source
        chunks_moved = tuple(map(_version, self._chunks)) != chunks
        if source_moved:
            increment_version(self._chunks)
        if chunks_moved:
            self._chunks = [chunk.detach() for chunk in self._chunks]  # a change may have given them a graph
            increment_version(self._source)
        if source_moved or chunks_moved:
            self._seen = self._source._version, tuple(map(_version, self._chunks))


def counter(tensor: Tensor) -> Tensor:
    """A tensor whose version is that of `tensor`, and which keeps neither its memory nor its graph."""
    alias = tensor.detach()
    if type(alias) is Tensor:  # subclasses refuse to be emptied
        alias.data = alias.new_empty(0)
    return alias
