"""Surroundings: blocks that change what a thread sees of torch, one inside the other."""

from __future__ import annotations

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
"""What hooks and modes wrote; a test looks at it while one thread runs."""

DEVICE_TYPES = torch._C._autocast_supported_devices()
LOW = [torch.bfloat16, torch.float16]


@dataclass(frozen=True)
class Block:
    """A block by name, and how to open it."""

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
    def pack(x: torch.Tensor) -> torch.Tensor:
        LOG.append(f"pack {name}")
        return x

    def unpack(x: torch.Tensor) -> torch.Tensor:
        LOG.append(f"unpack {name}")
        return x

    return saved_tensors_hooks(pack, unpack)


@contextmanager
def cast(kind: str, dtype: torch.dtype, enabled: bool) -> Iterator[None]:
    # torch.autocast refuses device types that this machine has not.
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


def block(name: str, open_: Callable[..., AbstractContextManager[Any]], *args: Any, **kwargs: Any) -> Block:
    said = ", ".join([*map(str, args), *(f"{key}={value}" for key, value in kwargs.items())])
    return Block(f"{name}({said})", lambda: open_(*args, **kwargs))


@contextmanager
def grad_mode(on: bool) -> Iterator[None]:
    # torch.set_grad_enabled acts when it is made, which would be too early here.
    with torch.enable_grad() if on else torch.no_grad():
        yield


FLAGS = st.booleans()
BLOCKS = st.one_of(
    FLAGS.map(lambda on: block("grad_mode", grad_mode, on)),
    FLAGS.map(lambda on: block("inference_mode", torch.inference_mode, on)),
    st.builds(
        lambda dtype, on, cache: block("autocast", torch.autocast, "cpu", dtype, on, cache),
        st.sampled_from(LOW),
        FLAGS,
        FLAGS,
    ),
    st.builds(
        lambda kind, dtype, on: block("cast", cast, kind, dtype, on),
        st.sampled_from(DEVICE_TYPES),
        st.sampled_from(LOW),
        FLAGS,
    ),
    st.builds(
        lambda kind, dtype: block("dtype_alone", dtype_alone, kind, dtype),
        st.sampled_from(DEVICE_TYPES),
        st.sampled_from(LOW),
    ),
    st.sampled_from("ab").map(lambda name: block("hooks", hooks, name)),
    st.sampled_from(["cpu", "meta"]).map(lambda device: block("device", torch.device, device)),
    st.sampled_from("xy").map(lambda name: block("logging", Logging, name)),
    st.sampled_from(["red", "green"]).map(lambda value: block("COLOUR", variable, COLOUR, value)),
    st.integers(0, 2).map(lambda value: block("SIZE", variable, SIZE, value)),
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
