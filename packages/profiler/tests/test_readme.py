import contextlib
import io
import re
import sys
from pathlib import Path

import pytest
import torch

README = Path(__file__).parents[1] / "README.md"


@pytest.mark.skipif(not README.exists(), reason="the tests were moved away from the README")
@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no notes to show")
def test_the_examples_run():
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    printed = io.StringIO()
    torch.manual_seed(0)
    with contextlib.redirect_stdout(printed):
        exec(compile("\n".join(blocks), str(README), "exec"), {"__name__": "readme"})
    # What a block is said to print stands in comments at its end.
    for comment in re.findall(r"^# (.*)$", "\n".join(blocks), re.MULTILINE):
        assert comment in printed.getvalue()
    assert "5 layers on cpu, micro-batch of 8 rows (chunks=8)" in printed.getvalue()
