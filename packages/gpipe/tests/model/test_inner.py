"""Parts of a model, called through its pipe, or by a forward that was set on the pipe, compute in the pipeline."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Callable
from contextlib import closing
from types import MethodType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from gpipe import GPipe

from ..layers import Layer

WIDTH, ROWS, CHUNKS = 4, 6, 3
MODES = st.sampled_from(["never", "except_last", "always"])


class Trunk(nn.Module):
    """Blocks with operations before and after them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(
            Layer(lambda s, x: s.linear(x).tanh(), linear=nn.Linear(WIDTH, WIDTH)) for _ in "ab"
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.threads: list[tuple[str, int]] = []
        for block in self.blocks:
            block.register_forward_pre_hook(self._note)

    def _note(self, block: nn.Module, args: tuple[Tensor]) -> None:
        self.threads.append((threading.current_thread().name, len(args[0])))

    def forward(self, x: Tensor, shift: float = 0.0) -> Tensor:
        hidden = self.embed(x)
        for block in self.blocks:
            hidden = block(hidden) + shift
        return self.norm(hidden)


class Model(nn.Module):
    """Two trunks and a head, and methods that return or call its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Trunk(), Trunk()
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(x)))

    @property
    def base(self) -> nn.Module:
        return self.first

    def get_base(self) -> nn.Module:
        return self.first

    def encode(self, x: Tensor) -> Tensor:
        return self.first(x)

    def first_block(self, x: Tensor) -> Tensor:
        return self.first.blocks[0](x)


PARTS: dict[str, Callable[[Any], Callable[[Tensor], Tensor]]] = {
    "attribute": lambda m: m.first,
    "the later one": lambda m: m.second,
    "property": lambda m: m.base,
    "method": lambda m: m.get_base(),
    "get_submodule": lambda m: m.get_submodule("second"),
    "forward": lambda m: m.first.forward,
    "method that calls": lambda m: m.encode,
}


def made(checkpoint: str = "never") -> tuple[Any, GPipe, Any]:
    """A model, its pipe, and an equal plain model."""
    torch.manual_seed(0)
    model = Model().double()
    plain = Model().double()
    plain.load_state_dict(model.state_dict())
    return model, GPipe(model, devices=["cpu"] * 2, chunks=CHUNKS, checkpoint=checkpoint), plain


def rows() -> Tensor:
    return torch.randn(ROWS, WIDTH, dtype=torch.float64, requires_grad=True)


def expect_in_forwards(model: Any, name: str = "first", runs: int = 1) -> None:
    """Check that each block of this trunk ran once per micro-batch, on the threads of forwards."""
    calls = [rows for thread, rows in getattr(model, name).threads if thread.startswith("gpipe forward")]
    assert calls == [ROWS // CHUNKS] * (2 * CHUNKS * runs)
    elsewhere = {thread for thread, _ in getattr(model, name).threads if not thread.startswith("gpipe forward")}
    assert all(thread.startswith("worker of") for thread in elsewhere)  # where blocks are recomputed


def expect_same_gradients(model: Any, plain: Any) -> None:
    for (name, own), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (own.grad is None) == (other.grad is None), name
        if own.grad is not None:
            torch.testing.assert_close(own.grad, other.grad)


@given(st.sampled_from(sorted(PARTS)), MODES)
def test_part_computes_in_pipeline(part: str, checkpoint: str) -> None:
    model, pipe, plain = made(checkpoint)
    with closing(pipe):
        x = rows()
        y = x.detach().clone().requires_grad_()
        found, expected = PARTS[part](pipe)(x), PARTS[part](plain)(y)
        torch.testing.assert_close(found, expected)
        found.square().sum().backward()
        expected.square().sum().backward()
        torch.testing.assert_close(x.grad, y.grad)
        expect_same_gradients(model, plain)
        expect_in_forwards(model, "second" if part in ("the later one", "get_submodule") else "first")


@given(MODES)
def test_part_takes_other_arguments_than_the_model(checkpoint: str) -> None:
    _, pipe, plain = made(checkpoint)
    with closing(pipe):
        x = rows()
        torch.testing.assert_close(pipe.first(x, 2.0), plain.first(x, 2.0))
        torch.testing.assert_close(pipe.first(x=x, shift=2.0), plain.first(x, 2.0))


def test_pipe_method_inside_forward_matches_model() -> None:
    model, pipe, plain = made()
    with closing(pipe):
        model.head.register_forward_pre_hook(lambda head, args: pipe.get_base() and None)
        x = rows()
        torch.testing.assert_close(pipe(x), plain(x))


def through_self(self: Any, x: Tensor) -> Tensor:
    return self.head(self.second(self.get_base()(x)).relu())


def through_closure(model: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: model.head(model.second(model.first(x)).relu())


def around_previous(previous: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: previous(x).relu()


@given(st.sampled_from(["self", "closure", "previous"]), MODES, st.booleans())
def test_forward_set_on_pipe_computes_in_pipeline(kind: str, checkpoint: str, grad: bool) -> None:
    model, pipe, plain = made(checkpoint)
    with closing(pipe):
        for each, inner in ((pipe, model), (plain, plain)):
            ways = {"self": MethodType(through_self, each), "closure": through_closure(inner)}
            each.forward = ways.get(kind) or around_previous(each.forward)
        with torch.set_grad_enabled(grad):
            for _ in range(2):
                x = rows().detach()
                found, expected = pipe(x), plain(x)
                torch.testing.assert_close(found, expected)
                if grad:
                    found.square().sum().backward()
                    expected.square().sum().backward()
        expect_same_gradients(model, plain)
        for name in ("first", "second"):
            expect_in_forwards(model, name, runs=2)


@pytest.mark.parametrize(
    "forward", [lambda self, x: self.first.blocks[0](x), lambda self, x: self.first_block(x)], ids=["block", "method"]
)
def test_block_called_by_itself_raises(forward: Any) -> None:
    """The call is in a forward set on the pipe. Afterwards, the pipe works as before."""
    model, pipe, plain = made()
    with closing(pipe):
        before = pipe.forward
        pipe.forward = MethodType(forward, pipe)
        x = rows()
        with pytest.raises(RuntimeError, match=r"block 'first\.blocks\.0' was called by itself"):
            pipe(x)
        pipe.forward = before
        torch.testing.assert_close(pipe(x), plain(x))
        torch.testing.assert_close(model(x), plain(x))


def test_model_method_without_gradients_matches_model() -> None:
    model, pipe, _ = made()
    with closing(pipe), torch.no_grad():
        pipe.encode(rows())
    assert model.first.threads == [(threading.current_thread().name, ROWS)] * 2


def test_plain_model_computes_as_before() -> None:
    model, pipe, _plain = made()
    with closing(pipe):
        pipe.first(rows())
        model.first.threads.clear()
        model(rows())
        model.first(rows())
        assert {rows for _, rows in model.first.threads} == {ROWS}
        assert pipe[:] is model


def test_part_is_the_module() -> None:
    model, pipe, _ = made()
    with closing(pipe):
        part = pipe.first
        assert isinstance(part, Trunk)
        assert type(part).__name__ == "Trunk"
        assert vars(part) is vars(model.first)
        assert part.state_dict().keys() == model.first.state_dict().keys()
        assert part.blocks is model.first.blocks
        part.mark = 3
        assert model.first.mark == 3
        part.eval()
        assert not model.first.training
        assert type(pickle.loads(pickle.dumps(pipe.head))) is nn.Linear
        assert type(copy.deepcopy(part)) is Trunk
        with pytest.raises(TypeError, match="denied to move"):
            part.to("meta")
        assert [name for name, _ in pipe.named_modules()] == [name for name, _ in model.named_modules()]


def test_replaced_forward_may_call_previous_one() -> None:
    model, pipe, plain = made()
    with closing(pipe):
        for each in (pipe, plain):
            each.first.forward = around_previous(each.first.forward)
        x = rows()
        torch.testing.assert_close(pipe(x), plain(x))
        torch.testing.assert_close(model(x), plain(x))
        torch.testing.assert_close(pipe.first(x), plain.first(x))


def test_module_around_part_trains_like_plain() -> None:
    model, pipe, plain = made()
    with closing(pipe):
        around, expected = nn.Sequential(pipe.first, nn.Tanh()), nn.Sequential(plain.first, nn.Tanh())
        assert [name for name, _ in around.named_parameters()] == [name for name, _ in expected.named_parameters()]
        x = rows().detach()
        for each in (around, expected):
            each(x).sum().backward()
        expect_same_gradients(model, plain)
        expect_in_forwards(model)


def test_parts_in_several_threads() -> None:
    model, pipe, plain = made()
    failed = []

    def call() -> None:
        try:
            for _ in range(5):
                x = rows().detach()
                torch.testing.assert_close(pipe(x), plain(x).relu())
        except BaseException as error:
            failed.append(error)

    with closing(pipe):
        pipe.forward = around_previous(pipe.forward)
        threads = [threading.Thread(target=call) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failed
    assert all(vars(module).get("_compiled_call_impl") is None for module in model.modules())


def test_pipe_is_freed(no_collector: None) -> None:
    _, pipe, _ = made()
    pipe.first(rows())
    pipe.get_base()
    pipe.forward = MethodType(through_self, weakref.proxy(pipe))
    pipe(rows())
    freed = weakref.ref(pipe)
    del pipe
    assert freed() is None
    gc.collect()


def test_pipe_is_instance_of_class_of_model() -> None:
    _model, pipe, plain = made()
    with closing(pipe):
        assert isinstance(pipe, Model)
        assert isinstance(pipe, GPipe)
        assert type(pipe).__name__ == "ModelPipeOfModel"
        assert not isinstance(GPipe(nn.Sequential(nn.Linear(1, 1)), [1], devices=["cpu"]), Model)
        for twin in (copy.deepcopy(pipe), copy.copy(copy.deepcopy(pipe))):
            assert isinstance(twin, GPipe)
            assert isinstance(twin, Model)
            x = rows()
            torch.testing.assert_close(twin(x), plain(x))
            torch.testing.assert_close(twin.first(x), plain.first(x))
            twin.close()


class OfRNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.GRU(3, 3, batch_first=True) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)[0]
        return x

    def copied(self) -> nn.Module:
        return copy.deepcopy(self.layers[1])


def test_a_method_may_copy_a_block() -> None:
    """PEFT does so to add an adapter. An RNN copies all of its attributes."""
    with closing(GPipe(OfRNN(), devices=["cpu"] * 2, chunks=2)) as pipe:
        found = pipe.copied()
        assert vars(found).get("_compiled_call_impl") is None
        x = torch.ones(2, 2, 3)
        torch.testing.assert_close(found(x), pipe[:].layers[1](x))
