"""Who takes part, and in what: pure data, which goes to a process of its own."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .machine import installed

CHECKPOINTS = ("never", "except_last", "always")
SCHEDULES = ("fill_drain", "1f1b", "zero_bubble", "interleaved")
STAGES = 2
PEERS = ("torchgpipe", "fairscale", "distributed")


@dataclass(frozen=True)
class Task:
    """A workload in so many micro-batches; training, or else forward only, under no_grad in eval mode."""

    workload: str
    chunks: int
    training: bool = True


@dataclass(frozen=True)
class Contender:
    """A library and how it is used. With a `schedule`, `step` does forward and backward."""

    library: str
    checkpoint: str = "never"
    schedule: str = ""
    threads: int = 1

    @property
    def columns(self) -> tuple[str, str, str]:
        """Library, way, checkpointing; what makes no difference is left out."""
        if self.library == "plain":
            return self.library, f"{self.threads} thread" + "s" * (self.threads > 1), ""
        pipeline = self.library in ("gpipe", *PEERS)
        return self.library, self.schedule, self.checkpoint if pipeline else ""

    @property
    def name(self) -> str:
        library, way, checkpoint = self.columns
        return ", ".join(part for part in (library, way, checkpoint and f"checkpoint {checkpoint}") if part)


LOOP = Contender("loop")
TWO_LOOPS = Contender("two loops")
BASELINES = [LOOP, TWO_LOOPS, Contender("plain"), Contender("plain", threads=2)]


def contenders(task: Task, *, quarters: bool) -> list[Contender]:
    """All that can do `task`; interleaving wants a model that can be cut into quarters."""
    if not task.training:
        ways = [("gpipe", ""), ("torchgpipe", ""), ("fairscale", ""), ("distributed", "fill_drain")]
        return BASELINES + [Contender(library, schedule=schedule) for library, schedule in ways]
    modes = [Contender(library, mode) for library in ("gpipe", "torchgpipe", "fairscale") for mode in CHECKPOINTS]
    steps = [Contender("gpipe", schedule=name) for name in SCHEDULES if quarters or name != "interleaved"]
    distributed = [Contender("distributed", schedule=name) for name in SCHEDULES if quarters or name in _HALVES]
    # It has no checkpointing of its own: each stage is wrapped in torch.utils.checkpoint.
    distributed.append(Contender("distributed", "always", "fill_drain"))
    return [*BASELINES, *modes, *steps, *distributed]


_HALVES = ("fill_drain", "1f1b", "zero_bubble")


def can_run(contender: Contender) -> bool:
    """Whether its library is here; the others come with us, or with torch."""
    return contender.library not in ("torchgpipe", "fairscale") or installed(contender.library)


def rival(ours: Contender, library: str, field: Iterable[Contender]) -> Contender | None:
    """Whom of `library` `ours` is measured against: as much recomputed, by the same schedule if it can."""
    schedule = (ours.schedule or "fill_drain") if library == "distributed" else ""
    return next((one for one in field if one == Contender(library, ours.checkpoint, schedule)), None)
