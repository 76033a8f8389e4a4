"""The processes that have stages of a pipe: one only, unless :mod:`gpipe.distributed` brings others."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Final

from torch import Tensor, nn

from ..transport._link import Channel
from ._failures import Failures
from ._losses import Losses

if TYPE_CHECKING:
    from ._run import Run


class Processes:
    """What a pipe does together with other processes: nothing, if this one has all stages.

    Attributes:
        ranks: the process of each stage; None if this one has all.
        me: the number of this process among them; None if there are no others.
        seed: the seed of the next run; None to take it from the generator of this process.
    """

    ranks: tuple[int, ...] | None = None
    me: int | None = None
    seed: int | None = None

    def channel(self, number: int, failures: Failures, loss: Losses | None) -> Channel | None:
        """The channel of that number for a run, if its other end is in another process."""
        return None

    def together(self, run: Run) -> AbstractContextManager[None]:
        """A context for a whole run, at the end of which all processes meet."""
        return nullcontext()

    def shared(self, module: nn.Module) -> list[Tensor]:
        """The leaves in ``module`` that other processes use too: their gradients are summed over the processes."""
        return []

    def whole(self, run: Run) -> dict[Tensor, Tensor]:
        return run.whole()


ALONE: Final = Processes()
"""The only process of a pipe."""
