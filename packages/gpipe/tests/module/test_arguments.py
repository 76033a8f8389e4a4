"""Arguments of a pipe: each is used as documented, or raises an error naming it, and nothing has changed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from gpipe import GPipe
from gpipe.module import _arguments

from ..layers import MODES, linears, piped, rows, state

CPU = torch.device("cpu")

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
"""Substrings that errors contain instead of the name: the immovable device, or the count."""
NAMES = ("balance", "devices", "chunks", "checkpoint", "deferred_batch_norm")


def refused(make: Callable[[], object]) -> str | None:
    """Return the message of a permitted error, or None if there was none."""
    try:
        make()
    except (TypeError, ValueError, IndexError) as error:
        return str(error)
    return None


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
@example({"balance": torch.tensor(2.5)})
@example({"devices": torch.tensor(2.5)})
@example({"deferred_batch_norm": "no"})
def test_arguments_are_accepted_or_raise_naming_them(arguments: dict[str, Any]) -> None:
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
def test_what_is_set_later_is_checked_alike(name: str, value: Any) -> None:
    pipe = piped(linears(), [1, 2], chunks=2)
    before = repr(pipe)
    message = refused(lambda: setattr(pipe, name, value))
    assert message == refused(lambda: piped(linears(), [1, 2], **{name: value}))
    assert message is None or (name in message and repr(pipe) == before)
    pipe(rows())


@pytest.mark.parametrize("device", ["", "cup", "cuda:x", "cuda:-1", -1, 99, "cuda:99", torch.device("cuda", 99)])
def test_a_device_that_torch_does_not_know(device: Any) -> None:
    with pytest.raises(ValueError, match=r"devices\[1\] is .*, which cannot be used here: .*'cpu'"):
        GPipe(linears(), [1, 2], devices=["cpu", device])


def test_device_without_streams_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = linears()
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: None)
    with pytest.raises(
        ValueError, match=r"devices\[0\] is 'xla:0'.*torch\.accelerator, .*does not support 'xla' devices"
    ):
        GPipe(layers, [1, 2], devices=["xla:0", "cpu"])


def test_an_accelerator_without_streams_or_events(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_streams(device: torch.device) -> None:
        raise RuntimeError("Backend doesn't support create a new Stream.")

    layers = linears()
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: None)
    monkeypatch.setattr(_arguments, "has_streams", lambda device: device.type == "xpu")
    monkeypatch.setattr(_arguments, "new_stream", no_streams)
    with pytest.raises(ValueError, match=r"devices\[0\] is 'xpu:0', which cannot be used here: Backend doesn't"):
        GPipe(layers, [1, 2], devices=["xpu:0", "cpu"])


@pytest.mark.parametrize("name", ["balance", "devices", "partitions"])
@pytest.mark.parametrize("value", [None, [3], nn.ModuleList()])
def test_division_of_layers_cannot_be_set(name: str, value: Any) -> None:
    pipe = piped(linears(), [1, 2], chunks=2)
    before = repr(pipe)
    with pytest.raises(AttributeError, match=rf"{name} of a pipe cannot be set; build a new pipe, .*GPipe\("):
        setattr(pipe, name, value)
    assert repr(pipe) == before
