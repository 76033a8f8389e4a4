import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiler import _clock
from profiler._clock import undisturbed_clock


@given(st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 10**9)), min_size=1))
def test_time_in_the_queue_does_not_count(tmp_path_factory, steps):
    """Each step is nanoseconds on the core, and nanoseconds in the queue for it."""
    statistics = tmp_path_factory.mktemp("proc") / "schedstat"
    statistics.write_text("0 0 0\n")
    with pytest.MonkeyPatch.context() as patch, undisturbed_clock(str(statistics)) as clock:
        wall = queued = 0
        patch.setattr(_clock.time, "perf_counter", lambda: wall / 1e9)
        began = clock()
        for turns, (running, waiting) in enumerate(steps):
            wall += running + waiting
            queued += waiting
            statistics.write_text(f"{wall - queued} {queued} {turns}\n")
            assert clock() - began == pytest.approx((wall - queued) / 1e9, abs=1e-6)


def test_readings_that_do_not_belong_together_are_taken_again(tmp_path):
    statistics = tmp_path / "schedstat"
    statistics.write_text("0 0 0\n")
    with pytest.MonkeyPatch.context() as patch, undisturbed_clock(str(statistics)) as clock:
        times = iter([5.0, 9.0])

        def interrupted():
            now = next(times)
            statistics.write_text("5000000000 3000000000 1\n")
            return now

        patch.setattr(_clock.time, "perf_counter", interrupted)
        assert clock() == 6.0  # the second reading, less what was queued before it
