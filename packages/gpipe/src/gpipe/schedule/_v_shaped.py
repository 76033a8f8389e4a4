"""V-shaped schedules: two stages per worker, forward through all workers and back."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import count

from ._actions import Kind
from ._lanes import Steps

# The next step of a worker without its micro-batch, since micro-batches run in order per kind and stage. Index 0 is the
# worker's stage on the way down, 1 its stage on the way back.
Turn = tuple[Kind, int]
_F0, _F1 = (Kind.FORWARD, 0), (Kind.FORWARD, 1)
_B0, _B1 = (Kind.BACKWARD, 0), (Kind.BACKWARD, 1)
_I0, _I1 = (Kind.BACKWARD_INPUT, 0), (Kind.BACKWARD_INPUT, 1)
_W0, _W1 = (Kind.BACKWARD_WEIGHT, 0), (Kind.BACKWARD_WEIGHT, 1)


def v_placement(stages: int) -> list[int]:
    """Place stages in a V: down all workers and back, so that the first and the last stage share a worker.

    Args:
        stages: n, the number of stages.

    Returns:
        The index of the worker of each stage.

    Raises:
        ValueError: ``stages`` is odd.

    >>> v_placement(6)
    [0, 1, 2, 2, 1, 0]
    """
    if stages % 2:
        raise ValueError(
            f"a V needs two stages on every worker, as in devices=[0, 1, 1, 0], got {stages} stages; choose a balance "
            f"with an even number of partitions"
        )
    down = list(range(stages // 2))
    return down + down[::-1]


def zbv_turns(m: int, k: int, r: int) -> Iterator[Turn]:
    """Generate the steps of worker r of k under ZB-V, for at least m micro-batches."""
    # Micro-batch 0 returns to the first worker after 2k - 1 forwards. From then on a forward of each half, or a
    # backward, is always ready.
    m = max(m, 2 * k - 1)
    yield from [_F0] * (2 * (k - r) - 1)
    yield from [_F1, _F0] * r
    yield from [_F1, _I1, _W1] * (k - r)
    yield from [_F0, _I0, _W0, _F1, _I1, _W1] * (m - (2 * k - r - 1))
    yield from [_I0, _W0, _F1, _I1, _W1] * (k - r - 1)
    # From here on, input gradients have priority, as previous workers wait for them.
    yield from [_I0, _I1] * r
    yield from [_I0, _W0] * (k - r)
    yield from [_W1] * r + [_W0] * r


def dualpipev_turns(m: int, k: int, r: int) -> Iterator[Turn]:
    """Generate the steps of worker r of k under DualPipeV, for at least m micro-batches."""
    m, behind = max(m, 2 * k), k - r - 1
    yield from [_F0] * (2 * behind)
    yield from [_F0, _F1] * (r + 1)
    yield from [_I1, _W1, _F1] * behind
    yield from [_F0, _B1, _F1, _B0] * (m - (2 * k - r - 1))
    yield from [_B1, _F1, _B0] * behind
    # From here on, the worker has no forwards left to run while it waits for gradients.
    yield from ([_B1, _B0] * (r + 1))[: r + 1]
    late = ([_I1, _I0] * (r + 1))[r + 1 :]
    yield from late
    weights = iter([_W1 if turn is _I1 else _W0 for turn in late] + [_W0] * behind)
    for _ in range(behind):
        yield from (next(weights), _I0)
    yield from weights


def v_shaped(
    turns: Callable[[int, int, int], Iterator[Turn]], microbatches: int, stages: int, workers: int, worker: int
) -> Steps:
    """Number the micro-batches of ``turns``. Delayed weight gradients are computed oldest first."""
    own = worker, stages - 1 - worker
    forwards, backwards = (count(), count()), (count(), count())
    weights: tuple[deque[int], deque[int]] = (deque(), deque())
    for kind, way in turns(microbatches, workers, worker):
        if kind is Kind.BACKWARD_WEIGHT:
            i = weights[way].popleft()
        else:
            i = next(forwards[way] if kind is Kind.FORWARD else backwards[way])
        if kind is Kind.BACKWARD_INPUT:
            weights[way].append(i)
        yield own[way], (kind, i)
