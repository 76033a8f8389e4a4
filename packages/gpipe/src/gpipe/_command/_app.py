"""``gpipe check | profile | simulate | timeline``: what Python offers, for a model that is named."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import Annotated, Any

import cyclopts
import torch
from cyclopts import App, Parameter
from rich.console import Console
from torch import nn

import profiler
from profiler import Profile
from profiler.target import load, model_of, sample_of

from .._check import check as check_model
from .._flatten import flatten
from .._gpipe import GPipe
from ..balance import balance_by_parameters, balance_cost
from ..module._arguments import checked_devices
from ..simulate import simulate as simulate_schedule
from ..simulate import stage_costs
from ..timeline import Timeline, record
from ..timeline._chrome import trace
from ..values._leaves import tensors_of
from ._output import save

Texts = Annotated[list[str], Parameter(consume_multiple=True, negative="")]
Numbers = Annotated[list[int] | None, Parameter(consume_multiple=True, negative="")]
Devices = Annotated[list[str], Parameter(consume_multiple=True, negative="")]
Switch = Annotated[bool, Parameter(negative="")]

app = App(name="gpipe", help="Pipeline-parallel training of PyTorch models.", version_flags=["--version"])
"""Every command takes a model, ``package.module:name``: a module, or a function without arguments that makes one."""


def run(arguments: Sequence[str]) -> int:
    """Do what the command line says.

    Returns:
        The exit status: 0 if all is well, 1 if a check found something, 2 if what was asked for cannot be used.
    """
    try:
        status: int = app(arguments, exit_on_error=False, result_action="return_value") or 0
        return status
    except cyclopts.CycloptsError:
        return 2  # it has been printed
    except Exception as error:  # models fail on samples that are not theirs in any way they like
        lines = [f"gpipe: {type(error).__name__}: {error}", *getattr(error, "__notes__", [])]
        Console(stderr=True).print("\n".join(lines), style="red", markup=False, highlight=False)
        return 2


@app.command
def check(
    target: str,
    *,
    sample: Texts,
    loss: str | None = None,
    loss_target: Texts | None = None,
    balance: Numbers = None,
    chunks: int = 4,
    json: Switch = False,
) -> int:
    """Find out whether a model computes in micro-batches what it computes on the whole mini-batch.

    Exits with 1 if there is an error or a warning.

    Parameters
    ----------
    target
        The model: package.module:name.
    sample
        A mini-batch: a shape such as 64,3,224,224 or input_ids=8,128:int64:50257, or package.module:function.
    loss
        The loss: package.module:function, of output and target.
    loss_target
        The target, as a sample.
    balance
        Layers of each stage.
    chunks
        Micro-batches.
    json
        Print JSON.
    """
    model, mini_batch = model_of(target), sample_of(sample)
    goal = None if loss_target is None else sample_of(loss_target, "loss-target")
    loss_fn = None if loss is None else load(loss, "loss")
    with _busy("checking"):
        report = check_model(model, mini_batch, target=goal, loss_fn=loss_fn, balance=balance, chunks=chunks)
    print(report.to_json() if json else report)
    return 0 if report.ok else 1


@app.command
def profile(
    target: str,
    *,
    sample: Texts,
    device: str = "cpu",
    chunks: int = 1,
    timeout: float = 1.0,
    json: Switch = False,
    svg: str | None = None,
) -> None:
    """Measure what each layer costs.

    Parameters
    ----------
    target
        The model: package.module:name.
    sample
        A mini-batch: a shape such as 64,3,224,224 or input_ids=8,128:int64:50257, or package.module:function.
    device
        Where to measure.
    chunks
        Micro-batches that the mini-batch is cut into; one is measured.
    timeout
        Seconds to measure for.
    json
        Print JSON.
    svg
        Save a picture there.
    """
    layers, mini_batch = _layers(model_of(target), sample_of(sample))
    found = _profiled(layers, mini_batch, device, chunks, timeout)
    print(found.to_json() if json else found)
    if svg is not None:
        save(svg, lambda path: path.write_text(found.picture(), encoding="utf-8"))


@app.command
def simulate(
    target: str,
    *,
    sample: Texts,
    devices: Devices = ["cpu", "cpu"],  # noqa: B006 — never changed
    balance: Numbers = None,
    chunks: int = 8,
    schedule: str = "1f1b",
    checkpoint: str = "never",
    timeout: float = 1.0,
    json: Switch = False,
    html: str | None = None,
) -> None:
    """Measure the layers, and predict a step of a pipeline of them.

    Parameters
    ----------
    target
        The model: package.module:name.
    sample
        A mini-batch: a shape such as 64,3,224,224 or input_ids=8,128:int64:50257, or package.module:function.
    devices
        One for each stage; layers are measured on the first.
    balance
        Layers of each stage; by default the best for the measured times.
    chunks
        Micro-batches.
    schedule
        1f1b, fill_drain, interleaved or zero_bubble.
    checkpoint
        never, except_last or always.
    timeout
        Seconds to measure for.
    json
        Print JSON.
    html
        Save the timeline there, as a page.
    """
    layers, mini_batch = _layers(model_of(target), sample_of(sample))
    places = checked_devices(devices, len(devices))
    measured = _profiled(layers, mini_batch, str(places[0]), chunks, timeout)
    sizes = balance_cost(measured.seconds, len(places)) if balance is None else balance
    costs = stage_costs(measured, sizes)
    _show(simulate_schedule(schedule, costs, microbatches=chunks, checkpoint=checkpoint), json, html)


@app.command
def timeline(
    target: str,
    *,
    sample: Texts,
    devices: Devices = ["cpu", "cpu"],  # noqa: B006 — never changed
    balance: Numbers = None,
    chunks: int = 8,
    schedule: str = "1f1b",
    checkpoint: str = "never",
    json: Switch = False,
    html: str | None = None,
) -> None:
    """Run a step of a pipeline twice, and show what each stage did in the second.

    The loss is the mean square of the output.

    Parameters
    ----------
    target
        The model: package.module:name.
    sample
        A mini-batch: a shape such as 64,3,224,224 or input_ids=8,128:int64:50257, or package.module:function.
    devices
        One for each stage.
    balance
        Layers of each stage; by default even by the bytes of their parameters.
    chunks
        Micro-batches.
    schedule
        1f1b, fill_drain, interleaved, zero_bubble or auto.
    checkpoint
        never, except_last or always.
    json
        Print JSON.
    html
        Save the timeline there, as a page.
    """
    layers, mini_batch = _layers(model_of(target), sample_of(sample))
    sizes = balance_by_parameters(len(devices), layers) if balance is None else balance
    pipe = GPipe(layers, sizes, devices=devices, chunks=chunks, checkpoint=checkpoint)
    with closing(pipe):
        for _ in range(2):
            with record() as recorded:
                pipe.step(mini_batch, loss_fn=_mean_square, schedule=schedule)
    _show(recorded, json, html)


def _layers(model: nn.Module, sample: Any) -> tuple[nn.Sequential, Any]:
    """The layers of ``model``; what they are called with is the sample."""
    return (model if isinstance(model, nn.Sequential) else flatten(model, sample)), sample


def _profiled(layers: nn.Sequential, sample: Any, device: str, chunks: int, timeout: float) -> Profile:
    bar = Console(stderr=True).is_terminal
    return profiler.profile(layers, sample, device=torch.device(device), chunks=chunks, timeout=timeout, progress=bar)


def _mean_square(output: Any) -> torch.Tensor:
    return torch.stack([x.square().mean() for x in tensors_of(output) if x.is_floating_point()]).sum()


def _show(found: Timeline, json: bool, html: str | None) -> None:
    print(trace(found) if json else found)
    if html is not None:
        save(html, found.save)


def _busy(what: str) -> Any:
    return Console(stderr=True).status(f"{what} …")
