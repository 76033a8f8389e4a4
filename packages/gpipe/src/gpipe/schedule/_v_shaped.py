"""Schedules of two stages a worker, which micro-batches pass in the shape of a V: down all workers, and up again."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import count

from ._actions import Kind
from ._lanes import Steps, adapted, schedule_by_worker
from ._makespan import Lane
from ._modes import Stops
from ._schedule import Schedule

# What a worker does next, without its micro-batch: of each kind these come in order. 0 is its stage on the way down, 1
# that on the way up.
Turn = tuple[Kind, int]
_F0, _F1 = (Kind.FORWARD, 0), (Kind.FORWARD, 1)
_B0, _B1 = (Kind.BACKWARD, 0), (Kind.BACKWARD, 1)
_I0, _I1 = (Kind.BACKWARD_INPUT, 0), (Kind.BACKWARD_INPUT, 1)
_W0, _W1 = (Kind.BACKWARD_WEIGHT, 0), (Kind.BACKWARD_WEIGHT, 1)


def v_placement(stages: int) -> list[int]:
    """The worker of each stage where these go down all workers, and up again: the first and the last stage share one.

    Args:
        stages: n, how many there are.

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
    """ZB-V: no bubble at all, and no more held than under 1F1B.

    Stage j runs on worker j on the way down, and on worker n − 1 − j on the way up, so that the backward begins where
    the forward did. If a forward and both parts of the backward of a stage take the same time f, and m ≥ n − 1, no
    worker of the k = n / 2 waits between its first step and its last one, and all is over after (6m + k − 1)f: worker r
    begins by r·f later. Each holds at most n micro-batches of one stage, as much as the k of both that the first worker
    holds under 1F1B.

    Source: ZB-V (Qi et al., arXiv 2401.10241, section 6, and arXiv 2405.15362)::

        F0@0 F1@0 F2@0 F0@3 I0@3 W0@3 F1@3 I1@3 W1@3 I0@0 W0@0 F2@3 I2@3 W2@3 I1@0 W1@0 I2@0 W2@0 .
        .    F0@1 F0@2 F1@1 F1@2 I0@2 W0@2 F2@1 I0@1 W0@1 F2@2 I1@2 W1@2 I1@1 I2@2 I2@1 W1@1 W2@2 W2@1

    Args:
        microbatches: m, how many there are.
        stages: n, how many there are, an even number.
        checkpoint_stop: micro-batches below it are checkpointed; a number, or one for each stage.
        split: the stages whose backward is split, by default all; the others do all of it where its first part was.

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
    # Micro-batch 0 is back after as many forwards; from then on there is always one of both ways, or a backward.
    m = max(m, 2 * k - 1)
    yield from [_F0] * (2 * (k - r) - 1)
    yield from [_F1, _F0] * r
    yield from [_F1, _I1, _W1] * (k - r)
    yield from [_F0, _I0, _W0, _F1, _I1, _W1] * (m - (2 * k - r - 1))
    yield from [_I0, _W0, _F1, _I1, _W1] * (k - r - 1)
    # Gradients leave at once now: the workers before wait for them.
    yield from [_I0, _I1] * r
    yield from [_I0, _W0] * (k - r)
    yield from [_W1] * r + [_W0] * r


def dualpipev(
    microbatches: int, stages: int, checkpoint_stop: Stops = 0, split: Collection[int] | None = None
) -> Schedule:
    """DualPipeV: forwards and backwards in pairs, of the one way and of the other.

    The half of DualPipe that has every parameter once: stages are placed as for :func:`zbv`. In the middle of the run a
    forward of one way is followed by the backward of the other, which share nothing, so that what is copied for the one
    can go on while the other computes. Backwards are split at both ends only, where that lets a worker begin earlier.

    With f the time of a forward of a stage, b that of a whole backward and w its part for the weights, the published
    bubble is (k − 1)(f&b + b − 3w) on k = n / 2 workers, for m ≥ n, where f&b is what a pair takes. Here the two of a
    pair run one after the other, f&b = f + b, and the bubble is at most that where f ≤ b and 2w ≤ b; where f = w and
    b = 2f it is (k − 1)f. Each worker holds at most n + 1 micro-batches of one stage.

    Source: DualPipe (DeepSeek-V3, arXiv 2412.19437), and its cut in half, https://github.com/deepseek-ai/DualPipe.

    Args:
        microbatches: m, how many there are.
        stages: n, how many there are, an even number.
        checkpoint_stop: micro-batches below it are checkpointed; a number, or one for each stage.
        split: the stages that split backwards, by default all; the others do all of it where its first part was.

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
    # From the middle on nobody has a forward any more to fill the time until a gradient comes.
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
    """The steps of a worker of these two stages. The oldest of those weights come first that were put off."""
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
