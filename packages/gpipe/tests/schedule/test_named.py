"""Schedules by their names."""

import re
from functools import partial
from itertools import product

import pytest

from gpipe.schedule import SCHEDULES, in_flight, named
from gpipe.simulate import StageCost, makespan, simulate

from ..schedules import LOOPED, V_SHAPED


@pytest.mark.parametrize("name", ["1F1B", "Fill_Drain", "ZBV"])
def test_capitals_do_not_matter(name: str) -> None:
    assert named(name, 3, [0, 0]) == named(name.lower(), 3, [0, 0]) == SCHEDULES[name.lower()](3, [0, 0])


@pytest.mark.parametrize("name", ["1f1b ", "fill-drain", "zerobubble"])
def test_other_names_are_refused_with_a_list(name: str) -> None:
    with pytest.raises(ValueError, match=rf"unknown schedule {name!r}; choose one of 'fill_drain', '1f1b', "):
        named(name, 3, [0, 1])


@pytest.mark.parametrize(
    ("name", "placement", "told"),
    [
        *product(
            [name for name in LOOPED if name != "looped_bfs"],  # see test_loads.py
            ([0, 0, 1, 1], [1, 0, 1, 0]),
            ["needs its stages on the workers in turn, as in devices=[0, 1, 0, 1]"],
        ),
        *product(V_SHAPED, ([0, 1, 0, 1], [1, 0, 0, 1]), ["needs its stages down all workers and up again"]),
    ],
)
def test_workers_in_another_order_are_refused(name: str, placement: list[int], told: str) -> None:
    for run in (named, partial(makespan, costs=[StageCost(1, 2)] * 4)):
        with pytest.raises(
            ValueError, match=re.escape(f"'{name}' {told}") + rf".* on workers {re.escape(str(placement))}"
        ):
            run(name, microbatches=3, placement=placement)


@pytest.mark.parametrize("name", V_SHAPED)
def test_single_worker_follows_order_of_several(name: str) -> None:
    assert named(name, 5, [0] * 6) == named(name, 5, [0, 1, 2, 2, 1, 0])
    assert max(map(in_flight, named(name, 20, [0] * 6))) <= 7


@pytest.mark.parametrize("name", V_SHAPED)
def test_a_simulation_by_name_is_in_a_v(name: str) -> None:
    timeline = simulate(name, [StageCost(1, 2)] * 4, microbatches=6)
    assert timeline.workers == {0: 0, 1: 1, 2: 1, 3: 0}
