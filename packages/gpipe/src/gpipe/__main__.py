"""``python -m gpipe``: plan, check and profile a model, and simulate or record its steps, from the command line."""

from __future__ import annotations

import sys


def main() -> None:
    try:
        from ._command import run
    except ModuleNotFoundError as error:
        if error.name != "cyclopts":
            raise
        print(
            "gpipe: the command line needs cyclopts; install the extra gpipe-torch[cli], or cyclopts", file=sys.stderr
        )
        sys.exit(2)
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
