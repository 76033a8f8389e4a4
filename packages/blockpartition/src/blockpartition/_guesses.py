"""Which bound to try next."""

from __future__ import annotations


class Guesses:
    """Bounds at which blocks lack nothing and leave nothing over, going by what the bounds before lacked or left over.

    By lines between what was tried on both sides, as in the Illinois algorithm (Dowell and Jarratt 1971), by halving
    close to the end, and where three lines did not halve what is open: passes are few whatever the costs are.

    Args:
        blocks: how many there are.
        noise: how much is left over by chance, about.
        width: how far apart the ends of the search are.
    """

    def __init__(self, blocks: int, noise: int, width: int) -> None:
        self._blocks = blocks
        self._noise = noise
        self._width = width
        self._tried: dict[bool, tuple[int, int]] = {}
        """The last bound of each side, by whether everything fitted, and what was left over."""
        self._fits = False
        self._in_a_row = self._passes = 0

    def next(self, bound: int, over: int, low: int, high: int) -> int:
        """A bound between the ends, or a little beyond them.

        over: what blocks up to `bound` left over; negative if they did not hold everything.
        """
        self._in_a_row = self._in_a_row + 1 if (over >= 0) == self._fits else 1
        self._fits = over >= 0
        self._tried[self._fits] = bound, over
        if len(self._tried) < 2:
            # Each block gains at most what the bound does: go further, and further still if that is not enough.
            step = max(over, self._noise) if self._fits else min(over * 5 // 4, -self._noise)
            return bound - (step << max(0, self._in_a_row - 3)) // self._blocks
        near = max(abs(over) for _, over in self._tried.values()) < self._noise
        return (low + high) // 2 if near or self._stalls(high - low) else self._between()

    def _between(self) -> int:
        if self._in_a_row > 1:  # what is left of the other side counts half, which draws the guess there
            bound, over = self._tried[not self._fits]
            self._tried[not self._fits] = bound, over // 2
        (first, lack), (last, over) = self._tried[False], self._tried[True]
        return first - lack * (last - first) // (over - lack)

    def _stalls(self, width: int) -> bool:
        self._passes += 1
        if self._passes % 3:
            return False
        before, self._width = self._width, width
        return 2 * width > before
