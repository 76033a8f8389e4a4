"""Update parameters on the host as soon as their gradients have arrived, while other stages compute their backwards.

An optimizer skips parameters whose ``.grad`` is None. So its ``step()`` is called once per stage, while only the
parameters of this stage have a gradient. Source: ZeRO-Offload (arXiv 2101.06840) overlaps updates with transfers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import chain

import torch
from torch import Tensor

from streams import add_note, waiting

from ._accumulate import GradientSums, add_to
from ._autograd_calls import accumulate_whole
from ._offloaded import LeafGradient, Offloaded
from ._scale import Scale, scale_gradient
from ._tied import Tied


class Updates:
    """The updates of one step, on a thread of their own.

    Args:
        optimizer: updates each parameter independently, and skips those without a gradient, like torch's optimizers.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._parameters = [*chain.from_iterable(group["params"] for group in optimizer.param_groups)]
        self._before: dict[Tensor, Tensor | None] = {}
        self._thread: waiting.ThreadPoolExecutor | None = None
        self._futures: list[waiting.Future[None]] = []
        self._found: list[LeafGradient] = []
        self._done: set[Tensor] = set()

    def begin(
        self, offloaded: Mapping[int, Offloaded], tied: Tied, sums: Iterable[GradientSums], scale: Callable[[], Scale]
    ) -> None:
        """Begin a step.

        Args:
            offloaded: the parameters of the stages, by index.
            tied: the copies of parameters.
            sums: hold the gradients of leaves that the loss uses, until the run ends.
            scale: returns the factor of all gradients, once the last loss is computed.
        """
        self._offloaded, self._tied, self._sums, self._scale = offloaded, tied, sums, scale
        self._left = {index: {*each.homes} for index, each in offloaded.items()}
        self._before = {parameter: parameter.grad for parameter in self._parameters}
        for parameter in self._parameters:
            parameter.grad = None
        self._thread = waiting.ThreadPoolExecutor(1, thread_name_prefix="gpipe optimizer")

    def update_stage(self, stage: int) -> None:
        """Update what a stage has the last gradient of. Called after its last unload."""
        assert self._thread is not None
        self._futures.append(self._thread.submit(self._update, stage))

    def _update(self, stage: int) -> None:
        self._found += self._offloaded[stage].take()
        ended = self._left.pop(stage)
        # The rest is updated at the end: what later stages, or the loss, have gradients of.
        waiting = set[Tensor]().union(*self._left.values(), self._tied.owners_of_others(self._sums))
        ready = [home for home in ended if home not in waiting]
        self._apply(ready)

    def _apply(self, ready: Iterable[Tensor]) -> None:
        own = {*ready}
        gradients = [pair for pair in self._found if self._tied.get_owner(pair[0]) in own]
        self._found = [pair for pair in self._found if self._tied.get_owner(pair[0]) not in own]
        self._restore(own)
        scale = self._scale()
        accumulate_whole(
            add_to(
                {}, self._tied.map_to_owners([(leaf, scale_gradient(each, scale)) for leaf, each in gradients])
            ).items()
        )
        self._step(own)

    def _step(self, own: set[Tensor]) -> None:
        self._done |= own & {*self._parameters}
        self._optimizer.step()
        for parameter in self._parameters:
            if parameter in own:
                parameter.grad = None

    def _restore(self, parameters: Iterable[Tensor]) -> None:
        for parameter in parameters:
            if parameter in self._before:
                parameter.grad = self._before.pop(parameter)

    def wait(self) -> list[LeafGradient]:
        """Wait for the updates of stages. Return the gradients of the rest, which are not scaled."""
        assert self._thread is not None
        self._thread.shutdown()
        for future in self._futures:
            future.result()
        self._restore([*self._before])
        found, self._found = self._found, []
        return found

    def end(self) -> None:
        """Update the remaining parameters, whose gradients are now complete."""
        if any(parameter.grad is not None for parameter in self._parameters):
            self._step({*self._parameters})

    def stop(self) -> None:
        """Begin no more updates after a failure."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)

    def give_back(self, error: BaseException) -> None:
        """Restore ``.grad`` after a failure; note on ``error`` what was updated before it."""
        self._restore([*self._before])
        if self._done:
            add_note(
                error,
                f"{len(self._done)} of {len(self._parameters)} parameters of the optimizer were already updated in "
                "this step; load a checkpoint to have all of them as before",
            )
