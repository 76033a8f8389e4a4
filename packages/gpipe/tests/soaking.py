"""The command line of programs that train for many steps."""

import argparse
from collections.abc import Callable, Sequence


def run(soak: Callable[[int, int], None], steps: int, arguments: Sequence[str] | None = None) -> int:
    """Call ``soak`` with a number of steps, by default ``steps``, and a seed; return the exit code."""
    parser = argparse.ArgumentParser(prog="soak")
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    soak(options.steps, options.seed)
    return 0
