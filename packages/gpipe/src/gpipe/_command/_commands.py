"""The commands: plan and check a model, profile its layers, predict a step of a pipeline, and record one."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from json import dumps
from typing import Annotated, Any, Literal

import torch
from cyclopts import Parameter
from rich.console import Console
from torch import nn

from microbatch import scatter

from .._check import check as check_model
from .._check._loss import mean_square
from .._gpipe import GPipe
from .._plan import Infeasible
from .._plan import plan as make_plan
from .._plan._blocks import profile_of
from .._plan._planned import as_input
from ..balance import balance_by_parameters, balance_cost
from ..engine._workers import placement
from ..module._arguments import checked_devices
from ..simulate import simulate as simulate_schedule
from ..simulate import stage_costs
from ..timeline import record
from ..timeline._chrome import trace
from ._output import expect_writable, finish
from ._target import load, model_of, sample_of


def _not_empty(kind: Any, values: Sequence[Any] | None) -> None:
    if values is not None and not len(values):
        raise ValueError("expected at least one value")


_MANY = Parameter(consume_multiple=True, negative="", validator=_not_empty)
_YES = Parameter(negative="")
_SAMPLE = "A mini-batch: a shape such as 64,3,224,224 or input_ids=8,128:int64:50257, or package.module:function."

Target = Annotated[str, Parameter(help="The model: package.module:name.")]
Sample = Annotated[list[str], _MANY, Parameter(help=_SAMPLE)]
Loss = Annotated[str | None, Parameter(help="The loss: package.module:function, of output and target.")]
Reduction = Annotated[
    Literal["mean", "sum"] | None,
    Parameter(help="How the losses of micro-batches add up: as means over rows, or sums."),
]
LossTarget = Annotated[list[str] | None, _MANY, Parameter(help="The target, as a sample.")]
Texts = Annotated[list[str], _MANY]
Devices = Annotated[tuple[str, ...], _MANY]
Numbers = Annotated[list[int] | None, _MANY]
Json = Annotated[bool, _YES, Parameter(help="Print JSON.")]
Switch = Annotated[bool, _YES]


def plan(
    target: Target,
    *,
    sample: Sample,
    devices: Devices | None = None,
    fake: str | None = None,
    bandwidth: str | None = None,
    latency: float | None = None,
    loss: Loss = None,
    loss_target: LossTarget = None,
    reduction: Reduction = None,
    optimizer: str = "adam",
    memory: Texts | None = None,
    chunks: Numbers = None,
    quick: Switch = False,
    json: Json = False,
    html: str | None = None,
) -> int:
    """Find the balance, the number of micro-batches, the schedule, and which stages recompute.

    Exits with 1 if nothing fits into the memory, and says what would.

    Args:
        devices: One for each stage.
        fake: Instead of devices, some that are not there, such as 8x80GB or 8xH100; nothing runs, and all figures are
            estimates.
        bandwidth: Of fake devices, what each sends in a second to another one, such as 50GB.
        latency: Of the same links, in seconds.
        optimizer: A name such as adam or sgd: what its state takes.
        memory: What each device may hold, once or for each, such as 80GB or 24GiB.
        chunks: Numbers of micro-batches to look at.
        quick: Do not train a copy for a few steps to choose between the best.
        html: Save the plan there, as a page.
    """
    expect_writable(html, ".html", ".json", ".txt")
    chosen = _devices(devices, fake)
    model, mini_batch, training = _training(target, sample, loss, loss_target, reduction)
    try:
        found = make_plan(
            model,
            mini_batch,
            chosen,
            **training,
            optimizer=optimizer,
            memory=memory[0] if memory and len(memory) == 1 else memory,
            chunks=chunks,
            calibrate=not quick,
            bandwidth=bandwidth,
            latency=latency,
        )
    except Infeasible as error:  # a finding rather than a mistake: its own status, and JSON of its own
        facts = {"error": str(error), "device": error.device, "short": error.short, "changes": error.changes}
        finish(f"gpipe: {error}", (lambda: dumps(facts, indent=2)) if json else None)
        return 1
    finish(found, found.to_json if json else None, html, found.save)
    return 0


def check(
    target: Target,
    *,
    sample: Sample,
    loss: Loss = None,
    loss_target: LossTarget = None,
    reduction: Reduction = None,
    balance: Numbers = None,
    chunks: int = 4,
    json: Json = False,
    html: str | None = None,
) -> int:
    """Find out whether a model computes in micro-batches what it computes on the whole mini-batch.

    Exits with 1 if there is an error or a warning.

    Args:
        balance: Layers of each stage.
        chunks: Micro-batches.
        html: Save the report there, as a page.
    """
    expect_writable(html, ".html", ".json", ".txt")
    model, mini_batch, training = _training(target, sample, loss, loss_target, reduction)
    report = check_model(model, mini_batch, **training, balance=balance, chunks=chunks)
    finish(report, report.to_json if json else None, html, report.save)
    return 0 if report.ok else 1


def profile(
    target: Target, *, sample: Sample, device: str = "cpu", chunks: int = 1, timeout: float = 1.0, json: Json = False
) -> None:
    """Measure what each layer costs.

    Args:
        device: Where to measure.
        chunks: Micro-batches that the mini-batch is cut into; one is measured.
        timeout: Seconds to measure for.
    """
    mini_batch = sample_of(sample)
    bar = Console(stderr=True).is_terminal
    found = profile_of(model_of(target), mini_batch, torch.device(device), chunks, timeout, progress=bar)
    finish(found, found.to_json if json else None)


def simulate(
    target: Target,
    *,
    sample: Sample,
    devices: Devices = ("cpu", "cpu"),
    balance: Numbers = None,
    chunks: int = 8,
    schedule: str = "1f1b",
    checkpoint: str = "never",
    timeout: float = 1.0,
    json: Json = False,
    html: str | None = None,
) -> None:
    """Measure the layers, and predict a step of a pipeline of them.

    Args:
        devices: One for each stage; layers are measured on the first. Stages on one device take turns; a plain cpu is
            one for each stage.
        balance: Layers of each stage; by default the best for the measured times.
        chunks: Micro-batches.
        schedule: 1f1b, fill_drain, interleaved, looped_bfs, zero_bubble, interleaved_zero_bubble, zbv or dualpipev.
        checkpoint: never, except_last or always.
        timeout: Seconds to measure for.
        html: Save the timeline there, as a page.
    """
    expect_writable(html, ".html", ".json", ".svg")
    mini_batch = sample_of(sample)
    places = checked_devices(devices, len(devices))
    measured = profile_of(model_of(target), mini_batch, places[0], chunks, timeout)
    sizes = balance_cost(measured.seconds, len(places)) if balance is None else balance
    costs, placed = stage_costs(measured, sizes), placement(places)
    found = simulate_schedule(
        schedule, costs, microbatches=len(scatter(mini_batch, chunks)), checkpoint=checkpoint, placement=placed
    )
    finish(found, (lambda: trace(found)) if json else None, html, found.save)


def timeline(
    target: Target,
    *,
    sample: Sample,
    devices: Devices = ("cpu", "cpu"),
    balance: Numbers = None,
    chunks: int = 8,
    schedule: str = "1f1b",
    checkpoint: str = "never",
    json: Json = False,
    html: str | None = None,
) -> None:
    """Run a step of a pipeline twice, and show what each stage did in the second.

    The loss is the mean square of the output.

    Args:
        devices: One for each stage.
        balance: Layers of each stage; by default even by the bytes of their parameters.
        chunks: Micro-batches.
        schedule: 1f1b, fill_drain, interleaved, looped_bfs, zero_bubble, interleaved_zero_bubble, zbv, dualpipev, or
            auto.
        checkpoint: never, except_last or always.
        html: Save the timeline there, as a page.
    """
    expect_writable(html, ".html", ".json", ".svg")
    mini_batch = sample_of(sample)
    model, sizes = model_of(target), balance
    if balance is None and isinstance(model, nn.Sequential):
        sizes = balance_by_parameters(len(devices), model)
    mini_batch = as_input(model, mini_batch)
    with closing(GPipe(model, sizes, devices=devices, chunks=chunks, checkpoint=checkpoint)) as pipe:
        for _ in range(2):  # the first step opens threads and warms up kernels
            with record() as recorded:
                pipe.step(mini_batch, loss_fn=mean_square, reduction="mean", schedule=schedule)
    finish(recorded, (lambda: trace(recorded)) if json else None, html, recorded.save)


def _training(
    target: str, sample: Sequence[str], loss: str | None, loss_target: Sequence[str] | None, reduction: str | None
) -> tuple[nn.Module, Any, dict[str, Any]]:
    """The model, the mini-batch, and what a step of training takes beside them."""
    model, mini_batch = model_of(target), sample_of(sample)
    goal = None if loss_target is None else sample_of(loss_target, "loss-target")
    loss_fn = None if loss is None else load(loss, "loss")
    return model, mini_batch, {"target": goal, "loss_fn": loss_fn, "reduction": reduction}


def _devices(given: Sequence[str] | None, fake: str | None) -> Sequence[str] | str:
    """The devices ``given``, or those that are ``fake``; ValueError unless it is one of the two."""
    if fake is None and given is not None:
        return given
    if fake is None or given is not None:
        raise ValueError(f"devices: give either --devices or --fake, got {'neither' if fake is None else 'both'}")
    return fake
