"""The command-line application and its exit status."""

from __future__ import annotations

from collections.abc import Sequence

import cyclopts
from cyclopts import App
from rich.console import Console

from ._commands import check, plan, profile, simulate, timeline

app = App(name="gpipe", help="Pipeline-parallel training of PyTorch models.", version_flags=["--version"])
"""Commands take a model as ``package.module:name``: a module, or a function without arguments that returns one."""

for command in (plan, check, profile, simulate, timeline):
    app.command(command)


def run(arguments: Sequence[str]) -> int:
    """Run the command line; return the exit status.

    The status is 0 on success, 1 if a check found something or no plan fits, 2 if an argument is invalid or an error
    was raised, and 130 after an interrupt.
    """
    # By default, cyclopts prints errors in a box and exits. Here an error is one line, and run() returns the status.
    try:
        return app(arguments, exit_on_error=False, print_error=False, result_action="return_value") or 0
    except KeyboardInterrupt:
        return 130
    except (Exception, SystemExit) as error:  # a model may raise anything on a wrong sample
        plain = isinstance(error, (TypeError, ValueError, cyclopts.CycloptsError))
        lines = [f"gpipe: {'' if plain else f'{type(error).__name__}: '}{error}", *getattr(error, "__notes__", [])]
        text = "; ".join(line.strip() for line in "\n".join(lines).splitlines() if line.strip())
        Console(stderr=True).print(text, style="red", markup=False, highlight=False, emoji=False, soft_wrap=True)
        return 2
