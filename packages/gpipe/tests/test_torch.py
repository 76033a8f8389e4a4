"""Private functions of torch behave as gpipe expects, as far as tests of pipes do not show it."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import Library

import gpipe
from gpipe import _torch
from gpipe.checkpoint._random import interception

from .layers import OnGradient

PRIVATE = re.compile(r"\btorch\._[A-Za-z]\w*|\b_C\._\w+|\bdistributed_c10d\._?\w+")


def test_no_other_file_calls_them():
    folder = Path(gpipe.__file__).parent
    found = {path.name for path in folder.rglob("*.py") if PRIVATE.search(path.read_text())}
    assert found == {"_torch.py"}


def test_nested_backwards_have_different_ids():
    seen: list[int] = []

    def nested(gradient: Tensor) -> Tensor:
        seen.append(_torch.backward_id())
        with torch.enable_grad():
            root = torch.ones(1, requires_grad=True) * 2
            root.register_hook(lambda _: seen.append(_torch.backward_id()))
            root.backward()
        return gradient

    OnGradient.apply(torch.ones(1, requires_grad=True), nested).backward()
    outer, inner = seen
    assert -1 == _torch.backward_id() < min(seen)
    assert outer != inner


def test_a_graph_is_another_user_of_a_parameter():
    parameter = nn.Parameter(torch.ones(2))
    assert not _torch.find_used_by_graphs([parameter])
    graph = parameter * 2
    assert _torch.find_used_by_graphs([parameter])
    del graph
    assert not _torch.find_used_by_graphs([parameter])


def test_operations_that_consist_of_others_are_known():
    assert _torch.is_composite(torch.ops.aten.dropout.default)
    assert not _torch.is_composite(torch.ops.aten.native_dropout.default)


def test_operations_use_key_only_if_set():
    seen: list[str] = []
    interception.prepare()  # every operation but one skips the key from now on
    library = Library("gpipe_test_torch", "DEF")
    library.define("one(Tensor x) -> Tensor", tags=[torch.Tag.nondeterministic_seeded])
    library.impl("one", lambda x: x + 1, "CompositeExplicitAutograd")
    assert "gpipe_test_torch::one" in _torch.operation_names()
    assert _torch.has_tag("gpipe_test_torch::one", torch.Tag.nondeterministic_seeded)
    assert not _torch.has_tag("aten::add.Tensor", torch.Tag.nondeterministic_seeded)

    def kernel(x: Tensor) -> Tensor:
        seen.append("here")
        _torch.set_intercepting(False)
        try:
            return torch.ops.gpipe_test_torch.one(x)
        finally:
            _torch.set_intercepting(True)

    library.impl("one", kernel, _torch.INTERCEPTING)
    assert _torch.is_intercepted_by_others()
    torch.ops.gpipe_test_torch.one(torch.ones(1))
    assert not seen
    assert not _torch.is_intercepting()
    _torch.set_intercepting(True)
    try:
        assert _torch.is_intercepting()
        assert torch.ops.gpipe_test_torch.one(torch.ones(1)).item() == 2
    finally:
        _torch.set_intercepting(False)
        library._destroy()
    assert seen == ["here"]


def test_fake_tensors_are_noticed():
    assert not _torch.is_faked()
    with FakeTensorMode():
        assert _torch.is_faked()


def test_the_compiler_leaves_a_function_out():
    seen: list[bool] = []
    graphs: list[Any] = []

    def left_out(x: Tensor) -> Tensor:
        seen.append(torch.compiler.is_compiling())
        return x + 1

    _torch.not_compiled(left_out, "because")

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph

    compiled = torch.compile(lambda x: left_out(x * 2) * 3, backend=backend)
    assert compiled(torch.ones(1)).item() == 9
    assert seen == [False]
    assert len(graphs) == 2
    with pytest.raises(torch._dynamo.exc.Unsupported, match="because"):
        torch.compile(lambda x: left_out(x), backend=backend, fullgraph=True)(torch.ones(1))
    torch._dynamo.reset()


def test_a_profiler_is_noticed():
    assert not _torch.is_profiled()
    with torch.profiler.profile(acc_events=True):  # without it, torch 2.11 warns
        assert _torch.is_profiled()
    assert not _torch.is_profiled()
