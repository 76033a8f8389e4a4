"""Direct transfers between the accelerators of ranks: the same results as one process, without a race."""

import copy
import os
import re
import signal
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from packages.gpipe.tests.distributed.planted import Planted, planted_in
from packages.gpipe.tests.worlds import of_each_size, world
from torch import nn

from gpipe import GPipe
from gpipe.distributed import LostRankError, Rank
from gpipe.distributed._device_links import DeviceLink, DeviceLinks
from gpipe.distributed._messages import RemoteLink

from . import accelerator, communicators
from .faults import Fault, planted
from .models import MODES, balance, model, reduction_of, rows, some_of, squares, whole_squares
from .test_tied import model as tied

DEVICE_LINKS, COPY = "gpipe.distributed._device_links", "gpipe.transport._copy"

worlds = pytest.fixture(scope="module")(of_each_size)


class Ranks(NamedTuple):
    """The placement of stages.

    Attributes:
        ranks: the process of each stage.
        devices: the device of each stage; None is the CPU.
        direct: the number of channel directions between devices, of all ranks.
    """

    ranks: list[int]
    devices: list[int | None]
    direct: int

    @property
    def size(self) -> int:
        return len({*self.ranks})

    def own(self) -> list[torch.device]:
        """Return the devices of the stages in this process."""
        here = zip(self.ranks, self.devices, strict=True)
        return [accelerator.device(device) for rank, device in here if rank == dist.get_rank()]

    def rank(self, plain: nn.Sequential, **options: Any) -> Rank:
        """This process's share of a copy of ``plain``."""
        communicators.register()
        sizes = balance(len(plain), len(self.ranks))
        own = {"ranks": self.ranks, "device": self.own(), "chunks": 3}
        return Rank(copy.deepcopy(plain), sizes, **{**own, **options})

    def pipe(self, plain: nn.Sequential, **options: Any) -> GPipe:
        """Return a pipe with the same placement in this process."""
        places = [accelerator.device(each) for each in self.devices]
        sizes = balance(len(plain), len(places))
        return GPipe(copy.deepcopy(plain), sizes, devices=places, chunks=3, **options)


PLACEMENTS = {
    "two ranks": Ranks([0, 1], [0, 1], 4),
    "in turn": Ranks([0, 1, 0, 1], [0, 0, 1, 2], 6),
    "a V": Ranks([0, 1, 1, 0], [0, 1, 2, 0], 6),
    "three ranks": Ranks([0, 1, 2], [0, 1, 0], 6),
    "the first on the CPU": Ranks([0, 1, 2], [None, 0, 1], 2),
    "the last on the CPU": Ranks([0, 1], [0, None], 0),
    "the CPU between": Ranks([0, 1, 2], [2, None, 1], 2),
}


@pytest.mark.parametrize(
    ("placement", "schedule", "checkpoint"), some_of(PLACEMENTS, ["fill_drain", "1f1b", "zero_bubble"], MODES, every=8)
)
def test_ranks_train_as_one_process(worlds, placement: str, schedule: str, checkpoint: str):
    ranks = PLACEMENTS[placement]
    opened = worlds(ranks.size).run(_expect_one_process, ranks, schedule, checkpoint)
    assert sum(opened) == 2 * ranks.direct


@pytest.mark.parametrize(
    ("placement", "schedule", "checkpoint"), some_of(PLACEMENTS, ["fill_drain", "1f1b", "zero_bubble"], MODES, every=12)
)
def test_stages_of_ranks_may_live_on_the_host(worlds, placement: str, schedule: str, checkpoint: str):
    ranks = PLACEMENTS[placement]
    worlds(ranks.size).run(partial(_expect_one_process, offload=True), ranks, schedule, checkpoint)


def _expect_one_process(ranks: Ranks, schedule: str, checkpoint: str, **more: Any) -> int:
    """Compare with a pipe in this process, and return the number of new communicators."""
    before, options = len(communicators.opened), {"checkpoint": checkpoint, **more}
    with accelerator.no_races():
        rank, pipe = ranks.rank(model(), **options), ranks.pipe(model(), **options)
        expect_alike(rank, pipe, schedule, steps=2)
        outputs = rank(rows())
        if outputs is not None:
            assert torch.equal(outputs.cpu(), pipe(rows().to(pipe.devices[0])).detach().cpu())
    return len(communicators.opened) - before


@pytest.mark.parametrize(("placement", "checkpoint"), some_of(PLACEMENTS, MODES, every=4))
def test_full_batch_loss_matches_one_process(worlds, placement: str, checkpoint: str):
    ranks = PLACEMENTS[placement]
    worlds(ranks.size).run(_expect_of_all_rows, ranks, checkpoint)


def _expect_of_all_rows(ranks: Ranks, checkpoint: str) -> None:
    with accelerator.no_races():
        rank, pipe = ranks.rank(model(), checkpoint=checkpoint), ranks.pipe(model(), checkpoint=checkpoint)
        for schedule in (None, "fill_drain"):
            expect_alike(rank, pipe, schedule, steps=2, loss_fn=whole_squares)
        found = rank.evaluate(rows(), loss_fn=whole_squares)
        assert torch.equal(found.cpu(), pipe.evaluate(rows().to(pipe.devices[0]), loss_fn=whole_squares).cpu())


def expect_alike(
    rank: Rank, pipe: GPipe, schedule: str | None = "1f1b", steps: int = 1, loss_fn: Callable[..., Any] = squares
) -> None:
    """Losses and gradients are equal bit for bit."""
    options = {"loss_fn": loss_fn, "reduction": reduction_of(loss_fn), "schedule": schedule}
    rank.zero_grad()
    pipe.zero_grad()
    for _ in range(steps):
        found = rank.step(rows(), **options)
        wanted = pipe.step(rows().to(pipe.devices[0]), **options)
        assert torch.equal(found.cpu(), wanted.cpu())
    whole = dict(pipe.named_parameters())
    for key, parameter in rank.named_parameters():
        assert torch.equal(parameter.grad.cpu(), whole[key].grad.cpu()), key


TIED = {  # directions of channels, and of weights between two ranks
    "two ranks": Ranks([0, 1], [0, 1], 2 + 2),
    "a V": Ranks([0, 1, 1, 0], [0, 1, 2, 0], 4 + 2),
    "three ranks": Ranks([0, 1, 2], [0, 1, 0], 4 + 4),
    "the first on the CPU": Ranks([0, 1], [None, 0], 0),
}


@pytest.mark.parametrize(("placement", "schedule"), some_of(TIED, ["fill_drain", "1f1b", "zero_bubble"], every=4))
def test_tied_weights_of_ranks_are_sent_directly(worlds, placement: str, schedule: str):
    ranks = TIED[placement]
    opened = worlds(ranks.size).run(_expect_tied, ranks, schedule)
    assert sum(opened) == 2 * ranks.direct


@pytest.mark.parametrize(("placement", "schedule"), some_of(TIED, ["fill_drain", "1f1b", "zero_bubble"], every=4))
def test_tied_weights_of_ranks_may_be_offloaded(worlds, placement: str, schedule: str):
    ranks = TIED[placement]
    worlds(ranks.size).run(partial(_expect_tied, offload=True), ranks, schedule)


def _expect_tied(ranks: Ranks, schedule: str, **options: Any) -> int:
    """Compare gradients with the plain model, and return the number of new communicators."""
    before, plain = len(communicators.opened), tied()
    squares(plain(rows())).backward()
    wanted = dict(plain.named_parameters(remove_duplicate=False))
    with accelerator.no_races():
        rank = ranks.rank(tied(), **options)
        for _ in range(2):
            rank.zero_grad()
            rank.step(rows(), loss_fn=squares, reduction="sum", schedule=schedule)
            for name, parameter in rank.named_parameters():
                torch.testing.assert_close(parameter.grad.cpu(), wanted[name].grad)
    return len(communicators.opened) - before


EARLY = Fault(
    "a step ends before all has come over the links", DEVICE_LINKS, "wait_event(CPUStream, self._last)", "pass"
)


@pytest.mark.parametrize("fault", [None, EARLY], ids=str)
def test_step_end_waits_for_received_tensors(worlds, fault: Fault | None):
    assert worlds(2).run(_ready_after_a_step, fault) == [[False, fault is None]] * 2


def _ready_after_a_step(fault: Fault | None) -> list[bool]:
    """Return whether a rank's received transfers count as finished, before and after the end of a step."""
    ranks, seen = PLACEMENTS["two ranks"], []
    rank = ranks.rank(model(), checkpoint="never")
    rank.step(rows(), loss_fn=squares, reduction="sum")
    settle = DeviceLinks.settle

    def watched(device_links: DeviceLinks) -> None:
        ready = [device_link._last for device_link in device_links.found.values() if device_link._last is not None]
        seen.append(all(event.query() for event in ready))
        settle(device_links)
        seen.append(all(event.query() for event in ready))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeviceLinks, "settle", watched)
        with nullcontext() if fault is None else planted(fault):
            rank.step(rows(), loss_fn=squares, reduction="sum")
    return seen


ELSEWHERE = Fault("a link opens on the current device", DEVICE_LINKS,
                  "device=self._device)])", "device=self._device.type).to(self._device)])")  # fmt: skip


@pytest.mark.parametrize(("fault", "more"), [(None, set()), (ELSEWHERE, {0})], ids=str)
def test_a_process_uses_its_own_devices_alone(fault: Fault | None, more: set[int]):
    """The current device is not used, as a context would waste memory of a GPU."""
    with world(2) as opened:
        assert opened.run(_contexts, fault) == [[{1} | more, {1, 2} | more], [{2} | more, {1, 2} | more]]


def _contexts(fault: Fault | None) -> list[set[int]]:
    """Return the devices that this process uses: after a run of its rank, and after a pipe on two devices."""
    ranks = Ranks([0, 1], [1, 2], 4)
    with nullcontext() if fault is None else planted(fault):
        ranks.rank(model()).step(rows(), loss_fn=squares, reduction="sum")
    alone: set[int] = accelerator.library().contexts()
    pipe = ranks.pipe(model())
    squares(pipe(rows())).backward()
    pipe.step(rows(), loss_fn=squares, reduction="sum")
    return [alone, accelerator.library().contexts()]


SENT, RECEIVED = [
    Fault(
        name,
        DEVICE_LINKS,
        f"        with use_stream(self._stream):\n            {what}",
        f"        if True:\n            {what}",
    )
    for name, what in [
        ("a link sends on the stream of its stage", "parts"),
        ("what comes over a link is allocated on the stream that reads it", "tensors"),
    ]
]


@pytest.mark.parametrize(("fault", "waits"), [(None, [False] * 2), (SENT, [True, False]), (RECEIVED, [False, True])])
def test_stage_and_device_links_run_concurrently(worlds, fault: Fault | None, waits: list[bool]):
    """A stage does not wait for its sends to finish, and receiving does not wait for the stage's computation."""
    assert worlds(2).run(_waits, fault) == waits


def _waits(fault: Fault | None) -> bool:
    """Return whether the stage waits for its first send (rank 0), or the first receive for the stage (rank 1)."""
    ranks, seen = PLACEMENTS["two ranks"], []
    accelerator.found()
    rank = ranks.rank(model())
    assert all(stream.query() for group in communicators.opened for stream in group.streams.values()), "links not open"
    rank.step(rows(), loss_fn=squares, reduction="sum")
    accelerator.found()
    name = ("send", "receive")[dist.get_rank()]
    with nullcontext() if fault is None else planted(fault):
        transfer = getattr(DeviceLink, name)

        def watched(device_link: DeviceLink, *given: Any) -> Any:
            computes = torch.accelerator.current_stream()
            computed = torch.ones(1, device=computes.device)
            event = computes.record_event()
            result = transfer(device_link, *given)
            groups = [stream for group in communicators.opened for stream in group.streams.values()]
            for stream in [computes] if name == "send" else groups:
                stream.synchronize()
            seen.append(all(stream.query() for stream in groups) if name == "send" else event.query())
            del computed
            return result

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(DeviceLink, name, watched)
            rank.step(rows(), loss_fn=squares, reduction="sum")
    return seen[0]


def test_by_way_of_the_host_if_asked_to(worlds):
    assert worlds(2).run(_by_way_of_the_host) == [0, 0]


def _by_way_of_the_host() -> int:
    before, ranks = len(communicators.opened), PLACEMENTS["two ranks"]
    expect_alike(ranks.rank(model(), transport="host"), ranks.pipe(model()))
    return len(communicators.opened) - before


@pytest.mark.parametrize(
    ("placement", "where", "phase", "schedule"),
    some_of(
        ["two ranks", "three ranks"], [0, 1], ["forward", "recompute", "backward"], ["1f1b", "zero_bubble"], every=7
    ),
)
def test_after_a_failure_the_next_step_is_right(worlds, placement: str, where: int, phase: str, schedule: str):
    ranks = PLACEMENTS[placement]
    found = worlds(ranks.size).run(_fail, ranks, where, phase, schedule)
    assert found == ["ArithmeticError" if rank == where else "RemoteError" for rank in range(ranks.size)]


def _fail(ranks: Ranks, where: int, phase: str, schedule: str) -> str:
    plain = with_each_stage(model(), len(ranks.ranks), Planted)
    with accelerator.no_races():
        rank, pipe = ranks.rank(plain, checkpoint="always"), ranks.pipe(plain, checkpoint="always")
        expect_alike(rank, pipe, schedule)
        if dist.get_rank() == where:
            planted_in(rank).when = phase, 1
        x = rows().requires_grad_()  # so that the first layer has a backward
        found = error_of(lambda: rank.step(x, loss_fn=squares, reduction="sum", schedule=schedule))
        planted_in(rank).when = None
        expect_alike(rank, pipe, schedule)
    return type(found).__name__


def error_of(work: Callable[[], object]) -> Exception | None:
    try:
        work()
    except Exception as error:
        return error.with_traceback(None)
    return None


def with_each_stage(plain: nn.Sequential, stages: int, layer: type[nn.Module]) -> nn.Sequential:
    """The model with a new ``layer`` in front of each of its stages, as :func:`balance` cuts both."""
    layers, sizes = iter(plain), balance(len(plain), stages)
    return nn.Sequential(*[each for size in sizes for each in (layer(), *[next(layers) for _ in range(size)])])


# fmt: off
FAULTS: list[tuple[Fault, str]] = [
    (Fault("a link does not wait for what computes what it sends", DEVICE_LINKS,
           "wait_stream(self._stream, current_stream(self._device))",
           "pass"), "READ by copy D2H on .* not ordered after"),
    (Fault("a link does not wait for its transfers", DEVICE_LINKS,
           "self._peer.wait(work)  # makes the current stream wait, not the thread", "pass"), "wrong numbers"),
    (Fault("what is sent is not recorded with its link", DEVICE_LINKS,
           "record_use(part, self._stream)",
           "pass"), "FREE of memory of .* not ordered after copy D2H .*no record_stream"),
    (Fault("a link keeps what it has sent", DEVICE_LINKS,
           "self._transfer([self._peer.send(part) for part in parts])",
           "[self._peer.send(part) for part in parts]"), "bytes more"),
    (Fault("the event of what comes is recorded where it does not come", DEVICE_LINKS,
           "record_event(self._stream)",
           "record_event(current_stream(self._device))"), "READ by .* not ordered after copy H2D"),
    (Fault("the wait for what comes is left out", DEVICE_LINKS,
           "wait_for_payload([*tensors], self._last, current_stream(self._device))",
           "pass"), "READ by .* not ordered after copy H2D"),
    (Fault("a stage does not wait for what comes", COPY,
           "wait_event(compute, event)", "pass"), "READ by .* not ordered after copy H2D"),
    (Fault("what came is not recorded with the stream that reads it", COPY,
           "return _each(payload, lambda tensor: record_use(tensor, compute))",
           "return payload"), "FREE of memory of .* not ordered after .*no record_stream"),
]
# fmt: on


@pytest.mark.parametrize(("fault", "text"), FAULTS, ids=[fault.name for fault, _ in FAULTS])
def test_each_fault_is_found(worlds, fault: Fault, text: str):
    found = worlds(2).run(_found, fault)
    assert any(re.search(text, each) for each in [*found[0], *found[1]]), found


def _found(fault: Fault) -> list[str]:
    """Return the problems of a step with the fault planted."""
    ranks = PLACEMENTS["two ranks"]
    rank, pipe = ranks.rank(model()), ranks.pipe(model())
    expect_alike(rank, pipe)
    assert accelerator.found() == []
    used = accelerator.used()
    with planted(fault):
        wrong = error_of(lambda: expect_alike(rank, pipe))
    found = ["wrong numbers"] * isinstance(wrong, AssertionError) + [str(race) for race in accelerator.found()]
    return [*found, *[f"{more} bytes more after a step" for more in [accelerator.used() - used] if more]]


def test_rank_killed_after_announcing_tensor_is_named():
    """Its device never sends the announced tensor, so the next rank's device waits, and no message reports the loss."""
    with world(3) as opened:
        answers = opened.answers(_lose, limit=300.0)
    for succeeded, text in answers[1:]:
        assert succeeded, text
        assert "rank 0 has ended, or did not answer within 600 s" in text


def _lose() -> str:
    rank = PLACEMENTS["three ranks"].rank(model(), timeout=600.0)
    rank.step(rows(), loss_fn=squares, reduction="sum")
    if dist.get_rank() == 0:
        put = RemoteLink.put
        communicators.Communicator.send = lambda *_: Mute()
        RemoteLink.put = lambda link, *given, **flag: (put(link, *given, **flag), link.flush(), _end())
    found = error_of(lambda: rank.step(rows(), loss_fn=squares, reduction="sum"))
    assert isinstance(found, LostRankError), found
    return str(found)


class Mute(dist.Work):
    """A transfer that sends nothing."""

    def wait(self, timeout: Any = None) -> bool:
        return True


def _end() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_rows_on_devices_are_compared_after_step(worlds):
    """One rank may be on the CPU, where the digest is known earlier."""
    ranks = PLACEMENTS["two ranks"]
    for apart, on_devices in product((False, True), ([True, True], [True, False], [False, True])):
        worlds(2).run(_differ, ranks, on_devices, apart)


def _differ(ranks: Ranks, on_devices: list[bool], apart: bool) -> None:
    me = dist.get_rank()
    with accelerator.no_races():
        rank = ranks.rank(model())
        x = rows() + 1.0 * (apart and me == 1)
        given = x.to(ranks.own()[0]) if on_devices[me] else x
        told = pytest.raises(ValueError, match="input of rank 0 has other values than that of rank 1")
        with told if apart else nullcontext():
            rank.step(given, loss_fn=squares, reduction="mean")
        rank.close()
