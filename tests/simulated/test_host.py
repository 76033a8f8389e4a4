"""The host runs ahead of the devices: it waits only for a stage on the CPU."""

from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gpipe
from gpipe import LossSum
from gpipe.transport._copy import CopyStreams, carriers
from streams import use_stream

from .accelerator import device, found, library
from .models import HOWS, MODES, ROWS, SCHEDULED, counted_squares, model, piped, reduction_of, rows, running, squares
from .placements import PLACEMENTS, forward_streams

Loss = Callable[..., Any]


def counted(placement: str, mode: str, how: str, inline: bool, loss_fn: Loss = counted_squares) -> dict[str, int]:
    """Return the counters of a training step, after the pipe has finished its measurements."""
    pipe = piped(model(), placement, mode)
    x = rows().to(pipe.devices[0])
    with running(inline), forward_streams("own"):
        for _ in range(8 if how == "zero_bubble" else 2):
            library().take_counters()
            if how == "call":
                pipe(x).square().sum().backward()
            else:
                pipe.step(x, loss_fn=loss_fn, reduction=reduction_of(loss_fn), schedule=how)
        counters: dict[str, int] = library().take_counters()
    pipe.close()
    return counters


@pytest.mark.one_in(7)
@pytest.mark.parametrize("placement", ["one device", "all on one device", "three devices"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("inline", [False, True], ids=["threads", "inline"])
def test_it_never_waits_for_devices_alone(placement: str, mode: str, how: str, inline: bool):
    counters = counted(placement, mode, how, inline)
    assert counters["kernels"] > ROWS
    assert counters["synchronisations"] == 0


def contrast(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output @ target.T, torch.arange(len(output), device=output.device))


@pytest.mark.parametrize("placement", ["one device", "all on one device", "three devices"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("inline", [False, True], ids=["threads", "inline"])
@pytest.mark.parametrize("method", ["step", "evaluate"])
def test_host_does_not_wait_for_full_output(placement: str, mode: str, inline: bool, method: str):
    """The loss is computed once, or evaluated. The target may be on the first device."""
    plain, pipe = model(), piped(model(), placement, mode)
    x, y = rows().to(pipe.devices[0]), rows().flip(0)
    with running(inline), forward_streams("own"):
        for _ in range(2):
            pipe.zero_grad()
            there = y.to(pipe.devices[0])
            library().take_counters()
            loss = getattr(pipe, method)(x, there, loss_fn=contrast)
            del there
            counters = library().take_counters()
    assert counters["kernels"] > ROWS
    assert counters["synchronisations"] == 0
    expected = contrast(plain(rows()), y)
    torch.testing.assert_close(loss.cpu(), expected.detach())
    if method == "step":
        expected.backward()
        torch.testing.assert_close([p.grad.cpu() for p in pipe.parameters()], [p.grad for p in plain.parameters()])
    pipe.close()


def masked(logits: Tensor, labels: Tensor) -> Tensor:
    kept = labels != -100
    return (F.cross_entropy(logits, labels, reduction="none") * kept).sum() / kept.sum()


def summed(logits: Tensor, labels: Tensor) -> LossSum:
    kept = labels != -100
    return LossSum((F.cross_entropy(logits, labels, reduction="none") * kept).sum(), kept.sum())


@pytest.mark.parametrize(
    ("loss_fn", "how"),
    [
        *product([F.cross_entropy, summed], SCHEDULED[1:]),
        (lambda *given: F.cross_entropy(*given) / 2, None),
        (masked, None),
    ],
)
@pytest.mark.parametrize("inline", [False, True], ids=["threads", "inline"])
def test_labels_that_count_are_counted_on_the_device(loss_fn: Loss, inline: bool, how: str | None):
    """The host does not know how many they are."""
    plain, pipe = model(), piped(model(), "three devices", "always")
    labels, x = torch.arange(ROWS), rows().to(pipe.devices[0])
    for padded in (labels, labels.where(labels % 3 == 0, -100)):
        there = padded.to(pipe.devices[-1])
        with running(inline), forward_streams("own"):
            for _ in range(8 if how == "zero_bubble" else 2):
                pipe.zero_grad()
                library().take_counters()
                loss = pipe.step(x, there, loss_fn=loss_fn, schedule=how)
                counters = library().take_counters()
        assert counters["synchronisations"] == 0
        plain.zero_grad()
        expected = (masked if loss_fn is summed else loss_fn)(plain(rows()), padded)
        expected.backward()
        torch.testing.assert_close(loss.cpu(), expected.detach())
        torch.testing.assert_close([p.grad.cpu() for p in pipe.parameters()], [p.grad for p in plain.parameters()])
    pipe.close()


@pytest.mark.parametrize("placement", [name for name, places in PLACEMENTS.items() if None in places])
@pytest.mark.parametrize("how", ["call", "1f1b"])
def test_copies_to_and_from_cpu_are_asynchronous(placement: str, how: str):
    # A counted loss would scale gradients on the CPU by a number that the device knows.
    assert counted(placement, "always", how, inline=False, loss_fn=squares)["blocking"] == 0


@pytest.mark.parametrize("inline", [False, True], ids=["threads", "inline"])
@pytest.mark.parametrize("recorded", [False, True], ids=["", "recorded"])
def test_what_was_queued_before_need_not_be_done(inline: bool, recorded: bool):
    pipe = piped(model(), "three devices")
    with running(inline), forward_streams("own"):
        pipe(rows().to(pipe.devices[0])).sum().backward()
        before = [torch.Event(place, enable_timing=False) for place in pipe.devices]
        x = rows().pin_memory().to(pipe.devices[0], non_blocking=True)
        for place, event in zip(pipe.devices, before, strict=True):
            torch.ones(1, device=place)
            event.record(torch.accelerator.current_stream(place))
        with gpipe.record() if recorded else nullcontext():
            pipe(x).square().sum().backward()
        assert not any(event.query() for event in before)
    pipe.close()


def test_a_copy_waits_for_its_source_alone():
    """It waits neither for other copies of its stages nor for the target's computation, which continues."""
    places = [(device(k), torch.accelerator.current_stream(device(k)), CopyStreams.on(device(k))) for k in range(3)]
    ways = [(0, 1), (1, 0), (1, 2), (2, 1)]
    carry = dict(zip(ways, [*carriers(*places[:2]), *carriers(*places[1:])], strict=True))

    def sent(way: tuple[int, int]) -> tuple[Tensor, torch.Event]:
        ((tensor,), event) = carry[way].send([torch.ones(1, device=device(way[0]))])
        return tensor, event

    for way in ways:
        others = [sent(other)[0] for other in ways if other != way] + [torch.ones(1, device=device(way[1]))]
        _, event = sent(way)
        for other in others:
            after = torch.Stream(device=other.device)
            after.wait_event(event)
            with use_stream(after):
                other.sum()
        assert len(found()) == len(others)
        copied = sent(way)[0]
        copied.sum()
        assert len(found()) == 1


def test_pinned_input_may_change_after_call():
    pipe = piped(nn.Sequential(nn.Identity(), nn.Tanh(), nn.Tanh()), "CPU first")
    x = rows().pin_memory()
    with torch.no_grad():
        output = pipe(x)
    x.zero_()
    torch.testing.assert_close(output.cpu(), rows().tanh().tanh())
    pipe.close()
