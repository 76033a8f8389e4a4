"""Plans for stages whose parameters are on the host."""

from contextlib import closing
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import gpipe
from gpipe import Infeasible, Plan, plan
from gpipe._plan._bytes import DeviceBytes
from gpipe._plan._host import device_bytes, looped
from gpipe.schedule import Kind, looped_placement, named

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
def test_a_device_holds_no_more_than_is_planned(devices: int, each: int, chunks: int, sizes: list[int]) -> None:
    """The bytes of the loaded stages at any time, under the schedule that is planned."""
    placement = looped_placement(devices * each, devices)
    stages = [DeviceBytes(2 * sizes[j], sizes[j], 0, 1, 0) for j in range(len(placement))]
    buffers = [min(1, 2 * sizes[j]) for j in range(len(placement))]
    found = device_bytes(placement, stages, buffers)
    always = [sum(size for size, own in zip(buffers, placement, strict=True) if own == k) for k in range(devices)]
    walk = named("looped_bfs", chunks, placement, 0).loading(placement).walk
    assert walk is not None
    for k, line in enumerate(walk):
        loaded, most = set[int](), 0
        for stage, (kind, _) in line:
            loaded = loaded | {stage} if kind is Kind.LOAD else loaded - {stage} if kind is Kind.UNLOAD else loaded
            most = max(most, sum(2 * sizes[j] - buffers[j] for j in loaded))
        assert found[k].parameters == most + always[k]
        assert found[k].activations == each


def test_a_model_that_does_not_fit_is_planned_and_trains_as_planned() -> None:
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


def test_frozen_parameters_travel_one_way() -> None:
    frozen = model().requires_grad_(False)
    frozen[-1].requires_grad_(True)
    found = plan(frozen, batch(), "1x200KB", loss_fn=squares, reduction="sum", offload=True, optimizer="adam")
    assert all(stage.load for stage in found.stages)
    assert [bool(stage.unload) for stage in found.stages] == [False] * (len(found.stages) - 1) + [True]
    whole = LAYERS * EACH + EACH + 2 * EACH
    assert f"on the host: {whole / 1024:.0f} KiB" in str(found)


def test_the_seconds_of_transfers_follow_the_bandwidth() -> None:
    slow, fast = (made(host_bandwidth=each, chunks=1) for each in ("1MB", "1GB"))
    assert slow.predicted.seconds.mid > 100 * fast.predicted.seconds.mid
    # Each stage but the last two is loaded twice, and what a device computes is hidden.
    assert slow.predicted.seconds.mid >= (2 * LAYERS - 2 * max(slow.sizes)) * EACH / 1e6


def test_on_devices_that_are_there_a_copy_is_trained() -> None:
    x = batch("cpu")
    found = plan(model("cpu"), x, ["cpu:0"], loss_fn=squares, reduction="sum", offload=True, chunks=[1, 2])
    assert found.offload
    assert any(note.startswith("calibrated") for note in found.notes)


def test_a_loss_of_all_rows_waits() -> None:
    found = made(loss_fn=lambda y: y.square().sum().sqrt(), reduction=None)
    assert (found.whole_loss, found.schedule) == (True, "looped_bfs")


def test_several_devices_have_their_stages_in_turn() -> None:
    found = made("2x200KB", chunks=2)
    assert [*found.placement] == looped_placement(len(found.placement), 2)
    assert len(found.predicted.bytes) == 2


def test_too_little_memory_of_the_host_is_told_before_the_search() -> None:
    with pytest.raises(Infeasible, match=r"the host has .*, and parameters, gradients .* need .* more") as caught:
        made(host_memory="500KB")
    needed = LAYERS * EACH * 4
    assert (caught.value.device, caught.value.short) == (None, needed - 500_000)
    assert made(host_memory=needed).offload


def test_a_device_without_room_for_two_stages_is_told() -> None:
    with pytest.raises(Infeasible, match="nothing fits: device 0"):
        made("1x20KB")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"offload": 2}, TypeError, "offload must be True or False"),
        ({"offload": False, "host_memory": "1GB"}, ValueError, "host_memory: requires offload=True"),
        ({"offload": False, "host_bandwidth": 1e9}, ValueError, "host_bandwidth: requires offload=True"),
        ({"host_memory": "1 gigabyte"}, ValueError, "host_memory: expected bytes"),
        ({"schedule": "1f1b"}, ValueError, "with offload=True, only 'looped_bfs' is searched; got '1f1b'"),
        ({"devices": "4x1GB"}, ValueError, "expected at least 3 layers per device"),
    ],
)
def test_other_arguments_are_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        made(**options)


def test_ranks_have_no_stages_on_the_host() -> None:
    with pytest.raises(ValueError, match="which is for one process"):
        _ = made().rank_arguments


def test_few_layers_have_few_stages() -> None:
    assert [len(each) for each in looped(2, 9)] == [6, 8]
    assert looped(4, 8) == {}


def test_an_optimizer_without_state_takes_nothing_on_the_host() -> None:
    assert f"on the host: {2 * LAYERS * EACH / 1024:.0f} KiB" in str(made(optimizer="sgd"))
