"""Partitioning a module: every layer is in one partition, and errors name the cause."""

import copy
from collections import OrderedDict
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gpipe import BalanceError, GPipe, split_module, verify_module
from gpipe.module._devices import move

CPU = torch.device("cpu")

balances = st.lists(st.integers(1, 3), max_size=4)


def layers(count: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(1, 1) for _ in range(count)))


@given(balances, st.integers(0, 2))
def test_the_partitions_in_a_row_are_the_module(balance: list[int], surplus: int) -> None:
    module = layers(sum(balance))
    partitions, sizes, devices = split_module(module, balance, ["cpu"] * (len(balance) + surplus))
    assert [child for partition in partitions for child in partition.named_children()] == list(module.named_children())
    assert [len(partition) for partition in partitions] == sizes == balance
    assert devices == [CPU] * len(balance)


@given(balances, st.integers(-2, 2).filter(bool))
def test_a_wrong_sum_is_refused_with_both_numbers(balance: list[int], more: int) -> None:
    count = max(sum(balance) + more, 0)
    if count == sum(balance):
        return
    with pytest.raises(BalanceError) as caught:
        split_module(layers(count), balance, ["cpu"] * len(balance))
    first = str(caught.value).splitlines()[0]
    assert f"module: {count}, sum of balance: {sum(balance)}, balance: {balance}" in first
    assert "balance_by_time(" in str(caught.value)


@pytest.mark.parametrize("module", [nn.Linear(1, 1), nn.ModuleList([nn.Linear(1, 1)]), "model", None])
def test_what_is_no_sequential_is_refused(module: Any) -> None:
    name = type(module).__name__
    with pytest.raises(TypeError, match=name):
        GPipe(module, [1], devices=["cpu"])
    with pytest.raises(TypeError, match=name):
        verify_module(module)
    with pytest.raises(TypeError, match=name):
        split_module(module, [1], ["cpu"])


def test_a_layer_twice_is_refused() -> None:
    layer = nn.Linear(1, 1)
    module = nn.Sequential(OrderedDict(first=layer, between=nn.ReLU(), again=layer))
    with pytest.raises(ValueError, match="duplicate children is not supported: 'again' is the same layer as 'first'"):
        GPipe(module, [3], devices=["cpu"])
    with pytest.raises(ValueError, match="duplicate children"):
        verify_module(module)


@given(st.lists(st.integers(1, 2), min_size=2, max_size=4), st.data())
def test_a_parameter_in_any_two_partitions_is_refused(balance: list[int], data: st.DataObject) -> None:
    module = layers(sum(balance))
    blocks = [j for j, size in enumerate(balance) for _ in range(size)]
    one, other = sorted(data.draw(st.sets(st.integers(0, len(blocks) - 1), min_size=2, max_size=2)))
    module[other].weight = module[one].weight
    if blocks[one] == blocks[other]:
        verify_module(module, balance)
        return
    with pytest.raises(ValueError, match=rf"'{other}\.weight' is '{one}\.weight'"):
        split_module(module, balance, ["cpu"] * len(balance))


def test_without_a_balance_any_two_layers_are_suspect() -> None:
    module = layers(2)
    module[1].weight = module[0].weight
    with pytest.raises(ValueError, match="duplicate parameters in distinct children"):
        verify_module(module)


@pytest.mark.parametrize("count", [0, 1])
def test_too_few_devices(count: int) -> None:
    with pytest.raises(IndexError, match="too few devices") as caught:
        GPipe(layers(2), [1, 1], devices=["cpu"] * count)
    assert f"(devices: {count}, partitions: 2)" in str(caught.value)


@given(st.lists(st.integers(1, 3), min_size=1, max_size=4), st.sampled_from(["cpu", "cpu:0", "meta"]))
def test_every_layer_and_every_parameter_is_in_it(balance: list[int], device: str) -> None:
    model = nn.Sequential(*(nn.Linear(1, 1, device=device) for _ in range(sum(balance))))
    pipe = GPipe(model, balance, devices=[device] * len(balance))
    named = [*dict(pipe.named_children()), *dict(pipe.named_parameters())]
    assert pipe.hf_device_map == dict.fromkeys(named, torch.device("cpu") if device != "meta" else "meta")
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


def test_scales_of_packed_weights_move_with_them():
    """The scales may be in a dict."""

    class Packed(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 4, dtype=torch.uint8), requires_grad=False)
            self.meta = {"scale": torch.ones(4), "zeros": [torch.ones(4)], "bits": 4}

    layer = nn.Sequential(Packed())
    scale, zero = layer[0].meta["scale"], layer[0].meta["zeros"][0]
    move(layer, torch.device("meta"))
    assert (scale.device.type, zero.device.type, layer[0].weight.device.type) == ("meta",) * 3
    assert layer[0].meta["scale"] is scale
