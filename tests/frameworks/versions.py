"""Print which versions of distributions are installed.

python -m tests.frameworks.versions transformers trl
"""

import sys
from importlib.metadata import PackageNotFoundError, version

for name in ("torch", *sys.argv[1:]):
    try:
        print(name, version(name))
    except PackageNotFoundError:
        print(name, "is not installed: not for this platform")
