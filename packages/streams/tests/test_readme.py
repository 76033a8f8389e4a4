import re
import threading
from contextlib import ExitStack
from contextvars import ContextVar
from pathlib import Path

import pytest
import torch

from streams import spawn_workers, submit

README = Path(__file__).parents[1] / "README.md"
NUMBER: ContextVar[int] = ContextVar("number")

pytestmark = pytest.mark.skipif(not README.exists(), reason="the tests were moved away from the README")


def test_the_programs_in_the_readme_run():
    programs = re.findall(r"^```python\n(.*?)^```", README.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert len(programs) == 3
    names = {"__name__": "readme"}
    for program in programs:
        exec(compile(program, str(README), "exec"), names)


def settings() -> dict[str, object]:
    return {
        "`torch.is_grad_enabled()`": torch.is_grad_enabled(),
        '`torch.is_autocast_enabled("cpu")`': torch.is_autocast_enabled("cpu"),
        "`torch.empty(0).device`": torch.empty(0).device,
        "a context variable set to 1": NUMBER.get("unset"),
    }


def test_the_table_of_what_threads_see_is_right():
    token = NUMBER.set(1)
    found: list[dict[str, object]] = []
    with ExitStack() as stack:
        for setting in (torch.no_grad(), torch.autocast("cpu"), torch.device("meta")):
            stack.enter_context(setting)
        [in_queue], _ = stack.enter_context(spawn_workers([torch.device("cpu")]))
        found.append(settings())
        thread = threading.Thread(target=lambda: found.append(settings()))
        thread.start()
        thread.join(300)
        found.append(submit(in_queue, settings).result(300))
    NUMBER.reset(token)
    for name in found[0]:
        row = " | ".join(str(each[name]) for each in found)
        assert f"| {name} | {row} |" in README.read_text(encoding="utf-8")
