import copy
import pickle

import pytest
import torch

from streams import (
    CPUStream,
    CPUStreamType,
    as_cuda,
    current_stream,
    default_stream,
    get_device,
    is_cuda,
    new_stream,
    use_stream,
)

from .cuda import DEVICE
from .fakes import FakeDevice

GIVERS = [new_stream, current_stream, default_stream]


@pytest.mark.parametrize("give", GIVERS)
@pytest.mark.parametrize("device", [torch.device("cpu"), torch.device("cpu", 3), torch.device("meta"), FakeDevice()])
def test_whatever_is_not_cuda_has_the_placeholder(give, device):
    assert give(device) is CPUStream


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_there_is_one_placeholder_whatever_happens_to_it(protocol):
    assert pickle.loads(pickle.dumps(CPUStream, protocol)) is CPUStream
    assert copy.copy(CPUStream) is CPUStream
    assert copy.deepcopy([CPUStream])[0] is CPUStream
    assert CPUStreamType() is CPUStream
    assert repr(CPUStream) == "CPUStream"


def test_the_placeholder_is_on_the_cpu():
    assert not is_cuda(CPUStream)
    assert get_device(CPUStream) == torch.device("cpu")


def test_the_placeholder_is_no_cuda_stream():
    with pytest.raises(TypeError, match=r"must be a torch\.cuda\.Stream here; got CPUStream"):
        as_cuda(CPUStream)


@pytest.mark.parametrize("give", GIVERS)
@pytest.mark.parametrize("junk", ["cuda", 0, None])
def test_what_is_no_device_is_named(give, junk):
    with pytest.raises(TypeError, match=r"device must have a \.type"):
        give(junk)


@pytest.mark.parametrize("give", GIVERS)
def test_a_device_that_is_not_there_is_named(give):
    with pytest.raises(ValueError, match=r"cuda:99, but torch sees \d+ CUDA devices"):
        give(torch.device("cuda", 99))


@pytest.mark.parametrize("junk", [None, CPUStreamType, torch.device("cpu")])
@pytest.mark.parametrize("ask", [is_cuda, as_cuda, get_device, use_stream])
def test_what_is_no_stream_is_named(ask, junk):
    with pytest.raises(TypeError, match=r"stream must be CPUStream or a torch\.Stream"):
        ask(junk)


@pytest.mark.cuda
@pytest.mark.parametrize("device", [torch.device("cuda"), DEVICE])
def test_a_cuda_stream_is_new_and_on_its_device(device):
    stream = new_stream(device)
    assert is_cuda(stream)
    assert as_cuda(stream) is stream
    assert stream != default_stream(device)
    assert get_device(stream) == DEVICE


@pytest.mark.cuda
def test_the_current_cuda_stream_is_the_default_one_until_another_is_used():
    assert current_stream(DEVICE) == default_stream(DEVICE) == torch.cuda.default_stream(DEVICE)
    stream = new_stream(DEVICE)
    with use_stream(stream):
        assert current_stream(DEVICE) == stream
    assert current_stream(DEVICE) == default_stream(DEVICE)
