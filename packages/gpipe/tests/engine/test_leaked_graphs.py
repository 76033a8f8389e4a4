"""Tensors that leave a layer through side effects train correctly or raise an explanatory error."""

from collections.abc import Callable
from contextlib import closing
from contextvars import ContextVar
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import prune

import gpipe

from ..layers import ALL_ROWS, DOUBLE, MODES, Layer, assert_same, piped, rows, running, squares, trained

SEEN: ContextVar[Any] = ContextVar("SEEN", default=0)
GLOBAL: dict[str, Any] = {}


# How a layer stores a tensor, how the loss reads it, and whether it is outside all layers.
WAYS: dict[str, tuple[Callable[[Layer, Any], None], Callable[[Layer], Any], bool]] = {
    "attribute": (lambda layer, value: setattr(layer, "aux", value), lambda layer: layer.aux, False),
    "list": (lambda layer, value: setattr(layer, "all", [*layer.all[-3:], value]), lambda layer: layer.all[-1], False),
    "dict": (lambda layer, value: layer.named.update(aux=value), lambda layer: layer.named["aux"], False),
    "global": (lambda layer, value: GLOBAL.update(aux=value), lambda layer: GLOBAL["aux"], True),
    "context variable": (lambda layer, value: SEEN.set(value), lambda layer: SEEN.get(), True),
}


def leave(s: Layer, x: Tensor) -> Tensor:
    """A linear layer that stores an auxiliary loss, of its output or of its own head."""
    linear, head = s.m
    y: Tensor = linear(x).tanh()
    aux = squares(head(x) if s.has_head else y)
    if not s.has_head:
        y = y + 0 * head(x)
    WAYS[s.way][0](s, aux)
    return y


def leaving(way: str, head: bool) -> Layer:
    parts = nn.Linear(3, 3, dtype=DOUBLE), nn.Linear(3, 1, dtype=DOUBLE)
    return Layer(leave, *parts, way=way, has_head=head, aux=0.0, all=[0.0], named={"aux": 0.0})


def model_with(way: str, head: bool, at: int) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(3, 3, dtype=DOUBLE) for _ in range(3)]
    layers[at] = leaving(way, head)
    return nn.Sequential(*layers)


def train(model: nn.Module, at: int, way: str, schedule: str | None) -> None:
    trained(model, rows(), schedule, lambda y, *_: squares(y) + WAYS[way][1](model.get_submodule(str(at))))


@given(
    st.sampled_from([*WAYS]),
    st.booleans(),
    st.integers(0, 2),
    st.sampled_from([[3], [1, 2], [2, 1], [1, 1, 1]]),
    st.integers(1, 3),
    st.sampled_from(MODES),
    st.sampled_from([None, "fill_drain", "1f1b", "zero_bubble", ALL_ROWS]),
    st.booleans(),
)
def test_stored_tensors_train_correctly_or_raise(
    way: str, head: bool, at: int, balance: list[int], chunks: int, mode: str, schedule: str | None, inline: bool
) -> None:
    # Without a graph, or if it is undetectable: see the row of docs/semantics.md.
    assume(schedule or at >= balance[0] or not WAYS[way][2])
    assume(not schedule or mode == "never" or at >= sum(balance[:-1]) or way != "global")
    plain = model_with(way, head, at)
    train(plain, at, way, schedule)
    GLOBAL["aux"] = 0.0  # nothing of the plain model's may be left
    SEEN.set(0.0)
    with closing(piped(model_with(way, head, at), balance, chunks=chunks, checkpoint=mode)) as pipe, running(inline):
        try:
            train(pipe, at, way, schedule)
        except RuntimeError:  # our error, or torch's for a graph that is used twice
            return
        assert_same(pipe, plain)


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("mode", ["never", "always"])
@pytest.mark.parametrize("schedule", [None, "1f1b", "zero_bubble", ALL_ROWS])
def test_stored_graph_tensor_unused_by_loss_is_allowed(mode: str, schedule: str | None) -> None:
    def model() -> nn.Sequential:
        layers = model_with("attribute", head=False, at=1)
        for k in (0, 2):  # these set the weight with its graph in every forward
            torch.nn.utils.weight_norm(layers[k])
        return layers

    plain, pipe = model(), gpipe.GPipe(model(), [1, 2], devices=["cpu"] * 2, chunks=3, checkpoint=mode)
    with closing(pipe):
        for _ in range(2):
            trained(plain, rows())
            trained(pipe, rows(), schedule)
        assert_same(pipe, plain)


@pytest.mark.parametrize(
    ("balance", "schedule", "message"),
    [
        ([2, 1], None, r"partition 0 \(layers '0' to '1'\) '1.aux' holds .* Return it from"),
        ([1, 2], "1f1b", r"partition 1 \(layers '1' to '2'\) a layer has left .* Return it from"),
    ],
)
def test_the_place_and_the_way_out_are_named(balance: list[int], schedule: str | None, message: str) -> None:
    pipe = piped(model_with("attribute", head=True, at=1), balance, chunks=2)
    with closing(pipe), pytest.raises(RuntimeError, match=message):
        train(pipe, 1, "attribute", schedule)


@pytest.mark.parametrize("mode", ["never", "always"])
@pytest.mark.parametrize("schedule", [None, "fill_drain", "1f1b", "zero_bubble", ALL_ROWS])
def test_input_used_by_next_micro_batch_raises(schedule: str | None, mode: str) -> None:
    def use(s: Layer, x: Tensor) -> Tensor:
        before, s.kept = s.kept, x
        return x + before

    model = nn.Sequential(nn.Linear(3, 3, dtype=DOUBLE), Layer(use, kept=0.0))
    pipe = piped(model, [1, 1], chunks=3, checkpoint=mode)
    with closing(pipe), pytest.raises(RuntimeError, match="another micro-batch or partition"):
        trained(pipe, rows(), schedule)


@pytest.mark.parametrize("removed", [False, True])
def test_hook_on_stored_input_fires_until_removed(removed: bool) -> None:
    def keep(s: Layer, x: Tensor) -> Tensor:
        s.kept = x
        return 2 * x

    seen: list[Tensor] = []
    model = nn.Sequential(nn.Linear(3, 3, dtype=DOUBLE), Layer(keep))
    with closing(piped(model, [1, 1], chunks=2, checkpoint="never")) as pipe:
        y = pipe(rows())
        handle = pipe.get_submodule("1").kept.register_hook(seen.append)
        if removed:
            handle.remove()
        y.sum().backward()
    assert [gradient.unique().tolist() for gradient in seen] == ([] if removed else [[2.0]])


@pytest.mark.parametrize(("schedule", "reduction"), [("fill_drain", None), ("fill_drain", "sum"), ("1f1b", "sum")])
def test_hook_computed_weight_in_loss_raises(schedule: str, reduction: str | None) -> None:
    model = nn.Sequential(nn.Linear(3, 3, dtype=DOUBLE), nn.Linear(3, 3, dtype=DOUBLE))
    prune.l1_unstructured(model[0], "weight", 0.5)
    with (
        closing(gpipe.GPipe(model, [1, 1], devices=["cpu"] * 2, chunks=3, checkpoint="never")) as pipe,
        pytest.raises(RuntimeError, match="the loss has used that graph up"),
    ):
        pipe.step(rows(), loss_fn=lambda y: y.sum() + model[0].weight.sum(), reduction=reduction, schedule=schedule)
