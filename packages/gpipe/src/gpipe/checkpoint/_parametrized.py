"""Make the cache of ``torch.nn.utils.parametrize.cached()`` local to the threads of pipes.

Torch caches tensors in one dict per process, as long as any thread is inside ``cached()``. A stage would find the
tensor of a different micro-batch, whose graph has a separate backward, and a recomputation would find a cache that its
forward did not. So on threads of pipes, each micro-batch has its own cache on each stage. Each call of a block has its
own cache, because it is recomputed separately. All other threads share the process-wide cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from contextvars import Context, ContextVar
from functools import cache
from typing import Any

from torch import Tensor

from .._forks import fork_lock
from .._torch import get_parametrize_cache, is_intercepting, replace_cached, set_parametrized_cache

Cache = dict[Any, Tensor | None]

_own: ContextVar[Cache | None] = ContextVar("gpipe.parametrized", default=None)


class _Process:
    """The process-wide cache. While any cache is in use, this object replaces torch's cache and its counter.

    Torch checks the counter to decide whether to cache, and replaces the cache when the counter is 0.
    """

    def __init__(self) -> None:
        self._lock = fork_lock()
        self._users: set[object] = set()  # one for each context in which any cache is used
        self._count = 0  # the counter of the process-wide cache
        self._cache: Cache = {}

    @contextmanager
    def replaced(self) -> Iterator[None]:
        """Return a context in which torch uses this object, which selects the cache of the calling thread."""
        user = object()
        try:
            self._begin(user)
            yield
        finally:
            try:
                self._end(user)
            finally:  # again after an interrupt, because torch would otherwise use this object forever
                self._end(user)

    def _begin(self, user: object) -> None:
        with self._lock:
            if not self._users:
                self._count, self._cache = get_parametrize_cache()
            self._users.add(user)
            set_parametrized_cache(self, self)  # also with other users, whose end may have been interrupted

    def _end(self, user: object) -> None:
        """Remove a user, if it was added and is not removed yet."""
        with self._lock:
            if self._users == {user}:
                set_parametrized_cache(self._count, self._cache)
            self._users.discard(user)

    def counts(self) -> bool:
        """Return whether a thread outside pipes is inside ``cached()``."""
        with self._lock:
            return bool(self._count if self._users else get_parametrize_cache()[0])

    def _here(self) -> Cache | None:
        if is_intercepting():
            return _own.get()
        return self._cache if self._count else None

    # The interface of the counter.

    def __bool__(self) -> bool:
        return bool(self._users or self._count)  # threads without a cache are handled in get and __setitem__

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
    """Return whether this thread, or the thread that started its run, is inside ``cached()``."""
    return _own.get() is not None if is_intercepting() else _process.counts()


def has_cache(variables: Context) -> bool:
    """Return whether a thread with these context variables is inside ``cached()``."""
    return variables.get(_own) is not None


@contextmanager
def own_cache(caches: bool) -> Iterator[None]:
    """Return a context in which this thread of a pipe has its own empty cache, or none without ``caches``."""
    before = _own.get()
    if before is None and not caches:
        yield
        return
    with _process.replaced() if caches else nullcontext():
        try:
            _own.set({} if caches else None)
            yield
        finally:
            _own.set(before)


def _cached() -> Iterator[None]:
    """Replace the generator function of ``parametrize.cached``."""
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
    """Give threads of pipes their own caches from now on."""
    replace_cached(_cached)
