"""The pytest options of ``nox -s search``: number of examples, time limit, and reproducing a failure."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TESTS = """
from hypothesis import given, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

@given(st.integers())
def test_holds(number):
    assert number + 1 > number

class TestHalf:
    @given(st.integers())
    @settings(max_examples=settings.default.max_examples // 2)
    def test_half(self, number):
        pass

class Machine(RuleBasedStateMachine):
    @rule(number=st.integers())
    def goes_on(self, number):
        pass

TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=settings.default.max_examples // 3, stateful_step_count=2)

@given(st.lists(st.integers(), min_size=3))
def test_fails(numbers):
    assert sum(numbers) < 10**6

def test_plain():
    raise AssertionError("no property")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copy(ROOT / "conftest.py", tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_numbers.py").write_text(TESTS)
    return tmp_path


def _search(folder: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False).stdout


def test_search_runs_only_properties(folder: Path) -> None:
    output = _search(folder, "--examples=300", "--hypothesis-seed=1", "-k", "not fails")
    assert re.search(r" 300  test_numbers.py::test_holds", output), output
    assert re.search(r" 150  test_numbers.py::TestHalf::test_half", output), output
    assert re.search(r" 100  test_numbers.py::TestMachine::runTest", output), output
    assert "3 properties, 550 examples" in output
    assert "3 passed" in output, output


def test_no_example_starts_when_the_time_is_over(folder: Path) -> None:
    output = _search(folder, "--examples=300", "--seconds=0", "--hypothesis-seed=1", "-k", "not fails")
    assert "3 properties, 3 examples" in output, output


def test_the_command_that_is_printed_repeats_the_failure(folder: Path) -> None:
    output = _search(folder, "--examples=300", "--hypothesis-seed=1")
    (line,) = re.findall(r"^repeat a failure: (.+)$", output, re.MULTILINE)
    command, *arguments = line.split(" -- ")
    assert command == "python -m nox -s search"
    again = _search(folder, *shlex.split(arguments[0]))
    smallest = [re.findall(r"^E +(numbers=.+),$", each, re.MULTILINE) for each in (output, again)]
    assert smallest[0] == smallest[1] != [], output + again
