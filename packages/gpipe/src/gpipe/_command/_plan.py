"""``gpipe plan``."""

from __future__ import annotations

from collections.abc import Sequence
from json import dumps

from .._plan import Infeasible
from .._plan import plan as make_plan
from ._inputs import Devices, Figures, Json, Loss, LossTarget, Numbers, Sample, Switch, Target, Texts
from ._output import expect_writable, finish
from ._target import load, model_of, sample_of


def plan(
    target: Target,
    *,
    sample: Sample,
    devices: Devices | None = None,
    fake: str | None = None,
    bandwidth: Texts | None = None,
    latency: Figures = None,
    loss: Loss = None,
    loss_target: LossTarget = None,
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
            estimates. 64x8x80GB are 64 nodes of 8 devices, for which replicas and stages are chosen.
        bandwidth: Of fake devices, what each sends in a second to another one, such as 50GB; or two: to another device
            of its node, and to another node.
        latency: Of the same links, in seconds.
        optimizer: A name such as adam or sgd: what its state takes.
        memory: What each device may hold, once or for each, such as 80GB or 24GiB.
        chunks: Numbers of micro-batches to look at.
        quick: Do not train a copy for a few steps to choose between the best.
        html: Save the plan there, as a page.
    """
    expect_writable(html, ".html", ".json", ".txt")
    chosen = _devices(devices, fake)
    model, mini_batch = model_of(target), sample_of(sample)
    goal = None if loss_target is None else sample_of(loss_target, "loss-target")
    try:
        found = make_plan(
            model,
            mini_batch,
            chosen,
            target=goal,
            loss_fn=None if loss is None else load(loss, "loss"),
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


def _devices(given: Sequence[str] | None, fake: str | None) -> Sequence[str] | str:
    """The devices ``given``, or those that are ``fake``; ValueError unless it is one of the two."""
    if fake is None and given is not None:
        return given
    if fake is None or given is not None:
        raise ValueError(f"devices: give either --devices or --fake, got {'neither' if fake is None else 'both'}")
    return fake
