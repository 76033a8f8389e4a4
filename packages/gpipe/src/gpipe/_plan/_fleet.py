"""Many equal devices: how many replicas of a pipe, and how many stages each of them has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Any

from profiler.text import format_bytes, format_seconds

from ..timeline._hops import Link
from ._arguments import read_chunks
from ._candidate import Candidate, Space, by_seconds
from ._costs import Measured
from ._fake import Fake
from ._search import NEAR, search

FEW = 5
"""How many candidates are kept of the layout that is taken, so that a plan also shows the best of other layouts."""


@dataclass(frozen=True)
class FleetLayout:
    """How devices are shared out among replicas.

    Attributes:
        replicas: pipes that train the same model, each on other rows.
        stages: of each replica, on a device each.
        rows: of the mini-batch, for each replica.
        chunks: numbers of micro-batches to look at, of each replica.
    """

    replicas: int
    stages: int
    rows: int
    chunks: tuple[int, ...] = ()

    @property
    def devices(self) -> int:
        return self.replicas * self.stages


def layouts_of(fake: Fake, layers: int, rows: int, chunks: Any, checkpoint: Any) -> list[FleetLayout]:
    """The layouts to look at, by their stages: all whose replicas get the same number of rows.

    Raises:
        ValueError: there is none; says which rows, chunks or modes would do.
    """
    if fake.nodes is None:
        return [FleetLayout(1, min(fake.count, layers), rows, tuple(read_chunks(chunks, rows)))]
    found = _even(fake.nodes * fake.count, layers, rows)
    if checkpoint is not None and not isinstance(checkpoint, str):
        found = _of_stages(found, len(checkpoint))
    numbers = None if chunks is None else read_chunks(chunks, max(each.rows for each in found))
    own = [read_chunks(None, each.rows) if numbers is None else numbers for each in found]
    kept = [replace(each, chunks=tuple(m for m in few if m <= each.rows)) for each, few in zip(found, own, strict=True)]
    return [each for each in kept if each.chunks]


def read_size(fake: Fake, memory: Any) -> Any:
    """What devices may hold: as given, else what they are said to have.

    Raises:
        ValueError: a size for each, while it is not known how many stages there are.
    """
    if fake.nodes is not None and not isinstance(memory, (str, int, float, type(None))):
        raise ValueError(f"memory: expected one size for all of {fake.nodes * fake.count} devices, got {memory!r}")
    return fake.memory if memory is None else memory


def _even(devices: int, layers: int, rows: int) -> list[FleetLayout]:
    pairs = [(devices // stages, stages) for stages in range(1, min(devices, layers) + 1) if devices % stages == 0]
    found = [FleetLayout(replicas, stages, rows // replicas) for replicas, stages in pairs if rows % replicas == 0]
    if not found:
        choices = ", ".join(f"{replicas} (of {stages} stages)" for replicas, stages in pairs)
        raise ValueError(
            f"sample: expected rows that go evenly on the replicas; {devices} devices make replicas {choices}, and "
            f"the mini-batch has {rows} rows"
        )
    return found


def _of_stages(found: list[FleetLayout], modes: int) -> list[FleetLayout]:
    kept = [each for each in found if each.stages == modes]
    if not kept:
        known = ", ".join(str(each.stages) for each in found)
        raise ValueError(
            f"checkpoint: expected one mode, or one for each stage of a replica, which may be {known}; got {modes}"
        )
    return kept


def of_several_rows(layouts: Sequence[FleetLayout]) -> list[FleetLayout]:
    """The same without micro-batches of a single row."""
    kept = [replace(each, chunks=tuple(m for m in each.chunks if m < each.rows)) for each in layouts]
    return [each for each in kept if each.chunks]


def all_chunks(layouts: Sequence[FleetLayout]) -> list[int]:
    """Into how many micro-batches all replicas together cut the mini-batch."""
    return sorted({each.replicas * m for each in layouts for m in each.chunks})


def of_replica(measured: Measured, fake: Fake, layout: FleetLayout) -> Measured:
    """What holds for one replica, with its share of the rows, given what holds for the whole mini-batch."""
    if fake.nodes is None:
        return measured
    return replace(
        measured,
        profiles=measured.profiles[:1] * layout.stages,
        rows=layout.rows,
        input_bytes=measured.input_bytes // layout.replicas,
        copied=(False, *(True,) * (layout.stages - 1)),
        links=_links(fake, layout.stages),
        replicas=layout.replicas,
        ring=(fake.between if fake.nodes > 1 else fake.inside).bandwidth,
    )


def _links(fake: Fake, stages: int) -> tuple[Link, ...]:
    """The link before each stage. Replicas are on devices in a row, so that some of them begin in the middle of a node:
    a hop counts as one between nodes if it is that in any replica.
    """
    aligned = gcd(stages, fake.count)
    return (Link(), *(fake.inside if j % aligned or fake.nodes == 1 else fake.between for j in range(1, stages)))


def search_all(spaces: Sequence[Space]) -> tuple[Space, list[Candidate]]:
    """The space with the best way to train, and what was found, the best first: some there, and the best of each other.

    Of those near the fastest, the one of the fewest stages is the best. Nothing is found if nothing fits.
    """
    found = [(space, search(space)) for space in spaces]
    tops = [(space, ways[0]) for space, ways in found if ways]
    if not tops:
        return spaces[-1], []
    fastest = min(each.seconds for _, each in tops)
    near = [pair for pair in tops if pair[1].seconds <= fastest * (1 + NEAR)]
    space, best = min(near, key=lambda pair: (len(pair[1].sizes), pair[1].simplicity, pair[1].seconds))
    here = next(ways for each, ways in found if each is space)
    if len(spaces) == 1:
        return space, here
    others = [*here[1:FEW], *(each for other, each in tops if other is not space)]
    return space, [best, *by_seconds(others)]


def notes_on(fake: Fake, best: Candidate) -> list[str]:
    """How seconds between nodes and replicas were found, for the reader of the plan."""
    if fake.nodes is None:
        return []
    measured, stages = best.costs.measured, len(best.sizes)
    found = [
        f"a formula, not measured: links are {_described(fake.inside)} inside a node of {fake.count} devices, and "
        f"{_described(fake.between)} from a device to another node"
    ]
    if measured.replicas > 1:
        size = format_bytes(max(best.costs.gradient_bytes(best.sizes)))
        found.append(
            f"a formula, not measured: {measured.replicas} replicas of {stages} stages add up {size} of gradients on a "
            f"ring, 2(r - 1)/r · bytes / bandwidth, in {format_seconds(best.costs.reduction(best.sizes))}, after the "
            "last backward; nothing of it is overlapped"
        )
    return found


def _described(link: Link) -> str:
    return f"{link.bandwidth / 1e9:.4g} GB/s and {link.latency * 1e6:.3g} µs"
