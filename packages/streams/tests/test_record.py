import pytest
import torch

from streams import CPUStream, current_stream, new_stream, record_stream, use_stream

from .cuda import DEVICE, sleep, warm_up

VIEWS = {
    "itself": lambda x: x,
    "a slice": lambda x: x[256:512],
    "a transposed view": lambda x: x.view(32, 32).t()[3:],
    "another dtype": lambda x: x.view(torch.int32)[5:],
}


def test_on_the_cpu_there_is_nothing_to_record():
    x = torch.ones(2)
    record_stream(x, CPUStream)
    assert x.tolist() == [1, 1]


@pytest.mark.parametrize("junk", [None, (torch.ones(1),), 3])
def test_what_is_no_tensor_is_named(junk):
    with pytest.raises(TypeError, match=r"tensor must be a torch\.Tensor; got"):
        record_stream(junk, CPUStream)


def test_what_is_no_stream_is_named():
    with pytest.raises(TypeError, match="stream must be"):
        record_stream(torch.ones(1), None)


@pytest.mark.cuda
def test_a_cpu_tensor_needs_no_record_on_a_cuda_stream():
    record_stream(torch.ones(1), new_stream(DEVICE))


def reused(view, *, recorded):
    """Whether the block under ``view`` is handed out again while another stream is still busy."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    reader = new_stream(DEVICE)
    x = torch.zeros(1024, device=DEVICE)
    address, seen = x.data_ptr(), view(x)
    with use_stream(reader):
        sleep()
    if recorded:
        record_stream(seen, reader)
    del x, seen
    y = torch.empty(1024, device=DEVICE)
    assert not reader.query(), "the reader was too fast to prove anything"
    torch.cuda.synchronize()
    return y.data_ptr() == address


@pytest.mark.cuda
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
def test_the_block_of_a_recorded_view_is_not_handed_out_while_it_is_read(view):
    warm_up()
    assert reused(view, recorded=False), "the allocator did not reuse the block anyway: this proves nothing"
    assert not reused(view, recorded=True)


@pytest.mark.cuda
def test_recording_on_the_tensors_own_stream_costs_no_reuse():
    x = torch.zeros(1024, device=DEVICE)
    address = x.data_ptr()
    record_stream(x, current_stream(DEVICE))
    del x
    assert torch.empty(1024, device=DEVICE).data_ptr() == address
