"""The report of a check, as text, JSON or HTML."""

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
        findings: all findings, beginning with the layers' findings in layer order.
        checked: the numbers of layers, rows and micro-batches, and the dtype of the computations, as text.
        compared: the comparisons in which a pipe of the model agreed; empty if there are errors.
        loss: whether a pipe computes the loss per micro-batch, or once on the full mini-batch, as text; empty if the
            model computes its own loss.
    """

    findings: tuple[Finding, ...]
    checked: str
    compared: tuple[str, ...]
    loss: str = ""

    @property
    def ok(self) -> bool:
        """True if there is no error and no warning: the pipe trains like the plain model."""
        return all(finding.level == "note" for finding in self.findings)

    def to_json(self) -> str:
        """Return the report as a JSON object."""
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
        """Write the report to a file, in the format given by the suffix of ``path``.

        Args:
            path: the file. ``.html`` writes a page, ``.json`` the result of :meth:`to_json`, ``.txt`` the text.

        Raises:
            ValueError: ``path`` has a different suffix.
        """
        save(path, {".html": lambda: page("Check", str(self)), ".json": self.to_json, ".txt": lambda: f"{self}\n"})

    def __str__(self) -> str:
        ordered = sorted(self.findings, key=lambda finding: _LEVELS.index(finding.level))
        counts = Counter[str](finding.level for finding in self.findings)
        found = ", ".join(f"{counts[level]} {level}{'s' * (counts[level] != 1)}" for level in _LEVELS if counts[level])
        # With errors in layers, comparing a pipe of them would only repeat these.
        pipe = "the full pipe was not compared; fix the errors first"
        if self.compared:
            pipe = f"the full pipe matches the plain model in {', '.join(self.compared)}"
        last = "\n".join([f"{found or 'nothing found'}: {self.checked}", *filter(None, [self.loss]), pipe])
        return "\n\n".join([*map(str, ordered), last])

    def _repr_html_(self) -> str:
        return fragment(str(self))
