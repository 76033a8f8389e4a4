import io
import json
import subprocess
import sys
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockpartition import Mode, Stage, partition, place
from blockpartition.__main__ import main
from blockpartition._draw import draw

from .cases import cases
from .strategies import problems


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


def test_numbers_keep_their_kind(run):
    assert json.loads(run("1", "--costs", "2/3", "4/3", "1", "--json"))["loads"] == ["3"]
    assert json.loads(run("2", "--costs", "1e3", "0.5", "--json"))["loads"] == [1000.0, 0.5]


def test_even_is_passed_on(run):
    costs = [1, 1, 1, 1, 100, 1, 1, 1, 1]
    found = json.loads(run("5", "--even", "exact", "--json", "--costs", *map(str, costs)))
    assert tuple(found["sizes"]) == partition(costs, 5, even="exact").sizes != partition(costs, 5).sizes


def test_constraints_are_those_of_place(run):
    costs, memory, transfer = [4, 4, 1, 4, 4, 4], [3, 1, 2, 2, 1, 1], [2, 1, 0, 1, 2]
    words = {name: list(map(str, values)) for name, values in (("c", costs), ("m", memory), ("t", transfer))}
    printed = run(
        "3", "--json", "--costs", *words["c"], "--memory", *words["m"], "--transfer", *words["t"],
        "--activations", *["1"] * 6, "--boundary", *["1/2"] * 6, "--speed", "1", "2", "1.5",
        "--capacity", "-", "7", "9", "--mode", "keep", "--mode", "again:time=4/3,saved=0,boundary=2,transient=1",
        "--in-flight", "3", "2", "1", "--overlap", "--forbid", "2", "--pin", "1", "--order", "free",
        "--microbatches", "4", "--objective", "makespan", "--gap", "0.01",
    )  # fmt: skip
    modes = [Mode("keep"), Mode("again", time=Fraction(4, 3), saved=0, boundary=2, transient=1)]
    found = place(
        costs, [Stage(1, None, modes), Stage(2, 7, modes), Stage(1.5, 9, modes)], memory=memory, transfer=transfer,
        activations=[1] * 6, boundary=[Fraction(1, 2)] * 6, in_flight=[3, 2, 1], overlap=True, forbid=[2], pin=[1],
        order="free", microbatches=4, objective="makespan", gap=0.01,
    )  # fmt: skip
    told = json.loads(printed)
    assert (tuple(told["sizes"]), tuple(told["modes"]), tuple(told["order"])) == (found.sizes, found.modes, found.order)
    assert told["makespan"] == found.makespan


@cases("word", ["1f1b", "fill_drain"])
def test_schedules_are_passed_on(run, word):
    found = place([1] * 6, [Stage(1, 12)] * 3, activations=[1] * 6, in_flight=word, microbatches=4)
    words = ["--activations", *["1"] * 6, "--capacity", "12", "--in-flight", word, "--microbatches", "4"]
    assert json.loads(run("3", "--json", *words, "--costs", *["1"] * 6))["sizes"] == list(found.sizes)


def test_a_drawing_of_a_placement():
    stages = [Stage(2, 9), Stage(1, 9, [Mode("keep"), Mode("again", time=1.5, saved=0)])]
    found = place([4, 4, 4, 4], stages, activations=[5, 1, 5, 5], in_flight=[1, 1])
    assert draw(found, [4, 4, 4, 4], 40, "#=").splitlines() == [
        "stage 0  0-1   4         ##===",
        "stage 1  2-3  12  again  ########=======",
        "bottleneck 12, at least 5.33333 for anyone; 2.25 times the mean",
    ]


def test_bars(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "38")
    drawing = draw(partition([4, 8, 15, 16], 3), [4, 8, 15, 16], 38)
    assert run("3", "--costs", "4", "8", "15", "16") == f"{drawing}\n"
    assert "█" in drawing


def test_a_drawing():
    assert draw(partition([4, 8, 15, 16, 23, 42], 3), [4, 8, 15, 16, 23, 42], 30, "#=").splitlines() == [
        "0-2  27  ##====########",
        "3-4  39  ########============",
        "  5  42  #####################",
        "bottleneck 42, at least 42 for anyone; 1.16667 times the mean",
    ]


def test_the_last_line_rounds_what_has_no_end():
    *_, last = draw(partition([Fraction(1, 3), 1], 1), [Fraction(1, 3), 1]).splitlines()
    assert last == "bottleneck 1.33333, at least 1.33333 for anyone; 1 times the mean"
    *_, last = draw(partition([10**7 + 1, 1.7e308, 1.7e308], 3), [10**7 + 1, 1.7e308, 1.7e308]).splitlines()
    assert last == "bottleneck 1.7e+308, at least 1.7e+308 for anyone; 1.5 times the mean"
    *_, last = draw(partition([10**7 + 1], 1), [10**7 + 1]).splitlines()
    assert last == "bottleneck 10000001, at least 10000001 for anyone; 1 times the mean"
    *_, last = draw(partition([1.7e308, 1.7e308], 1), [1.7e308, 1.7e308]).splitlines()
    assert last == f"bottleneck {int(1.7e308) * 2}, at least {int(1.7e308) * 2} for anyone; 1 times the mean"


def test_no_room_still_leaves_a_bar():
    assert draw(partition([5, 1], 2), [5, 1], 1, "#=").splitlines()[:2] == ["0  5  #", "1  1"]


@given(problems(), st.integers(20, 120))
def test_bars_are_as_long_as_the_loads(problem, width):
    costs, k = problem
    found = partition(costs, k)
    lines = draw(found, costs, width, "##").splitlines()[:-1]
    assert len(lines) == k
    assert all(len(line) <= max(width, len(line.rstrip("#")) + 1) for line in lines)
    bars = [line.count("#") for line in lines]
    largest = max(map(Fraction, found.loads))
    if largest:
        assert all(
            abs(bar - max(bars) * Fraction(load) / largest) <= 1 for bar, load in zip(bars, found.loads, strict=True)
        )


def test_terminals_without_blocks_get_plain_bars(run, monkeypatch):
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    main(["2", "--costs", "1", "1"])
    out.seek(0)
    assert "#" in out.read()


def test_help_says_what_each_option_is_for(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    for part in (
        "usage: python -m blockpartition [-h] [--costs COST ...] [--even {quantile,exact}] [--json] [placement ...]",
        "Cut costs into contiguous blocks whose largest sum is the least possible.",
        "partitions number of blocks",
        "numbers such as 4, 1.5 or 2/3; read from standard input if not given",
        "choice among the optima",
        "--json print everything that is known about the partition",
    ):
        assert part in text


@cases(
    ("arguments", "message"),
    [
        (["2", "--costs", "1", "x"], "expected a number such as 4, 1.5 or 2/3, got 'x'"),
        (["2", "--costs", "1/0"], "expected a number such as 4, 1.5 or 2/3, got '1/0'"),
        (["4", "--costs", "1", "2", "3"], "3 layers cannot fill 4 stages; use at most 3"),
        (["1", "--costs", "nan"], "costs[0] must be finite, got nan"),
        (["1", "--costs", "-1"], "costs[0] must not be negative, got -1"),
        (["two", "--costs", "1"], "argument partitions: invalid int value: 'two'"),
        (["9", "--speed", "2", "--costs", "1", "2", "3"], "3 layers cannot fill 9 stages; use at most 3"),
        (
            ["2", "--speed", "1", "2", "3", "--costs", "1", "2"],
            "--speed has 3 values for 2 stages; give one for each, or",
        ),
        (["2", "--speed", "0", "--costs", "1", "2"], "speed of stage[0] must be positive, got 0"),
        (
            ["2", "--mode", "a:tim=2", "--costs", "1", "2"],
            "expected a mode such as recompute:time=4/3,saved=0,transient=1",
        ),
        (
            ["2", "--mode", "a,time=2", "--costs", "1", "2"],
            "expected a mode such as recompute:time=4/3,saved=0,transient=1",
        ),
        (
            ["2", "--mode", "a:time", "--costs", "1", "2"],
            "expected a mode such as recompute:time=4/3,saved=0,transient=1",
        ),
        (["2", "--mode", "a:time=x", "--costs", "1", "2"], "expected a number such as 4, 1.5 or 2/3, got 'x'"),
        (
            ["2", "--in-flight", "1", "b", "--costs", "1", "2"],
            "--in-flight must be '1f1b', 'fill_drain' or numbers, got",
        ),
        (
            ["2", "--objective", "makespan", "--costs", "1", "2"],
            "objective='makespan' depends on how many micro-batches",
        ),
        (["2", "--capacity", "1", "--costs", "2", "2"], "a capacity of 2 on each stage is the least that would do"),
        (["2", "--pin", "1", "--even", "exact", "--costs", "1", "2"], "--even chooses among plain partitions"),
        (["1", "--even", "fair", "--costs", "1"], "argument --even: invalid choice: 'fair'"),
    ],
)
def test_mistakes_are_told_and_fail(capsys, arguments, message):
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


def test_the_command_as_a_program():
    command = [sys.executable, "-m", "blockpartition", "2", "--json"]
    done = subprocess.run(
        command, input="1 2 3", capture_output=True, text=True, timeout=60, check=True, env=_environment()
    )
    assert json.loads(done.stdout)["sizes"] == [2, 1]


@pytest.mark.timeout(60)
@pytest.mark.skipif(sys.platform == "win32", reason="needs a pipe that can be closed")
@cases("more", [[], ["--json"]])
def test_a_reader_that_leaves_early_is_no_error(more):
    """Like `… | head -1`."""
    command = [sys.executable, "-m", "blockpartition", "20000", *more]
    program = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=_environment()
    )
    program.stdout.close()
    _, errors = program.communicate(b"1 " * 20_000)
    assert (program.returncode, errors) == (1, b"")


def test_numbers_may_have_any_number_of_digits(run):
    long = "1" + "0" * 5000
    printed = run("2", "--costs", long, "1", long + "/3", "--json")
    assert json.loads(printed, parse_int=str)["sizes"] == ["1", "2"]
    assert long in run("1", "--costs", long)


@pytest.mark.skipif(not hasattr(sys, "get_int_max_str_digits"), reason="this Python has no such limit")
def test_the_limit_on_digits_is_as_before(run):
    before = sys.get_int_max_str_digits()
    run("1", "--costs", "1")
    assert sys.get_int_max_str_digits() == before


def _environment():
    import os

    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
