"""Where a pipe says that its layers are, so that frameworks leave them there."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gpipe import GPipe


@given(st.lists(st.integers(1, 3), min_size=1, max_size=4), st.sampled_from(["cpu", "cpu:0", "meta"]))
def test_every_layer_and_every_parameter_is_in_it(balance: list[int], device: str) -> None:
    model = nn.Sequential(*(nn.Linear(1, 1, device=device) for _ in range(sum(balance))))
    pipe = GPipe(model, balance, devices=[device] * len(balance))
    named = [*dict(pipe.named_children()), *dict(pipe.named_parameters())]
    assert pipe.hf_device_map == dict.fromkeys(named, device.partition(":")[0])
    assert copy.deepcopy(pipe).hf_device_map == pipe.hf_device_map


def test_replicas_of_one_process_are_refused() -> None:
    with pytest.raises(RuntimeError, match=r"nn.DataParallel cannot replicate a pipe.*CUDA_VISIBLE_DEVICES"):
        GPipe(nn.Sequential(nn.Linear(1, 1)), [1], devices=["cpu"])._replicate_for_data_parallel()


@pytest.mark.cuda
def test_stages_on_gpus() -> None:
    pipe = GPipe(nn.Sequential(nn.Linear(1, 1), nn.ReLU()), [1, 1], devices=["cuda", "cuda:0"])
    assert pipe.hf_device_map == dict.fromkeys(["0", "1", "0.weight", "0.bias"], "cuda:0")


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_data_parallel_is_refused() -> None:
    pipe = GPipe(nn.Sequential(nn.Linear(1, 1)), [1], devices=["cuda:0"])
    with pytest.raises(RuntimeError, match=r"nn.DataParallel cannot replicate a pipe"):
        nn.DataParallel(pipe, [0, 1])(torch.ones(4, 1, device="cuda"))
