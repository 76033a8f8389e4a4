"""The tensors that ``torch.nn.utils.parametrize.cached()`` keeps, on threads of pipes.

Torch keeps them in one dict for the process, while any thread is inside. A stage would get the tensor of another
micro-batch, whose graph has its own backward, and a recomputation would find a cache that its forward did not. So on
threads of pipes, each micro-batch has a cache of its own on each stage, and each call of a block has its own, because
it is recomputed alone. All other threads share the cache of the process.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from contextvars import Context, ContextVar
from functools import cache
from typing import Any

from torch import Tensor

from .._forks import fork_lock
from .._torch import is_intercepting, parametrized_cache, replace_cached, set_parametrized_cache

Cache = dict[Any, Tensor | None]

_own: ContextVar[Cache | None] = ContextVar("gpipe.parametrized", default=None)


class _Process:
    """The cache of the process, and the objects that stand for it and its counter while any cache is in use.

    Torch reads the counter to see whether to cache, and replaces the cache when the counter is 0.
    """

    def __init__(self) -> None:
        self._lock = fork_lock()
        self._users = 0  # of any cache
        self._count = 0  # of the cache of the process
        self._cache: Cache = {}

    @contextmanager
    def replaced(self) -> Iterator[None]:
        """Return a context in which torch asks this object which cache a thread has."""
        with self._lock:
            if not self._users:
                self._count, self._cache = parametrized_cache()
                set_parametrized_cache(self, self)
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users:
                    set_parametrized_cache(self._count, self._cache)

    def counts(self) -> bool:
        """Return whether a thread outside pipes is inside of ``cached()``."""
        with self._lock:
            return bool(self._count if self._users else parametrized_cache()[0])

    def _here(self) -> Cache | None:
        if is_intercepting():
            return _own.get()
        return self._cache if self._count else None

    # The interface of the counter.

    def __bool__(self) -> bool:
        return bool(self._users or self._count)  # the cache itself knows who has none

    def __iadd__(self, count: int) -> _Process:
        with self._lock:
            self._count += count
        return self

    def __isub__(self, count: int) -> _Process:
        with self._lock:
            self._count -= count
            if not self._count:
                self._cache = {}
        return self

    # The interface of the cache.

    def get(self, key: Any) -> Tensor | None:
        here = self._here()
        return None if here is None else here.get(key)

    def __setitem__(self, key: Any, tensor: Tensor) -> None:
        here = self._here()
        if here is not None:
            here[key] = tensor


_process = _Process()


def is_caching() -> bool:
    """Return whether this thread is inside of ``cached()``, or the thread that began its run is."""
    return _own.get() is not None if is_intercepting() else _process.counts()


def has_cache(variables: Context) -> bool:
    """Return whether a thread with these context variables is inside of ``cached()``."""
    return variables.get(_own) is not None


@contextmanager
def own_cache(caches: bool) -> Iterator[None]:
    """Return a context in which this thread of a pipe has an empty cache of its own, or none."""
    before = _own.get()
    if before is None and not caches:
        yield
        return
    with _process.replaced() if caches else nullcontext():
        _own.set({} if caches else None)
        try:
            yield
        finally:
            _own.set(before)


def _cached() -> Iterator[None]:
    """Do the same as the generator of ``parametrize.cached``."""
    if is_intercepting():
        before = _own.get()
        with _process.replaced():
            _own.set({} if before is None else before)
            try:
                yield
            finally:
                _own.set(before)
        return
    with _process.replaced():
        _process.__iadd__(1)
        try:
            yield
        finally:
            _process.__isub__(1)


@cache
def prepare() -> None:
    """Let threads of pipes have caches of their own, from now on."""
    replace_cached(_cached)
