"""Inputs of plans without measurements: layers with made-up costs on made-up devices."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, pairwise, product

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch import nn

from gpipe._plan._arguments import MODES, SCHEDULES, list_placements
from gpipe._plan._candidate import Candidate, SearchSpace, build_candidate
from gpipe._plan._costs import Measured
from gpipe.simulate import Link
from profiler import LayerProfile, Profile

ROWS = 16

few = settings(
    max_examples=min(10, settings.default.max_examples // 2),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def layer(name: str, seconds: float, saved: int, parameters: int, output: int, rows: int, base: float = 0.0):
    """A layer whose seconds and bytes grow with the rows, from ``base`` seconds on."""
    return LayerProfile(
        name=name,
        kind="Linear",
        forward_seconds=base + seconds * rows,
        backward_seconds=2 * (base + seconds * rows),
        trainable_bytes=parameters,
        frozen_bytes=0,
        buffer_bytes=0,
        saved_bytes=(saved + output) * rows,
        output_bytes=output * rows,
        peak_bytes=2 * (saved + output) * rows + parameters,
        flops=0,
        backward_input_seconds=base + seconds * rows,
    )


def profile_of(figures: Sequence[tuple[float, int, int, int]], rows: Sequence[int] = (1, ROWS)) -> Profile:
    """A profile of layers of (seconds, saved, parameters, output), a row each, at some numbers of rows."""
    found = [
        Profile(
            tuple(layer(f"layer{k}", *each, rows=n, base=1e-3) for k, each in enumerate(figures)),
            "cpu", torch="2", threads=1, chunks=max(1, ROWS // n), rows=n, rounds=3,
        )
        for n in rows
    ]  # fmt: skip
    return replace(found[-1], others=tuple(found[:-1]))


def model_of(found: Profile) -> nn.Sequential:
    """A model whose layers have the names of a profile's."""
    return nn.Sequential(OrderedDict((name, nn.Sequential(nn.Linear(3, 3))) for name in found.names))


figures = st.tuples(st.sampled_from([1e-3, 2e-3, 5e-3]), st.integers(0, 50), st.integers(0, 400), st.integers(1, 20))


def measured_of(layers: Sequence[tuple[float, int, int, int]], stages: int) -> Measured:
    """Costs of such layers, on devices that share their memory."""
    profile = profile_of(layers)
    optimizer = tuple(2 * parameters for _, _, parameters, _ in layers)
    return Measured(
        profile, optimizer, ROWS, ROWS * 4, needs_gradient=False, separate_memory=False, placement=tuple(range(stages)),
        links=(Link(),) * stages, action=1e-4, step=1e-3,
    )  # fmt: skip


@st.composite
def measurements(draw: st.DrawFn, most_layers: int = 6, most_stages: int = 3) -> Measured:
    layers = draw(st.lists(figures, min_size=1, max_size=most_layers))
    stages = draw(st.integers(1, min(most_stages, len(layers))))
    copied = draw(st.booleans())
    link = draw(st.sampled_from([Link(), Link(1e-3, 1e6)])) if copied else Link()
    links = (Link(), *(link,) * (stages - 1))
    return replace(measured_of(layers, stages), needs_gradient=draw(st.booleans()), separate_memory=copied, links=links)


def space_of(measured: Measured, memory: int | None = None) -> SearchSpace:
    return SearchSpace(
        measured, (1, 2, 4, 8), ("1f1b", "zero_bubble", "fill_drain"), MODES, (memory,) * measured.devices
    )


def looped(space: SearchSpace) -> list[SearchSpace]:
    """Return the same model on these devices, with two stages on each."""
    measured, (link, *_) = space.measured, space.measured.links[1:] or [Link()]
    placements = list_placements(SCHEDULES, measured.devices, measured.layers)
    return [
        replace(
            space, measured=replace(measured, placement=placement, links=links_of(placement, link)), schedules=names
        )
        for placement, names in placements.items()
        if len(placement) > measured.devices
    ]


def links_of(placement: Sequence[int], link: Link) -> tuple[Link, ...]:
    """Between stages of a device nothing is sent."""
    return (Link(), *(Link() if a == b else link for a, b in pairwise(placement)))


def everything(space: SearchSpace) -> Iterator[Candidate]:
    """Replay every candidate of a space."""
    n, k = space.measured.layers, space.measured.stages
    for chunks in space.chunks:
        costs = space.measured.cut(chunks)
        for cuts, schedule in product(combinations(range(1, n), k - 1), space.schedules):
            sizes = tuple(b - a for a, b in zip((0, *cuts), (*cuts, n), strict=True))
            for modes in product(space.modes, repeat=k):
                yield build_candidate(costs, schedule, sizes, modes)
