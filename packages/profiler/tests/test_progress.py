import sys

import pytest

from profiler._progress import progress_bar

pytest.importorskip("rich")


class Terminal:
    """Keeps what is shown."""

    encoding = "utf-8"

    def __init__(self, isatty):
        self.shown = ""
        self.isatty = lambda: isatty

    def write(self, text):
        self.shown += text
        return len(text)

    def flush(self):
        pass


def spend_a_quarter_of(timeout, wanted, isatty, monkeypatch):
    """What is on the terminal then, and in the end."""
    terminal = Terminal(isatty)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", terminal)
    with progress_bar(wanted, timeout) as spend:
        spend(timeout / 4)
        shown = terminal.shown
        spend(timeout * 2)
    return shown, terminal.shown


def test_shows_how_much_of_the_time_is_spent(monkeypatch):
    then, finally_ = spend_a_quarter_of(4.0, wanted=True, isatty=True, monkeypatch=monkeypatch)
    assert "25%" in then
    assert "100%" in finally_


@pytest.mark.parametrize(("wanted", "isatty"), [(False, True), (True, False), (False, False)])
def test_silent_unless_wanted_and_looked_at(wanted, isatty, monkeypatch):
    assert spend_a_quarter_of(4.0, wanted, isatty, monkeypatch) == ("", "")
