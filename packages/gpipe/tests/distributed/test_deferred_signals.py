"""Signal handlers do not run while ranks exchange messages, and no interrupt leaves ranks in different calls."""

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import nn

from gpipe.distributed import (
    LostRankError,
    Rank,
    RemoteError,
    _deferred_signals,
    average_gradients,
    broadcast_batches,
    load,
    save,
)
from gpipe.distributed._deferred_signals import allow_signals, defer_signals
from gpipe.distributed._messages import RemoteLink

from .planted import batch, network

SOURCES = Path(_deferred_signals.__file__).parent


class Stop(BaseException):
    """The error of a signal handler, as in programs that save a checkpoint before they exit."""


@contextmanager
def handled(handler: Callable[[int, Any], Any], *numbers: signal.Signals) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
        assert all(signal.getsignal(number) is handler for number in numbers)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stop(number: int, frame: Any) -> None:
    raise Stop(f"got signal {number}")


BLOCKS = st.recursive(st.just("signal"), lambda inner: st.tuples(st.sampled_from("da"), st.lists(inner, max_size=3)))


@given(st.lists(BLOCKS, max_size=4))
def test_handlers_run_only_when_signals_are_allowed(program: list[Any]) -> None:
    """No signal is lost. A second signal of the same kind runs the handler at once, for both signals."""
    runs, expected, pending, states = list[int](), 0, [False], ["a"]

    def expect(more: int) -> None:
        nonlocal expected
        expected += more
        assert len(runs) == expected

    def run(items: list[Any]) -> None:
        for item in items:
            if item == "signal":
                signal.raise_signal(signal.SIGUSR1)
                runs_now = states[-1] == "a" or pending[0]
                pending[0] = not runs_now
                expect(runs_now)
                continue
            with defer_signals() if item[0] == "d" else allow_signals():
                states.append(item[0])
                expect(settled())
                run(item[1])
            states.pop()
            if item[0] == "a" and "d" in states:
                states[-1] = "d"  # an allow_signals block ends with an exchange
            expect(settled())

    def settled() -> bool:
        was_pending = pending[0] and states[-1] == "a"
        pending[0] = pending[0] and not was_pending
        return was_pending

    with handled(lambda number, frame: runs.append(number), signal.SIGUSR1):
        run(program)
    assert not pending[0]


def test_handler_waits_until_signals_are_allowed() -> None:
    order: list[str] = []
    with handled(lambda number, frame: order.append("handler"), signal.SIGUSR1):
        with defer_signals():
            signal.raise_signal(signal.SIGUSR1)
            order.append("deferred")
            with allow_signals():
                order.append("allowed")
                with defer_signals():
                    signal.raise_signal(signal.SIGUSR1)
                    order.append("inner")
                order.append("allowed")
            signal.raise_signal(signal.SIGUSR1)
            order.append("last")
        order.append("end")
    assert order == ["deferred", "handler", "allowed", "inner", "handler", "allowed", "last", "handler", "end"]


def test_second_signal_of_a_kind_runs_immediately() -> None:
    with handled(_stop, signal.SIGUSR1), defer_signals():
        signal.raise_signal(signal.SIGUSR1)
        with pytest.raises(Stop):
            signal.raise_signal(signal.SIGUSR1)


def test_handler_set_in_the_block_is_kept() -> None:
    with handled(_stop, signal.SIGUSR1):
        with defer_signals():
            before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
        assert before != _stop
        signal.signal(signal.SIGUSR1, _stop)


def test_other_threads_defer_nothing() -> None:
    def run() -> None:
        with defer_signals(), allow_signals():
            found.append(signal.getsignal(signal.SIGUSR1))

    found: list[Any] = []
    with handled(_stop, signal.SIGUSR1):
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        assert found == [_stop]


class _Interrupt:
    """Sends a signal to this process before line number ``at`` of a call of all ranks, on the main thread."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.lines = 0

    def __call__(self, frame: Any, event: str, value: Any) -> Any:
        path = Path(frame.f_code.co_filename)
        if not path.is_relative_to(SOURCES) or "signals" in path.name:
            return None
        if event == "line" and _deferred_signals._active is not None:  # not before or after the call
            self.lines += 1
            if self.lines == self.at:
                signal.raise_signal(signal.SIGTERM)
        return self

    @contextmanager
    def traced(self) -> Iterator[None]:
        sys.settrace(self)
        try:
            yield
        finally:
            sys.settrace(None)


class _Case:
    def __init__(self, path: str) -> None:
        self.path = path
        self.rank = Rank(network(), [4, 4], chunks=2)
        self.optimizer = torch.optim.SGD(self.rank.parameters(), 1e-2)
        self.step()
        save(path, self.rank, self.optimizer)

    def step(self) -> None:
        self.rank.step(*batch(), loss_fn=nn.functional.mse_loss)

    def evaluate(self) -> None:
        self.rank.evaluate(*batch(), loss_fn=nn.functional.mse_loss)

    def forward(self) -> None:
        self.rank(batch()[0])

    def clip(self) -> None:
        self.rank.clip_grad_norm_(1.0)

    def average(self) -> None:
        average_gradients(self.rank, groups[dist.get_rank()])

    def read(self) -> None:
        next(broadcast_batches([batch()], self.rank))

    def save(self) -> None:
        save(self.path, self.rank, self.optimizer)

    def load(self) -> None:
        load(self.path, self.rank, self.optimizer)

    def create(self) -> None:
        Rank(network(), [4, 4], chunks=2)


groups: list[Any] = []
CALLS = ["step", "evaluate", "forward", "clip", "average", "read", "save", "load", "create"]


@settings(
    max_examples=max(5, settings().max_examples // 4),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    phases=[phase for phase in Phase if phase is not Phase.shrink],  # an example may take as long as a timeout
)
@given(st.sampled_from(CALLS), st.integers(0, 1), st.lists(st.floats(0, 0.9), max_size=2))
def test_signal_leaves_all_ranks_in_the_same_call(
    worlds: Any, tmp_path: Path, call: str, who: int, places: list[float]
) -> None:
    """Its error is raised on that rank and reported to the others, or is raised after a call that succeeds on all."""
    outcomes = worlds(2).run(_interrupt, str(tmp_path / "run"), call, who, places)
    assert len(outcomes[0]) == len(places)
    for own, other in zip(outcomes[who], outcomes[1 - who], strict=True):
        assert own.startswith("Stop"), own
        assert other == "" or f"rank {who} failed: Stop: got signal" in other, other


def _interrupt(path: str, call: str, who: int, places: list[float]) -> list[str]:
    """Return what ``call`` raises for a signal at each of ``places`` on rank ``who``. Later steps are correct."""
    if not groups:
        groups.extend(dist.new_group([k]) for k in range(2))
    case, outcomes = _Case(path), []
    for _ in range(2):  # the first call runs more lines
        counter = _Interrupt(0)
        with counter.traced():
            getattr(case, call)()
    for place in places:
        at = 1 + round(place * (counter.lines - 1)) if dist.get_rank() == who else 0
        outcomes.append(_outcome(case, call, at))
        case.rank.zero_grad()
        case.step()
        norm = case.rank.clip_grad_norm_(1e9)
        plain = network()
        nn.functional.mse_loss(plain(batch()[0]), batch()[1]).backward()
        torch.testing.assert_close(norm, nn.utils.get_total_norm([p.grad for p in plain.parameters()]))
    save(path, case.rank, case.optimizer)
    load(path, case.rank, case.optimizer)
    case.rank.close()
    return outcomes


def _outcome(case: _Case, call: str, at: int) -> str:
    with handled(_stop, signal.SIGTERM):
        try:
            with _Interrupt(at).traced():
                getattr(case, call)()
        except (Stop, RemoteError) as error:
            return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("call", ["step", "clip", "save"])
def test_error_during_exchange_raises_on_all_ranks(worlds: Any, tmp_path: Path, call: str) -> None:
    """No later call hangs. The error stands for a second Ctrl+C, or one from another thread, which is not deferred."""
    for who in range(2):
        texts = worlds(2).run(_fail_within_exchange, str(tmp_path / f"run{who}"), call, who)
        assert texts[who] == "KeyboardInterrupt: planted"
        assert f"rank {who} failed while it exchanged messages" in texts[1 - who]
        assert "KeyboardInterrupt: planted" in texts[1 - who]


def _fail_within_exchange(path: str, call: str, who: int) -> str:
    case = _Case(path)
    receive, patch = RemoteLink.receive, pytest.MonkeyPatch()

    def fail(link: RemoteLink) -> Any:
        receive(link)
        raise KeyboardInterrupt("planted")

    if dist.get_rank() == who:
        patch.setattr(RemoteLink, "receive", fail)
    try:
        for _ in range(2):  # the other rank may have finished the first call
            getattr(case, call)()
        raise AssertionError("no error")
    except (KeyboardInterrupt, LostRankError) as error:
        found = f"{type(error).__name__}: {error}"
    patch.undo()
    for later in ("step", "clip"):
        with pytest.raises(LostRankError, match=f"rank {who} failed while it exchanged messages"):
            getattr(case, later)()
    case.rank.close()
    return found
