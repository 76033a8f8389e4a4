"""The report of a check in HTML."""

from __future__ import annotations

from collections.abc import Iterable

from profiler.svg import escaped

from ._findings import Finding

_STYLE = """<style>
.gpipe-report .finding { margin: .8rem 0; padding-left: .8rem; border-left: 3px solid var(--line) }
.gpipe-report .error { border-color: #e45756 } .gpipe-report .warning { border-color: #eeca3b }
.gpipe-report pre { margin: .3rem 0; white-space: pre-wrap }
</style>"""


def body(findings: Iterable[Finding], summary: str) -> str:
    """What the page and a notebook show.

    Args:
        findings: in the order in which they are shown.
        summary: lines of text.
    """
    return f"{_STYLE}<h1>Check</h1>{''.join(map(_finding, findings))}{_paragraphs(summary)}"


def _finding(found: Finding) -> str:
    evidence = f"<pre>{escaped(found.evidence)}</pre>" if found.evidence else ""
    return (
        f'<div class="finding {found.level}"><p><b>{found.level}[{found.code}]</b> '
        f"{escaped(found.where)}{escaped(found.message)}</p>"
        f'{evidence}<p class="faint">{escaped(found.advice)}</p></div>'
    )


def _paragraphs(lines: str) -> str:
    return "".join(f"<p>{escaped(line)}</p>" for line in lines.splitlines())
