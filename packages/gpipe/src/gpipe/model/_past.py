"""Intercept calls of a model's modules from code that a pipe runs, such as a forward that was set on the pipe.

Modules around blocks then compute in the pipeline. A single block cannot, because it would compute the full mini-batch
on the caller's thread, while every other stage waits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import nn

from ..engine._run_lock import RunLock, locks_of_thread
from ._called import answered_by, intercepted, is_answered_by

Compute = Callable[[nn.Module, Any, Any], Any]
"""Computes a module around blocks, with these arguments and keywords, in the pipeline."""


def around_blocks(model: nn.Module, blocks: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the modules of ``model`` that contain ``blocks`` and have a forward; among them ``model`` itself."""
    own, found = {*blocks}, dict[nn.Module, bool]()
    _contains(model, own, found)
    return [each for each, contains in found.items() if contains and type(each).forward is not nn.Module.forward]


def _contains(module: nn.Module, blocks: Collection[nn.Module], found: dict[nn.Module, bool]) -> bool:
    """Return whether ``module`` is or contains one of the ``blocks``. Record it for all its modules outside blocks."""
    if module in blocks:
        return True
    if module not in found:
        found[module] = False
        inside = [_contains(child, blocks, found) for child in module.children()]  # all of them, none is skipped
        found[module] = True in inside
    return found[module]


class Past:
    """The calls of modules on the caller's thread that bypass the forward of the pipe.

    Args:
        on_device: returns a context whose operations compute on the device of the model's outputs.
        run_lock: held while the interception of calls begins and ends, so that no run is in progress then.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Mapping[str, nn.Module],
        run_lock: RunLock,
        on_device: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self._model, self._blocks, self._run_lock, self._on_device = model, blocks, run_lock, on_device
        self._count = 0  # of threads inside
        self._scope = ExitStack()

    @contextmanager
    def entered(self, compute: Compute) -> Iterator[None]:
        """Let ``compute`` handle calls of modules around blocks on this thread in this context."""
        if is_answered_by(self) or self._run_lock in locks_of_thread():
            yield
            return
        self._run_lock.run(partial(self._begin, compute))
        try:
            with answered_by(self), self._on_device():
                yield
        finally:
            self._run_lock.run(self._end)

    def _begin(self, compute: Compute) -> None:
        if not self._count:
            self._scope.enter_context(self._intercepted(compute))
        self._count += 1

    def _end(self) -> None:
        self._count -= 1
        if not self._count:
            self._scope.close()

    def _intercepted(self, compute: Compute) -> AbstractContextManager[None]:
        blocks = {block: partial(self._refuse, name) for name, block in self._blocks.items()}
        around = around_blocks(self._model, self._blocks.values())
        return intercepted({**{module: partial(self._enter, compute, module) for module in around}, **blocks})

    def _enter(self, compute: Compute, module: nn.Module, function: Any, *args: Any, **kwargs: Any) -> Any:
        return compute(module, args, kwargs) if is_answered_by(self) else function(*args, **kwargs)

    def _refuse(self, name: str, function: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_answered_by(self):
            return function(*args, **kwargs)
        raise RuntimeError(
            f"block {name!r} was called by itself, by a forward that was set on the pipe or a method of the model; it "
            "would compute all rows on this thread, without the pipeline; call a module around the blocks, whose "
            "forward calls them, such as the model, or change the forward of the model before the pipe is made"
        )

    def call(self, stage: int, module: nn.Module, name: str, function: Any, args: Any, kwargs: Any) -> Any:
        """Call a block, in a run that this thread has begun."""
        return function(*args, **kwargs)
