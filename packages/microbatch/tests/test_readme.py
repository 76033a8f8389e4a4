import re
from pathlib import Path

import pytest
import torch

README = Path(__file__).parents[1] / "README.md"


@pytest.mark.skipif(not README.exists(), reason="the tests were moved away from the README")
def test_the_examples_run(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    torch.manual_seed(0)
    exec(compile("\n".join(blocks), str(README), "exec"), {"__name__": "readme"})
    # The comments below a print are what it prints.
    comments = re.findall(r"^# (.*)$", "\n".join(blocks), re.MULTILINE)
    assert capsys.readouterr().out.split() == " ".join(comments).split()
