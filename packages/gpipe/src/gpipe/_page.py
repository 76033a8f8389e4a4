"""Reports as HTML: the text that is printed, above a picture. Nothing is fetched from anywhere."""

from __future__ import annotations

import re
from html import escape  # xml.sax takes longer to import than the rest of a report

_STYLE = """
.gpipe-report { color-scheme: light dark; color: #1f2937; background: #ffffff; padding: .5rem 1rem }
@media (prefers-color-scheme: dark) { .gpipe-report { color: #e5e7eb; background: #14181f } }
.gpipe-report pre { font-size: 13px; color: inherit; background: none }
.gpipe-report > * { overflow-x: auto }
"""

_FORBIDDEN = re.compile("[^\t\n\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def escaped(text: str) -> str:
    """Text escaped for an element or an attribute. Characters that XML does not allow are replaced.

    >>> escaped('a < "b"')
    'a &lt; &quot;b&quot;'
    """
    return escape(_FORBIDDEN.sub("\N{REPLACEMENT CHARACTER}", text))


def fragment(text: str, picture: str = "") -> str:
    """A report as notebooks show it, light or dark as the reader's browser.

    Args:
        text: the report, which is escaped.
        picture: an SVG to show below it.
    """
    shown = f"<pre>{escaped(text)}</pre>" if text else ""
    below = f"<div>{picture}</div>" if picture else ""
    return f'<div class="gpipe-report"><style>{_STYLE}</style>{shown}{below}</div>'


def page(title: str, text: str, picture: str = "") -> str:
    """The same as a file, with a title."""
    return (
        '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n'
        f"<title>{escaped(title)}</title>\n{fragment(text, picture)}\n</html>\n"
    )
