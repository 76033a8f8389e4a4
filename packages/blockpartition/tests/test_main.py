import io
import json
import os
import subprocess
import sys

import pytest

from blockpartition.__main__ import main

from .cases import cases


@pytest.fixture
def run(capsys, monkeypatch):
    def call(*arguments, stdin=""):
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        main(arguments)
        return capsys.readouterr().out

    return call


def test_json_tells_everything(run):
    assert json.loads(run("3", "--costs", "4", "8", "15", "16", "23", "42", "--json")) == {
        "sizes": [3, 2, 1],
        "cuts": [3, 5],
        "loads": [27, 39, 42],
        "bottleneck": 42,
        "lower_bound": 42,
        "imbalance": 42 * 3 / 108,
        "witness": [3, 5, 5],
        "gap": 0.0,
        "blocks": [[4, 8, 15], [16, 23], [42]],
    }


@cases("stdin", ["4 8 15 16 23 42", "4\n8\n15\n16\n23\n42\n", "4, 8, 15,16, 23,42", "[4,8,15,16,23,42]"])
def test_costs_come_from_standard_input(run, stdin):
    assert run("3", stdin=stdin) == run("3", "--costs", "4", "8", "15", "16", "23", "42")


def test_a_line_for_each_block_and_what_is_known_of_the_largest(run):
    assert run("3", "--costs", "4", "8", "15", "16", "23", "42").splitlines() == [
        "0-2  27",
        "3-4  39",
        "  5  42",
        "bottleneck 42",
        "at least 42 for anyone",
        "1.16667 times the mean",
    ]


@cases("costs", [["1" + "0" * 5000], ["1e999"], ["nan"], ['{"a": 1}'], ["80Gb"], ["null"], ["1/0"], ["1", "-2"], [""]])
@cases("stdin", [True, False])
def test_what_is_no_list_of_costs_is_refused_in_one_line(run, capsys, costs, stdin):
    with pytest.raises(SystemExit) as exit_:
        run("1", stdin=" ".join(costs)) if stdin else run("1", "--costs", *costs)
    assert exit_.value.code == 2
    assert "error: " in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("text", [b"\xff\xfe 1", b"[[1, 2], [3", b""])
def test_a_file_that_is_no_text_is_refused(text):
    done = subprocess.run(
        [sys.executable, "-m", "blockpartition", "9"], input=text, capture_output=True, timeout=300, env=_environment()
    )
    assert done.returncode == 2
    assert b"Traceback" not in done.stderr


def _environment():
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
