"""Add notes to exceptions of any class, on every supported Python version."""


def add_note(error: BaseException, note: str) -> None:
    """Add a note like ``error.add_note(note)``.

    It also works on Python 3.10, which stores notes but does not print them, and for exceptions that do not allow
    setting attributes.

    Args:
        error: the exception.
        note: one or more lines.

    >>> error = ValueError("no rows")
    >>> add_note(error, "while reading batch 3")
    >>> error.__notes__
    ['while reading batch 3']
    """
    vars(error).setdefault("__notes__", []).append(note)
