"""Reports in HTML: for notebooks, and as pages that need no other file."""

from __future__ import annotations

from collections.abc import Sequence

from .svg import DARK, FAINT, GROUND, INK, PAPER, RULE, escaped

__all__ = ["fragment", "page", "scrolling", "table"]

_NAMES = {"ink": INK, "faint": FAINT, "line": RULE, "paper": PAPER, "bar": GROUND}
_LIGHT = "; ".join(f"--{name}: {colour}" for name, colour in _NAMES.items())
_DARKER = "; ".join(f"--{name}: {DARK[colour]}" for name, colour in _NAMES.items())

# Notebooks give tables stripes in their own theme, which may be dark where the browser is light, or the reverse.
_STYLE = f"""
.gpipe-report {{ color-scheme: light dark; {_LIGHT};
  font: 14px/1.5 ui-sans-serif, system-ui, sans-serif; padding: .5rem 1rem;
  color: var(--ink); background: var(--paper) }}
@media (prefers-color-scheme: dark) {{ .gpipe-report {{ {_DARKER} }} }}
body.gpipe-report {{ max-width: 72rem; margin: 2rem auto }}
.gpipe-report h1 {{ font-size: 1.4rem; margin: 0 0 .2rem; color: inherit }}
.gpipe-report h2 {{ font-size: 1.05rem; margin: 1.5rem 0 .5rem; color: inherit }}
.gpipe-report p {{ margin: .2rem 0 }} .gpipe-report .faint {{ color: var(--faint) }}
.gpipe-report code, .gpipe-report pre {{ font-size: .95em; color: inherit; background: none }}
.gpipe-report .scroll {{ overflow-x: auto }} .gpipe-report svg {{ max-width: none }}
.gpipe-report table {{ border-collapse: collapse; margin: 0; font-size: inherit; color: inherit }}
.gpipe-report tr {{ background: none !important }}
.gpipe-report th, .gpipe-report td {{ padding: .2rem .9rem .2rem 0; white-space: nowrap; text-align: right }}
.gpipe-report th.left, .gpipe-report td.left {{ text-align: left }}
.gpipe-report th {{ color: var(--faint); font-weight: 500; border-bottom: 1px solid var(--line) }}
"""


def fragment(body: str) -> str:
    """A report as a part of a page, as ``_repr_html_`` returns it.

    Args:
        body: HTML.

    Returns:
        An element with its style, light or dark as the reader's browser.
    """
    return f'<div class="gpipe-report"><style>{_STYLE}</style>{body}</div>'


def page(title: str, body: str) -> str:
    """A report as a page that needs no other file.

    Args:
        title: the title, which is escaped.
        body: HTML.

    Returns:
        The text of the page.
    """
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escaped(title)}</title>\n<style>{_STYLE}</style>\n</head>\n"
        f'<body class="gpipe-report">\n{body}\n</body>\n</html>\n'
    )


def scrolling(wide: str) -> str:
    """An element around content that may be wider than the page, such as a picture or a table.

    Args:
        wide: HTML.

    Returns:
        An element that scrolls sideways.
    """
    return f'<div class="scroll">{wide}</div>'


def table(rows: Sequence[Sequence[str]], left: int) -> str:
    """A table, as :func:`profiler.text.align` makes it of text.

    Args:
        rows: the head and the lines; their text is escaped.
        left: the number of columns that are aligned left; others are aligned right.

    Returns:
        The element.

    >>> "<td>&lt;a&gt;</td>" in table([["name"], ["<a>"]], left=0)
    True
    """
    head, *body = (_cells("td" if k else "th", row, left) for k, row in enumerate(rows))
    return scrolling(f"<table><thead>{head}</thead><tbody>{''.join(body)}</tbody></table>")


def _cells(tag: str, row: Sequence[str], left: int) -> str:
    sides = [' class="left"' if k < left else "" for k in range(len(row))]
    cells = (f"<{tag}{side}>{escaped(cell)}</{tag}>" for side, cell in zip(sides, row, strict=True))
    return f"<tr>{''.join(cells)}</tr>"
