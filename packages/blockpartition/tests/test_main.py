import io
import json
import runpy
import sys

import pytest

from .cases import cases


@pytest.fixture
def run(capsys, monkeypatch):
    def call(*arguments, stdin=""):
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        monkeypatch.setattr(sys, "argv", ["blockpartition", *arguments])
        monkeypatch.delitem(sys.modules, "blockpartition.__main__", raising=False)
        runpy.run_module("blockpartition", run_name="__main__")
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


@cases("costs", [["1" + "0" * 5000], ["1e999"], ["80Gb"], ["1", "-2"], [""]])
@cases("stdin", [True, False])
def test_invalid_costs_exit_with_one_line(run, capsys, costs, stdin):
    with pytest.raises(SystemExit) as exit_:
        run("1", stdin=" ".join(costs)) if stdin else run("1", "--costs", *costs)
    assert exit_.value.code == 2
    assert "error: " in capsys.readouterr().err.splitlines()[-1]
