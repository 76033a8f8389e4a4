"""Improve an order by exchanges on its critical path, the chain of actions that determines the makespan."""

from __future__ import annotations

from collections.abc import Iterator

from ._coded import Coded, Order, W

Exchange = tuple[int, int, bool]
"""A worker, a position, and whether all pairs of actions like the one at this position and the next are exchanged."""


def improve(coded: Coded, order: Order, replays: int, bound: float) -> Order:
    """Exchange neighbors on the critical path as long as the makespan decreases.

    Args:
        order: an order that does not deadlock and fits.
        replays: the most orders that are replayed.
        bound: a makespan that no order is below; the search ends there.

    Returns:
        An order that fits, and is not slower.
    """
    found = coded.replay(order)
    assert found is not None
    best, starts = found
    while replays > 0 and best > bound:
        for exchange in _exchanges(coded, order, starts):
            other = _apply_exchange(coded, order, exchange)
            if not coded.fits_on(exchange[0], other[exchange[0]]):
                continue
            replays -= 1
            found = coded.replay(other)
            if found is not None and found[0] < best * (1 - 1e-12):
                order, (best, starts) = other, found
                break
            if replays <= 0:
                return order
        else:
            return order
    return order


def _exchanges(coded: Coded, order: Order, starts: list[float]) -> Iterator[Exchange]:
    """Yield the exchanges on the critical path that could shorten it."""
    path = _critical(coded, order, starts)
    seen = set[tuple[int, ...]]()
    for r, k in path:
        first, second = order[r][k], order[r][k + 1]
        if not _is_free(coded, first, second):
            continue
        kind = _kind(coded, first, second)
        if (r, *kind) not in seen:
            seen.add((r, *kind))
            yield r, k, True
    for r, k in path:
        if _is_free(coded, order[r][k], order[r][k + 1]):
            yield r, k, False


def _critical(coded: Coded, order: Order, starts: list[float]) -> list[tuple[int, int]]:
    """Return the worker and position of each action that the next one on the critical path waits for on its worker."""
    m, n, took, hop = coded.problem.microbatches, coded.problem.stages, coded.took, coded.hop
    position = {code: (r, k) for r, line in enumerate(order) for k, code in enumerate(line)}
    senders = {coded.outbox[code]: code for line in order for code in line}
    ends = [(starts[line[-1]] + took[line[-1]], line[-1]) for line in order if line]
    code, found = max(ends)[1], []
    while True:
        r, k = position[code]
        before = order[r][k - 1] if k else -1
        if before >= 0 and starts[before] + took[before] >= starts[code]:
            found.append((r, k - 1))
            code = before
            continue
        sender = senders.get(coded.inbox[code], -1) if coded.inbox[code] < 2 * n * m else -1
        if sender < 0 or starts[sender] + took[sender] + hop[sender] < starts[code]:
            return found
        code = sender


def _is_free(coded: Coded, first: int, second: int) -> bool:
    """Return whether the actions may change places, and whether this could help."""
    m, n = coded.problem.microbatches, coded.problem.stages
    slot, other = first // (m * n), second // (m * n)
    if other == W or first // m == second // m:  # micro-batches stay in order
        return False
    # On its way through a worker, a micro-batch keeps the order of its actions.
    return slot == W or first % m != second % m


def _kind(coded: Coded, first: int, second: int) -> tuple[int, int, int]:
    m = coded.problem.microbatches
    return first // m, second // m, second % m - first % m


def _apply_exchange(coded: Coded, order: Order, exchange: Exchange) -> Order:
    r, position, everywhere = exchange
    line = order[r].copy()
    kind = _kind(coded, line[position], line[position + 1])
    k, end = (0, len(line) - 1) if everywhere else (position, position + 1)
    while k < end:
        if _kind(coded, line[k], line[k + 1]) == kind:
            line[k], line[k + 1] = line[k + 1], line[k]
            k += 1
        k += 1
    return [line if number == r else other for number, other in enumerate(order)]
