"""Run the forward of a model for one micro-batch on its own thread, which the stages resume in turn."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from streams import limit_threads, use_device, waiting

from .._current import Work, current
from .._torch import dispatch_modes, set_intercepting, with_dispatch_modes
from ..checkpoint._parametrized import is_caching, own_cache
from ..engine._cores import Cores, bind, usable
from ..engine._run_lock import RunLocks, locks_of_thread, serving
from ..values._leaves import Activation, as_arguments
from ._called import answered_by
from ._calls import AnyRun, Calls, Ended
from ._facts import Facts, Place
from ._row_order import Entries
from ._tensors import Turn
from ._used import Uses


class Forward:
    """One call of the model, for the rows of a micro-batch.

    Args:
        run: the run that it belongs to.
        inputs: the arguments of the model, as leaves.
        known: the facts from earlier forwards, if this one can end after its last block; None for a complete one.
    """

    def __init__(self, run: AnyRun, microbatch: int, inputs: Activation, known: Facts | None) -> None:
        self._run, self._inputs = run, inputs
        self._calls = Calls(run, microbatch, inputs, known, self._enter)
        self._output: Any = None
        self._go, self._stopped = waiting.Semaphore(0), waiting.Semaphore(0)
        self._is_on = self._is_over = self._is_abandoned = False
        self._error: BaseException | None = None
        self._work = current.work
        self._modes: list[Any] = []
        self._saving: AbstractContextManager[None] = nullcontext()
        self._run_locks: RunLocks = ()
        self._threads, self._process, self._cores = 1, 0, Cores()

    # Called by workers.

    @property
    def turns(self) -> list[Turn]:
        """The turn of each stage."""
        return self._calls.tensors.turns

    @property
    def uses(self) -> Uses | None:
        """The calls of blocks, and the uses of their outputs; None unless a replay computes the model's output."""
        return self._calls.uses

    @property
    def drew(self) -> set[str]:
        """The names of the generators of Python and NumPy that the model has used before its last call of a block."""
        return self._calls.drew

    @property
    def numbers(self) -> dict[Any, set[Any]]:
        """The numbers that the model has read from tensors: see :class:`Facts`."""
        return self._calls.numbers

    @property
    def used(self) -> dict[Place, Tensor]:
        """The outputs of blocks that the model itself uses, on the last stage; known at the end."""
        return self._calls.used

    def go_on(self, stage: int, saving: AbstractContextManager[None]) -> Turn:
        """Resume the forward until it calls a block of a later stage of this process, or ends.

        Args:
            saving: the context of the operations of ``stage``, entered on the forward's thread.

        Returns:
            The turn of ``stage``.
        """
        self._calls.until = stage
        if not self._is_over:
            self._work, self._modes, self._saving = current.work, dispatch_modes(), saving
            self._cores = usable()
            if not self._is_on:
                self._is_on, self._run_locks, self._threads = True, locks_of_thread(), torch.get_num_threads()
                self._process = os.getpid()
                self._run.start(self._compute)
            self._go.release()
            self._stopped.acquire()
            self._work, self._modes, self._saving = Work({}), [], nullcontext()
        if self._error is not None:
            error, self._error = self._error, None
            try:
                raise error
            finally:
                del error  # avoids a reference cycle: its traceback refers to this frame
        return self._calls.tensors.turns[stage]

    def take(self) -> tuple[Any, dict[Place | Entries, Tensor]]:
        """Return the output, or None if the forward ended early, and the tensors on the last stage that a replay needs.

        The thread may keep this object alive a little longer, but no graph.
        """
        calls, output = self._calls, self._output
        found = dict[Place | Entries, Tensor]([*calls.used.items(), *calls.orders.items()])
        self._forget()
        return output, found

    def abandon(self) -> None:
        """End the forward where it has stopped. Afterwards, nothing refers to its thread."""
        if self._is_on and not self._is_over and self._process == os.getpid():  # a forked child has no such thread
            self._is_abandoned = True
            while not self._is_over:  # again if the model catches the exception and continues
                self._go.release()
                self._stopped.acquire()
        self._forget()

    def _forget(self) -> None:
        self._output = None
        self._calls.clear()

    # Called on the forward's own thread.

    def _compute(self) -> None:
        self._go.acquire()
        try:
            if torch.get_num_threads() != self._threads:
                limit_threads(self._threads)
            set_intercepting(True)
            context = self._run.spec.context
            backwards_stay = torch.autograd.set_multithreading_enabled(False)
            # The cache last, because the context says whether there is one.
            with (
                context.applied(),
                serving(self._run_locks),
                backwards_stay,
                self._run.on_streams(),
                own_cache(is_caching()),
            ):
                self._turns()
        except Ended:
            pass
        except BaseException as error:
            if not self._calls.is_done:
                self._error = error
        finally:
            set_intercepting(False)
            current.work = Work({})
            self._calls.end()
            self._is_over = True
            self._stopped.release()

    def _turns(self) -> None:
        settings, calls, run = self._settings(), self._calls, self._run
        next(settings)
        self._turn = settings
        try:
            current.work.rng.at = 0
            arguments = as_arguments(calls.entering(self._inputs))
            del self._inputs
            with answered_by(calls), calls.between:
                calls.begin_piece()
                self._output = calls.finish(run.pick(run.model(*arguments.args, **arguments.kwargs)))
        finally:
            calls.leave_piece()
            self._turn.close()
            del self._turn

    def _settings(self) -> Generator[None]:
        """Apply the settings of a turn until the generator is closed."""
        current.work = self._work
        bind(self._cores)  # the worker, which waits, shares its cores
        with use_device(self._run.places[self._calls.until][0]), with_dispatch_modes(self._modes), self._saving:
            yield

    def _enter(self, stage: int, arguments: Any) -> None:
        """Wait for the turn of ``stage``, which calls a block with ``arguments``."""
        tensors = self._calls.tensors
        while tensors.stage < stage:
            tensors.end(stage, arguments)
            arguments = ()
            if self._run.is_own(tensors.stage + 1):
                self._wait()
            tensors.begin()

    def _wait(self) -> None:
        """Stop until a worker begins the turn of the next stage, unless it has begun that one."""
        if self._calls.tensors.stage + 1 <= self._calls.until:
            return
        self._turn.close()
        at = current.work.rng.at
        self._stopped.release()
        self._go.acquire()
        if self._is_abandoned:
            self._turn = _no_settings()
            raise Ended
        self._turn = self._settings()
        next(self._turn)
        current.work.rng.at = at


def _no_settings() -> Generator[None]:
    return
    yield
