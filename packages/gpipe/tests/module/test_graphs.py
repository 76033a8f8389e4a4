"""CUDA graphs in layers raise an error, wherever they are hidden. torch.compile works without them."""

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import FunctionType
from typing import Any
from unittest import mock

import pytest
import torch
from packages.streams.tests.accelerator import accelerator
from torch import nn

from gpipe import GPipe
from gpipe.engine._run import expect_no_capture
from gpipe.module._graphs import expect_no_graphs

from ..layers import INDUCTOR, running, trained

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
GRAPHS: dict[str, dict[str, Any]] = {
    "reduce-overhead": {"mode": "reduce-overhead"},
    "max-autotune": {"mode": "max-autotune"},
    "options": {"options": {"triton.cudagraphs": True}},
    "backend": {"backend": "cudagraphs"},
}
PLAIN: dict[str, dict[str, Any]] = {
    "default": {},
    "no cudagraphs": {"mode": "max-autotune-no-cudagraphs"},
    "eager": {"backend": "eager"},
    "own": {"backend": lambda graph, inputs: graph.forward},
}


@pytest.fixture(autouse=True)
def compiler() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # caused by the compiler, even during its import
        torch._dynamo.reset()
        yield
        torch._dynamo.reset()


def wrapped(layer: nn.Module, options: dict[str, Any]) -> nn.Module:
    return torch.compile(layer, **options)  # type: ignore[return-value]


def in_place(layer: nn.Module, options: dict[str, Any]) -> nn.Module:
    layer.compile(**options)
    return layer


each_way = pytest.mark.parametrize("compiled", [wrapped, in_place])
Compile = Callable[[nn.Module, dict[str, Any]], nn.Module]


@each_way
@pytest.mark.parametrize("options", GRAPHS.values(), ids=GRAPHS)
def test_a_graph_is_found_at_any_depth(compiled: Compile, options: dict[str, Any]) -> None:
    layer = nn.Sequential(nn.Tanh(), nn.Sequential(compiled(nn.Linear(2, 2), options)))
    with pytest.raises(ValueError, match=r"'1\.0' of partition 3 replays a CUDA graph \(torch\.comp.*mode='def"):
        expect_no_graphs(layer, CUDA, 3)
    expect_no_graphs(layer, CPU, 3)


@each_way
@pytest.mark.parametrize("options", PLAIN.values(), ids=PLAIN)
def test_without_graphs_nothing_is_found(compiled: Compile, options: dict[str, Any]) -> None:
    expect_no_graphs(nn.Sequential(compiled(nn.Linear(2, 2), options)), CUDA, 0)


def test_a_graphed_callable_is_found() -> None:
    """It replaces the forward of the module itself."""
    layer = nn.Linear(2, 2)
    layer.forward = FunctionType((lambda x: x).__code__, vars(torch.cuda.graphs))  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=r"'' of partition 0 .*make_graphed_callables"):
        expect_no_graphs(layer, CUDA, 0)
    layer.forward = lambda x: x  # type: ignore[method-assign]
    expect_no_graphs(layer, CUDA, 0)


@pytest.mark.parametrize("capturing", [None, 0, 1])
def test_a_run_is_no_part_of_a_graph(capturing: int | None) -> None:
    """Whichever of its devices captures; torch answers for the current one."""
    with accelerator("cuda") as fake:
        with mock.patch.object(torch.cuda, "is_current_stream_capturing", side_effect=lambda: fake.index == capturing):
            with nullcontext() if capturing is None else pytest.raises(RuntimeError, match="cannot be captured"):
                expect_no_capture([CPU, torch.device("cuda", 0), torch.device("cuda", 1)])
            expect_no_capture([CPU, CPU])
        assert fake.index == 0


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4)) for _ in range(3))).double()


def left(module: nn.Module, schedule: str | None) -> list[Any]:
    x = torch.linspace(-1, 1, 24, dtype=torch.float64).view(6, 4).requires_grad_()
    module.zero_grad()
    return [*trained(module, x, schedule), x.grad, *[p.grad for p in module.parameters()]]


def test_concurrent_compilation_does_not_affect_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, found = GPipe(nn.Sequential(nn.Dropout(), nn.Dropout()), [2], devices=["cpu"], checkpoint="always"), []
    for compiling in (False, True):
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda answer=compiling: answer)
        torch.manual_seed(0)
        found.append(pipe(torch.ones(4, 8)))
    assert torch.equal(*found)


@pytest.mark.parametrize(
    ("schedule", "mode", "inline", "backend"),
    [
        (None, "always", False, "aot_eager"),
        (None, "never", True, "eager"),
        ("1f1b", "except_last", False, "eager"),
        ("zero_bubble", "never", False, "aot_eager"),
        ("zero_bubble", "always", True, "eager"),
        pytest.param("1f1b", "always", False, INDUCTOR.values[0], marks=INDUCTOR.marks),
    ],
)
def test_compiled_layers_train_as_the_plain_model(schedule: str | None, mode: str, inline: bool, backend: str) -> None:
    """Wrapped, compiled in place, and a whole partition: a call and steps, more than once."""
    plain = blocks()
    layers = list(copy.deepcopy(plain))
    layers[0] = wrapped(layers[0], {"backend": backend, "fullgraph": True})
    in_place(layers[1], {"backend": backend})
    pipe = GPipe(nn.Sequential(*layers), [1, 1, 1], devices=["cpu"] * 3, chunks=2, checkpoint=mode)
    pipe.partitions[2].compile(backend=backend)
    expected = left(plain, None)
    with running(inline):
        for _ in range(2):
            torch.testing.assert_close(left(pipe, schedule), expected)
