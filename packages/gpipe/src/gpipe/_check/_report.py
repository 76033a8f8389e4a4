"""The report of a check, as text and as JSON."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from os import PathLike

from .._page import fragment, page, save
from ._findings import Finding

_LEVELS = ("error", "warning", "note")


@dataclass(frozen=True)
class Report:
    """The result of :func:`gpipe.check`. ``str()`` explains it.

    Attributes:
        findings: all findings; those of layers first, in the order of layers.
        checked: the numbers of layers, rows and micro-batches, and the dtype of the computations, as text.
        compared: the settings under which a pipe of the whole model agreed with the plain model; empty if there are
            errors.
        loss: whether a pipe computes the loss for each micro-batch, or once on all rows; empty for a model's own loss.
    """

    findings: tuple[Finding, ...]
    checked: str
    compared: tuple[str, ...]
    loss: str = ""

    @property
    def ok(self) -> bool:
        """Whether the pipe trains like the plain model: there is no error and no warning."""
        return all(finding.level == "note" for finding in self.findings)

    def to_json(self) -> str:
        """The report as a JSON object."""
        findings = [{**each._asdict(), "level": each.level, "advice": each.advice} for each in self.findings]
        facts = {
            "ok": self.ok,
            "findings": findings,
            "checked": self.checked,
            "compared": self.compared,
            "loss": self.loss,
        }
        return json.dumps(facts, indent=2)

    def save(self, path: str | PathLike[str]) -> None:
        """Write the report to a file, in the format that the ending of ``path`` selects.

        Args:
            path: ``.html`` is a page; ``.json`` is :meth:`to_json`; ``.txt`` is the text.

        Raises:
            ValueError: ``path`` has another ending.
        """
        save(path, {".html": lambda: page("Check", str(self)), ".json": self.to_json, ".txt": lambda: f"{self}\n"})

    def __str__(self) -> str:
        ordered = sorted(self.findings, key=lambda finding: _LEVELS.index(finding.level))
        counts = Counter[str](finding.level for finding in self.findings)
        found = ", ".join(f"{counts[level]} {level}{'s' * (counts[level] != 1)}" for level in _LEVELS if counts[level])
        # Where layers are at fault, a pipe of them would only say so again.
        pipe = "the whole pipe was not compared; fix the errors first"
        if self.compared:
            pipe = f"the whole pipe equals the plain model under {', '.join(self.compared)}"
        last = "\n".join([f"{found or 'nothing found'}: {self.checked}", *filter(None, [self.loss]), pipe])
        return "\n\n".join([*map(str, ordered), last])

    def _repr_html_(self) -> str:
        return fragment(str(self))
