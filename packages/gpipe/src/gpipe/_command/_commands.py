"""The subcommands: ``plan``, ``check``, ``profile``, ``simulate`` and ``timeline``."""

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
from .._plan._blocks import profile_model
from .._plan._fake_devices import read_fake
from .._plan._planned import as_input
from ..balance import balance_by_parameters, balance_cost
from ..engine._workers import placement
from ..module._arguments import check_devices
from ..simulate import simulate as simulate_schedule
from ..simulate import stage_costs
from ..timeline import record
from ..timeline._chrome import trace
from ._output import expect_writable, finish
from ._target import create_sample, load, load_model


def _not_empty(kind: Any, values: Sequence[Any] | None) -> None:
    if values is not None and not len(values):
        raise ValueError("expected at least one value")


_MANY = Parameter(consume_multiple=True, negative="", validator=_not_empty)
_YES = Parameter(negative="")
_SAMPLE = "A mini-batch: a shape such as 64,3,224,224 or input_ids=8,128:int64:50257, or package.module:function."

Target = Annotated[str, Parameter(help="The model: package.module:name.")]
Sample = Annotated[list[str], _MANY, Parameter(help=_SAMPLE)]
Loss = Annotated[str | None, Parameter(help="The loss, called with output and target: package.module:function.")]
Reduction = Annotated[Literal["mean", "sum"] | None, Parameter(help="Whether the loss is a mean over rows or a sum.")]
LossTarget = Annotated[list[str] | None, _MANY, Parameter(help="The target, in the format of a sample.")]
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
    fake: Devices | None = None,
    bandwidth: str | None = None,
    latency: float | None = None,
    loss: Loss = None,
    loss_target: LossTarget = None,
    reduction: Reduction = None,
    optimizer: str = "adam",
    memory: Texts | None = None,
    speeds: Annotated[list[float] | None, _MANY] = None,
    chunks: Numbers = None,
    offload: Switch = False,
    host_memory: str | None = None,
    host_bandwidth: str | None = None,
    quick: Switch = False,
    json: Json = False,
    html: str | None = None,
) -> int:
    """Find the balance, the number of micro-batches, the schedule, and which stages recompute.

    If nothing fits into memory, exits with status 1 and suggests changes.

    Args:
        devices: One device per stage.
        fake: Hypothetical devices to plan for instead, such as 8x80GB, or 24GB 12GB; nothing is run, and all figures
            are estimates.
        bandwidth: Bytes per second between two fake devices, such as 50GB.
        latency: Seconds of latency between two fake devices.
        optimizer: The optimizer, such as adamw, sgd or adamw_8bit, for the memory of its state.
        memory: The memory limit of all devices, or one per device, such as 80GB or 24GiB.
        speeds: The relative speed of each device, such as 1 0.5.
        chunks: Numbers of micro-batches to try.
        offload: Keep parameters on the host.
        host_memory: The host's memory for saved tensors, and for offloaded parameters, gradients and the optimizer's
            state, such as 64GB.
        host_bandwidth: Bytes per second between the host and each device, such as 25GB.
        quick: Do not train a copy for a few steps to choose between the best plans.
        html: Save the plan to this file, as a page.
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
            speeds=speeds,
            chunks=chunks,
            calibrate=not quick,
            bandwidth=bandwidth,
            latency=latency,
            offload=offload,
            host_memory=host_memory,
            host_bandwidth=host_bandwidth,
        )
    except Infeasible as error:  # a result and not an error, with a separate status and JSON
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
    """Check that a model computes the same in micro-batches as on the full mini-batch.

    Exits with status 1 if there is an error or a warning.

    Args:
        balance: Number of layers of each stage.
        chunks: Number of micro-batches.
        html: Save the report to this file, as a page.
    """
    expect_writable(html, ".html", ".json", ".txt")
    model, mini_batch, training = _training(target, sample, loss, loss_target, reduction)
    report = check_model(model, mini_batch, **training, balance=balance, chunks=chunks)
    finish(report, report.to_json if json else None, html, report.save)
    return 0 if report.ok else 1


def profile(
    target: Target, *, sample: Sample, device: str = "cpu", chunks: int = 1, timeout: float = 1.0, json: Json = False
) -> None:
    """Measure the time and memory of each layer.

    Args:
        device: The device to measure on.
        chunks: Number of micro-batches; one of them is measured.
        timeout: Seconds to measure for.
    """
    mini_batch = create_sample(sample)
    bar = Console(stderr=True).is_terminal
    found = profile_model(load_model(target), mini_batch, torch.device(device), chunks, timeout, progress=bar)
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
    """Measure the layers, and predict a training step of their pipeline.

    Args:
        devices: One device per stage; layers are measured on the first. Stages on the same device take turns, except on
            cpu without an index.
        balance: Number of layers of each stage; by default the best balance for the measured times.
        chunks: Number of micro-batches.
        schedule: 1f1b, fill_drain, interleaved, looped_bfs, zero_bubble, interleaved_zero_bubble, zbv or dualpipev.
        checkpoint: never, except_last, always or offload.
        timeout: Seconds to measure for.
        html: Save the timeline to this file, as a page.
    """
    expect_writable(html, ".html", ".json", ".svg")
    mini_batch = create_sample(sample)
    places = check_devices(devices, len(devices))
    measured = profile_model(load_model(target), mini_batch, places[0], chunks, timeout)
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
    """Run two training steps of a pipeline, and show the timeline of the second.

    The loss is the mean square of the output.

    Args:
        devices: One device per stage.
        balance: Number of layers of each stage; by default balanced by the bytes of their parameters.
        chunks: Number of micro-batches.
        schedule: 1f1b, fill_drain, interleaved, looped_bfs, zero_bubble, interleaved_zero_bubble, zbv, dualpipev, or
            auto.
        checkpoint: never, except_last, always or offload.
        html: Save the timeline to this file, as a page.
    """
    expect_writable(html, ".html", ".json", ".svg")
    mini_batch = create_sample(sample)
    model, sizes = load_model(target), balance
    if balance is None and isinstance(model, nn.Sequential):
        sizes = balance_by_parameters(len(devices), model)
    mini_batch = as_input(model, mini_batch)
    with closing(GPipe(model, sizes, devices=devices, chunks=chunks, checkpoint=checkpoint)) as pipe:
        for _ in range(2):  # the first step starts threads and warms up kernels
            with record() as recorded:
                pipe.step(mini_batch, loss_fn=mean_square, reduction="mean", schedule=schedule)
    finish(recorded, (lambda: trace(recorded)) if json else None, html, recorded.save)


def _training(
    target: str, sample: Sequence[str], loss: str | None, loss_target: Sequence[str] | None, reduction: str | None
) -> tuple[nn.Module, Any, dict[str, Any]]:
    """Return the model, the mini-batch, and the further arguments of a training step."""
    model, mini_batch = load_model(target), create_sample(sample)
    goal = None if loss_target is None else create_sample(loss_target, "loss-target")
    loss_fn = None if loss is None else load(loss, "loss")
    return model, mini_batch, {"target": goal, "loss_fn": loss_fn, "reduction": reduction}


def _devices(given: Sequence[str] | None, fake: Sequence[str] | None) -> Sequence[str]:
    """Return the devices ``given``, or the ``fake`` ones; ValueError unless exactly one of the two is set."""
    if fake is None and given is not None:
        return given
    if fake is None or given is not None:
        raise ValueError(f"devices: pass either --devices or --fake, got {'neither' if fake is None else 'both'}")
    if read_fake(fake) is None:
        raise ValueError(
            f"fake: expected hypothetical devices, such as 8x80GB, 2xH100 or 24GB 12GB; got {' '.join(fake)}"
        )
    return fake
