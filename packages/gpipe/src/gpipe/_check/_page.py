"""The report of a check in HTML."""

from __future__ import annotations

from profiler import html
from profiler.svg import escaped

from ._findings import Finding
from ._report import Report

_STYLE = """<style>
.gpipe-report .finding { margin: .8rem 0; padding-left: .8rem; border-left: 3px solid var(--line) }
.gpipe-report .error { border-color: #e45756 } .gpipe-report .warning { border-color: #eeca3b }
.gpipe-report pre { margin: .3rem 0; white-space: pre-wrap }
</style>"""


def page(report: Report) -> str:
    """The report in a page of its own."""
    return html.page("Check", body(report))


def body(report: Report) -> str:
    """What the page and a notebook show: the findings, errors first, and the summary."""
    findings = "".join(map(_finding, report._ordered()))
    return f"{_STYLE}<h1>Check</h1>{findings}{_paragraphs(report._summary())}"


def _finding(found: Finding) -> str:
    evidence = f"<pre>{escaped(found.evidence)}</pre>" if found.evidence else ""
    return (
        f'<div class="finding {found.level}"><p><b>{found.level}[{found.code}]</b> '
        f"{escaped(found.where)}{escaped(found.message)}</p>"
        f'{evidence}<p class="faint">{escaped(found.advice)}</p></div>'
    )


def _paragraphs(lines: str) -> str:
    return "".join(f"<p>{escaped(line)}</p>" for line in lines.splitlines())
