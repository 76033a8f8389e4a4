"""Finding codes, with their severity and advice."""

from __future__ import annotations

from typing import Literal, NamedTuple

Level = Literal["error", "warning", "note"]

CODES = {
    "batchnorm": "set deferred_batch_norm=True, use at least eight rows per micro-batch, or use GroupNorm",
    "mixes-rows": "compute each row independently: check dim=, batch_first and transposed inputs; or do it in the loss",
    "rows": "pass values that depend on a row's position as an input, and divide by the number of rows in the loss",
    "rows-lost": "return one output row per input row; or pass out_spec=Sum() or out_spec=Mean()",
    "hard-coded-batch": "take the number of rows from the input, as in x.view(x.shape[0], -1)",
    "gradient": "check custom autograd functions and hooks: the gradient of a row must not depend on different rows",
    "stateful": "store nothing between calls that changes the output: the layer is called once per micro-batch",
    "impure": "use PyTorch's generators and do not seed them; do not read a clock or the state of other layers",
    "buffers": "each micro-batch updates them: divide momentum by chunks, or update outside the forward",
    "loss": "omit reduction=, or let loss_fn return gpipe.LossSum(total, count), for example for a mean over a mask",
    "untrained": "unfreeze a parameter, and use differentiable operations after it, not argmax or detach",
    "recompute": "check layers for state or generators that a recomputation cannot repeat; or use checkpoint='never'",
    "pipeline": "look for state that layers share: each layer alone agrees",
    "random": "masks differ from the plain model's; they are reproducible with the same seed and chunks",
}
"""The advice for each kind of finding."""

_WARNINGS = ("batchnorm", "buffers")


class Finding(NamedTuple):
    """A difference or problem that a check found.

    Attributes:
        code: the kind, a key of ``CODES``.
        layer: the name of the layer; None for the loss, the full model, and the operations of a model's own forward.
        kind: the class name of the layer; for the operations of a model's own forward, the class name of the model.
        message: the problem.
        evidence: the measurement or error behind it; may be empty.
    """

    code: str
    layer: str | None
    kind: str
    message: str
    evidence: str = ""

    @property
    def level(self) -> Level:
        """``"error"``: wrong results, or training fails. ``"warning"``: results differ. ``"note"``: harmless."""
        return "warning" if self.code in _WARNINGS else "note" if self.code == "random" else "error"

    @property
    def advice(self) -> str:
        """The remedy, as text."""
        return CODES[self.code]

    @property
    def where(self) -> str:
        """The layer, as the prefix of a message; empty for the loss and the full model."""
        if self.layer is not None:
            return f"layer {self.layer!r} ({self.kind}): "
        return f"the forward of {self.kind}: " if self.kind else ""

    def __str__(self) -> str:
        lines = [f"{self.level}[{self.code}]: {self.where}{self.message}"]
        lines += [f"  |  {line}" for line in self.evidence.splitlines()]
        return "\n".join([*lines, f"  = {self.advice}"])
