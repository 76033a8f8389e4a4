"""The kinds of findings of a check."""

from __future__ import annotations

from typing import Literal, NamedTuple

Level = Literal["error", "warning", "note"]

CODES: dict[str, tuple[Level, str]] = {
    "batchnorm": (
        "warning",
        "deferred_batch_norm=True gives the running statistics of the whole mini-batch; keep eight rows or more in a "
        "micro-batch, or use GroupNorm or LayerNorm, which look at one row at a time",
    ),
    "mixes-rows": (
        "error",
        "compute each row by itself; if a dimension is not where the layer expects it, look at batch_first, dim= and "
        "transposed inputs; if rows have to meet, do it in the loss, with all outputs",
    ),
    "rows": (
        "error",
        "let a row's output depend on that row alone; what depends on the place of a row in the mini-batch belongs "
        "into the input, and a division by the number of rows into the loss",
    ),
    "rows-lost": (
        "error",
        "keep one row of output for each row of input, and reduce over rows in the loss; for a model that returns "
        "sums or means there are out_spec=Sum() and out_spec=Mean()",
    ),
    "hard-coded-batch": ("error", "take the number of rows from the input, as in x.view(x.shape[0], -1)"),
    "gradient": (
        "error",
        "look at custom autograd functions and hooks: the gradient of a row must not depend on the other rows",
    ),
    "stateful": (
        "error",
        "a pipeline calls the layer once for each micro-batch, and again for recomputations: keep nothing from call to "
        "call that changes the output",
    ),
    "impure": (
        "error",
        "draw from PyTorch's generators, which a pipeline repeats for recomputations, and neither seed them nor draw "
        "from Python's or NumPy's; leave clocks, and what other layers keep, out of the forward",
    ),
    "buffers": (
        "warning",
        "they are updated once for each micro-batch, instead of once; divide momentum by the number of micro-batches, "
        "or update them outside of the forward",
    ),
    "loss": (
        "error",
        "the loss is no plain mean over rows, as with ignore_index, padding or class weights: let loss_fn return "
        "(sum, count), or use reduction='sum'",
    ),
    "untrained": (
        "error",
        "let a parameter require grad, and what comes after it be differentiable, unlike argmax and detach; for "
        "inference alone the layers agree, as far as nothing else is found",
    ),
    "recompute": (
        "error",
        "a recomputation must repeat its forward: see what the layers keep or draw elsewhere; or checkpoint='never'",
    ),
    "pipeline": ("error", "the layers agree one by one, but not together: look for what they share"),
    "random": ("note", "masks are others than the plain model's; with the same seed and chunks they are repeated"),
    "in-place": ("note", "where a stage begins with this layer, the pipe works on a clone of its input"),
    "frozen": ("note", "nothing to do; its stage has no gradients of weights to compute"),
    "tied": ("note", "keep the layers in one stage if you can: then no gradient has to be sent"),
    "reassociation": ("note", "sums in another order differ by rounding; nothing to do"),
}
"""All kinds of findings: how bad each is, and what to do about it."""


class Finding(NamedTuple):
    """A difference or problem that a check found.

    Attributes:
        code: the kind, a key of ``CODES``.
        layer: the name of the layer; None for the loss and the whole model.
        kind: the class of the layer, as a name.
        message: what happens.
        evidence: what was measured.
    """

    code: str
    layer: str | None
    kind: str
    message: str
    evidence: str = ""

    @property
    def level(self) -> Level:
        """``"error"``: results are wrong or training fails. ``"warning"``: they differ. ``"note"``: good to know."""
        return CODES[self.code][0]

    @property
    def advice(self) -> str:
        """What to do about it, as text."""
        return CODES[self.code][1]

    @property
    def where(self) -> str:
        """The layer, as the start of a message; empty for the whole model."""
        return "" if self.layer is None else f"layer {self.layer!r} ({self.kind}): "

    def __str__(self) -> str:
        lines = [f"{self.level}[{self.code}]: {self.where}{self.message}"]
        lines += [f"  |  {line}" for line in self.evidence.splitlines()]
        return "\n".join([*lines, f"  = {self.advice}"])
