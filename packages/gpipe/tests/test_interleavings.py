"""Pipes in every order of events, with failures and interrupts: nothing hangs, and the next step is right.

This is the short form of ``nox -s interleavings``.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from packages.streams.tests.interleavings.explore import explore, repeat

from .interleavings.catalogue import ORDERS_ONLY, PROGRAMS
from .interleavings.planted import FAULTS, ROOT, Fault, planted_source
from .interleavings.scenarios import INJECTS, fast

SHORT = ("1f1b", "call-model", "two-callers", "nested-and-inner", "freed-between")
FOUND = {
    # Programs that failed once, with the choices of the run: each deadlocked, lost a thread, or hung a later step.
    "nested-seeds": ("", [0, 0, 0, 1]),
    "each-other": ("", [0]),
    "pipe-in-a-block": ("", [0]),
}


@pytest.fixture(autouse=True)
def _fast() -> Iterator[None]:
    with fast():
        yield


@pytest.mark.parametrize(
    "name", [name if name in SHORT else pytest.param(name, marks=pytest.mark.long) for name in PROGRAMS]
)
@pytest.mark.parametrize("injections", [0, 1], ids=["orders", "failures"])
def test_nothing_hangs_and_the_next_step_is_right(name: str, injections: int) -> None:
    if injections and name in ORDERS_ONLY:
        return
    found = explore(
        PROGRAMS[name], injections=injections, most=6 if name in SHORT else 40, injects=INJECTS if injections else ()
    )
    for failure in found.failures:
        assert failure.error is not None
        raise failure.error


@pytest.mark.parametrize("name", FOUND)
def test_runs_that_failed_once_are_right(name: str) -> None:
    kind, indices = FOUND[name]
    repeat(PROGRAMS[name], indices, injects=INJECTS if kind else ())


@pytest.mark.parametrize("name", ["freed-between", "attentions", "evaluate-model"])
def test_interrupt_at_each_wait_of_regressions(name: str) -> None:
    found = explore(PROGRAMS[name], preemptions=0, injections=1, most=10, injects=INJECTS)
    assert not found.failures, found.failures[0].error


@pytest.mark.skipif(not (ROOT / "packages" / "gpipe" / "src").exists(), reason="these are the tests of a wheel")
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.what.replace(" ", "-"))
def test_planted_fault_fits_the_sources(fault: Fault) -> None:
    path, source = planted_source(fault)
    assert source != path.read_text()
