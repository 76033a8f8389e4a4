"""Notes on exceptions, where there are none too."""

from __future__ import annotations


def annotate(error: Exception, note: str) -> None:
    if hasattr(error, "add_note"):
        error.add_note(note)
    elif error.args and isinstance(error.args[0], str):  # Python 3.10 has no notes
        error.args = (f"{error.args[0]}\n{note}", *error.args[1:])
