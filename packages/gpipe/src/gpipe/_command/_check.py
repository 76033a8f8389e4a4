"""``gpipe check``."""

from __future__ import annotations

from .._check import check as check_model
from ._inputs import Json, Loss, LossTarget, Numbers, Sample, Target
from ._output import expect_writable, finish
from ._target import load, model_of, sample_of


def check(
    target: Target,
    *,
    sample: Sample,
    loss: Loss = None,
    loss_target: LossTarget = None,
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
    model, mini_batch = model_of(target), sample_of(sample)
    goal = None if loss_target is None else sample_of(loss_target, "loss-target")
    loss_fn = None if loss is None else load(loss, "loss")
    report = check_model(model, mini_batch, target=goal, loss_fn=loss_fn, balance=balance, chunks=chunks)
    finish(report, report.to_json if json else None, html, report.save)
    return 0 if report.ok else 1
