from threading import Event, Thread

import pytest
import torch

from streams import CPUStream, current_stream, new_stream, use_device, use_stream

from .cuda import DEVICE
from .fakes import PATIENCE, FakeDevice, in_thread, wait


@pytest.mark.parametrize("device", [torch.device("cpu"), FakeDevice()])
def test_a_device_without_streams_may_be_used_again_and_again(device):
    with use_device(device), use_device(device), use_stream(CPUStream), use_stream(CPUStream):
        assert current_stream(device) is CPUStream


def test_what_is_raised_inside_passes():
    with pytest.raises(ZeroDivisionError), use_device(torch.device("cpu")), use_stream(CPUStream):
        raise ZeroDivisionError


def test_what_is_no_device_is_named():
    with pytest.raises(TypeError, match=r"wrap names and numbers in torch\.device"):
        use_device("cpu")


@pytest.mark.cuda
def test_the_cuda_device_is_current_inside_and_on_this_thread_only():
    last = torch.device("cuda", torch.cuda.device_count() - 1)
    before = torch.cuda.current_device()
    with use_device(last):
        assert torch.cuda.current_device() == last.index
        assert in_thread(torch.cuda.current_device) == 0
    assert torch.cuda.current_device() == before


@pytest.mark.cuda
def test_using_a_stream_uses_its_device_too():
    last = torch.device("cuda", torch.cuda.device_count() - 1)
    stream = new_stream(last)
    with use_stream(stream):
        assert torch.cuda.current_device() == last.index
        assert in_thread(lambda: current_stream(DEVICE)) == torch.cuda.default_stream(DEVICE)


@pytest.mark.cuda
def test_two_threads_in_one_stream_get_back_what_each_had():
    shared, own = new_stream(DEVICE), new_stream(DEVICE)
    entered, left = Event(), Event()
    found = []

    def other():
        with use_stream(own):
            with use_stream(shared):
                entered.set()
                wait(left)
            found.append(current_stream(DEVICE))

    thread = Thread(target=other, daemon=True)
    with use_stream(shared):
        thread.start()
        wait(entered)
    assert current_stream(DEVICE) == torch.cuda.default_stream(DEVICE)
    left.set()
    thread.join(PATIENCE)
    assert found == [own]
