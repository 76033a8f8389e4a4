""":func:`gpipe.plan`: plan a pipe for a model, a mini-batch and devices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from profiler import Profile
from profiler.sandbox import copied

from .._gpipe import GPipe
from ..module._arguments import Device, check_flag
from ..module._data import expect_data
from ..module._split_batch import replicate_constants
from ..module._training import takes_output_alone
from ..timeline import simulate
from . import _arguments
from ._arguments import OFFLOAD, SEARCH
from ._blocks import Training, with_own_loss
from ._calibrate import UNSURE, train, try_candidates
from ._candidate import Candidate, SearchSpace, by_seconds
from ._costs import Measured
from ._data import Alternative, Expected, Prediction, layer_keys
from ._dry_run import ACCOUNT, dry_run
from ._fake_devices import FakeDevices, read_fake
from ._host import NOTE, host_notes, read_host
from ._infeasible import expect_host, explain, recompute_blocks
from ._links import describe_links, measure_host_bandwidth
from ._loss import read_loss
from ._measure import measure
from ._optimizer import optimizer_bytes
from ._ordered import WORTH, find_order
from ._plan import Plan, remembering
from ._planned import as_input, find_layers
from ._request import Request, chunks_to_search, read_placements, read_places, read_profile
from ._search import NEAR, search
from ._without_weights import with_packed

GUESSED = Expected(0.5, 1.0, 2.0)
"""The range of step times around an estimate without measurements, as factors."""


@torch.enable_grad()
def plan(
    model: nn.Module,
    sample: Any,
    devices: Iterable[Device | tuple[Device, Mapping[str, Any]]] | str,
    *,
    target: Any = None,
    loss_fn: Callable[..., Any] | None = None,
    reduction: str | None = None,
    optimizer: str | float | type[Optimizer] | Optimizer = "adam",
    memory: int | str | Sequence[int | str | None] | None = None,
    speeds: Sequence[float | None] | None = None,
    chunks: int | Iterable[int] | None = None,
    checkpoint: str | None = None,
    schedule: str | None = None,
    profile: Profile | None = None,
    calibrate: bool = True,
    bandwidth: float | str | Mapping[tuple[int, int], float | str] | None = None,
    latency: float | None = None,
    offload: bool = False,
    host_memory: int | str | None = None,
    host_bandwidth: float | str | None = None,
) -> Plan:
    """Find the fastest way to train ``model`` that fits: balance, chunks, schedule, and which stages recompute.

    Layers are profiled at a few micro-batch sizes. For each number of chunks and each schedule, the search chooses
    balance and checkpoint modes together, within the memory limits. On CPUs and hypothetical devices, the engine runs
    one step of the best candidate on fake tensors to count its bytes. Then a copy of the model is trained for a few
    steps with each of up to four candidates, interleaved. The plan is the simplest one within 2 % of the fastest.

    The search includes schedules with two stages per device (interleaved, V-shaped), except on a plain ``"cpu"``, where
    each stage has its own worker; ``"cpu:0"`` and ``"cpu:1"`` can have several stages. More than two stages per device
    are not searched.

    Args:
        model: an ``nn.Sequential``, or a model with its own forward, which is split between its blocks. It is not
            changed. A model in evaluation mode is planned and tried in training mode.
        sample: a mini-batch with as many rows as in training. For a model with its own forward, a mapping or a tuple
            contains the arguments.
        devices: one per stage, all of one type; or text such as ``"8x80GB"`` or ``["24GB", "2xA100"]`` for hypothetical
            devices. With text, nothing runs: the model may be on ``meta``, bytes are counted, and seconds are
            estimated. A device may be a pair with its memory and relative speed, as in
            ``[("cuda:0", {"speed": 1.0}), ("cuda:1", {"speed": 0.5, "memory": "12GB"})]``. If devices or their links
            differ, their order is also searched; see ``plan.devices``.
        target, loss_fn, reduction: as for :meth:`gpipe.GPipe.step`. If it is not known how to combine the losses of
            micro-batches, the plan computes the loss once, on the outputs of the full mini-batch, under
            ``"fill_drain"``. Without ``loss_fn``, the model's own loss is used if its forward computes one; otherwise
            the loss counts as free. On hypothetical devices nothing runs that could show how a model's own loss adds
            up, so pass ``reduction``. If ``loss_fn`` is a module, a copy is called. Any other object with state, such
            as a metric, may contain fake tensors afterwards.
        optimizer: determines the size of its state: a name such as ``"adamw"``, ``"sgd"`` or ``"adamw_8bit"``, an
            optimizer or its class, or the bytes per trained parameter.
        memory: the limit of each device, in bytes or as text such as ``"24GiB"``; one for all devices, or a list. The
            default is the memory of a GPU or a hypothetical device, and no limit for a CPU.
        speeds: the relative speed of each device, such as ``[1.0, 0.5]``, or None for the default: GPUs with different
            names are measured, hypothetical devices are estimated from their data sheets, and all others are equally
            fast.
        chunks, checkpoint, schedule: restrict the search to one or several numbers of chunks, one checkpoint mode for
            all stages, or one schedule. By default, ``checkpoint="offload"`` is searched on devices with their own
            memory, together with the other modes. By default or with ``schedule="search"``, the order of actions is
            searched as well (:func:`gpipe.schedule.search`); by default it is used if that saves 3 % of a step.
        profile: a profile of the layers on a micro-batch, used instead of measuring. It needs ``rows=`` of at least two
            sizes, unless ``chunks`` is the number that it was made with. For hypothetical devices it may lack seconds,
            which are then estimated.
        calibrate: whether to train a copy for some steps. This takes a few seconds, or about twenty steps if those take
            longer, and the memory of training. If False, ``plan.predicted.seconds`` is computed from the times of
            single layers.
        bandwidth: bytes per second between two hypothetical devices, as a number or text such as ``"50GB"``, or for
            some pairs of devices, as in ``{(0, 1): "100GB"}``; by default 25 GB/s. Links of GPUs are measured.
        latency: seconds per transfer between two hypothetical devices; by default 10 µs.
        offload: whether parameters are on the host, as in :class:`gpipe.GPipe`. The search then chooses the number of
            stages per device, with the schedule ``"looped_bfs"``.
        host_memory: the host's memory for saved tensors, and with ``offload`` for parameters, gradients and the
            optimizer's state, in bytes or as text such as ``"64GB"``; by default no limit.
        host_bandwidth: bytes per second between the host and each device, in each direction, as a number or text such
            as ``"25GB"``. By default, it is measured, and assumed to be 25 GB/s for hypothetical devices.

    Returns:
        The plan. ``print`` shows it, and ``.build(model)`` builds the pipe.

    Raises:
        Infeasible: a ValueError; no plan fits. The message says which device, or whether the host, lacks how much
            memory, and what would fit.
        TypeError, ValueError: an argument is invalid (the message names it), or ``schedule`` cannot wait for a loss of
            the full mini-batch.
        Exception: any error in a layer, with a note that names the layer.

    >>> import torch
    >>> from torch import nn
    >>> model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    >>> found = plan(model, torch.zeros(8, 8), ["cpu", "cpu"], chunks=4, calibrate=False)
    >>> sum(found.balance), found.chunks, found.checkpoint
    (4, 4, ['never', 'never'])
    """
    if isinstance(model, GPipe):
        raise TypeError("model: expected a model, got a pipe; pass its layers, pipe[:]")
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected an nn.Sequential or another nn.Module, got {type(model).__name__}")
    model = with_packed(model)
    sample = replicate_constants(as_input(model, sample), "sample")
    _arguments.expect_rows(sample)
    calibrate = check_flag("calibrate", calibrate)
    takes_output_alone(loss_fn, target)  # or raises
    target = None if target is None else replicate_constants(target, "target")
    _arguments.expect_target(target, sample)
    devices, facts = _arguments.read_facts(_arguments.list_devices(devices, model))
    fake = read_fake(devices, bandwidth, latency)
    host = read_host(offload, host_memory, host_bandwidth)
    found = find_layers(model, sample, lambda most: len(read_places(devices, fake, most)))
    if not found.layers:
        raise ValueError("model: expected at least one layer, got none")
    places, given = (read_places(devices, fake, most) for most in (len(found.layers), _arguments.ALL))
    modes = _arguments.read_modes(checkpoint, separate_memory=places[0].type != "cpu")
    uses_host = host.parameters or OFFLOAD in modes
    if uses_host and not fake and host_bandwidth is None and places[0].type != "cpu":
        host = replace(host, bandwidth=measure_host_bandwidth(places))
    if not fake and (profile is None or calibrate):
        expect_data(model, "plan")
    request = Request(
        model=found,
        sample=sample,
        target=target,
        loss=read_loss(loss_fn, reduction, target),
        fake=fake,
        places=places,
        placements=read_placements(devices, places, len(found.layers), schedule, host),
        schedule=schedule and schedule.lower(),
        chunks=chunks_to_search(chunks, sample, model),
        # Devices without a layer are not used, whatever is known of them.
        memory=_arguments.read_memory(memory, given, facts, _list_memory_sizes(fake) if fake else None)[: len(places)],
        speeds=_arguments.read_speeds(speeds, len(given), facts)[: len(places)],
        modes=modes,
        optimizer=optimizer_bytes(optimizer, found.layers.values()),
        profile=read_profile(profile, found.names, timed=fake is None),
        host=host,
    )
    if found.division is not None:
        request = replace(request, loss=with_own_loss(Training(found, sample, target, request.loss)))
    return _make_plan(request, calibrate=calibrate and fake is None)


def _make_plan(request: Request, *, calibrate: bool) -> Plan:
    spaces = measure(request)
    expect_host(spaces[0].measured)
    try:
        return _chosen(request, spaces, calibrate=calibrate)
    except RuntimeError as error:
        # Not every operation supports hooks for saved tensors.
        modes = [mode for mode in request.modes if mode != OFFLOAD]
        if not calibrate or modes in ([], [*request.modes]):
            raise
        found = _chosen(request, [replace(space, modes=modes) for space in spaces], calibrate=calibrate)
        note = f"checkpoint='offload' was left out, since training with it raised {error!r:.200}"
        return replace(found, notes=(*found.notes, note))


def _chosen(request: Request, spaces: list[SearchSpace], *, calibrate: bool) -> Plan:
    found = _add_searched_order(request, _search(request, spaces))
    spread = GUESSED if request.fake else UNSURE
    notes = [_source(request, found[0].costs.measured)]
    if calibrate:
        try:
            given = request.places, request.sample, request.target, request.loss
            try_out = partial(train, request.model, copied(request.model.module), *given)
            found, spread, note = try_candidates(partial(_fits, request), found, try_out, partial(_dry_run, request))
        except torch.OutOfMemoryError:
            note = "not calibrated: not enough memory to train a copy of the model"
        notes.append(note)
    return remembering(_build_plan(found, request, spread, notes), request.loss, request.sample)


def _fits(request: Request, candidate: Candidate) -> bool:
    return candidate.fits(candidate.costs.measured.reorder(request.memory))


MOST_SEARCHES = 6
"""The most searches: another one follows if the dry run of a plan takes more bytes than the limits allow."""


def _search(request: Request, spaces: list[SearchSpace]) -> list[Candidate]:
    """Return the candidates; the first fits according to its dry run. Raise Infeasible if none does."""
    for _ in range(MOST_SEARCHES):
        found = search(spaces)
        k = next(k for k, space in enumerate(spaces) if space.measured is found[0].costs.measured)
        best = _dry_run(request, found[0])
        if best.fits(spaces[k].memory):
            return [best, *found[1:]]
        fitted = found[0].fits(spaces[k].limits)
        # Set the scale even if nothing fits: the error multiplies the estimated bytes by it.
        scale = [true.total / max(1, own.total) for true, own in zip(best.bytes, best.account, strict=True)]
        spaces[k] = replace(spaces[k], scale=tuple(map(max, spaces[k].scale or scale, scale)))
        if not fitted:
            break
    raise explain(spaces[k], found[0], request.names, recompute_blocks(request.model.module))


def _add_searched_order(request: Request, found: list[Candidate]) -> list[Candidate]:
    """Return the candidates; a searched order is first if it is requested or worth it."""
    if request.schedule not in (None, SEARCH):
        return found
    best = {candidate.costs.measured.placement: candidate for candidate in reversed(found)}
    searched = [find_order(candidate, candidate.costs.measured.reorder(request.memory)) for candidate in best.values()]
    faster = by_seconds(candidate for candidate in searched if candidate is not None)
    if request.schedule is None:
        least = min(candidate.seconds for candidate in found)
        faster = [candidate for candidate in faster if candidate.seconds < least * (1 - WORTH)]
    first = next(filter(partial(_fits, request), map(partial(_dry_run, request), faster)), None)
    return found if first is None else [first, *found]


def _dry_run(request: Request, candidate: Candidate) -> Candidate:
    """Return the candidate with the bytes of a dry run.

    With a given profile, or on accelerators, there is no dry run, and the bytes are estimates.
    """
    if request.host.parameters:
        sizes = candidate.costs.device_bytes_with_host(candidate.sizes, candidate.modes, candidate.schedule)
        return replace(candidate, dry_run_bytes=sizes, note=NOTE)
    if request.profile is not None or any(place.type not in ("cpu", "meta") for place in request.places):
        return replace(candidate, note=f"{ACCOUNT}; plan.verify measures them")
    return dry_run(request.model, request.sample, request.target, request.loss, candidate)


def _source(request: Request, measured: Measured) -> str:
    fake, profile, link = request.fake, measured.profile, f"links send {describe_links(measured.links)}"
    if fake:
        figures = dict.fromkeys((each.flops / 1e12, each.bandwidth / 1e12) for each in fake.each)
        reached = " or ".join(f"{flops:.0f} TFLOP/s and {bandwidth:.2f} TB/s" for flops, bandwidth in figures)
        return (
            f"an estimate: nothing ran. Bytes are counted; seconds assume that training reaches a part of {reached}, "
            f"and that {link}"
        )
    rows = ", ".join(str(each.rows) for each in (*profile.others, profile))
    engine = f"the engine adds {measured.action * 1e6:.0f} µs per action and {measured.step * 1e6:.0f} µs per step"
    between = link if measured.separate_memory else engine
    return f"{len(profile)} layers measured on {profile.device} at {rows} rows; {between}"


def _list_memory_sizes(fake: FakeDevices) -> list[int]:
    return [device.memory for device in fake.each]


SHOWN = 8
"""The most alternatives that a plan keeps."""


def _build_plan(found: Sequence[Candidate], request: Request, spread: Expected, notes: Sequence[str]) -> Plan:
    """Return a plan of the first candidate, with the next ones as alternatives.

    ``spread`` has factors on the predicted seconds of a step, and ``notes`` explain how the figures were obtained.
    """
    best, others = found[0], found[1:]
    stages, hops = best.costs.stage_costs(best.sizes, best.modes), best.costs.hops(best.sizes)
    bubble = simulate(best.program(best.chunks), stages, transfer=hops[1:]).bubble
    seconds = Expected(*(best.seconds * factor for factor in (spread.low, spread.mid, spread.high)))
    measured = best.costs.measured
    return Plan(
        layers=layer_keys(request.model.named.items()),
        own_forward=request.model.division is not None,
        devices=tuple(measured.reorder(request.names)),
        memory=tuple(measured.reorder(request.memory)),
        rows=measured.rows,
        placement=measured.placement,
        sizes=best.sizes,
        chunks=best.chunks,
        schedule=best.schedule,
        order="" if best.order is None else str(best.order),
        modes=best.modes,
        split=best.split,
        predicted=Prediction(seconds, best.bytes, measured.rows / seconds.mid, bubble),
        stages=tuple(stages),
        hops=tuple(hops),
        alternatives=tuple(_alternative(best, other, spread.mid) for other in others[:SHOWN]),
        whole_loss=measured.whole_loss,
        offload=request.host.parameters,
        notes=(
            *notes,
            request.loss.note(best.schedule, whole=measured.whole_loss),
            best.note,
            *_describe_speeds(measured),
            *host_notes(best),
        ),
    )


def _describe_speeds(measured: Measured) -> list[str]:
    listed = ", ".join(f"{speed:.3g}" for speed in measured.speeds)
    return [f"relative speeds of the devices: {listed}"] if len({*measured.speeds}) > 1 else []


def _alternative(best: Candidate, other: Candidate, factor: float) -> Alternative:
    seconds, reason = other.seconds * factor, _reason(best, other)
    return Alternative(other.chunks, other.schedule, other.sizes, other.modes, seconds, other.fullest, reason)


def _reason(best: Candidate, other: Candidate) -> str:
    slower = other.seconds / best.seconds - 1
    if slower > NEAR:
        return f"{slower:.0%} slower"
    if other.costs.measured.order != best.costs.measured.order:
        return "as fast, with a different order of the devices"
    if len(other.sizes) != len(best.sizes):
        return "as fast, with a different number of stages"
    return f"as fast, {'less simple' if other.simplicity > best.simplicity else 'with a different balance'}"
