"""Schedules with two stages on each worker, in the shape of a V: through all workers forth, and back."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import count

from ._actions import Kind
from ._lanes import Steps, adapted, schedule_by_worker
from ._makespan import Lane
from ._modes import Stops
from ._schedule import Schedule

# The next step of a worker, without its micro-batch: for each kind and stage, micro-batches come in order. 0 is the
# worker's first stage, on the way forth, 1 its second, on the way back.
Turn = tuple[Kind, int]
_F0, _F1 = (Kind.FORWARD, 0), (Kind.FORWARD, 1)
_B0, _B1 = (Kind.BACKWARD, 0), (Kind.BACKWARD, 1)
_I0, _I1 = (Kind.BACKWARD_INPUT, 0), (Kind.BACKWARD_INPUT, 1)
_W0, _W1 = (Kind.BACKWARD_WEIGHT, 0), (Kind.BACKWARD_WEIGHT, 1)


def v_placement(stages: int) -> list[int]:
    """The worker of each stage in a V: stage j is on worker j, then back, so the first and the last stage share one.

    Args:
        stages: n, the number of stages.

    Returns:
        For each stage, the number of its worker.

    Raises:
        ValueError: the number of stages is odd.

    >>> v_placement(6)
    [0, 1, 2, 2, 1, 0]
    """
    down = list(range(_workers(stages)))
    return down + down[::-1]


def zbv(microbatches: int, stages: int, checkpoint_stop: Stops = 0, split: Collection[int] | None = None) -> Schedule:
    """ZB-V: no bubble, and no more activations than under 1F1B.

    Stage j is on worker j in the first half, and on worker n − 1 − j in the second, so the last stage, where backwards
    begin, is on the first worker. If a forward and both parts of the backward of a stage each take the time f, and m ≥
    n − 1, none of the k = n / 2 workers waits between its first step and its last. Worker r begins at r·f, and the step
    ends at (6m + k − 1)f. Each worker holds at most n micro-batches of one stage, as much as the k micro-batches of two
    stages that the first worker holds under 1F1B.

    Source: ZB-V (Qi et al., arXiv 2401.10241, section 6, and arXiv 2405.15362)::

        F0@0 F1@0 F2@0 F0@3 I0@3 W0@3 F1@3 I1@3 W1@3 I0@0 W0@0 F2@3 I2@3 W2@3 I1@0 W1@0 I2@0 W2@0 .
        .    F0@1 F0@2 F1@1 F1@2 I0@2 W0@2 F2@1 I0@1 W0@1 F2@2 I1@2 W1@2 I1@1 I2@2 I2@1 W1@1 W2@2 W2@1

    Args:
        microbatches: m, the number of micro-batches.
        stages: n, the number of stages, which is even.
        checkpoint_stop: micro-batches below it are checkpointed; a number, or one for each stage.
        split: the stages whose backward is split, by default all; the others compute it at the place of its first part.

    Returns:
        A program for each stage.

    Raises:
        ValueError: the number of stages is odd, or ``checkpoint_stop`` has another length.
    """
    return schedule_by_worker(zbv_lanes(microbatches, stages, checkpoint_stop, split), stages)


def zbv_lanes(
    microbatches: int, stages: int, checkpoint_stop: Stops, split: Collection[int] | None = None
) -> list[Lane]:
    return _lanes(_zbv, microbatches, stages, checkpoint_stop, split)


def _zbv(m: int, k: int, r: int) -> Iterator[Turn]:
    # Micro-batch 0 is back after this many forwards; from then on there is always a forward of each half, or a
    # backward.
    m = max(m, 2 * k - 1)
    yield from [_F0] * (2 * (k - r) - 1)
    yield from [_F1, _F0] * r
    yield from [_F1, _I1, _W1] * (k - r)
    yield from [_F0, _I0, _W0, _F1, _I1, _W1] * (m - (2 * k - r - 1))
    yield from [_I0, _W0, _F1, _I1, _W1] * (k - r - 1)
    # From here on gradients of inputs are computed first: the workers before wait for them.
    yield from [_I0, _I1] * r
    yield from [_I0, _W0] * (k - r)
    yield from [_W1] * r + [_W0] * r


def dualpipev(
    microbatches: int, stages: int, checkpoint_stop: Stops = 0, split: Collection[int] | None = None
) -> Schedule:
    """DualPipeV: in the middle of the run, forwards of one half are paired with backwards of the other.

    This is the half of DualPipe that has each parameter once, with stages placed as for :func:`zbv`. The forward and
    the backward of a pair are independent, so the transfers of one overlap with the computation of the other. Backwards
    are split at the begin and the end of the run only, where that lets a worker begin earlier.

    Let f be the time of a forward of a stage, b that of a whole backward, w that of its part for the weights, and f&b
    that of a pair. The published bubble is (k − 1)(f&b + b − 3w) on k = n / 2 workers, for m ≥ n. Here the two actions
    of a pair run one after the other, so f&b = f + b, and the bubble is at most that if f ≤ b and 2w ≤ b; if f = w and
    b = 2f it is (k − 1)f. Each worker holds at most n + 1 micro-batches of one stage.

    Source: DualPipe (DeepSeek-V3, arXiv 2412.19437), and DualPipeV, https://github.com/deepseek-ai/DualPipe.

    Args:
        microbatches: m, the number of micro-batches.
        stages: n, the number of stages, which is even.
        checkpoint_stop: micro-batches below it are checkpointed; a number, or one for each stage.
        split: the stages that split backwards, by default all; the others compute them at the place of the first part.

    Returns:
        A program for each stage.

    Raises:
        ValueError: the number of stages is odd, or ``checkpoint_stop`` has another length.
    """
    return schedule_by_worker(dualpipev_lanes(microbatches, stages, checkpoint_stop, split), stages)


def dualpipev_lanes(
    microbatches: int, stages: int, checkpoint_stop: Stops, split: Collection[int] | None = None
) -> list[Lane]:
    return _lanes(_dualpipev, microbatches, stages, checkpoint_stop, split)


def _dualpipev(m: int, k: int, r: int) -> Iterator[Turn]:
    m, behind = max(m, 2 * k), k - r - 1
    yield from [_F0] * (2 * behind)
    yield from [_F0, _F1] * (r + 1)
    yield from [_I1, _W1, _F1] * behind
    yield from [_F0, _B1, _F1, _B0] * (m - (2 * k - r - 1))
    yield from [_B1, _F1, _B0] * behind
    # From the middle on a worker has no more forwards to fill the time until a gradient arrives.
    yield from ([_B1, _B0] * (r + 1))[: r + 1]
    late = ([_I1, _I0] * (r + 1))[r + 1 :]
    yield from late
    weights = iter([_W1 if turn is _I1 else _W0 for turn in late] + [_W0] * behind)
    for _ in range(behind):
        yield from (next(weights), _I0)
    yield from weights


def _lanes(
    turns: Callable[[int, int, int], Iterable[Turn]],
    microbatches: int,
    stages: int,
    checkpoint_stop: Stops,
    split: Collection[int] | None,
) -> list[Lane]:
    k = _workers(stages)
    lanes = [_numbered(turns(microbatches, k, r), (r, stages - 1 - r)) for r in range(k)]
    return adapted(lanes, microbatches, stages, checkpoint_stop, split)


def _numbered(turns: Iterable[Turn], own: tuple[int, int]) -> Steps:
    """The steps of a worker with these two stages. Of the delayed weights the oldest come first."""
    forwards, backwards = (count(), count()), (count(), count())
    weights: tuple[deque[int], deque[int]] = (deque(), deque())
    for kind, way in turns:
        if kind is Kind.BACKWARD_WEIGHT:
            i = weights[way].popleft()
        else:
            i = next(forwards[way] if kind is Kind.FORWARD else backwards[way])
        if kind is Kind.BACKWARD_INPUT:
            weights[way].append(i)
        yield own[way], (kind, i)


def _workers(stages: int) -> int:
    if stages % 2:
        raise ValueError(
            f"a V has two stages on every worker, as in devices=[0, 1, 1, 0]; got {stages} stages; choose a balance "
            f"with an even number of partitions"
        )
    return stages // 2
