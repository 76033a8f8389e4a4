"""Every wait, event, recorded stream and change of streams is needed: with a fault in it, a case or a test fails."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import gpipe
from streams import default_stream

from . import (
    accelerator,
    test_accelerator,
    test_devices,
    test_direct,
    test_failures,
    test_host,
    test_matrix,
    test_model,
    test_offloaded,
    test_profile,
    test_saved,
)
from .faults import Fault, planted
from .models import assert_trains_like, counted_squares, model, piped, squares
from .races import ROOT

# torch warns once per process: it must order streams for nodes that are kept alive.
pytestmark = [pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")]

COPY, LINK, RUN = "gpipe.transport._copy", "gpipe.transport._transport", "gpipe.engine._run"
ORDER, USE = "streams._order", "streams._use"
TASK, STREAM, CLOCK = "streams._task", "streams._stream", "profiler._times"
WORKERS, TIED, RECORD, CALLS = (
    "gpipe.engine._workers",
    "gpipe.engine._tied",
    "gpipe.timeline._record",
    "gpipe.engine._autograd_calls",
)


OFFLOADED, SAVED = "gpipe.engine._offloaded", "gpipe.engine._saved"
FORWARD, TENSORS = "gpipe.model._forward", "gpipe.model._tensors"
PARTS, REPLAY = "gpipe.model._stage_run", "gpipe.model._replay"


class Case(NamedTuple):
    """Two training steps, compared with the plain model's."""

    placement: str
    how: str = "call"
    streams: str = "own"
    mode: str = "never"
    inline: bool = False
    counted: bool = False
    keeps_nodes: bool = False

    def __str__(self) -> str:
        threads = "inline" if self.inline else "threads"
        how = f"{self.how} with a counted loss" if self.counted else self.how
        how += " and kept nodes" * self.keeps_nodes
        return f"{self.placement}, {how}, {self.streams} streams, checkpoint={self.mode}, {threads}"

    def problems(self) -> list[str]:
        """Races, and gradients that differ."""
        return problems(self._train)

    def _train(self) -> None:
        pipe = piped(model(), self.placement, self.mode)
        # A node belongs to the stream that was current at its creation, here the default one.
        kept = [p.view_as(p).grad_fn.next_functions for p in pipe.parameters() if self.keeps_nodes]
        loss_fn = counted_squares if self.counted else squares
        assert_trains_like(model(), pipe, self.how, self.streams, inline=self.inline, loss_fn=loss_fn)
        del kept


class Check:
    """A test, with its arguments."""

    def __init__(self, test: Callable[..., None], *arguments: Any) -> None:
        self._test = test
        self._arguments = arguments

    def __str__(self) -> str:
        name = self._test.__name__.removeprefix("test_").replace("_", " ")
        return f"{name} ({', '.join(map(str, self._arguments))})" if self._arguments else name

    def problems(self) -> list[str]:
        """Races, and how the test fails."""
        return problems(lambda: self._test(*self._arguments))


def problems(work: Callable[[], None]) -> list[str]:
    """Return the error raised by ``work``, and its races."""
    accelerator.found()
    try:
        work()
    except (Exception, pytest.fail.Exception) as error:
        return [f"{type(error).__name__}: {error}", *(str(race) for race in accelerator.found())]
    return [str(race) for race in accelerator.found()]


TWO, THREE, BETWEEN, FIRST = Case("two devices"), Case("three devices"), Case("CPU between"), Case("CPU first")
TWICE, CPUS = Case("the first device twice"), Case("CPU twice")
FOREIGN = Case("three devices", streams="foreign")
KEPT = Case("three devices", how="1f1b", counted=True, keeps_nodes=True)
KEPT_TWICE = KEPT._replace(placement="the first device twice")
INLINE = Case("three devices", streams="foreign", mode="always", inline=True)
PINNED = Check(test_host.test_copies_to_and_from_cpu_are_asynchronous, "CPU between", "call")
OVERWRITTEN = Check(test_host.test_pinned_input_may_change_after_call)
QUEUED = Check(test_host.test_what_was_queued_before_need_not_be_done, True, True)
APART = Check(test_host.test_a_copy_waits_for_its_source_alone)
PROFILE = Check(test_profile.test_seconds_are_measured_on_current_stream)
TIMELINE = Check(test_devices.test_a_timeline_of_devices, "never", False)
SHARED = Check(test_matrix.test_in_order_and_equal, ("three devices", "call", "foreign"), "never", False, True)
TASKS = Check(test_devices.test_each_part_of_a_task_has_its_stream)
RESTORED = Check(test_devices.test_use_stream_restores_stream_of_each_thread)
NEW = Check(test_devices.test_default_stream_is_initially_current)
WAITED = Check(test_accelerator.test_waits_that_order, "synchronise the stream")
MADE = Check(test_model.test_in_order_and_equal, "made", ("three devices", "1f1b", "own"), "never", False)
RESIDUALS = Check(test_model.test_in_order_and_equal, "residuals", ("two devices", "1f1b", "own"), "never", False)
MASKED = Check(test_model.test_in_order_and_equal, "masked", ("three devices", "1f1b", "own"), "always", False)
CHANGED = Check(test_model.test_in_order_and_equal, "inplace", ("three devices", "1f1b", "own"), "never", False)
CALLED = Check(test_model.test_backward_of_replay_waits_for_caller)
REPLAYED = Check(test_model.test_a_loss_of_all_rows, "inplace", "three devices", None, "own", "never")
TIED_HEAD = Check(test_model.test_a_loss_of_all_rows, "tied", "three devices", None, "own", "never")
UPDATED = Check(test_offloaded.test_updates_right_after_step_and_evaluation)
UPDATED_IN_STEP = Check(test_offloaded.test_updates_during_a_step)
SAVES = Check(test_saved.test_tensors_of_many_bytes, "fill_drain")
SAVES_APART = Check(test_saved.test_copies_do_not_hold_up_computations)
SAVES_AND_FAILS = Check(test_saved.test_a_failure_in_a_backward_leaves_nothing, "fill_drain")
FAILED = Check(test_failures.test_gradients_may_be_zeroed_right_after_a_failure)

SEND = "with use_stream(target.copy), use_stream(source.copy):"
TO_HOST = "return allocate_pinned_like(tensor).copy_(tensor, non_blocking=True)"
TO_DEVICE = "tensor = allocate_pinned_like(tensor).copy_(tensor)"
ALL_WAIT = "            _all_wait(now, self._streams)"
FINALLY = "        finally:  # even after a failure, the caller may read or zero .grad"
ON_STREAM = "with use_stream(self.stream):\n            "
EVENT = "event = record_event(stream, timed=True)"
PROFILED = "streams.record_event(streams.current_stream(device), timed=True)"

# fmt: off
FAULTS: list[tuple[Fault, Case | Check]] = [
    (Fault("a copy does not wait for what computes its source", COPY,
           "wait_stream(source.copy, source.compute)", "pass"), TWO),
    (Fault("what computes the source waits for its copy instead", COPY,
           "wait_stream(source.copy, source.compute)", "wait_stream(source.compute, source.copy)"), TWO),
    (Fault("the target's copy stream is not current during a copy", COPY, SEND, "with use_stream(source.copy):"), TWO),
    (Fault("the source's copy stream is not current during a copy", COPY,
           SEND, "with use_stream(target.copy):"), BETWEEN),
    (Fault("copies run on the streams of their caller", COPY, SEND, "if True:"), TWO),
    (Fault("the source of a copy is not recorded with its stream", COPY,
           "_each(payload, lambda tensor: record_use(tensor, source.copy))", "pass"), TWO),
    (Fault("the source of a copy is recorded with its own stream", COPY,
           "record_use(tensor, source.copy)", "record_use(tensor, source.compute)"), TWO),
    (Fault("the event of a copy is recorded where nothing is copied", COPY,
           "record_event(last)", "record_event(self._source.compute)"), TWO),
    (Fault("the event of a copy is one of its source's device", COPY,
           "target.copy if is_accelerator(target.copy) else source.copy", "source.copy"), FIRST),
    (Fault("a copy has no event", COPY, ", record_event(last)", ", None"), TWO),
    (Fault("the target does not wait for a copy", COPY, "wait_event(compute, event)", "pass"), TWO),
    (Fault("the host does not wait for a copy to it", COPY, "wait_event(compute, event)", "pass"), BETWEEN),
    (Fault("of two stages on the CPU one does not wait for a skip to it", LINK,
           "payload = self._carrier.receive(payload)",
           'payload = payload[0] if "skip" in self.name else self._carrier.receive(payload)'), CPUS),
    (Fault("what was copied is not recorded with the stream that reads it", COPY,
           "return _each(payload, lambda tensor: record_use(tensor, compute))", "return payload"), TWO),
    (Fault("nothing that copies use is recorded", COPY, "    record_stream(tensor, stream)", "    pass"), TWO),
    (Fault("a copy to a device from memory that is not pinned", COPY, TO_DEVICE, "pass"), PINNED),
    (Fault("a copy to the host into memory that is not pinned", COPY, TO_HOST, 'return tensor.to("cpu")'), PINNED),
    (Fault("a copy to the host that it waits for", COPY, TO_HOST, TO_HOST.replace("True", "False")), PINNED),
    (Fault("a copy to a device that the host waits for", COPY,
           "tensor.to(self._target.device, non_blocking=True)", "tensor.to(self._target.device)"), PINNED),
    (Fault("pinned memory is not pinned", COPY,
           'device="cpu", pin_memory=True)\n\n\ndef _each', 'device="cpu")\n\n\ndef _each'), PINNED),
    (Fault("a pinned input is sent itself, and its owner may change it", COPY,
           TO_DEVICE, f"tensor = tensor if tensor.is_pinned() else {TO_DEVICE[9:]}"), OVERWRITTEN),
    (Fault("values leave on the stream of gradients", COPY, "own.values_out", "own.gradients_out"), APART),
    (Fault("values arrive on the stream of gradients", COPY, "theirs.values_in", "theirs.gradients_in"), APART),
    (Fault("a copy is on the stream with which its target computes", COPY,
           SEND, SEND.replace("target.copy", "target.compute")), APART),
    (Fault("workers compute on the default streams", WORKERS, "with use_stream(self.stream):", "if True:"), TWO),
    (Fault("a worker has the stream of the stage of its own number", RUN,
           "self._streams[placement.index(worker)]", "self._streams[worker]"), TWICE),
    (Fault("a backward does not wait for the caller", RUN, "_all_wait(self._streams, now)", "pass"), FOREIGN),
    (Fault("the caller does not wait after a backward", RUN, ALL_WAIT, "            pass"), FOREIGN),
    (Fault("the caller does not wait after a backward that fails", RUN,
           FINALLY, "        except MemoryError:\n            raise\n        else:"), FAILED),
    (Fault("a backward takes the caller to be where it was in the forward", RUN,
           "now = self._current_streams() if self._pipeline.on_accelerator else self._streams",
           "now = self._streams"), FOREIGN),
    (Fault("who has to be waited for waits", RUN,
           "wait_stream(source, target)", "wait_stream(target, source)"), FOREIGN),
    (Fault("only streams that are the same wait", RUN, "if source is not target:", "if source is target:"), FOREIGN),
    (Fault("an inline run stays on the streams of its caller", RUN,
           "with use_stream(streams[stage.index]), nullcontext()", "with nullcontext()"), INLINE),
    (Fault("gradients for several devices begin on the stream of one", CALLS,
           "_on_current_streams(roots)", "list(roots)"), KEPT),
    (Fault("gradients for two devices begin on the stream of one", CALLS, "< 2", "< 3"), KEPT_TWICE),
    (Fault("gradients of shared weights are not recorded", TIED,
           "    record_stream(gradient, current_stream(gradient.device))", "    pass"), SHARED),
    (Fault("a timeline's events are on the default stream", RECORD,
           EVENT, "import streams; " + EVENT.replace("stream,", "streams.default_stream(stream.device),")), TIMELINE),
    (Fault("a timeline's events have no times", RECORD, EVENT, "event = record_event(stream)"), TIMELINE),
    (Fault("a timeline does not wait for its events", RECORD,
           "            event.synchronize()", "            pass"), TIMELINE),
    (Fault("a timeline does not wait for the event that its clock begins with", RECORD,
           "            base.synchronize()", "            pass"), TIMELINE),
    (Fault("a timeline's clock begins when the caller's work is done", RECORD,
           "_event(new_stream(device))", "_event(current_stream(device))"), QUEUED),
    (Fault("a profiler's events are on the default stream", CLOCK,
           PROFILED, PROFILED.replace("current", "default")), PROFILE),
    (Fault("a profiler's events have no times", CLOCK, PROFILED, PROFILED.replace(", timed=True", "")), PROFILE),
    (Fault("a profiler does not wait for its events", CLOCK, "    end.synchronize()", "    pass"), PROFILE),
    (Fault("an event is recorded on the current stream", ORDER, "event.record(stream)", "event.record()"), TWO),
    (Fault("no event has a time", ORDER, "enable_timing=timed", "enable_timing=False"), PROFILE),
    (Fault("a stream does not wait for an event", ORDER,
           "            source.wait_event(event)", "            pass"), TWO),
    (Fault("the host does not wait for an event", ORDER, "        event.synchronize()", "        pass"), BETWEEN),
    (Fault("the host does not wait for a stream", ORDER, "        target.synchronize()", "        pass"), WAITED),
    (Fault("a stream does not wait for another", ORDER, "wait_event(source, record_event(target))", "pass"), TWO),
    (Fault("a stream is made to wait for the one that waits", ORDER,
           "wait_event(source, record_event(target))", "wait_event(target, record_event(source))"), TWO),
    (Fault("nothing is recorded with streams", ORDER, "part.record_stream(stream)", "pass"), TWO),
    (Fault("a stream does not become current", USE, "    torch.accelerator.set_stream(stream)", "    pass"), NEW),
    (Fault("a stream stays current", USE, "        _choose(before, device)", "        pass"), TWO),
    (Fault("the stream of another device becomes current again", USE,
           "current_stream(stream.device)", "current_stream()"), NEW),
    (Fault("the device of a stream stays current", USE,
           "_choose(before, device)", "_choose(before, stream.device.index)"), RESTORED),
    (Fault("a task computes on the default stream", TASK,
           ON_STREAM + "return self._compute()", "if True:\n            return self._compute()"), TASKS),
    (Fault("a task is finalized on the default stream", TASK,
           ON_STREAM + "    self._finalize(result)", "if True:\n                self._finalize(result)"), TASKS),
    (Fault("new streams are the current one", STREAM,
           "    return torch.Stream(on_accelerator(device))", "    return current_stream(device)"), NEW),
    (Fault("the current stream is taken to be the default one", STREAM,
           "    return torch.accelerator.current_stream(on_accelerator(device))",
           "    return default_stream(device)"), NEW),
    (Fault("a copy does not wait for the turn that its source is from", COPY,
           "wait_event(source.copy, after)", "pass"), RESIDUALS),
    (Fault("what a turn has queued is taken to be what the next stage has", TENSORS,
           "record_event(self._moves.places[self.stage][1])",
           "record_event(self._moves.places[(self.stage + 1) % 3][1])"), MASKED),
    (Fault("a turn is on the device of another stage", FORWARD,
           "use_device(self._run.places[self._calls.until][0]), with_dispatch_modes", "with_dispatch_modes"), MASKED),
    (Fault("in a turn the streams of other stages are not current", FORWARD,
           "                self._run.on_streams(),\n", "                use_device(self._run.places[0][0]),\n"), MADE),
    (Fault("what names the device of another stage stays there", TENSORS,
           "return map_tree(output, self._move) if self._moves.copies else output", "return output"), MADE),
    (Fault("a change in place of a copy is lost", TENSORS,
           "version(known.copy) != known.own", "False"), CHANGED),
    (Fault("the streams of a model do not become current", PARTS,
           "scope.enter_context(use_stream(stream))", "pass"), MADE),
    (Fault("a loss that replays is on the stream of its stage alone", PARTS,
           "with self._run.on_streams(), use_device(self.stage.device):", "if True:"), TIED_HEAD),
    (Fault("a tensor that a later stage uses is not waited for", PARTS,
           "return lambda: forth.receive(parcel).tensors[0]", "return lambda: parcel[0].tensors[0]"), RESIDUALS),
    (Fault("a gradient for an earlier stage is not waited for", PARTS,
           "return lambda: back.receive(parcel)[0]", "return lambda: parcel[0][0]"), RESIDUALS),
    (Fault("the backward of a replay does not wait for the caller", REPLAY,
           "            wait_stream(stream, current_stream(device))", "            pass"), CALLED),
    (Fault("a replay copies a tensor anew for each operation", "gpipe.model._moved",
           "            self._copies[id(tensor)] = tensor, copy", "            pass"), REPLAYED),
    (Fault("a stage does not wait for its load", OFFLOADED, "wait_event(self._compute, self._ready)", "pass"), UPDATED),
    (Fault("the event of a load is recorded where nothing is loaded", OFFLOADED,
           "self._ready, self._is_awaited = record_event(self._link.inward), False",
           "self._ready, self._is_awaited = record_event(self._link.outward), False"), UPDATED),
    (Fault("loads are queued on the stream of computations", OFFLOADED,
           "with use_stream(self._link.inward), torch.no_grad(), torch.inference_mode(False):",
           "with torch.no_grad(), torch.inference_mode(False):"), UPDATED),
    (Fault("a load overwrites what an earlier stage still reads", OFFLOADED,
           "wait_event(self._link.inward, done)", "pass"), UPDATED),
    (Fault("the event of an unload is recorded where nothing is computed", OFFLOADED,
           "done = record_event(self._compute)", "done = record_event(self._link.inward)"), UPDATED),
    (Fault("gradients leave before they are computed", OFFLOADED, "wait_event(self._link.outward, done)", "pass"),
     UPDATED),
    (Fault("gradients leave on the stream of computations", OFFLOADED,
           "with use_stream(self._link.outward), torch.no_grad():", "with torch.no_grad():"), UPDATED),
    (Fault("gradients are overwritten while they leave", OFFLOADED,
           "record_stream(gradient, self._link.outward)", "pass"), UPDATED),
    (Fault("the event of gradients is recorded where none is sent", OFFLOADED,
           "self._sent = record_event(self._link.outward)", "self._sent = record_event(self._link.inward)"), UPDATED),
    (Fault("gradients are read before they arrive", OFFLOADED, "wait_event(CPUStream, self._sent)", "pass"),
     UPDATED_IN_STEP),
    (Fault("the caller changes parameters while they are loaded", OFFLOADED,
           "wait_event(CPUStream, self._ready)", "pass"), UPDATED),
    (Fault("saved tensors leave before they are computed", SAVED,
           "wait_event(self._link.outward, saved)", "pass"), SAVES),
    (Fault("the event of saved tensors is recorded where none is computed", SAVED,
           "saved = record_event(self._compute)", "saved = record_event(self._link.outward)"), SAVES),
    (Fault("saved tensors leave on the stream of computations", SAVED,
           "with use_stream(self._link.outward), torch.no_grad(), no_dispatch_modes():",
           "with torch.no_grad(), no_dispatch_modes():"), SAVES_APART),
    (Fault("the event of copies to the host is recorded where none is made", SAVED,
           "sent = record_event(self._link.outward)", "sent = record_event(self._link.inward)"), SAVES),
    (Fault("saved tensors are freed before they are copied", SAVED, "wait_event(compute, sent)", "pass"), SAVES),
    (Fault("saved tensors return to memory that is still in use", SAVED,
           "wait_event(self._link.inward, allocated)", "pass"), SAVES),
    (Fault("the event of new memory is recorded where none is allocated", SAVED,
           "allocated = record_event(compute)", "allocated = record_event(self._link.inward)"), SAVES),
    (Fault("saved tensors return on the stream of computations", SAVED,
           "            with use_stream(self._link.inward):", "            if True:"), SAVES_APART),
    (Fault("the event of saved tensors that return is recorded where none does", SAVED,
           "self._ready = record_event(self._link.inward)", "self._ready = record_event(self._link.outward)"), SAVES),
    (Fault("a backward does not wait for saved tensors", SAVED, "wait_event(compute, self._ready)", "pass"), SAVES),
    (Fault("after a failure memory is freed while saved tensors return", RUN,
           "                stage.leave()", "                pass"), SAVES_AND_FAILS),
]
# fmt: on


@pytest.mark.parametrize("case", {case: None for _, case in FAULTS}, ids=str)
def test_without_faults_nothing_is_wrong(case: Case | Check):
    assert case.problems() == []


@pytest.mark.parametrize(("fault", "case"), FAULTS, ids=[fault.name for fault, _ in FAULTS])
def test_each_fault_is_found(fault: Fault, case: Case | Check):
    with planted(fault):
        problems = case.problems()
    for k in range(accelerator.DEVICES):  # a fault may leave others current
        torch.accelerator.set_stream(default_stream(accelerator.device(k)))
    torch.accelerator.set_device_index(0)
    assert problems != []


ORDERS = re.compile(r"\b(wait_stream|wait_event|record_event|recorded|use_stream|_all_wait|_on_current_streams)\(")


def test_every_line_that_orders_is_taken_away_once():
    planted_lines = [fault.line for fault, _ in FAULTS]
    for folder in ("transport", "engine", "model"):
        for file in (Path(gpipe.__file__).parent / folder).glob("*.py"):
            for line in file.read_text().splitlines():
                if ORDERS.search(line) and not line.lstrip().startswith("def "):
                    known = any(each.strip() in line for each in [*planted_lines, *INSIDE])
                    assert known, f"{file.name}: {line.strip()}"


INSIDE = ["wait_stream(source, target)"]
"""Functions whose calls are removed."""


def table() -> str:
    """The lists as docs/accelerators.md shows them."""
    found: list[tuple[Fault, object]] = [
        *FAULTS,
        *((fault, "two ranks, step under 1f1b") for fault, _ in test_direct.FAULTS),
        (test_direct.EARLY, "step end waits for received tensors"),
        (test_direct.ELSEWHERE, "a process uses its own devices alone"),
        (test_direct.SENT, "stage and device links run concurrently"),
        (test_direct.RECEIVED, "stage and device links run concurrently"),
    ]
    rows = [f"| {fault.name} | {_place(fault)} | {case} |" for fault, case in found]
    head = ["| what is wrong | where | the case, or the test, that finds it |", "|---|---|---|"]
    return "\n".join([f"All {len(found)} are found.", "", *head, *rows])


def _place(fault: Fault) -> str:
    return f"`{fault.module.replace('.', '/')}.py`"


def test_the_documentation_has_them_all():
    page = (ROOT / "docs/accelerators.md").read_text()
    assert f"<!-- begin: faults -->\n\n{table()}\n\n<!-- end: faults -->" in page, table()
