"""Notes on exceptions of any class, on every version of Python."""


def add_note(error: BaseException, note: str) -> None:
    """Add a note, as ``error.add_note(note)`` does.

    Also on Python 3.10, which has no notes but keeps them, and to an exception that forbids to set its attributes.

    Args:
        error: the exception.
        note: one or more lines.

    >>> error = ValueError("no rows")
    >>> add_note(error, "while reading batch 3")
    >>> error.__notes__
    ['while reading batch 3']
    """
    vars(error).setdefault("__notes__", []).append(note)
