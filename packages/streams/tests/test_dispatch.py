"""Dispatch modes are out of sight of torch.compile."""

from typing import Any

import torch

from streams import DispatchMode

from .fakes import in_thread


class Counting(DispatchMode):
    operations = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        return operation(*args, **(kwargs or {}))


def test_a_compiled_function_under_a_mode_is_compiled() -> None:
    calls = []

    def backend(graph: Any, example: Any) -> Any:
        calls.append(graph)
        return graph.forward

    compiled = torch.compile(lambda x: x * 2 + 1, backend=backend)
    with Counting():
        assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 3.0))
    torch._dynamo.reset()
    assert len(calls) == 1


def test_a_pushed_mode_sees_its_own_thread_only() -> None:
    mode = Counting()
    with mode.pushed():
        in_thread(lambda: torch.ones(2))
        assert mode.operations == 0
        torch.ones(2)
    torch.ones(2)
    assert mode.operations == 1
