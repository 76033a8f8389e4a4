"""Which cores each worker on the CPU computes on."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from gpipe import GPipe, inline
from gpipe.engine import _workers
from gpipe.engine._cores import bind, shares, usable

from ..children import in_child
from ..layers import Call, rows

many_cores = pytest.mark.skipif(len(usable()) < 2, reason="needs two cores, and a system that binds threads to them")
core_sets = st.sets(st.integers(0, 255), min_size=1, max_size=64)


@pytest.fixture
def thread() -> Iterator[ThreadPoolExecutor]:
    """A thread that may be bound without harm to the others."""
    with ThreadPoolExecutor(1) as executor:
        yield executor


class TestShares:
    @pytest.fixture(autouse=True)
    def unset(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("GPIPE_PIN_WORKERS", raising=False)

    @given(core_sets, st.integers(1, 64))
    def test_every_core_has_one_owner_and_shares_are_even(self, cores: set[int], workers: int) -> None:
        found = shares(cores, workers)
        if len(cores) < workers:
            assert found == [cores] * workers
        else:
            assert sorted(core for own in found for core in own) == sorted(cores)
            assert max(map(len, found)) - min(map(len, found)) <= 1

    def test_neighbours_stay_together(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # Cores 0 and 2 are two threads of one physical core, as are 1 and 3.
        monkeypatch.setattr("gpipe.engine._cores._position", lambda core: (0, core % 2, core))
        assert shares(range(4), 2) == [{0, 2}, {1, 3}]


@many_cores
class TestPipe:
    def seen(self) -> tuple[GPipe, list[frozenset[int]]]:
        """A pipe of two stages, and the cores that each of them may use in a run."""
        seen: list[frozenset[int]] = [frozenset()] * 2

        def look(j: int) -> Callable[[Tensor], Tensor]:
            def layer(x: Tensor) -> Tensor:
                seen[j] = usable()
                return x * 1

            return layer

        model = nn.Sequential(Call(look(0)), Call(look(1)))
        return GPipe(model, [1, 1], devices=["cpu"] * 2, chunks=2), seen

    def test_workers_follow_when_the_caller_is_bound_to_fewer(self, thread: ThreadPoolExecutor) -> None:
        pipe, seen = self.seen()
        pipe(rows())
        one = frozenset({min(usable())})
        thread.submit(bind, one).result()
        thread.submit(pipe, rows()).result()
        assert seen == [one, one]
        assert os.sched_getaffinity(0) == usable()


@many_cores
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.parametrize("pin", ["0", "1"])
def test_a_process_that_a_layer_forks_has_all_cores(monkeypatch: pytest.MonkeyPatch, pin: str) -> None:
    """On a worker that is bound to a share of them."""
    monkeypatch.setenv("GPIPE_PIN_WORKERS", pin)
    found: list[tuple[frozenset[int], str, frozenset[int]]] = []
    layer = Call(lambda x: found.append((usable(), in_child(lambda: sorted(usable())), usable())) or x)
    pipe = GPipe(nn.Sequential(layer, Call(layer.function)), [1, 1], devices=["cpu"] * 2)
    pipe(rows())
    pipe.close()
    assert [theirs for _, theirs, _ in found] == [str(sorted(usable()))] * 2
    assert all(before == after for before, _, after in found)
    assert ([own for own, _, _ in found] == [usable()] * 2) == (pin == "0")


class TestCallersHelpers:
    def ended(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """Notes a number whenever the helpers of the calling thread are ended."""
        calls: list[int] = []
        monkeypatch.setattr(_workers, "pause_helpers", lambda: calls.append(threading.get_ident()))
        return calls

    def test_they_end_before_every_run_on_cpu_workers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("GPIPE_PAUSE_HELPERS", raising=False)
        calls = self.ended(monkeypatch)
        pipe = GPipe(nn.Sequential(nn.Linear(2, 2)), [1], devices=["cpu"])
        pipe(torch.ones(1, 2)).sum().backward()
        assert calls == [threading.get_ident()] * 2

    @pytest.mark.parametrize("value", ["0", "inline"])
    def test_they_stay_if_that_is_asked_for_and_where_nobody_needs_their_cores(
        self, monkeypatch: pytest.MonkeyPatch, value: str
    ) -> None:
        monkeypatch.setenv("GPIPE_PAUSE_HELPERS", value if value == "0" else "1")
        calls = self.ended(monkeypatch)
        pipe = GPipe(nn.Sequential(nn.Linear(2, 2)), [1], devices=["cpu"])
        with inline() if value == "inline" else nullcontext():
            pipe(torch.ones(1, 2)).sum().backward()
        assert not calls
