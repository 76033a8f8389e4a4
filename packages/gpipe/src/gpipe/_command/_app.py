"""The command line as a whole, and how it ends."""

from __future__ import annotations

from collections.abc import Sequence

import cyclopts
from cyclopts import App
from rich.console import Console

from ._commands import check, plan, profile, simulate, timeline

app = App(name="gpipe", help="Pipeline-parallel training of PyTorch models.", version_flags=["--version"])
"""Every command takes a model, ``package.module:name``: a module, or a function without arguments that makes one."""

for command in (plan, check, profile, simulate, timeline):
    app.command(command)


def run(arguments: Sequence[str]) -> int:
    """Run the command line; return the exit status.

    It is 0 if all is well, 1 if a check found something or no plan fits, 2 if the input cannot be used, 130 after an
    interrupt.
    """
    # cyclopts would print a box and exit by itself; here every error is one line, and the status is ours.
    try:
        return app(arguments, exit_on_error=False, print_error=False, result_action="return_value") or 0
    except KeyboardInterrupt:
        return 130
    except (Exception, SystemExit) as error:  # models fail on samples that are not theirs in any way they like
        plain = isinstance(error, (TypeError, ValueError, cyclopts.CycloptsError))
        lines = [f"gpipe: {'' if plain else f'{type(error).__name__}: '}{error}", *getattr(error, "__notes__", [])]
        text = "; ".join(line.strip() for line in "\n".join(lines).splitlines() if line.strip())
        Console(stderr=True).print(text, style="red", markup=False, highlight=False, emoji=False, soft_wrap=True)
        return 2
