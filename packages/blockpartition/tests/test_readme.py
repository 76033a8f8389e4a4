"""The README's examples run, and give what their comments say."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"

pytestmark = pytest.mark.skipif(not README.exists(), reason="the tests are here without the package's README")


def test_examples_do_what_they_say(capsys):
    names: dict = {}
    for code in re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL):
        exec(code, names)
        for line in code.splitlines():
            expression, _, said = line.partition("  # ")
            if said.startswith(("[", "(", "4")):
                assert str(eval(expression, names)) == said
    printed = capsys.readouterr().out
    assert printed == "no placement fits the capacities; a capacity of 11 on each stage is the least that would do\n"


def test_the_table_is_what_the_command_prints(capsys):
    from blockpartition.__main__ import main

    main(["3", "--costs", "4", "8", "15", "16", "23", "42"])
    assert capsys.readouterr().out in README.read_text(encoding="utf-8")
