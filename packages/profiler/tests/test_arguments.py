import pytest
import torch
from torch import nn

from profiler import profile, profile_seconds, profile_sizes, profile_times

ROWS = torch.rand(4, 3)


def linear():
    return nn.Sequential(nn.Linear(3, 3))


WAYS = {
    "times": lambda module, sample=ROWS, device="cpu": profile_times(module, sample, 1e-6, device),
    "sizes": lambda module, sample=ROWS, device="cpu": profile_sizes(module, sample, 1, 2.0, device),
    "profile": lambda module, sample=ROWS, device="cpu": profile(module, sample, device=device, timeout=1e-6),
}


@pytest.fixture(params=WAYS)
def way(request):
    return WAYS[request.param]


@pytest.mark.parametrize("module", [nn.Linear(3, 3), nn.ModuleList([nn.Linear(3, 3)]), None])
def test_only_a_sequential_has_layers_in_order(way, module):
    with pytest.raises(TypeError, match=r"module: expected nn\.Sequential, got"):
        way(module)


def test_an_empty_sequential_costs_nothing_to_know(way):
    with pytest.raises(ValueError, match="expected at least one layer"):
        way(nn.Sequential())


def test_a_lazy_layer_has_no_size_yet(way):
    with pytest.raises(ValueError, match=r"'1\.weight' is lazy"):
        way(nn.Sequential(nn.ReLU(), nn.LazyLinear(3)))


@pytest.mark.parametrize("sample", ["rows", 3, (ROWS, "rows"), {"x": [ROWS, 1.5]}])
def test_a_sample_is_a_tree_of_tensors(way, sample):
    with pytest.raises(TypeError):
        way(linear(), sample)


@pytest.mark.parametrize("sample", [torch.tensor(1.0), None, ()])
def test_a_sample_has_rows(way, sample):
    with pytest.raises((TypeError, ValueError)):
        way(linear(), sample)


@pytest.mark.parametrize("device", ["cuda:99", "mps", "xpu"])
def test_a_device_must_be_there(way, device):
    with pytest.raises(ValueError, match=f"device: .*'{device}'"):
        way(linear(), device=device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_no_cuda(way):
    with pytest.raises(ValueError, match="this machine has no CUDA device; use device='cpu'"):
        way(linear(), device="cuda")


def test_nothing_is_timed_without_a_device():
    with pytest.raises(ValueError, match="expected the CPU or an accelerator to run on, got 'meta'"):
        profile_times(linear(), ROWS, 1, "meta")


@pytest.mark.parametrize("timeout", ["1", None, True, [1]])
def test_time_is_a_number(timeout):
    for measure in (profile_times, profile_seconds, profile):
        with pytest.raises(TypeError, match="timeout: expected a number of seconds, got"):
            measure(linear(), ROWS, timeout=timeout, device="cpu")


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan"), float("inf")])
def test_time_is_positive(timeout):
    with pytest.raises(ValueError, match="timeout: expected a positive number of seconds, got"):
        profile_times(linear(), ROWS, timeout, "cpu")
    with pytest.raises(ValueError, match="timeout: expected a positive number of seconds, got"):
        profile(linear(), ROWS, device="cpu", timeout=timeout)


@pytest.mark.parametrize("chunks", [0, -3])
def test_there_is_a_micro_batch(chunks):
    with pytest.raises(ValueError, match="chunks: expected at least 1 micro-batch, got"):
        profile_sizes(linear(), ROWS, chunks, 2.0, "cpu")
    with pytest.raises(ValueError, match="chunks: expected at least 1 micro-batch, got"):
        profile(linear(), ROWS, device="cpu", chunks=chunks)


def test_chunks_are_whole():
    with pytest.raises(TypeError, match=r"chunks: expected a whole number, got 2\.5"):
        profile_sizes(linear(), ROWS, 2.5, 2.0, "cpu")


@pytest.mark.parametrize("param_scale", [-1, float("nan"), float("inf")])
def test_parameters_do_not_save_memory(param_scale):
    with pytest.raises(ValueError, match="param_scale: expected a number of copies >= 0, got"):
        profile_sizes(linear(), ROWS, 1, param_scale, "cpu")


def test_a_profile_refuses_gradients():
    model = linear()
    model(ROWS).sum().backward()
    with pytest.raises(ValueError, match=r"some parameter already has gradient \('0\.weight'\)"):
        profile(model, ROWS, device="cpu")


def test_the_default_is_the_accelerator_or_the_cpu():
    here = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    assert torch.device(profile(linear(), ROWS, timeout=1e-6).device).type == here.type
    assert profile(linear(), ROWS, device=torch.device("cpu"), timeout=1e-6).device == "cpu"
