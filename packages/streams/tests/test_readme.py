import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"

pytestmark = pytest.mark.skipif(not README.exists(), reason="the tests were moved away from the README")


def test_the_programs_in_the_readme_run():
    programs = re.findall(r"^```python\n(.*?)^```", README.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert len(programs) == 3
    names = {"__name__": "readme"}
    for program in programs:
        exec(compile(program, str(README), "exec"), names)
