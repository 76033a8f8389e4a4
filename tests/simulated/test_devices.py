"""Names, random generators and timing of devices in a pipe."""

import copy
import re
from threading import Event, Thread

import pytest
import torch
from packages.gpipe.tests.in_rows import InRows
from torch import Tensor, nn

import gpipe
from gpipe import GPipe
from streams import Task, current_stream, default_stream, new_stream, spawn_workers, use_stream

from .accelerator import device
from .models import MODES, running
from .placements import forward_streams


def test_each_part_of_a_task_has_its_stream():
    stream = new_stream(device(1))
    seen = []
    with spawn_workers([device(1)]) as ([in_queue], [out_queue]):
        in_queue.put(Task(stream, compute=lambda: current_stream(device(1)), finalize=seen.append))
        task, result = out_queue.get()[1]
        task.finalize(result)
        task = Task(stream, compute=int, finalize=lambda _: seen.append(current_stream(device(1))))
        task.finalize(0)
    assert seen == [stream, stream]


def test_default_stream_is_initially_current():
    for k in range(2):
        own = new_stream(device(k))
        assert current_stream(device(k)) == default_stream(device(k)) != own
        with use_stream(own):
            assert current_stream(device(k)) == own != default_stream(device(k))
            assert torch.accelerator.current_device_index() == k
        assert current_stream(device(k)) == default_stream(device(k))
        assert torch.accelerator.current_device_index() == 0


def test_use_stream_restores_stream_of_each_thread():
    shared, own = new_stream(device(1)), new_stream(device(1))
    entered, left = Event(), Event()
    found = []

    def other() -> None:
        with use_stream(own):
            with use_stream(shared):
                entered.set()
                assert left.wait(300)
            found.append(current_stream(device(1)))

    thread = Thread(target=other, daemon=True)
    with use_stream(shared):
        thread.start()
        assert entered.wait(300)
    here = current_stream(device(1)), torch.accelerator.current_device_index()
    left.set()
    thread.join(300)
    assert here == (default_stream(device(1)), 0)
    assert found == [own]


@pytest.mark.parametrize("inline", [False, True], ids=["threads", "inline"])
@pytest.mark.parametrize("mode", MODES)
def test_a_timeline_of_devices(mode: str, inline: bool):
    layers = [nn.Linear(4, 4) for _ in range(3)]
    places = [device(0), torch.device("cpu"), device(1)]
    pipe = GPipe(nn.Sequential(*layers), [1, 1, 1], devices=places, chunks=2, checkpoint=mode)
    with forward_streams("own"), gpipe.record() as timeline, running(inline):
        pipe(torch.ones(4, 4).to(device(0))).sum().backward()
    events = timeline.events
    assert {event.device for event in events} == {str(place) for place in places}
    assert all(event.seconds > 0 and event.wait >= 0 for event in events)
    assert all(event.bytes_moved for event in events if event.kind == "forward" and event.stage)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("k", [0, 1])
def test_model_moved_after_pipe_raises_until_moved_back(k: int, own: bool):
    model = small(own)
    x = torch.randn(4, 3)
    pipe = GPipe(model, [1, 1] if own else [2, 1], devices=[device(0), device(1)], chunks=2)
    expected = pipe(x)
    model.to(device(k))
    for call in (pipe, lambda x: pipe.step(x, loss_fn=torch.sum)):
        with pytest.raises(RuntimeError) as caught:
            call(x)
        note = rf"weight' of partition {1 - k} is on {device(k)}, expected {device(1 - k)}.*GPipe\(pipe\[:\]"
        assert any(re.search(note, each) for each in caught.value.__notes__)
    pipe = GPipe(pipe[:], pipe.balance, devices=pipe.devices, chunks=2)
    torch.testing.assert_close(pipe(x), expected)


def small(own: bool) -> nn.Module:
    if not own:
        return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Linear(3, 3), nn.Linear(3, 2)
            self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            x = self.embed(x)
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    return Model()


@pytest.mark.parametrize("is_used", [False, True])
def test_state_of_packed_weights_moves_with_them(is_used: bool):
    """The weight attribute remains the same tensor, so that no bytes are stored twice."""
    torch.manual_seed(0)
    layers = [InRows().to("cpu") for _ in range(3)]
    x = torch.randn(4, 6)
    expected = copy.deepcopy(nn.Sequential(*layers))(x)
    if is_used:
        nn.Sequential(*layers)(x)
    pipe = GPipe(nn.Sequential(*layers), [1, 1, 1], devices=[device(0), device(1), "cpu"], chunks=2)
    for layer in layers:
        weight, state = layer.weight, layer.state if is_used else layer.weight
        assert {state.CB.device, state.SCB.device} == {weight.device}
        assert state.CB.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()
    torch.testing.assert_close(pipe(x), expected)
