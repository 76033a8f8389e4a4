"""Notes on exceptions, on every version of Python."""


def add_note(error: BaseException, note: str) -> None:
    """``error.add_note(note)``. On Python 3.10, which has no notes, it is appended to ``error.__notes__``.

    Args:
        error: the exception.
        note: one or more lines.

    >>> error = ValueError("no rows")
    >>> add_note(error, "while reading batch 3")
    >>> error.__notes__
    ['while reading batch 3']
    """
    if hasattr(error, "add_note"):
        error.add_note(note)
    else:
        error.__notes__ = [*getattr(error, "__notes__", []), note]
