"""Plans that keep the parameters of stages, or their saved tensors, on the host."""

from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import gpipe
from gpipe import Infeasible, Plan, plan
from gpipe._plan import _arguments
from gpipe._plan._arguments import list_placements, read_modes
from gpipe._plan._bytes import DeviceBytes, in_flight_peaks
from gpipe._plan._costs import Measured
from gpipe._plan._host import Host, device_bytes, list_looped_placements
from gpipe._plan._search import search
from gpipe._plan._verify import peak_bytes
from gpipe.schedule import SPLITTING, Kind, looped_placement, named

from ..plans import everything, few, measurements, space_of

WIDTH, LAYERS, ROWS = 64, 8, 16
EACH = (WIDTH + 1) * WIDTH * 4
"""The bytes of a layer's parameters."""


def model(device: str = "meta") -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, device=device) for _ in range(LAYERS)))


def batch(device: str = "meta") -> Tensor:
    torch.manual_seed(0)
    return torch.randn(ROWS, WIDTH, device=device)


def squares(y: Tensor) -> Tensor:
    return y.square().sum()


def made(devices: Any = "1x200KB", **given: Any) -> Plan:
    options = {"loss_fn": squares, "reduction": "sum", "offload": True, **given}
    return plan(model(), batch(), devices, **options)


@given(st.integers(1, 3), st.integers(2, 6), st.integers(1, 4), st.lists(st.integers(0, 99), min_size=36, max_size=36))
def test_planned_bytes_are_the_peak_of_loaded_stages(devices: int, each: int, chunks: int, sizes: list[int]) -> None:
    """The peak is taken over all actions of the planned schedule."""
    placement = looped_placement(devices * each, devices)
    stages = [DeviceBytes(2 * sizes[j], sizes[j], 0, 1, 0) for j in range(len(placement))]
    buffers = [min(1, 2 * sizes[j]) for j in range(len(placement))]
    found = device_bytes(placement, stages, buffers)
    always = [sum(size for size, own in zip(buffers, placement, strict=True) if own == k) for k in range(devices)]
    worker_steps = named("looped_bfs", chunks, placement, 0).loading(placement).worker_steps
    assert worker_steps is not None
    for k, line in enumerate(worker_steps):
        loaded, most = set[int](), 0
        for stage, (kind, _) in line:
            loaded = loaded | {stage} if kind is Kind.LOAD else loaded - {stage} if kind is Kind.UNLOAD else loaded
            most = max(most, sum(2 * sizes[j] - buffers[j] for j in loaded))
        assert found[k].parameters == most + always[k]
        assert found[k].activations == each


def test_offload_plan_fits_and_trains_as_planned() -> None:
    with pytest.raises(Infeasible, match=r"what would fit: .*offload=True, which keeps parameters on the host"):
        made(offload=False)
    found = made(chunks=4)
    (place,) = found.predicted.bytes
    assert found.offload
    assert (found.schedule, {*found.placement}) == ("looped_bfs", {0})
    assert len(found.sizes) > 2
    assert 2 * EACH <= place.total <= 200_000 < 4 * LAYERS * EACH
    assert place.optimizer == 0
    loads = [event for event in found.timeline.events if event.kind is Kind.LOAD]
    assert len(loads) == 2 * len(found.sizes) - 2
    assert Plan.from_json(found.to_json()) == found
    assert "the optimizer's state are on the host: 520 KiB" in str(found)

    plain, x = model("cpu"), batch("cpu")
    own = model("cpu")
    own.load_state_dict(plain.state_dict())
    squares(plain(x)).backward()
    with closing(found.build(own, devices=["cpu:0"])) as pipe:
        with gpipe.record() as timeline:
            pipe.step(x, loss_fn=squares, reduction="sum", **found.step_arguments)
        assert sum(event.kind is Kind.LOAD for event in timeline.events) == len(loads)
        torch.testing.assert_close([p.grad for p in own.parameters()], [p.grad for p in plain.parameters()])
        checked = found.verify(x, pipe=pipe)
        assert (checked.bytes, checked.predicted_bytes) == ((), ())


def test_frozen_stages_send_nothing_back_to_host() -> None:
    frozen = model().requires_grad_(False)
    frozen[-1].requires_grad_(True)
    found = plan(frozen, batch(), "1x200KB", loss_fn=squares, reduction="sum", offload=True, optimizer="adam")
    assert all(stage.load for stage in found.stages)
    assert [bool(stage.unload) for stage in found.stages] == [False] * (len(found.stages) - 1) + [True]
    whole = LAYERS * EACH + EACH + 2 * EACH
    assert f"on the host: {whole / 1024:.0f} KiB" in str(found)


def test_transfer_time_follows_host_bandwidth() -> None:
    slow, fast = (made(host_bandwidth=each, chunks=1) for each in ("1MB", "1GB"))
    assert slow.predicted.seconds.mid > 100 * fast.predicted.seconds.mid
    # All stages but the last two are loaded twice, and computation overlaps with the transfers.
    assert slow.predicted.seconds.mid >= (2 * LAYERS - 2 * max(slow.sizes)) * EACH / 1e6


def test_offload_plan_is_calibrated_on_real_devices() -> None:
    x = batch("cpu")
    found = plan(model("cpu"), x, ["cpu:0"], loss_fn=squares, reduction="sum", offload=True, chunks=[1, 2])
    assert found.offload
    assert any(note.startswith("calibrated") for note in found.notes)


def test_full_batch_loss_uses_looped_bfs() -> None:
    found = made(loss_fn=lambda y: y.square().sum().sqrt(), reduction=None)
    assert (found.whole_loss, found.schedule) == (True, "looped_bfs")


def test_stages_are_placed_in_loops_over_devices() -> None:
    found = made("2x200KB", chunks=2)
    assert [*found.placement] == looped_placement(len(found.placement), 2)
    assert len(found.predicted.bytes) == 2


def test_insufficient_host_memory_for_parameters_raises() -> None:
    with pytest.raises(Infeasible, match=r"the host has .*, and parameters, gradients .* need .* more") as caught:
        made(host_memory="500KB")
    needed = LAYERS * EACH * 4
    assert (caught.value.device, caught.value.short) == (None, needed - 500_000)
    assert made(host_memory=needed).offload


def test_device_too_small_for_two_stages_raises() -> None:
    with pytest.raises(Infeasible, match="nothing fits: device 0"):
        made("1x20KB")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"offload": 2}, TypeError, "offload must be True or False"),
        ({"host_bandwidth": 0}, ValueError, "host_bandwidth: expected bytes"),
        ({"host_memory": "1 gigabyte"}, ValueError, "host_memory: expected bytes"),
        ({"schedule": "1f1b"}, ValueError, "with offload=True, only 'looped_bfs' is searched; got '1f1b'"),
        ({"devices": "4x1GB"}, ValueError, "expected at least 3 layers per device"),
    ],
)
def test_invalid_offload_arguments_raise(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        made(**options)


def test_offload_plan_has_no_rank_arguments() -> None:
    with pytest.raises(ValueError, match="which is for one process"):
        _ = made().rank_arguments


def test_number_of_stages_is_limited_by_layers() -> None:
    assert [len(each) for each in list_looped_placements(2, 9)] == [6, 8]
    assert list_looped_placements(4, 8) == {}


def test_stateless_optimizer_needs_no_host_memory() -> None:
    assert f"on the host: {2 * LAYERS * EACH / 1024:.0f} KiB" in str(made(optimizer="sgd"))


@given(
    st.sampled_from(["1f1b", "fill_drain", "zero_bubble", "interleaved", "zbv"]),
    st.integers(1, 12),
    st.integers(2, 3),
    st.booleans(),
    st.data(),
)
def test_counted_cells_are_the_peak_with_offloads(
    schedule: str, m: int, devices: int, splits: bool, data: st.DataObject
) -> None:
    """The memory of an offloaded cell is free once the next transfer is queued."""
    (placement,) = list_placements([schedule], devices, 2 * devices)
    j = data.draw(st.integers(0, len(placement) - 1), label="stage")
    split = [j] if splits and schedule in SPLITTING else []
    found = in_flight_peaks(schedule, "offload", m, placement, j, bool(split))
    line = named(schedule, m, placement, 0, split).offloading(placement, [j]).on(placement)[placement[j]]
    there, leaving, away, most = set[int](), set[int](), set[int](), 0
    for stage, (kind, i) in line:
        leaving = set() if kind in (Kind.OFFLOAD, Kind.PREFETCH) else leaving
        if stage != j:
            continue
        if kind is Kind.OFFLOAD:
            there, leaving, away = there - {i}, {i}, away | {i}
        else:
            there, away = there | {i}, away - {i}
        whole, bare = len(there) + len(leaving), len(away - leaving)
        most = max(most, whole)
        assert any(whole <= each.full and whole + bare <= each.full + each.inputs_only for each in found)
        there = there - {i} if kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT) else there
    assert most == max(each.full for each in found)
    assert most <= 3 or schedule != "fill_drain"


@settings(few)
@given(
    measurements(most_layers=3),
    st.sampled_from([0.99, 1.01, 1.1, None]),
    st.sampled_from([1e4, 1e5, 1e6, 1e9]),
    st.sampled_from([0, 500, None]),
)
def test_search_with_offload_finds_the_fastest_fit(
    measured: Measured, room: float | None, bandwidth: float, of_host: int | None
) -> None:
    """Compare with every mode of every stage. The result is at most 5 % slower, and respects the host's limit."""
    measured = replace(measured, separate_memory=True, host=Host(of_host, bandwidth))
    space = replace(space_of(measured), modes=read_modes(None, separate_memory=True), chunks=(1, 4))
    every = [*everything(space)]
    least = min(candidate.fullest for candidate in every if candidate.fits_host)
    memory = (None if room is None else int(room * least),) * measured.devices
    possible = [candidate for candidate in every if candidate.fits(memory)]
    found = search([replace(space, memory=memory)])
    assert found[0].fits(memory) == bool(possible)
    assert all(candidate.fits(memory) for candidate in found) == bool(possible)
    if possible:
        assert found[0].seconds <= 1.05 * min(candidate.seconds for candidate in possible)


def saving(device: str = "meta", pairs: int = 4) -> nn.Sequential:
    """Return layers that save more than they send to the next stage."""
    layers = [each for _ in range(pairs) for each in (nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))]
    return nn.Sequential(*layers).to(device)


FAST: dict[str, Any] = {
    "loss_fn": squares, "reduction": "sum", "optimizer": "sgd", "chunks": 8, "schedule": "fill_drain",
    "host_bandwidth": "10TB", "memory": "1.5MB",
}  # fmt: skip
"""The link to the host is so fast that nothing is recomputed, and devices cannot hold all saved tensors."""


def test_saved_tensors_are_offloaded_if_faster() -> None:
    x = torch.zeros(512, 64, device="meta")
    found = plan(saving(), x, "4x80GB", **FAST)
    assert {*found.modes} == {"offload"}
    assert not found.offload
    assert "of saved tensors are on the host at a time; links to the host are assumed to send 1e+04 GB/s" in str(found)
    assert Plan.from_json(found.to_json()) == found
    never, always = (
        plan(saving(), x, "4x80GB", **{**FAST, "memory": None, "checkpoint": mode}) for mode in ("never", "always")
    )
    assert 0.99 * never.predicted.seconds.mid <= found.predicted.seconds.mid < always.predicted.seconds.mid
    assert (
        max(each.total for each in found.predicted.bytes) <= 1.5e6 < min(each.total for each in never.predicted.bytes)
    )
    kinds = [event.kind for event in found.timeline.events]
    assert 0 < kinds.count(Kind.OFFLOAD) == kinds.count(Kind.PREFETCH) < 4 * 8

    slow = plan(saving(), x, "4x80GB", **{**FAST, "host_bandwidth": "1GB"})
    assert "offload" not in slow.modes
    assert "on the host" not in str(slow)

    few = plan(saving(), x, "4x80GB", **FAST, host_memory="1MB")
    assert few.modes.count("offload") < 4


def test_plan_with_offloaded_tensors_trains_as_planned() -> None:
    x = torch.randn(64, 64)
    options = {**FAST, "memory": None, "checkpoint": "offload", "calibrate": False}
    model, own = saving("cpu"), saving("cpu")
    own.load_state_dict(model.state_dict())
    squares(model(x)).backward()
    found = plan(own, x, ["cpu:0", "cpu:1"], **options)
    with closing(found.build(own)) as pipe:
        assert {*pipe.checkpoint} == {"offload"} or pipe.checkpoint == "offload"
        with gpipe.record() as timeline:
            pipe.step(x, loss_fn=squares, reduction="sum", **found.step_arguments)
        planned = [event.kind for event in found.timeline.events]
        ran = [event.kind for event in timeline.events]
        assert ran.count(Kind.OFFLOAD) == planned.count(Kind.OFFLOAD) > 0
        torch.testing.assert_close([p.grad for p in own.parameters()], [p.grad for p in model.parameters()])


@settings(few, max_examples=5)
@given(st.integers(1, 12), st.integers(1, 3), st.sampled_from(["fill_drain", "1f1b"]))
def test_bytes_with_offload_approximate_a_step(chunks: int, stages: int, schedule: str) -> None:
    """They are summed over the layers, since there is no dry run with offloads."""
    x = torch.randn(32 * chunks, 64)
    model = saving("cpu", 3)
    options = {**FAST, "memory": None, "chunks": chunks, "checkpoint": "offload", "calibrate": False}
    found = plan(model, x, [f"cpu:{j}" for j in range(stages)], **{**options, "schedule": schedule})
    with closing(found.build(model)) as pipe, gpipe.inline():  # on threads, a stage that runs ahead holds more
        sizes = peak_bytes(pipe, x, None, {"loss_fn": squares, "reduction": "sum"}, schedule, found.placement)
    for planned, size in zip(found.predicted.bytes, sizes, strict=True):
        assert 0.7 <= planned.total / size <= 1.3


class Hooked(nn.Linear):
    """A layer with an operation that does not support saved-tensor hooks."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.func.grad(lambda value: value.square().sum())(x))


def test_plan_avoids_offload_if_layers_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    # Search "offload" as on GPUs, although it is not searched by default on a CPU.
    monkeypatch.setattr(
        _arguments, "read_modes", lambda mode, separate_memory: [mode] if mode else ["never", "offload", "always"]
    )
    x, model = torch.randn(512, 64), nn.Sequential(Hooked(64, 64), *saving("cpu", 3))
    (need,) = plan(
        model, x, ["cpu:0"], **{**FAST, "memory": None, "checkpoint": "offload", "calibrate": False}
    ).predicted.bytes
    options = {**FAST, "memory": need.total + 1}
    assert "offload" in plan(model, x, ["cpu:0"], **options, calibrate=False).modes
    found = plan(model, x, ["cpu:0"], **options)
    assert "offload" not in found.modes
    assert "checkpoint='offload' was left out, since training with it raised RuntimeError" in found.notes[-1]


def test_insufficient_host_memory_for_saved_tensors_raises() -> None:
    x = torch.zeros(1024, 64, device="meta")
    with pytest.raises(Infeasible, match=r"the host has 1000 B, and what is there, .* needs .* more") as caught:
        plan(saving(), x, "4x80GB", **{**FAST, "checkpoint": "offload", "memory": "100MB"}, host_memory=1000)
    assert caught.value.device is None
    options = {**FAST, "checkpoint": "offload", "memory": "100MB", "host_memory": 1000 + caught.value.short}
    assert plan(saving(), x, "4x80GB", **options).modes == ("offload",) * 4
