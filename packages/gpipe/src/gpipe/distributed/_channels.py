"""The channels of a rank to the stages of other ranks: messages take the place of links in memory."""

from __future__ import annotations

from typing import Any

from .._current import current
from ..engine._failures import Failures
from ..engine._losses import Losses
from ..transport._transport import Channel
from ..values._describe import Cancelled
from ._far_loss import FarLoss
from ._forms import Payload
from ._messages import RemoteLink


class RemoteChannel(Channel):
    """A channel to a stage on another rank, for one run: values go in one direction, gradients in the other.

    Args:
        failures: is told when the other rank cancels the run.
        loss: the losses of the run. Each message says whether they return a count, as far as its sender knows.
    """

    __slots__ = ()

    def __init__(self, link: RemoteLink, failures: Failures, loss: Losses | None) -> None:
        arrived: dict[int, Payload] = {}

        def put(microbatch: int, payload: Any) -> None:
            link.put(microbatch, payload, flag=loss is not None and loss.scales)

        def get(microbatch: int) -> Any:
            while microbatch not in arrived:
                try:
                    i, counts, arrived[i] = link.get()
                except Cancelled:
                    failures.hear(link.poisoned)
                    raise
                if isinstance(loss, FarLoss):
                    loss.scales |= counts
            payload = arrived.pop(microbatch)
            if current.observed is not None:
                current.observed.got(payload, moved=True)
            return payload

        self.get_values = self.get_gradients = get
        self.put_values = self.put_gradients = put

    def cancel(self) -> None:
        """Nothing: other ranks learn of a failure by :meth:`RemoteLink.poison`."""
