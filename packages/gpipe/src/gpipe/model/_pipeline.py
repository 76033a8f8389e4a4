"""The stages of a model, the threads of its forwards, and the facts from them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from torch import nn

from streams import waiting

from ..checkpoint._random import RunRNG
from ..engine._accumulate import DeferredGradients
from ..engine._offloaded import Offload
from ..engine._pipeline import Pipeline
from ..engine._processes import ALONE, Processes
from ..engine._spec import RunSpec
from ..engine._stage_run import StageRuns
from ..engine._tied import Tied
from ..engine._workers import Workers
from ..skip import SkipLayout
from ..transport._copy import CopyStreams
from ..transport._transport import Transport
from ._conventions import Conventions
from ._elsewhere import Elsewhere
from ._facts import Facts
from ._far_run import FarRun
from ._generators import Drawing, Numbers
from ._owners import Owners
from ._pick import picker
from ._stage import DividedModel
from ._stage_run import ModelRun


class Threads:
    """The threads of forwards. They wait between runs, and end with the pipe."""

    def __init__(self) -> None:
        self._process, self._pool, self._ending = -1, None, None

    @property
    def pool(self) -> waiting.ThreadPoolExecutor:
        if self._pool is None or self._process != os.getpid():  # a forked child has no threads
            # The pool starts as many threads as there are micro-batches in flight.
            self._pool = waiting.ThreadPoolExecutor(2**16, thread_name_prefix="gpipe forward")
            self._process = os.getpid()
        return self._pool

    def close(self) -> None:
        """End the threads, and wait for them. After an interrupt, the next call waits for the same threads."""
        if self._pool is not None:
            self._ending, self._pool = self._pool, None
        if self._ending is not None and self._process == os.getpid():
            self._ending.shutdown()
        self._ending = None

    _pool: waiting.ThreadPoolExecutor | None
    _ending: waiting.ThreadPoolExecutor | None


class ModelPipeline(Pipeline):
    """The stages of a model.

    Attributes:
        divided: the model, its blocks and stages.
        threads: the threads of its forwards.
        conventions: how the model computes losses, as far as it was tested.
        elsewhere: the sizes of outputs of blocks that this process does not compute.
    """

    def __init__(
        self,
        divided: DividedModel,
        layout: SkipLayout,
        copy_streams: Sequence[CopyStreams],
        workers: Workers,
        processes: Processes = ALONE,
        *,
        offload: Offload = False,
    ) -> None:
        super().__init__(divided.stages, layout, copy_streams, workers, processes, offload=offload)
        self.divided = divided
        self.threads = Threads()
        self.conventions = Conventions(divided.model, {**divided.others, **divided.division.blocks})
        self._known: dict[Any, Facts] = {}
        self.elsewhere = Elsewhere(divided.stages[0].device)
        self._drawing = Drawing()
        self._owners = Owners()
        self._run: ModelRun | None = None  # until the facts from its forwards are read
        self._facts: Facts | None = None

    def of(self, module: nn.Module) -> ModelPipeline:
        """Return a pipeline of the same stages and threads for the forward of ``module``, a part of the model."""
        divided = self.divided._replace(model=module, pick=picker(None))
        found = ModelPipeline(divided, self.layout, self.copy_streams, self.workers, self.processes)
        found.threads, found.host_links = self.threads, self.host_links
        return found

    @property
    def takes_inputs(self) -> bool:
        return True  # each process runs the whole forward

    def stage_runs(
        self, spec: RunSpec, rng: RunRNG, transport: Transport, tied: Tied, deferred: DeferredGradients
    ) -> StageRuns:
        start, numbers = self.threads.pool.submit, Numbers(self._drawing, rng.advanced)
        given = self.divided, start, transport, spec, tied, deferred, self._known, numbers, self._owners
        run = ModelRun(*given) if self.processes.ranks is None else FarRun(self.elsewhere, *given)
        self._run, self._facts = run if spec.replays else None, None
        return run

    def take_facts(self) -> Facts:
        """Return the facts from the forwards of the last run, and keep them for later forwards of the same kind."""
        if self._run is not None:
            if len(self._known) >= _MOST:  # the constants in inputs keep changing
                self._known.clear()
            self._facts = self._known[self._run.kind] = self._run.facts
            self._run = None  # it holds the caller's arguments for the loss
        assert self._facts is not None
        return self._facts

    def forget(self) -> None:
        """Make the next forwards complete, after a replay of the full mini-batch has failed."""
        self._known.clear()


_MOST = 1 << 8
"""The number of kinds of forwards whose facts are kept."""
