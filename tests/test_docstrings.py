"""What users call says what it takes and what it gives."""

import importlib
import inspect

import pytest

MODULES = ("blockpartition", "microbatch", "streams", "profiler", "profiler.text", "profiler.svg", "gpipe.balance")


def functions(module):
    """The public functions, by name."""
    names = importlib.import_module(module).__all__
    found = {name: getattr(importlib.import_module(module), name) for name in names}
    return {name: each for name, each in found.items() if inspect.isfunction(each)}


@pytest.mark.parametrize("module", MODULES)
def test_public_functions_have_sections_for_arguments_and_results(module):
    bare = []
    for name, function in functions(module).items():
        signature, text = inspect.signature(function), inspect.getdoc(function) or ""
        if signature.parameters and "Args:" not in text:
            bare.append(f"{name}: Args")
        if signature.return_annotation not in (None, "None") and "Returns:" not in text:
            bare.append(f"{name}: Returns")
    assert not bare


@pytest.mark.parametrize("module", MODULES)
def test_the_arguments_are_those_of_the_signature(module):
    wrong = []
    for name, function in functions(module).items():
        text = inspect.getdoc(function) or ""
        after = text.partition("Args:\n")[2]
        entries = [line for line in after.partition("\n\n")[0].splitlines() if line[:5].strip() and line[:4] == "    "]
        told = {each.strip(" *") for line in entries for each in line.partition(":")[0].split(",")}
        if after and not told <= set(inspect.signature(function).parameters):
            wrong.append((name, sorted(told)))
    assert not wrong
