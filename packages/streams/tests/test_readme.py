import doctest
import re
from pathlib import Path

import pytest

from streams import _context, _stream

README = Path(__file__).parents[1] / "README.md"


@pytest.mark.skipif(not README.exists(), reason="the tests were moved away from the README")
def test_the_programs_in_the_readme_run():
    programs = re.findall(r"^```python\n(.*?)^```", README.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert len(programs) == 2
    names = {"__name__": "readme"}
    for program in programs:
        exec(compile(program, str(README), "exec"), names)


@pytest.mark.parametrize("module", [_context, _stream])
def test_the_examples_in_docstrings_hold(module):
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0
