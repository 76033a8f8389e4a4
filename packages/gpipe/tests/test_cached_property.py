"""A property is computed when it is first read, and without a lock."""

from __future__ import annotations

from threading import Event

from gpipe._cached_property import cached_property

from .layers import started


class Slow:
    """Its property waits in the first call, so that a second thread may compute it meanwhile."""

    def __init__(self) -> None:
        self.calls, self.is_inside, self.go_on = 0, Event(), Event()

    @cached_property
    def value(self) -> object:
        """Documented."""
        self.calls += 1
        if self.calls == 1:
            self.is_inside.set()
            assert self.go_on.wait(60)
        return object()


def test_property_is_computed_once() -> None:
    slow = Slow()
    slow.go_on.set()
    assert slow.value is slow.value
    assert slow.calls == 1
    assert Slow.value.__doc__ == "Documented."


def test_two_threads_get_the_first_result() -> None:
    slow, other = Slow(), Slow()
    other.go_on.set()
    waiting = started(lambda: slow.value)
    assert slow.is_inside.wait(60)
    assert other.value is other.value  # another object does not wait
    second = slow.value
    slow.go_on.set()
    assert waiting.result(60) is second is slow.value
