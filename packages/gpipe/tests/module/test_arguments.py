"""Arguments of a pipe: whatever is given, it is taken as it is meant, or refused by name, and nothing has changed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from gpipe import GPipe
from gpipe.engine._workers import placement
from gpipe.module import _arguments

from ..layers import linears, piped, rows

CPU = torch.device("cpu")
MODES = ("always", "except_last", "never")

nonsense = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 0),
    st.integers(1, 9),
    st.floats(),
    st.text(max_size=4),
    st.sampled_from(["cpu", "cuda", "cuda:0", "meta", "gpu", "never", "Always", "1", b"cpu", object(), 2j, CPU]),
    st.lists(st.one_of(st.integers(-1, 3), st.floats(0, 2), st.booleans(), st.none(), st.just("cpu")), max_size=3),
    st.sets(st.integers(1, 2)),
    st.dictionaries(st.integers(1, 2), st.integers(1, 2), max_size=2),
    st.just(torch.tensor([1, 2])),
    st.just(torch.tensor(2.5)),
)
MENTIONED = {"devices": "'meta'", "balance": "too few devices"}
"""What an error names instead: what cannot be moved there, or how many of both there are."""
NAMES = ("balance", "devices", "chunks", "checkpoint", "deferred_batch_norm")


def state(module: nn.Module) -> Any:
    """What may not change if a pipe cannot be made of ``module``."""
    return (
        [(name, id(each), type(each), each.training) for name, each in module.named_modules()],
        [(name, id(each), each.device, each.data_ptr()) for name, each in module.state_dict(keep_vars=True).items()],
    )


def refused(make: Callable[[], object]) -> str | None:
    """What an error says, of one of the types that an argument may be refused with."""
    try:
        make()
    except (TypeError, ValueError, IndexError) as error:
        return str(error)
    return None


class TestAnyArgument:
    @given(st.dictionaries(st.sampled_from(NAMES), nonsense, min_size=1))
    @example({"chunks": 2.7})
    @example({"chunks": None})
    @example({"chunks": True})
    @example({"checkpoint": True})
    @example({"devices": "cpu"})
    @example({"devices": ["meta", "cpu"]})
    @example({"devices": ["cpu", "cuda:0"]})
    @example({"balance": 2})
    @example({"balance": [True, 2]})
    @example({"deferred_batch_norm": "no"})
    def test_it_is_taken_or_refused_by_name_and_nothing_has_changed(self, arguments: dict[str, Any]) -> None:
        model = nn.Sequential(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), nn.BatchNorm1d(3), nn.Linear(3, 3))
        before, pipes = state(model), []
        options = {"balance": [1, 2], "devices": ["cpu", "cpu"], **arguments}
        message = refused(lambda: pipes.append(GPipe(model, **options)))
        for pipe in pipes:
            assert (len(pipe.balance), sum(pipe.balance)) == (len(pipe.devices), 3)
            assert (type(pipe.chunks), pipe.checkpoint in MODES) == (int, True)
            assert pipe.chunks == arguments.get("chunks", 1)
            pipe.eval()(torch.randn(6, 3))
        if message is not None:
            assert any(name in message or MENTIONED.get(name, name) in message for name in arguments)
            assert state(model) == before

    @given(st.sampled_from(["chunks", "checkpoint"]), nonsense)
    def test_what_is_set_later_is_checked_alike(self, name: str, value: Any) -> None:
        pipe = piped(linears(), [1, 2], chunks=2)
        before = repr(pipe)
        message = refused(lambda: setattr(pipe, name, value))
        assert message == refused(lambda: piped(linears(), [1, 2], **{name: value}))
        assert message is None or (name in message and repr(pipe) == before)
        pipe(rows())


class TestChunks:
    @pytest.mark.parametrize("chunks", [2.7, None, True, "4", [2], 2j, math.nan, math.inf])
    def test_what_is_no_whole_number(self, chunks: Any) -> None:
        with pytest.raises(TypeError, match=r"chunks must be an int.*chunks=8; got"):
            piped(linears(), [3], chunks=chunks)


class TestCheckpoint:
    def test_the_message_says_what_to_write(self) -> None:
        with pytest.raises(ValueError, match=r"checkpoint is not one of .*mean 'always'"):
            piped(linears(), [3], checkpoint="Always")


class TestBalance:
    @pytest.mark.parametrize(("balance", "example_"), [(2, r"\[1, 2\]"), (None, "balance_by_time")])
    def test_a_number_of_partitions_is_answered_by_a_list(self, balance: Any, example_: str) -> None:
        with pytest.raises((TypeError, ValueError), match=rf"(?s)balance.*{example_}"):
            GPipe(linears(), balance, devices=["cpu"] * 3)


class TestDevices:
    @pytest.mark.parametrize("device", ["", "cup", "cuda:x", "cuda:-1", -1, 99, "cuda:99", torch.device("cuda", 99)])
    def test_what_torch_does_not_know(self, device: Any) -> None:
        with pytest.raises(
            ValueError, match=r"devices\[1\] is .*, which is not a device that can be used here: .*'cpu'"
        ):
            GPipe(linears(), [1, 2], devices=["cpu", device])

    def test_a_device_that_torch_can_use_but_not_order(self, monkeypatch: pytest.MonkeyPatch) -> None:
        layers = linears()
        monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: None)
        with pytest.raises(ValueError, match=r"devices\[0\] is 'xla:0'.*torch\.accelerator, .*knows no 'xla' devices"):
            GPipe(layers, [1, 2], devices=["xla:0", "cpu"])

    def test_an_accelerator_without_streams_or_events(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def no_streams(device: torch.device) -> None:
            raise RuntimeError("Backend doesn't support create a new Stream.")

        layers = linears()
        monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: None)
        monkeypatch.setattr(_arguments, "has_streams", lambda device: device.type == "xpu")
        monkeypatch.setattr(_arguments, "new_stream", no_streams)
        with pytest.raises(
            ValueError, match=r"devices\[0\] is 'xpu:0', which is not a device that can be used here: Backend doesn't"
        ):
            GPipe(layers, [1, 2], devices=["xpu:0", "cpu"])

    @pytest.mark.parametrize("given", ["xpu", torch.device("xpu"), "xpu:1"])
    def test_an_accelerator_has_the_number_of_the_current_one(
        self, given: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """So two spellings of one device are one worker."""
        monkeypatch.setattr(_arguments, "_expect_usable", lambda device: None)
        monkeypatch.setattr(_arguments, "has_streams", lambda device: device.type == "xpu")
        monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1)
        places = [_arguments.parsed_device(each, "devices[0]") for each in (given, "xpu:1", "cpu", "cpu:1")]
        assert places == [torch.device("xpu", 1), torch.device("xpu", 1), CPU, torch.device("cpu", 1)]
        assert placement(places) == (0, 0, 1, 2)

    @pytest.mark.parametrize(("kind", "count"), [("cuda", 3), ("xpu", 3), ("mps", 0)])
    def test_by_default_all_accelerators(self, kind: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
        here = torch.device(kind)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: here)
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: 3)
        expected = [torch.device(kind, k) for k in range(count)] or [CPU, CPU]
        assert _arguments.checked_devices(None, 2) == expected

    def test_any_iterable_will_do_also_an_endless_one(self) -> None:
        assert GPipe(linears(), [1, 2], devices=itertools.repeat("cpu")).devices == [CPU, CPU]


class TestFixed:
    @pytest.mark.parametrize("name", ["balance", "devices", "partitions"])
    @pytest.mark.parametrize("value", [None, [3], nn.ModuleList()])
    def test_what_says_how_layers_are_divided_cannot_be_set(self, name: str, value: Any) -> None:
        pipe = piped(linears(), [1, 2], chunks=2)
        before = repr(pipe)
        with pytest.raises(AttributeError, match=rf"{name} of a pipe cannot be set; make a new pipe .*GPipe\("):
            setattr(pipe, name, value)
        assert repr(pipe) == before

    @pytest.mark.parametrize("name", ["balance", "devices"])
    def test_lists_that_are_handed_out_are_copies(self, name: str) -> None:
        pipe = piped(linears(), [1, 2], chunks=2)
        before = list(getattr(pipe, name))
        getattr(pipe, name).clear()
        assert getattr(pipe, name) == before
        pipe(rows())
