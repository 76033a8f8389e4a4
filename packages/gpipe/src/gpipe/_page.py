"""Save reports to files, and render them as HTML pages."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from html import escape  # xml.sax takes longer to import than the rest of a report
from os import PathLike, fspath
from pathlib import Path

_STYLE = """
.gpipe-report { color-scheme: light dark; color: #1f2937; background: #ffffff; padding: .5rem 1rem }
@media (prefers-color-scheme: dark) { .gpipe-report { color: #e5e7eb; background: #14181f } }
.gpipe-report pre { font-size: 13px; color: inherit; background: none }
.gpipe-report > * { overflow-x: auto }
"""

_FORBIDDEN = re.compile("[^\t\n\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def escape_xml(text: str) -> str:
    """Escape text for an element or an attribute, and replace characters that XML does not allow.

    >>> escape_xml('a < "b"')
    'a &lt; &quot;b&quot;'
    """
    return escape(_FORBIDDEN.sub("\N{REPLACEMENT CHARACTER}", text))


def fragment(text: str, picture: str = "") -> str:
    """Return a report as HTML for notebooks, light or dark like the reader's browser.

    Args:
        text: the report as plain text, which is escaped.
        picture: an SVG to show below the text.
    """
    shown = f"<pre>{escape_xml(text)}</pre>" if text else ""
    below = f"<div>{picture}</div>" if picture else ""
    return f'<div class="gpipe-report"><style>{_STYLE}</style>{shown}{below}</div>'


def page(title: str, text: str, picture: str = "") -> str:
    """Return the same as a complete HTML document with a title."""
    return (
        '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n'
        f"<title>{escape_xml(title)}</title>\n{fragment(text, picture)}\n</html>\n"
    )


def save(path: str | PathLike[str], forms: Mapping[str, Callable[[], str]]) -> None:
    """Write a report to a file.

    Args:
        path: the file, which is overwritten.
        forms: functions that return the report in a format, keyed by file extension, such as ``.json``.

    Raises:
        ValueError: ``forms`` has no format for the extension of ``path``.
    """
    file = Path(fspath(path))
    if file.suffix not in forms:
        *others, last = forms
        raise ValueError(
            f"path: expected a name that ends in {', '.join(others)} or {last}, got the ending {file.suffix!r}"
        )
    file.write_bytes(forms[file.suffix]().encode())
