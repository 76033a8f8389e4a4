"""Notes on exceptions, also where Python has none."""

from __future__ import annotations

from streams import add_note


class UnnotedError(Exception):
    """As exceptions are on Python 3.10."""

    def __getattribute__(self, name: str) -> object:
        if name == "add_note":
            raise AttributeError(name)
        return super().__getattribute__(name)


def test_notes_add_up() -> None:
    for error in (Exception("what"), UnnotedError("what")):
        add_note(error, "where")
        add_note(error, "when")
        assert error.__notes__ == ["where", "when"]
        assert error.args == ("what",)
