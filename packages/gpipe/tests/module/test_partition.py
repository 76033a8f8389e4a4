"""Cutting a module: every layer lands in one partition, and what cannot be cut is refused with what was wrong."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gpipe import BalanceError, GPipe, recommend_auto_balance, split_module, verify_module

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


@given(balances)
def test_the_module_stays_as_it_is(balance: list[int]) -> None:
    module = layers(sum(balance))
    before = list(module.named_children())
    split_module(module, balance, ["cpu"] * len(balance))
    assert list(module.named_children()) == before


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


def test_any_iterable_of_whole_numbers_will_do() -> None:
    numpy = pytest.importorskip("numpy")
    for balance in ((1, 2), iter([1, 2]), torch.tensor([1, 2]), numpy.array([1, 2])):
        partitions, sizes, _ = split_module(layers(3), balance, ["cpu"] * 2)
        assert [len(partition) for partition in partitions] == sizes == [1, 2]
        assert [type(size) for size in sizes] == [int, int]


def test_training_mode_is_handed_on() -> None:
    module = layers(2).eval()
    partitions, _, _ = split_module(module, [1, 1], ["cpu"] * 2)
    assert not any(child.training for partition in partitions for child in partition.modules())


class TestBadBalance:
    def test_missing_it_is_told_how_to_get_one(self) -> None:
        with pytest.raises(ValueError, match="balance is required") as caught:
            GPipe(layers(2), devices=["cpu"])
        assert "from gpipe.balance import balance_by_time" in str(caught.value)

    @pytest.mark.parametrize("balance", [[0, 2], [2, 0], [3, -1], [-1, 3]])
    def test_not_positive(self, balance: list[int]) -> None:
        with pytest.raises(BalanceError, match="all balance numbers must be positive integer") as caught:
            GPipe(layers(2), balance, devices=["cpu"] * 2)
        assert f"(balance: {balance})" in str(caught.value)

    @pytest.mark.parametrize("balance", [[], [1], [3], [1, 2]])
    def test_wrong_sum(self, balance: list[int]) -> None:
        with pytest.raises(BalanceError, match="module and sum of balance have different length") as caught:
            GPipe(layers(2), balance, devices=["cpu"] * 2)
        assert f"balance: {balance}" in str(caught.value)

    @pytest.mark.parametrize("balance", [[1.0, 1.0], ["1", "1"], [None, 2]])
    def test_no_whole_numbers(self, balance: list[Any]) -> None:
        with pytest.raises(TypeError):
            GPipe(layers(2), balance, devices=["cpu"] * 2)

    def test_it_is_a_value_error(self) -> None:
        assert issubclass(BalanceError, ValueError)

    def test_the_advice_follows_the_message(self) -> None:
        advice = recommend_auto_balance("what happened").splitlines()
        assert advice[0] == "what happened"
        assert any("balance_by_time(" in line for line in advice)


class TestBadModule:
    @pytest.mark.parametrize("module", [nn.Linear(1, 1), nn.ModuleList([nn.Linear(1, 1)]), "model", None])
    def test_no_sequential(self, module: Any) -> None:
        name = type(module).__name__
        with pytest.raises(TypeError, match=rf"module must be nn.Sequential to be partitioned; got {name}"):
            GPipe(module, [1], devices=["cpu"])
        with pytest.raises(TypeError, match=name):
            verify_module(module)
        with pytest.raises(TypeError, match=name):
            split_module(module, [1], ["cpu"])

    def test_a_layer_twice(self) -> None:
        layer = nn.Linear(1, 1)
        module = nn.Sequential(OrderedDict(first=layer, between=nn.ReLU(), again=layer))
        with pytest.raises(
            ValueError, match="duplicate children is not supported: 'again' is the same layer as 'first'"
        ):
            GPipe(module, [3], devices=["cpu"])
        with pytest.raises(ValueError, match="duplicate children"):
            verify_module(module)

    def test_a_parameter_in_two_partitions(self) -> None:
        module = layers(3)
        module[2].weight = module[0].weight
        with pytest.raises(ValueError, match="duplicate parameters in distinct partitions") as caught:
            split_module(module, [2, 1], ["cpu"] * 2)
        assert "'2.weight' is '0.weight'" in str(caught.value)
        with pytest.raises(ValueError, match=r"'2\.weight' is '0\.weight'"):
            verify_module(module, [2, 1])
        assert GPipe(module, [2, 1], devices=["cpu"] * 2)[2].weight is module[0].weight

    @given(st.lists(st.integers(1, 2), min_size=2, max_size=4), st.data())
    def test_a_parameter_in_any_two_partitions(self, balance: list[int], data: st.DataObject) -> None:
        module = layers(sum(balance))
        blocks = [j for j, size in enumerate(balance) for _ in range(size)]
        one, other = sorted(data.draw(st.sets(st.integers(0, len(blocks) - 1), min_size=2, max_size=2)))
        module[other].weight = module[one].weight
        if blocks[one] == blocks[other]:
            verify_module(module, balance)
            return
        with pytest.raises(ValueError, match=rf"'{other}\.weight' is '{one}\.weight'"):
            split_module(module, balance, ["cpu"] * len(balance))

    def test_a_parameter_deep_inside_two_partitions(self) -> None:
        module = nn.Sequential(layers(1), nn.Sequential(layers(1)))
        module[1][0][0].bias = module[0][0].bias
        with pytest.raises(ValueError, match=r"'1\.0\.0\.bias' is '0\.0\.bias'"):
            verify_module(module, [1, 1])

    def test_a_parameter_twice_in_one_partition_is_fine(self) -> None:
        module = layers(3)
        module[1].weight = module[0].weight
        verify_module(module, [2, 1])
        assert len(GPipe(module, [2, 1], devices=["cpu"] * 2).partitions) == 2

    def test_without_a_balance_any_two_layers_are_suspect(self) -> None:
        module = layers(2)
        module[1].weight = module[0].weight
        with pytest.raises(ValueError, match="duplicate parameters in distinct children"):
            verify_module(module)

    def test_a_submodule_in_two_partitions_without_parameters_is_fine(self) -> None:
        activation = nn.ReLU()
        module = nn.Sequential(nn.Sequential(nn.Linear(1, 1), activation), nn.Sequential(activation))
        verify_module(module, [1, 1])

    def test_a_buffer_in_two_partitions_is_fine(self) -> None:
        module = layers(2)
        mask = torch.ones(1)
        for layer in module:
            layer.register_buffer("mask", mask)
        verify_module(module, [1, 1])

    def test_one_that_shares_nothing_passes(self) -> None:
        assert verify_module(layers(3)) is None
        assert verify_module(nn.Sequential()) is None


class TestBadDevices:
    @pytest.mark.parametrize("count", [0, 1])
    def test_too_few(self, count: int) -> None:
        with pytest.raises(IndexError, match="too few devices") as caught:
            GPipe(layers(2), [1, 1], devices=["cpu"] * count)
        assert f"(devices: {count}, partitions: 2)" in str(caught.value)

    @pytest.mark.parametrize(("wrong", "right"), [("gpu", "cuda"), ("gpu:1", "cuda:1")])
    def test_gpu_is_called_cuda(self, wrong: str, right: str) -> None:
        with pytest.raises(ValueError, match=f"write '{right}'") as caught:
            GPipe(layers(1), [1], devices=[wrong])
        assert repr(wrong) in str(caught.value)

    def test_nothing_is_moved_when_something_is_wrong(self) -> None:
        module = layers(2)
        with pytest.raises(IndexError):
            GPipe(module, [1, 1], devices=["meta"])
        assert module[0].weight.device == CPU


class TestBadOptions:
    @pytest.mark.parametrize("chunks", [0, -1, -7])
    def test_chunks_below_one(self, chunks: int) -> None:
        with pytest.raises(ValueError, match=rf"number of chunks must be positive integer \(chunks: {chunks}\)"):
            GPipe(layers(1), [1], devices=["cpu"], chunks=chunks)

    @pytest.mark.parametrize("chunks", ["many", None, [2]])
    def test_chunks_that_are_no_number(self, chunks: Any) -> None:
        with pytest.raises((TypeError, ValueError)):
            GPipe(layers(1), [1], devices=["cpu"], chunks=chunks)

    @pytest.mark.parametrize("mode", ["sometimes", "", "Always", None])
    def test_unknown_checkpoint_mode(self, mode: Any) -> None:
        with pytest.raises(ValueError, match="checkpoint is not one of 'always', 'except_last', 'never'") as caught:
            GPipe(layers(1), [1], devices=["cpu"], checkpoint=mode)
        assert repr(str(mode)) in str(caught.value)


class TestBadInput:
    @pytest.mark.parametrize("value", ["text", 1, 1.5, object(), None])
    def test_no_tensor(self, value: Any) -> None:
        pipe = GPipe(layers(1), [1], devices=["cpu"])
        with pytest.raises((TypeError, ValueError)) as caught:
            pipe(value)
        assert "input" in str(caught.value)

    def test_the_place_is_named(self) -> None:
        pipe = GPipe(layers(1), [1], devices=["cpu"])
        with pytest.raises(TypeError, match=r"input\[1\]"):
            pipe((torch.zeros(1), np.zeros(1)))

    def test_no_dimension_to_split(self) -> None:
        with pytest.raises(ValueError, match="no dimension 0"):
            GPipe(layers(1), [1], devices=["cpu"])(torch.tensor(1.0))

    def test_tensors_that_cannot_be_cut_alike(self) -> None:
        pipe = GPipe(layers(1), [1], devices=["cpu"], chunks=2)
        with pytest.raises(ValueError, match="must give equally many"):
            pipe((torch.zeros(4, 1), torch.zeros(1, 1)))

    def test_an_empty_pipe_checks_too(self) -> None:
        with pytest.raises(TypeError):
            GPipe(nn.Sequential(), [], devices=[])("text")
