"""The report of a check, as text and as JSON."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from os import PathLike

from .._page import fragment, page
from .._saving import save
from ._findings import Finding

_LEVELS = ("error", "warning", "note")


@dataclass(frozen=True)
class Report:
    """The result of :func:`gpipe.check`. ``str()`` explains it.

    Attributes:
        findings: all findings; those of layers first, in the order of layers.
        layers: the number of layers that were checked.
        rows: the number of rows of the sample.
        microbatches: the number of micro-batches that it was cut into.
        dtype: the dtype of the computations; ``"float64"`` unless the model cannot compute in it.
        compared: the settings under which a pipe of the whole model agreed with the plain model; empty if there are
            errors.
    """

    findings: tuple[Finding, ...]
    layers: int
    rows: int
    microbatches: int
    dtype: str
    compared: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether the pipe trains like the plain model: there is no error and no warning."""
        return all(finding.level == "note" for finding in self.findings)

    def to_json(self) -> str:
        """The report as a JSON object."""
        findings = [{**each._asdict(), "level": each.level, "advice": each.advice} for each in self.findings]
        facts = {name: getattr(self, name) for name in ("layers", "rows", "microbatches", "dtype", "compared")}
        return json.dumps({"ok": self.ok, "findings": findings, **facts}, indent=2)

    def save(self, path: str | PathLike[str]) -> None:
        """Write the report to a file, in the format that the ending of ``path`` selects.

        Args:
            path: ``.html`` is a page; ``.json`` is :meth:`to_json`; ``.txt`` is the text.

        Raises:
            ValueError: ``path`` has another ending.
        """
        save(path, {".html": lambda: page("Check", str(self)), ".json": self.to_json, ".txt": lambda: f"{self}\n"})

    def __str__(self) -> str:
        return "\n\n".join([*map(str, self._ordered()), self._summary()])

    def _repr_html_(self) -> str:
        return fragment(str(self))

    def _ordered(self) -> list[Finding]:
        """The findings, errors first."""
        return sorted(self.findings, key=lambda finding: _LEVELS.index(finding.level))

    def _summary(self) -> str:
        counts = Counter[str](finding.level for finding in self.findings)
        found = ", ".join(f"{counts[level]} {level}{'s' * (counts[level] != 1)}" for level in _LEVELS if counts[level])
        lines = [
            f"{found or 'nothing found'}: {self.layers} layers, {self.rows} rows in {self.microbatches} micro-batches, "
            f"in {self.dtype}"
        ]
        if self.compared:
            lines.append(f"the whole pipe equals the plain model under {', '.join(self.compared)}")
        else:
            lines.append("the whole pipe was not compared; fix the errors first")
        return "\n".join(lines)
