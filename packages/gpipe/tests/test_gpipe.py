"""A pipe is the module that it wraps, to everybody who looks at modules."""

from __future__ import annotations

import copy
import io
import pickle
import re
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gpipe import GPipe

from .layers import DOUBLE, Call, assert_trains_like, linears, piped, rows

CPU = torch.device("cpu")


class Square(nn.Module):
    """A layer that pickles."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.square()


def deep() -> nn.Sequential:
    """A model with names, nested layers, buffers, and a layer without parameters."""
    return nn.Sequential(
        OrderedDict(
            stem=nn.Linear(3, 3),
            norm=nn.BatchNorm1d(3),
            body=nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3, bias=False))),
            act=nn.ReLU(),
            head=nn.Linear(3, 3),
        )
    ).to(DOUBLE)


@st.composite
def balances(draw: st.DrawFn, layers: int = 5) -> list[int]:
    cuts = sorted(draw(st.sets(st.integers(1, layers - 1))))
    return [end - start for start, end in zip([0, *cuts], [*cuts, layers], strict=True)]


def by_pickle(pipe: GPipe) -> GPipe:
    return pickle.loads(pickle.dumps(pipe))  # type: ignore[no-any-return]


def by_torch_save(pipe: GPipe) -> GPipe:
    file = io.BytesIO()
    torch.save(pipe, file)
    file.seek(0)
    return torch.load(file, weights_only=False)  # type: ignore[no-any-return]


each_copy = pytest.mark.parametrize("copied", [copy.deepcopy, by_pickle, by_torch_save])


class TestNames:
    @given(balances())
    def test_the_state_is_that_of_the_model_key_for_key(self, balance: list[int]) -> None:
        model = deep()
        state, pipe_state = model.state_dict(), piped(model, balance).state_dict()
        assert list(pipe_state) == list(state)
        assert all(torch.equal(pipe_state[key], state[key]) for key in state)
        assert pipe_state._metadata == state._metadata

    @given(balances())
    def test_parameters_buffers_and_modules_have_their_own_names(self, balance: list[int]) -> None:
        model = deep()
        pipe = piped(model, balance)
        for listing in ("named_parameters", "named_buffers", "named_modules", "named_children"):
            names = [name for name, _ in getattr(pipe, listing)()]
            assert names == [name for name, _ in getattr(model, listing)()]

    @given(balances(), balances())
    def test_a_checkpoint_of_one_balance_loads_into_another(self, one: list[int], other: list[int]) -> None:
        source, target = piped(deep(), one), piped(deep(), other)
        target.load_state_dict(source.state_dict())
        assert all(torch.equal(a, b) for a, b in zip(source.parameters(), target.parameters(), strict=True))

    @given(balances())
    def test_a_checkpoint_loads_into_the_plain_model(self, balance: list[int]) -> None:
        model = deep()
        model.load_state_dict(piped(deep(), balance).state_dict(), strict=True)

    @given(balances())
    def test_a_checkpoint_of_torchgpipe_loads(self, balance: list[int]) -> None:
        source, target = deep(), piped(deep(), balance)
        view = piped(source, balance).partitions
        old = {f"partitions.{key}": value for key, value in view.state_dict().items()}
        assert not old.keys() & target.state_dict().keys()
        keys = list(old)
        assert str(target.load_state_dict(old)) == "<All keys matched successfully>"
        assert list(old) == keys
        assert all(torch.equal(a, b) for a, b in zip(source.parameters(), target.parameters(), strict=True))

    def test_what_is_missing_or_unknown_is_still_told(self) -> None:
        pipe = piped(linears(2), [1, 1])
        state = {f"partitions.0.{key}": value for key, value in linears(1).state_dict().items()} | {"other": rows()}
        told = pipe.load_state_dict(state, strict=False)
        assert (told.missing_keys, told.unexpected_keys) == (["1.weight", "1.bias"], ["other"])
        with pytest.raises(RuntimeError, match=r"1\.weight"):
            pipe.load_state_dict(state)

    def test_inside_a_bigger_module(self) -> None:
        class Bigger(nn.Module):
            def __init__(self, inner: nn.Module) -> None:
                super().__init__()
                self.inner = inner
                self.tail = nn.Linear(3, 3, dtype=DOUBLE)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.tail(self.inner(x))

        model, bigger = Bigger(linears()), Bigger(piped(linears(), [1, 2], chunks=2))
        assert list(bigger.state_dict()) == list(model.state_dict())
        view = {f"inner.partitions.{key}": value for key, value in bigger.inner.partitions.state_dict().items()}
        bigger.load_state_dict(view | {key: value for key, value in model.state_dict().items() if "tail" in key})
        model.load_state_dict(bigger.state_dict())
        assert_trains_like(bigger, model)

    @pytest.mark.parametrize(
        "name", ["chunks", "partitions", "balance", "devices", "checkpoint", "_workers", "_stages"]
    )
    def test_a_child_may_have_the_name_of_an_attribute(self, name: str) -> None:
        model = nn.Sequential(
            OrderedDict([(name, nn.Linear(3, 3, dtype=DOUBLE)), ("1", nn.Linear(3, 3, dtype=DOUBLE))])
        )
        pipe = piped(model, [1, 1], chunks=2)
        assert (pipe.chunks, pipe.balance, pipe.devices) == (2, [1, 1], [CPU, CPU])
        assert len(pipe.partitions) == 2
        assert list(pipe.state_dict()) == list(model.state_dict())
        assert_trains_like(pipe, model)
        assert_trains_like(copy.deepcopy(pipe), model)

    def test_a_child_called_partitions_keeps_its_keys(self) -> None:
        model = nn.Sequential(OrderedDict(partitions=linears(2)))
        pipe = piped(model, [1])
        with torch.no_grad():
            pipe[0][1].weight.zero_()
        pipe.load_state_dict(model.state_dict())
        assert torch.equal(pipe[0][1].weight, model[0][1].weight)
        assert torch.equal(pipe[0][0].weight, model[0][0].weight)
        pipe.load_state_dict({f"partitions.0.{key}": value for key, value in model.state_dict().items()})


class TestSequence:
    @given(balances())
    def test_length_iteration_and_index_are_the_models(self, balance: list[int]) -> None:
        model = deep()
        pipe = GPipe(model, balance, devices=["cpu"] * len(balance))
        assert len(pipe) == 5
        assert list(pipe) == list(model)
        assert [pipe[k] for k in range(-5, 5)] == [model[k] for k in range(-5, 5)]

    @pytest.mark.parametrize("cut", [slice(1, 3), slice(None, None, 2), slice(-2, None), slice(0, 0)])
    def test_a_slice_is_a_sequential_of_the_same_layers(self, cut: slice) -> None:
        model = deep()
        part = GPipe(model, [2, 3], devices=["cpu"] * 2)[cut]
        assert isinstance(part, nn.Sequential)
        assert list(part.named_children()) == list(model[cut].named_children())

    @pytest.mark.parametrize("index", [5, -6])
    def test_beyond_the_end(self, index: int) -> None:
        with pytest.raises(IndexError):
            piped(deep(), [2, 3])[index]

    def test_partitions_hold_the_same_layers_under_their_names(self) -> None:
        pipe = piped(deep(), [2, 3])
        assert isinstance(pipe.partitions, nn.ModuleList)
        assert all(isinstance(partition, nn.Sequential) for partition in pipe.partitions)
        named = [pair for partition in pipe.partitions for pair in partition.named_children()]
        assert named == list(pipe.named_children())


class TestAttributes:
    def test_they_are_what_was_asked_for(self) -> None:
        pipe = GPipe(linears(), (1, 2), devices=("cpu", CPU, "cpu"), chunks=2, checkpoint="always")
        assert (pipe.balance, pipe.devices, pipe.chunks, pipe.checkpoint) == ([1, 2], [CPU, CPU], 2, "always")

    def test_chunks_and_checkpoint_become_plain_types(self) -> None:
        class Mode(str):
            __slots__ = ()

        pipe = GPipe(linears(1), [1], devices=["cpu"], chunks=torch.tensor(3), checkpoint=Mode("never"))  # type: ignore[arg-type]
        assert (type(pipe.chunks), type(pipe.checkpoint)) == (int, str)

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there are CUDA devices to take")
    def test_without_devices_the_cpu_serves_every_partition(self) -> None:
        assert GPipe(linears(), [1, 2]).devices == [CPU, CPU]

    def test_the_tree_of_partitions_is_shown_with_devices(self) -> None:
        shown = repr(GPipe(deep(), [2, 3], devices=["cpu", "cpu"], chunks=4, checkpoint="never"))
        assert shown.startswith("GPipe(balance=[2, 3], chunks=4, checkpoint='never'\n  (0) on cpu: ")
        assert re.search(r"\n  \(1\) on cpu: \w+\(\n    \(body\): Sequential\(\n", shown)
        assert all(f"({name}): " in shown for name, _ in deep().named_children())


class TestMoving:
    @pytest.mark.parametrize(
        "move",
        [
            lambda pipe: pipe.cuda(),
            lambda pipe: pipe.cuda(0),
            lambda pipe: pipe.cpu(),
            lambda pipe: pipe.to("cpu"),
            lambda pipe: pipe.to(CPU, torch.float32),
            lambda pipe: pipe.to(device="cuda"),
            lambda pipe: pipe.to(torch.zeros(1)),
            lambda pipe: pipe.to_empty(device="cpu"),
        ],
    )
    def test_it_is_denied(self, move: Callable[[GPipe], Any]) -> None:
        pipe = piped(deep(), [2, 3])
        before = copy.deepcopy(pipe.state_dict())
        with pytest.raises(TypeError, match=r"denied to move parameters and buffers.*devices="):
            move(pipe)
        assert all(torch.equal(value, before[key]) for key, value in pipe.state_dict().items())

    @pytest.mark.parametrize(
        ("change", "dtype"),
        [
            (lambda pipe: pipe.half(), torch.float16),
            (lambda pipe: pipe.float(), torch.float32),
            (lambda pipe: pipe.bfloat16(), torch.bfloat16),
            (lambda pipe: pipe.to(torch.float32), torch.float32),
            (lambda pipe: pipe.to(dtype=torch.bfloat16, non_blocking=True), torch.bfloat16),
            (lambda pipe: pipe.type(torch.float32), torch.float32),
        ],
    )
    def test_the_dtype_may_change(self, change: Callable[[GPipe], GPipe], dtype: torch.dtype) -> None:
        pipe = piped(deep(), [2, 3])
        assert change(pipe) is pipe
        assert {parameter.dtype for parameter in pipe.parameters()} == {dtype}
        assert all(a is b for a, b in zip(pipe.parameters(), pipe.partitions.parameters(), strict=True))

    def test_after_a_forward_the_dtype_may_change_too(self) -> None:
        model, pipe = deep(), piped(deep(), [2, 3], checkpoint="always")
        pipe.load_state_dict(model.state_dict())
        assert_trains_like(pipe, model)
        pipe.float()
        assert_trains_like(pipe, model.float(), rows().float())

    def test_the_memory_format_may_change(self) -> None:
        model = nn.Sequential(nn.Conv2d(2, 2, 2), nn.ReLU())
        pipe = piped(model, [1, 1]).to(memory_format=torch.channels_last)
        assert pipe[0].weight.is_contiguous(memory_format=torch.channels_last)


class TestModes:
    def test_they_reach_every_module_of_the_partitions(self) -> None:
        pipe = piped(deep(), [2, 3])
        for mode in (False, True):
            assert pipe.train(mode) is pipe
            assert {module.training for module in (*pipe.modules(), *pipe.partitions.modules())} == {mode}
        assert pipe.eval() is pipe
        assert not any(partition.training for partition in pipe.partitions)

    def test_that_of_the_model_is_taken_over(self) -> None:
        pipe = piped(deep().eval(), [2, 3])
        assert {module.training for module in (*pipe.modules(), *pipe.partitions)} == {False}

    def test_a_partition_switched_alone_stays_so(self) -> None:
        model, pipe = deep(), piped(deep(), [2, 3], checkpoint="always")
        pipe.load_state_dict(model.state_dict())
        pipe.partitions[0].eval()
        model.stem.eval()
        model.norm.eval()
        assert_trains_like(pipe, model)

    def test_apply_and_requires_grad_reach_every_layer(self) -> None:
        pipe = piped(deep(), [2, 3])
        seen: list[nn.Module] = []
        pipe.apply(seen.append)
        assert set(pipe.partitions[0]) | set(pipe.partitions[1]) <= set(seen)
        pipe.requires_grad_(False)
        assert not any(parameter.requires_grad for parameter in pipe.partitions.parameters())


class TestCopies:
    @each_copy
    @pytest.mark.parametrize("used", [False, True])
    def test_a_copy_computes_alike_and_on_its_own(self, copied: Callable[[GPipe], GPipe], used: bool) -> None:
        model = nn.Sequential(nn.Linear(3, 3), Square(), nn.Linear(3, 3)).to(DOUBLE)
        pipe = piped(model, [1, 2], chunks=2, checkpoint="always")
        if used:
            assert_trains_like(pipe, model)
        twin = copied(pipe)
        before = [parameter.grad for parameter in pipe.parameters()]
        assert all(a is not b and torch.equal(a, b) for a, b in zip(pipe.parameters(), twin.parameters(), strict=True))
        assert_trains_like(twin, model)
        assert [parameter.grad for parameter in pipe.parameters()] == before
        assert repr(twin) == repr(pipe)

    @each_copy
    def test_partitions_of_a_copy_are_a_view_of_its_own_layers(self, copied: Callable[[GPipe], GPipe]) -> None:
        twin = copied(piped(deep(), [2, 3]))
        assert [child for partition in twin.partitions for child in partition] == list(twin)

    @each_copy
    def test_a_used_copy_may_outlive_the_original(self, copied: Callable[[GPipe], GPipe]) -> None:
        pipe = piped(linears(), [1, 2], chunks=2)
        assert_trains_like(pipe, linears())
        twin = copied(pipe)
        pipe.close()
        del pipe
        assert_trains_like(twin, linears())

    def test_while_a_run_waits_for_its_backward(self) -> None:
        pipe = piped(linears(), [1, 2], chunks=2, checkpoint="always")
        output = pipe(rows())
        twin = copy.deepcopy(pipe)
        output.sum().backward()
        assert all(parameter.grad is None for parameter in twin.parameters())

    def test_averaged_copies(self) -> None:
        pipe = piped(linears(), [1, 2], chunks=2)
        average = torch.optim.swa_utils.AveragedModel(pipe)
        average.update_parameters(pipe)
        torch.testing.assert_close(average(rows()), linears()(rows()))


class TestValues:
    def test_a_one_tuple_stays_one(self) -> None:
        pipe = piped(nn.Sequential(Call(lambda t: (t[0] + 1,)), Call(lambda t: (t[0] * 2,))), [1, 1], chunks=2)
        output = pipe((rows(),))
        assert isinstance(output, tuple)
        assert len(output) == 1
        torch.testing.assert_close(output[0], (rows() + 1) * 2)

    def test_trees_pass(self) -> None:
        split = Call(lambda x: {"twice": 2 * x, "rest": (x, None, [x[:, 0]])})
        join = Call(lambda t: {"sum": t["twice"] + t["rest"][0], "first": t["rest"][2][0], "none": t["rest"][1]})
        output = piped(nn.Sequential(split, join), [1, 1], chunks=4)(rows())
        assert output["none"] is None
        torch.testing.assert_close(output["sum"], 3 * rows())
        torch.testing.assert_close(output["first"], rows()[:, 0])

    @pytest.mark.parametrize("layer", [Call(lambda x: x.sum()), Call(lambda x: "text"), Call(lambda x: x.sum().item())])
    def test_an_output_that_cannot_be_put_together_is_refused(self, layer: nn.Module) -> None:
        with pytest.raises((TypeError, ValueError), match="output"):
            piped(nn.Sequential(layer), [1], chunks=2)(rows())

    def test_no_layers_are_the_identity(self) -> None:
        pipe = GPipe(nn.Sequential(), [], devices=["cpu"])
        x = rows()
        assert pipe(x) is x
        assert (len(pipe), pipe.devices, list(pipe.state_dict())) == (0, [], [])

    @given(st.integers(0, 9), st.integers(1, 9))
    def test_any_number_of_rows_and_chunks(self, count: int, chunks: int) -> None:
        x = rows(count)
        torch.testing.assert_close(piped(linears(), [2, 1], chunks=chunks)(x), linears()(x))

    def test_micro_batches_are_those_of_torch_chunk(self) -> None:
        seen: list[int] = []
        spy = Call(lambda x: (seen.append(len(x)), x)[1])
        GPipe(nn.Sequential(spy), [1], devices=["cpu"], chunks=4)(rows(7))
        assert seen == [2, 2, 2, 1]

    def test_the_rows_of_one_value_may_differ(self) -> None:
        pipe = GPipe(nn.Sequential(Call(lambda t: tuple(t))), [1], devices=["cpu"], chunks=2)
        assert [len(tensor) for tensor in pipe((rows(2), rows(4), rows(6)))] == [2, 4, 6]


class TestTraining:
    def test_an_optimizer_with_groups_learns_as_on_the_model(self) -> None:
        model, pipe = linears(), piped(linears(), [1, 2], chunks=3, checkpoint="always")
        for module in (model, pipe):
            groups = [{"params": module[0].parameters(), "lr": 0.1}, {"params": module[1:].parameters()}]
            optimizer = torch.optim.Adam(groups, lr=0.01)
            for _ in range(5):
                optimizer.zero_grad()
                module(rows()).square().sum().backward()
                torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)
                optimizer.step()
        for a, b in zip(model.parameters(), pipe.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)

    def test_layers_may_change_between_runs(self) -> None:
        model, pipe = linears(), piped(linears(), [1, 2], chunks=3, checkpoint="always")
        for module in (model, pipe):
            module(rows()).sum().backward()
            nn.utils.parametrizations.weight_norm(module[1])
            module[2].weight = nn.Parameter(torch.ones(3, 3, dtype=DOUBLE))
        assert_trains_like(pipe, model)

    def test_hooks_on_layers_and_on_partitions_are_called_for_every_micro_batch(self) -> None:
        pipe = piped(linears(2), [1, 1], chunks=3, checkpoint="never")
        calls: list[str] = []
        pipe[0].register_forward_hook(lambda *_: calls.append("layer"))
        pipe.partitions[0].register_forward_hook(lambda *_: calls.append("partition"))
        pipe.partitions[0].register_full_backward_hook(lambda *_: calls.append("backward"))
        pipe.register_forward_hook(lambda *_: calls.append("pipe"))
        pipe(rows(grad=True)).sum().backward()
        assert {name: calls.count(name) for name in calls} == {"layer": 3, "partition": 3, "backward": 3, "pipe": 1}

    def test_a_backward_hook_on_the_pipe_sees_the_whole(self) -> None:
        pipe = piped(linears(2), [1, 1], chunks=3)
        shapes: list[Any] = []
        pipe.register_full_backward_hook(lambda _, inputs, outputs: shapes.append((inputs[0].shape, outputs[0].shape)))
        pipe(rows(grad=True)).sum().backward()
        assert shapes == [((6, 3), (6, 3))]

    @pytest.mark.parametrize("checkpoint", ["never", "except_last", "always"])
    def test_a_pipe_within_a_pipe(self, checkpoint: str) -> None:
        inner = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)).to(DOUBLE)
        model = nn.Sequential(inner, nn.Linear(3, 3, dtype=DOUBLE))
        nested = nn.Sequential(piped(inner, [1, 2], chunks=2), copy.deepcopy(model[1]))
        assert_trains_like(piped(nested, [1, 1], chunks=3, checkpoint=checkpoint), model)

    def test_a_pipe_after_itself(self) -> None:
        model, pipe = linears(), piped(linears(), [1, 2], chunks=2)
        model(model(rows())).sum().backward()
        pipe(pipe(rows())).sum().backward()
        for a, b in zip(model.parameters(), pipe.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad)
