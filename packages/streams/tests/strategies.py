"""Nested contexts that change the thread-local state of torch."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

COLOUR: ContextVar[str] = ContextVar("COLOUR", default="none")
SIZE: ContextVar[int] = ContextVar("SIZE")
LOG: list[str] = []
"""Messages of hooks and modes, which a test reads while a single thread runs."""

DEVICE_TYPES = torch._C._autocast_supported_devices()
Opens = Callable[..., AbstractContextManager[Any]]


@dataclass(frozen=True)
class Block:
    """A context manager with a name."""

    name: str
    open: Callable[[], AbstractContextManager[Any]] = field(repr=False, compare=False)


class Logging(TorchFunctionMode):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        LOG.append(f"{self.name} {func.__name__}")
        return func(*args, **(kwargs or {}))


def hooks(name: str) -> saved_tensors_hooks:
    def noting(what: str) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: LOG.append(f"{what} {name}") or x

    return saved_tensors_hooks(noting("pack"), noting("unpack"))


@contextmanager
def cast(kind: str, dtype: torch.dtype, enabled: bool) -> Iterator[None]:
    # torch.autocast rejects device types that this machine does not have.
    was, old = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    torch.set_autocast_enabled(kind, enabled)
    torch.set_autocast_dtype(kind, dtype)
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        torch.set_autocast_enabled(kind, was)
        torch.set_autocast_dtype(kind, old)


@contextmanager
def dtype_alone(kind: str, dtype: torch.dtype) -> Iterator[None]:
    old = torch.get_autocast_dtype(kind)
    torch.set_autocast_dtype(kind, dtype)
    try:
        yield
    finally:
        torch.set_autocast_dtype(kind, old)


@contextmanager
def variable(var: ContextVar[Any], value: Any) -> Iterator[None]:
    token = var.set(value)
    try:
        yield
    finally:
        var.reset(token)


def block(open_: Opens, *args: Any) -> Block:
    return Block(f"{open_.__name__}({', '.join(map(str, args))})", lambda: open_(*args))


def blocks_of(open_: Opens, *args: st.SearchStrategy[Any]) -> st.SearchStrategy[Block]:
    return st.builds(block, st.just(open_), *args)


FLAGS = st.booleans()
KINDS = st.sampled_from(DEVICE_TYPES)
LOW = st.sampled_from([torch.bfloat16, torch.float16])
BLOCKS = st.one_of(
    blocks_of(torch.set_grad_enabled, FLAGS),
    blocks_of(torch.inference_mode, FLAGS),
    blocks_of(torch.autocast, st.just("cpu"), LOW, FLAGS, FLAGS),
    blocks_of(cast, KINDS, LOW, FLAGS),
    blocks_of(dtype_alone, KINDS, LOW),
    blocks_of(hooks, st.sampled_from("ab")),
    blocks_of(torch.device, st.sampled_from(["cpu", "meta"])),
    blocks_of(Logging, st.sampled_from("xy")),
    blocks_of(variable, st.just(COLOUR), st.sampled_from(["red", "green"])),
    blocks_of(variable, st.just(SIZE), st.integers(0, 2)),
)


def surroundings(max_size: int = 5) -> st.SearchStrategy[list[Block]]:
    """Blocks to open one inside the other, the outermost first."""
    return st.lists(BLOCKS, max_size=max_size)


@contextmanager
def inside(blocks: list[Block]) -> Iterator[None]:
    """Open all ``blocks``."""
    with ExitStack() as stack:
        for each in blocks:
            stack.enter_context(each.open())
        yield
