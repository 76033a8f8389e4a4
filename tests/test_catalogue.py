"""The catalogue of errors is complete, and its page quotes messages that exist."""

import re
from collections.abc import Callable
from itertools import chain

import pytest
import torch
from docs.catalogue import HOLE, Message, filled, messages
from torch import nn

import blockpartition
import microbatch
from gpipe import GPipe
from gpipe.schedule import Schedule
from profiler import profile

from .pages import PACKAGES, ROOT

PAGE = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
NEEDS_GRAD = torch.ones(4, 2, requires_grad=True)


def everything() -> list[Message]:
    return list(chain.from_iterable(map(messages, PACKAGES)))


def pipe(**changed: object) -> GPipe:
    settings = {"balance": [1, 1], "devices": ["cpu", "cpu"], "chunks": 2, **changed}
    return GPipe(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), **settings)


@pytest.mark.parametrize(
    "fail",
    [
        lambda: pipe(balance=[1, 2]),
        lambda: pipe(chunks=0),
        lambda: pipe().cuda(),
        lambda: pipe().step(torch.ones(4, 2), loss_fn=lambda output: output),
        lambda: pipe().step(torch.ones(4, 2), loss_fn=torch.sum, schedule="1f2b"),
        lambda: torch.autograd.grad(pipe()(NEEDS_GRAD).sum(), NEEDS_GRAD),
        lambda: Schedule.parse("F0 G1"),
        lambda: microbatch.scatter("rows", 2),
        lambda: blockpartition.solve([1, -1], 2),
        lambda: profile(nn.Linear(2, 2), torch.ones(2, 2), chunks=0),
    ],
)
def test_what_is_raised_is_in_the_catalogue(fail: Callable[[], object]) -> None:
    with pytest.raises(Exception) as caught:  # noqa: PT011 — of whatever type
        fail()
    said = " ".join(str(caught.value).split())
    fitting = [each for each in everything() if len(HOLE.sub("", each.text)) > 12 and pattern(each.text).match(said)]
    assert type(caught.value).__name__ in {each.kind for each in fitting}, said


def pattern(text: str) -> re.Pattern[str]:
    """Compile a pattern that accepts any text in the holes, and each of the alternatives."""
    parts = [re.escape(part) for part in HOLE.split(text)]
    return re.compile(re.sub(r"\\\(((?:[^()]|\\\|)*?)\\ \\\|\\ (.*?)\\\)", r"(?:\1|\2)", ".*".join(parts)), re.DOTALL)


def test_what_the_page_explains_is_raised() -> None:
    explained = re.findall(r"^\| `([^`]+)` \|", PAGE, re.MULTILINE)
    assert len(explained) > 20
    assert [each for each in explained if not any(each in message.text for message in everything())] == []


def test_every_message_is_on_the_page_once() -> None:
    listed = re.findall(r"^- \*\*(\w+)\*\*: `` (.*) ``$", filled(PAGE), re.MULTILINE)
    assert sorted(listed) == sorted((each.kind, each.text) for each in everything())
