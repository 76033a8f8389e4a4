"""Notes on exceptions, including exceptions that do not support them."""

from dataclasses import dataclass

from streams import add_note


@dataclass(frozen=True)
class FrozenError(Exception):
    what: str


def test_notes_add_up() -> None:
    for error in (Exception("what"), FrozenError("what")):
        add_note(error, "where")
        add_note(error, "when")
        assert error.__notes__ == ["where", "when"]
        assert error.args == ("what",)
