"""The error raised if no plan fits: which device lacks how much memory, and what would fit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from profiler.text import format_bytes

from ..schedule._named import BREADTH_FIRST
from ..timeline._hops import Link
from ._arguments import SCHEDULES, list_placements, read_chunks, read_modes
from ._candidate import Candidate, SearchSpace
from ._costs import Measured
from ._host import list_looped_placements, parameter_bytes
from ._loss import waiting
from ._search import nearest


class Infeasible(ValueError):  # noqa: N818 — a result of the search rather than a mistake in the call
    """No plan fits into the memory of the devices.

    Attributes:
        device: the index of the device that lacks the most memory, in the plan that comes closest to fitting; None for
            the host.
        short: the number of bytes that are lacking.
        changes: changes to the arguments that would make a plan fit, each as text.
    """

    def __init__(self, message: str, device: int | None, short: int, changes: Sequence[str]) -> None:
        super().__init__(message)
        self.device = device
        self.short = short
        self.changes = tuple(changes)


def expect_host(measured: Measured) -> None:
    """Raise Infeasible if the host has no memory for parameters, gradients and the optimizer's state."""
    memory, needed = measured.host.memory, parameter_bytes(measured)
    if memory is not None and needed > memory:
        raise _of_host(memory, needed, "parameters, gradients and the optimizer's state need")


def _of_host(memory: int, needed: int, what: str) -> Infeasible:
    change = f"host_memory={needed} ({format_bytes(needed)})"
    return Infeasible(
        f"nothing fits: the host has {format_bytes(memory)}, and {what} {format_bytes(needed - memory)} more; what "
        f"would fit: {change}",
        None,
        needed - memory,
        [change],
    )


def explain(space: SearchSpace, best: Candidate, devices: Sequence[str], advice: str = "") -> Infeasible:
    """Return the error for a search whose ``best`` candidate does not fit, ending with ``advice``."""
    share, host = space.compute_share(best), space.measured.host
    if host.memory is not None and not best.fits_host and share <= 1:
        return _of_host(host.memory, best.host_bytes, "what is there, with saved tensors of all stages, needs")
    rooms = [(j, room) for j, room in enumerate(space.memory) if room is not None]
    scale = space.scale or (1.0,) * len(space.memory)
    short = {j: round(best.account[j].total * scale[j]) - room for j, room in rooms}
    j, room = max(rooms, key=lambda pair: short[pair[0]])
    of = space.measured.order
    device, order = of[j] if of else j, f", devices in the order {[*of]}" if of != tuple(sorted(of)) else ""
    sizes = {size for _, size in rooms}
    enough = math.ceil(share * max(sizes)) + 1
    memory = f"memory={enough} ({format_bytes(enough)} on each device)"
    fitting = [text for text, other in relaxations(space).items() if _something_fits(other)]
    changes = [*fitting, memory if len(sizes) == 1 else f"{share + 0.005:.2f} times the memory on each device"]
    return Infeasible(
        f"nothing fits: device {device} ({devices[device]}) has {format_bytes(room)} and is {format_bytes(short[j])} "
        f"short in the closest plan (chunks={best.chunks}, {best.schedule}, balance={list(best.sizes)}, "
        f"checkpoint={[*best.modes]}{order}); what would fit: {'; or '.join(changes)}{advice}",
        device,
        short[j],
        changes,
    )


def recompute_blocks(model: nn.Module) -> str:
    """Return the advice to let a model of transformers recompute its blocks; empty if it does, or cannot."""
    if not getattr(model, "supports_gradient_checkpointing", False) or model.is_gradient_checkpointing:
        return ""
    return (
        "; model.gradient_checkpointing_enable() may help: when a stage recomputes, it then holds the saved tensors "
        "of a single block instead of all its blocks"
    )


def _something_fits(space: SearchSpace) -> bool:
    candidate = nearest(space)
    if not space.measured.host.parameters:
        return candidate.fits(space.limits)
    sizes = candidate.costs.device_bytes_with_host(candidate.sizes, candidate.modes, candidate.schedule)
    return replace(candidate, dry_run_bytes=sizes).fits(space.memory)


def relaxations(space: SearchSpace) -> dict[str, SearchSpace]:
    """Return the search spaces for other arguments, by a text that describes the change; small changes first."""
    measured, stages = space.measured, space.measured.stages
    early = list_placements(SCHEDULES, stages, 0)[measured.placement] if stages == measured.devices else []
    plain = waiting(early) if measured.whole_loss else early
    # A profile with a single number of rows does not predict other micro-batch sizes.
    more = [m for m in read_chunks(None, measured.rows) if m > space.chunks[-1]] if measured.profile.others else []
    found: dict[str, SearchSpace] = {}
    modes = read_modes(None, separate_memory=measured.separate_memory)
    if space.modes != modes:
        found["checkpoint=None, so that the plan may choose"] = replace(space, modes=modes)
    if more:
        found[f"chunks up to {more[-1]}"] = replace(space, chunks=[*space.chunks, *more])
    if plain and [*space.schedules] != plain:
        found["schedule=None, so that the plan may choose"] = replace(space, schedules=plain)
    if measured.whole_loss and early:
        known = replace(measured, whole_loss=False)
        found["a loss_fn that returns gpipe.LossSum, or reduction=, if it is known how losses add up"] = replace(
            space, measured=known, schedules=early
        )
    if any(measured.optimizer) and not measured.host.parameters:
        stateless = replace(measured, optimizer=(0,) * measured.layers)
        found["optimizer='sgd', which has no state"] = replace(space, measured=stateless)
    if not measured.host.parameters and (deeper := [*list_looped_placements(measured.devices, measured.layers)]):
        placement = deeper[-1]  # the most stages, which need the least memory
        on_host = replace(
            measured,
            host=replace(measured.host, parameters=True),
            placement=placement,
            links=(Link(),) * len(placement),
        )
        found["offload=True, which keeps parameters on the host"] = replace(
            space, measured=on_host, schedules=[BREADTH_FIRST]
        )
    last = space.memory[-1]
    like = "" if last is None or len({*space.memory}) == 1 else f", with {format_bytes(last)} on each of the others"
    for larger in (2 * stages, 4 * stages):
        if plain and larger <= measured.layers:
            found[f"{larger} devices instead of {stages}{like}"] = _on_more(space, larger)
    return found


def _on_more(space: SearchSpace, stages: int) -> SearchSpace:
    """Return the space with more devices, equal to the last one. Links are free if there is only one device so far."""

    def longer(each: Sequence[Any]) -> Any:
        return (*each, *[each[-1]] * (stages - len(each))) if each else ()

    own = space.measured
    measured = replace(
        own, links=longer(own.links), placement=tuple(range(stages)), speeds=longer(own.speeds), order=()
    )
    return replace(space, measured=measured, memory=longer(space.memory), scale=longer(space.scale))
