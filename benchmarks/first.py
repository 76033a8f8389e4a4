"""Milliseconds of the first step of a contender in this interpreter, and of the next one; for `engine`.

python -m benchmarks.first gpipe always
"""

from __future__ import annotations

import os
import sys

from .contenders import Contender, Task
from .programs import build
from .timing import timed

if __name__ == "__main__":
    program = build(Contender(*sys.argv[1:]), Task("W 64", 8))
    print(*(timed(program.run) * 1e3 for _ in range(2)), flush=True)
    os._exit(0)  # fairscale's workers would keep the interpreter
