"""The assignment of cores to CPU workers."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from packages.streams.tests.fakes import in_child
from torch import nn

from gpipe import GPipe, inline
from gpipe.engine import _workers
from gpipe.engine._cores import bind, shares, usable

from ..layers import Call, on_backward, rows

cores = getattr(os, "sched_getaffinity", lambda _: ())(0)
many_cores = pytest.mark.skipif(len(cores) < 2, reason="needs two cores, and a system that binds threads to them")
core_sets = st.sets(st.integers(0, 255), min_size=1, max_size=64)


class TestShares:
    @pytest.fixture(autouse=True)
    def unset(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("GPIPE_PIN_WORKERS", raising=False)

    @given(core_sets, st.integers(1, 64))
    def test_cores_are_divided_evenly(self, cores: set[int], workers: int) -> None:
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
def test_workers_follow_affinity_of_caller() -> None:
    seen: dict[int, frozenset[int]] = {}
    layers = [Call(lambda x, j=j: seen.update({j: usable()}) or x * 1) for j in range(2)]
    pipe = GPipe(nn.Sequential(*layers), [1, 1], devices=["cpu"] * 2, chunks=2)
    pipe(rows())
    one = frozenset({min(usable())})
    with ThreadPoolExecutor(1) as thread:  # which may be bound without harm to the others
        thread.submit(bind, one).result()
        thread.submit(pipe, rows()).result()
    assert seen == {0: one, 1: one}
    assert os.sched_getaffinity(0) == usable()


@many_cores
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.parametrize("pin", ["0", "1"])
def test_forked_process_may_use_all_cores(monkeypatch: pytest.MonkeyPatch, pin: str) -> None:
    """The layer is on a worker bound to a share of the cores."""
    monkeypatch.setenv("GPIPE_PIN_WORKERS", pin)
    found: list[tuple[frozenset[int], str, frozenset[int]]] = []
    layer = Call(lambda x: found.append((usable(), in_child(lambda: sorted(usable())), usable())) or x)
    pipe = GPipe(nn.Sequential(layer, Call(layer.function)), [1, 1], devices=["cpu"] * 2)
    pipe(rows())
    pipe.close()
    assert [theirs for _, theirs, _ in found] == [str(sorted(usable()))] * 2
    assert all(before == after for before, _, after in found)
    assert ([own for own, _, _ in found] == [usable()] * 2) == (pin == "0")


@pytest.mark.parametrize("way", [nullcontext, inline])
def test_helpers_of_caller_stop_before_runs(way: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """They stop before any computation, unless their cores are not needed."""
    calls: list[Any] = []
    monkeypatch.setattr(_workers, "pause_helpers", lambda: calls.append(threading.get_ident()))
    layer = Call(lambda x: on_backward((calls.append("forward"), x)[1], lambda: calls.append("backward")))
    pipe = GPipe(nn.Sequential(layer), [1], devices=["cpu"])
    with way():
        pipe(torch.ones(1, 2, requires_grad=True)).sum().backward()
    paused = [threading.get_ident()] if way is nullcontext else []
    assert calls == [*paused, "forward", *paused, "backward"]
