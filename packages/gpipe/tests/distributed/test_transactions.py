"""Saving is a transaction: if any rank fails, all ranks raise, and the last complete checkpoint remains."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from gpipe.distributed import Rank, RemoteError, average_gradients, load, save
from gpipe.distributed._checkpoints import Folder

from ..worlds import world
from .planted import batch, mesh_of_four, network


class Plan:
    """A rank of a pipe, with an optimizer, that saves. Rank ``who`` makes a mistake."""

    def __init__(self, who: int) -> None:
        self.fails = dist.get_rank() == who
        self.rank = Rank(network(), [4, 4], chunks=2)
        self.optimizer: Any = torch.optim.AdamW(self.rank.parameters(), 1e-2)

    def step(self) -> None:
        self.rank.zero_grad()
        self.rank.step(*batch(), loss_fn=nn.functional.mse_loss)
        self.optimizer.step()

    def weights(self) -> list[torch.Tensor]:
        return [p.detach().clone() for p in self.rank.parameters()]

    def expect_loads(self, path: str, expected: list[torch.Tensor]) -> None:
        with torch.no_grad():
            for p in self.rank.parameters():
                p.zero_()
        load(path, self.rank, self.optimizer)
        for found, wanted in zip(self.weights(), expected, strict=True):
            assert torch.equal(found, wanted)


@contextmanager
def _interrupted(owner: Any, name: str) -> Iterator[None]:
    right = getattr(owner, name)

    def interrupt(*given: Any, **options: Any) -> Any:
        right(*given, **options)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, interrupt)
        yield


PLACES = {
    "state": (Rank, "state_dict"),
    "plan": (FileSystemWriter, "prepare_local_plan"),
    "write": (FileSystemWriter, "write_data"),
    "begin": (Folder, "begin"),
    "finish": (FileSystemWriter, "finish"),
}


@pytest.mark.parametrize("place", PLACES)
def test_interrupted_save_raises_on_all_ranks(worlds: Any, tmp_path: Path, place: str) -> None:
    for who in range(2):
        if who and place in ("begin", "finish"):  # only the first process does this
            continue
        found = worlds(2).run(_interrupt, str(tmp_path / f"run{who}"), place, who)
        assert found[who] == "KeyboardInterrupt"
        assert found[1 - who] == "RemoteError"


def _interrupt(path: str, place: str, who: int) -> str:
    plan = Plan(who)
    plan.step()
    save(path, plan.rank, plan.optimizer)
    before = plan.weights()
    plan.step()
    after = plan.weights()
    with (
        _interrupted(*PLACES[place]) if plan.fails else nullcontext(),
        pytest.raises((KeyboardInterrupt, RemoteError)) as caught,
    ):
        save(path, plan.rank, plan.optimizer)
    plan.expect_loads(path, before)
    with torch.no_grad():
        for p, value in zip(plan.rank.parameters(), after, strict=True):
            p.copy_(value)
    plan.step()
    save(path, plan.rank, plan.optimizer)
    plan.expect_loads(path, plan.weights())
    return caught.type.__name__


def _without_optimizer(plan: Plan, path: str) -> None:
    save(path, plan.rank, None if plan.fails else plan.optimizer)


def _on_its_own_disk(plan: Plan, path: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if plan.fails:
            right = Folder.partial
            patch.setattr(Folder, "partial", lambda self, token: right(self, token).with_name(f"disk of {token}"))
        save(path, plan.rank, plan.optimizer)


def _steps(plan: Plan, path: str) -> None:
    if plan.fails:
        plan.rank.step(*batch(), loss_fn=nn.functional.mse_loss)
    save(path, plan.rank, plan.optimizer)


def _clips(plan: Plan, path: str) -> None:
    if plan.fails:
        plan.rank.clip_grad_norm_(1.0)
    save(path, plan.rank, plan.optimizer)


def _averages(plan: Plan, path: str) -> None:
    if plan.fails:
        average_gradients(plan.rank)
    save(path, plan.rank, plan.optimizer)


def _loads(plan: Plan, path: str) -> None:
    (load if plan.fails else save)(path, plan.rank, plan.optimizer)


def _in_a_smaller_group(plan: Plan, path: str) -> None:
    groups = [dist.new_group([k]) for k in range(2)]
    save(path, plan.rank, plan.optimizer, group=groups[dist.get_rank()])


MISTAKES: dict[Callable[[Plan, str], None], str] = {
    _without_optimizer: "ValueError: optimizer: rank [01] passes one, but rank [01] does not",
    _on_its_own_disk: "Error: .*not all processes see the same files",
    _steps: "ValueError: the ranks disagree: the method that is called is",
    _clips: "ValueError: the ranks disagree: the method that is called is",
    _averages: "ValueError: the ranks disagree: the method that is called is",
    _loads: "ValueError: the ranks disagree: the method that is called is",
    _in_a_smaller_group: "Error: .*needs all ranks of the pipe, .*it lacks rank",
}


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_mistake_on_one_rank_raises_on_all(worlds: Any, tmp_path: Path, mistake: Callable[..., None]) -> None:
    """All ranks raise within the time limit of the test, which is far below the timeout of the groups."""
    for who in range(2):
        for text in worlds(2).run(_mistaken, str(tmp_path / f"run{who}"), mistake, who):
            assert re.search(MISTAKES[mistake], text), text


def _mistaken(path: str, mistake: Callable[[Plan, str], None], who: int) -> str:
    plan = Plan(who)
    plan.step()
    save(path, plan.rank, plan.optimizer)
    before = plan.weights()
    plan.step()
    with pytest.raises((ValueError, RuntimeError, FileNotFoundError)) as caught:
        mistake(plan, path)
    plan.expect_loads(path, before)
    plan.step()
    save(path, plan.rank, plan.optimizer)
    return f"{caught.type.__name__}: {caught.value}"


def test_saving_after_destroying_the_process_group_raises(tmp_path: Path) -> None:
    with world(2) as opened:
        for text in opened.run(_save_alone, str(tmp_path / "run")):
            assert "there is no process group" in text
            assert "before torch.distributed.destroy_process_group()" in text
    assert (tmp_path / "run" / ".metadata").is_file()
    assert [each.name for each in tmp_path.iterdir()] == ["run"]


def _save_alone(path: str) -> str:
    plan = Plan(-1)
    save(path, plan.rank)
    dist.barrier()
    dist.destroy_process_group()
    with pytest.raises(RuntimeError) as caught:
        save(path, plan.rank)
    plan.rank.close()
    with pytest.raises(RuntimeError, match="there is no process group"):
        save(path, plan.rank)
    return str(caught.value)


def test_saving_while_other_replicas_step_raises(worlds: Any, tmp_path: Path) -> None:
    for who in range(2):
        for text in worlds(4).run(_replica_saves, str(tmp_path / f"run{who}"), who):
            assert "the method that is called is" in text


def _replica_saves(path: str, who: int) -> str:
    mesh = mesh_of_four()
    rank = Rank(network(), [4, 4], chunks=2, group=mesh["stages"], replicas=mesh["replicas"])
    rank.step(*batch(), loss_fn=nn.functional.mse_loss)
    saves = mesh["replicas"].get_local_rank() == who
    call = partial(save, path, rank) if saves else partial(rank.step, *batch(), loss_fn=nn.functional.mse_loss)
    with pytest.raises(ValueError, match="the ranks disagree") as caught:
        call()
    rank.step(*batch(), loss_fn=nn.functional.mse_loss)
    save(path, rank)
    load(path, rank)
    return str(caught.value)


def test_plain_modules_in_different_calls_raise(worlds: Any, tmp_path: Path) -> None:
    """This holds without a pipe, if each process has the full model."""
    for who in range(2):
        for text in worlds(2).run(_other_calls, str(tmp_path / "run"), who):
            assert text.count("the method that is called is") == 2


def _other_calls(path: str, who: int) -> str:
    model, texts = nn.Linear(2, 2), []
    model(torch.ones(2)).sum().backward()
    average_gradients(model)
    save(path, model)
    for call in (lambda: average_gradients(model), lambda: load(path, model)):
        with pytest.raises(ValueError, match="the ranks disagree") as caught:
            call() if dist.get_rank() == who else save(path, model)
        texts.append(str(caught.value))
    save(path, model)
    return " ".join(texts)


OTHERS = ["run.previous", "run.partial", "run.tmp", ".run.gpipe-partial", ".run.mine.gpipe-partial", "other"]


@pytest.mark.parametrize("is_checkpoint", [False, True])
def test_save_leaves_other_files_unchanged(tmp_path: Path, is_checkpoint: bool) -> None:
    model, path = nn.Linear(2, 2), tmp_path / "run"
    for name in OTHERS:
        if is_checkpoint and not name.startswith("."):
            save(tmp_path / name, model)
        else:
            (tmp_path / name).mkdir()
            (tmp_path / name / "notes.txt").write_text("mine")
    before = _content(tmp_path)
    for _ in range(3):
        save(path, model)
    assert {name: text for name, text in _content(tmp_path).items() if not name.startswith("run/")} == before
    assert {each.name for each in tmp_path.iterdir()} == {"run", *OTHERS}


def _content(folder: Path) -> dict[str, bytes]:
    return {str(each.relative_to(folder)): each.read_bytes() for each in folder.rglob("*") if each.is_file()}


def test_foreign_files_in_a_checkpoint_are_kept(tmp_path: Path) -> None:
    model, path = nn.Linear(2, 2), tmp_path / "run"
    save(path, model)
    for at, name in product((path, tmp_path / ".run.gpipe-previous"), ("tokenizer.json", "sub/notes.txt")):
        other = at / name
        other.parent.mkdir(parents=True, exist_ok=True)
        other.write_text("mine")
        with pytest.raises(FileExistsError, match=r"has not written|is not a checkpoint"):
            save(path, model)
        assert other.read_text() == "mine"
        load(path, model)
        other.unlink()
        if other.parent != at:
            other.parent.rmdir()
        if at != path:
            at.rmdir()
    save(path, model)
