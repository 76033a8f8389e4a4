"""The kinds of findings of a check."""

from __future__ import annotations

from typing import Literal, NamedTuple

Level = Literal["error", "warning", "note"]

CODES = {
    "batchnorm": "set deferred_batch_norm=True, keep eight rows or more in a micro-batch, or use GroupNorm",
    "mixes-rows": "compute each row by itself: look at dim=, batch_first and transposed inputs; or do it in the loss",
    "rows": "pass what depends on the place of a row as an input, and divide by the number of rows in the loss",
    "rows-lost": "keep one row of output for each row of input; or give out_spec=Sum() or out_spec=Mean()",
    "hard-coded-batch": "take the number of rows from the input, as in x.view(x.shape[0], -1)",
    "gradient": "look at custom autograd functions and hooks: the gradient of a row must not depend on other rows",
    "stateful": "keep nothing from call to call that changes the output: each micro-batch is a call",
    "impure": "draw from PyTorch's generators, and do not seed them; read no clock, and no state of other layers",
    "buffers": "each micro-batch updates them: divide momentum by their number, or update outside of the forward",
    "loss": "leave out reduction=, or let loss_fn return gpipe.LossSum(total, count), as for a mean over a mask",
    "untrained": "let a parameter require grad, and what comes after it be differentiable, unlike argmax and detach",
    "recompute": "see what layers keep, or draw elsewhere: a recomputation must repeat it; or checkpoint='never'",
    "pipeline": "look for what the layers share: one by one they agree",
    "random": "masks are others than the plain model's; with the same seed and chunks they are repeated",
}
"""All kinds of findings, and what to do about them."""

_WARNINGS = ("batchnorm", "buffers")


class Finding(NamedTuple):
    """A difference or problem that a check found.

    Attributes:
        code: the kind, a key of ``CODES``.
        layer: the name of the layer; None for the loss, the whole model, and the operations of a model's own forward.
        kind: the class of the layer, as a name; for the operations of a model's own forward, the class of the model.
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
        return "warning" if self.code in _WARNINGS else "note" if self.code == "random" else "error"

    @property
    def advice(self) -> str:
        """What to do about it, as text."""
        return CODES[self.code]

    @property
    def where(self) -> str:
        """The layer, as the start of a message; empty for the whole model."""
        if self.layer is not None:
            return f"layer {self.layer!r} ({self.kind}): "
        return f"the forward of {self.kind}: " if self.kind else ""

    def __str__(self) -> str:
        lines = [f"{self.level}[{self.code}]: {self.where}{self.message}"]
        lines += [f"  |  {line}" for line in self.evidence.splitlines()]
        return "\n".join([*lines, f"  = {self.advice}"])
