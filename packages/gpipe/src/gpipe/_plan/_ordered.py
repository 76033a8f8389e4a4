"""Search the order of actions, once the balance, the chunks and the modes of a candidate are chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..schedule import Kind, search
from ..schedule._replay import makespan
from ._arguments import OFFLOAD, SEARCH
from ._candidate import Candidate, compute_stops
from ._costs import bounds

WORTH = 0.03
"""A searched order is chosen if it is faster than the best named schedule by more than this share.

It is an order for one number of micro-batches, so it cannot run on a mini-batch with fewer.
"""


def find_order(candidate: Candidate, memory: Sequence[float | None]) -> Candidate | None:
    """Return the candidate with a searched order that is at least as fast and fits; None if there is none.

    Args:
        candidate: a candidate with a named schedule.
        memory: the limit of each device.
    """
    costs, m = candidate.costs, candidate.chunks
    measured = costs.measured
    # A search does not plan transfers to the host, and does not wait for a loss of the full mini-batch.
    if measured.whole_loss or measured.host.parameters or OFFLOAD in candidate.modes:
        return None
    stages, own = costs.stage_costs(candidate.sizes, candidate.modes), bounds(candidate.sizes)
    split = [j for j, stage in enumerate(stages) if costs.splits("zero_bubble", *own[j], stage)]
    sizes = [costs.get_stage_bytes(*each) for each in own]
    seconds, hops = [{kind: stage.seconds(kind) for kind in Kind} for stage in stages], costs.hops(candidate.sizes)
    try:
        order = search(
            m,
            measured.placement,
            seconds,
            hops=hops,
            # Weight gradients that wait hold more, for a part of the time.
            activation_bytes=[each.kept + each.waiting * (j in split) for j, each in enumerate(sizes)],
            boundary_bytes=[each.bare for each in sizes],
            memory=[
                None if room is None else max(0.0, room - candidate.compute_fixed_bytes(k))
                for k, room in enumerate(memory)
            ],
            checkpoint_stop=compute_stops(candidate.modes, m),
            split=split,
        )
    except ValueError:  # not even one micro-batch fits beside the rest
        return None
    time = makespan(order.on(measured.placement), m, seconds, hops) + measured.step
    found = replace(
        candidate, schedule=SEARCH, seconds=time, split=tuple(split), order=order, dry_run_bytes=(), note=""
    )
    return found if found.seconds <= candidate.seconds and found.fits(memory) else None
