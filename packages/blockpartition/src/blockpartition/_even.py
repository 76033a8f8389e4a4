"""Among the partitions with the least bottleneck, one that is nearly even, found quickly."""

from __future__ import annotations

from bisect import bisect_left

from ._search import filled_back


def near_even(prefix: list[int], bottleneck: int, blocks: int) -> list[int]:
    """Ends of non-empty blocks up to the bottleneck, each as close to its quantile of the total as the others allow.

    Of two ends that are as near it is the earlier, and of those behind layers of zero the first. O(k log n).
    """
    lowest, total, ends, end, start = filled_back(prefix, bottleneck, blocks), prefix[-1], [0], 0, 0
    last = len(prefix) - 1 - blocks
    for j in range(1, blocks):
        last += 1  # beyond it, some of the rest would be empty
        limit = start + bottleneck
        goal = -(-2 * total * j // blocks)  # twice the quantile: which of two ends is nearer is then exact
        aim = (goal + 1) // 2 if goal < 2 * limit else limit
        low = max(lowest[j], prefix[j])
        if low > aim:
            aim = low
        first = end + 1
        end = bisect_left(prefix, aim, first, last)
        start, before = prefix[end], prefix[end - 1]
        if end > first and before >= low and (start > limit or goal <= before + start):
            end, start = bisect_left(prefix, before, first, end - 1), before
        ends.append(end)
    return [*ends, len(prefix) - 1]
