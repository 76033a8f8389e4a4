"""Notes on exceptions, on every version of Python."""


def add_note(error: BaseException, note: str) -> None:
    """``error.add_note(note)``. On Python 3.10, which has no notes, it is appended to ``error.__notes__``.

    Args:
        error: the exception.
        note: one or more lines.
    """
    if hasattr(error, "add_note"):
        error.add_note(note)
    else:
        error.__notes__ = [*getattr(error, "__notes__", []), note]
