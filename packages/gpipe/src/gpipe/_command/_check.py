"""``gpipe check``."""

from __future__ import annotations

from profiler.target import load, model_of, sample_of

from .._check import check as check_model
from ._inputs import Numbers, Switch, Texts, busy
from ._output import save


def check(
    target: str,
    *,
    sample: Texts,
    loss: str | None = None,
    loss_target: Texts | None = None,
    balance: Numbers = None,
    chunks: int = 4,
    json: Switch = False,
    html: str | None = None,
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
    html
        Save the report there, as a page.
    """
    model, mini_batch = model_of(target), sample_of(sample)
    goal = None if loss_target is None else sample_of(loss_target, "loss-target")
    loss_fn = None if loss is None else load(loss, "loss")
    with busy("checking"):
        report = check_model(model, mini_batch, target=goal, loss_fn=loss_fn, balance=balance, chunks=chunks)
    print(report.to_json() if json else report)
    if html is not None:
        save(html, report.save)
    return 0 if report.ok else 1
