"""Contenders and tasks, as plain data that can be sent to a separate process."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from .measure import installed

CHECKPOINTS = ("never", "except_last", "always")
SCHEDULES = ("fill_drain", "1f1b", "zero_bubble", "interleaved")
STAGES = 2
PEERS = ("torchgpipe", "fairscale", "distributed")
RANKS = ("ranks", "ranks, even cuts", "distributed", "distributed, even cuts")
IN_TWO_PROCESSES = (*RANKS, "DDP", "FSDP2", "torch.distributed.pipelining", "Rank")
PIPELINES = ("gpipe", "inline", *PEERS, *RANKS)


@dataclass(frozen=True)
class Task:
    """A workload in ``chunks`` micro-batches: training, or only the forward, under no_grad in eval mode."""

    workload: str
    chunks: int
    training: bool = True


@dataclass(frozen=True)
class Contender:
    """A library and how it is used.

    Attributes:
        schedule: if there is one, `step` does forward and backward.
        threads: OMP_NUM_THREADS of its process, and `torch.set_num_threads`; None: as torch has it.
        keep_memory: whether the allocator is configured to keep freed memory.
    """

    library: str
    checkpoint: str = "never"
    schedule: str = ""
    threads: int | None = None
    keep_memory: bool = False

    @property
    def columns(self) -> tuple[str, str, str]:
        """Library, schedule and checkpointing, the latter two where they make a difference."""
        return self.library, self.schedule, self.checkpoint if self.library in PIPELINES else ""

    @property
    def allocator(self) -> str:
        return "memory kept" if self.keep_memory else "as it is"

    @property
    def name(self) -> str:
        """Return the name used in figures, e.g. `gpipe, 1f1b, checkpoint never`."""
        library, schedule, checkpoint = self.columns
        parts = (
            library,
            schedule,
            checkpoint and f"checkpoint {checkpoint}",
            self.threads and f"threads {self.threads}",
            self.keep_memory and "memory kept",
        )
        return ", ".join(part for part in parts if part)

    def keeping_memory(self) -> Contender:
        """Return the same contender with an allocator that keeps freed memory."""
        return replace(self, keep_memory=True)


LOOP = Contender("loop", threads=1)
TWO_LOOPS = Contender("two loops", threads=1)
BASELINES = [LOOP, TWO_LOOPS, Contender("plain", threads=1), Contender("plain")]


def contenders(task: Task, *, quarters: bool) -> list[Contender]:
    """Return all contenders that can do `task`. Interleaving requires a model that can be split into quarters."""
    if not task.training:
        peers = [*_in_both_ways(("never",)), Contender("distributed", schedule="fill_drain")]
        return [*BASELINES, Contender("gpipe"), *peers]
    ours = [Contender("gpipe", mode) for mode in CHECKPOINTS]
    schedules = [name for name in SCHEDULES if quarters or name != "interleaved"]
    steps = [Contender("gpipe", schedule=name) for name in schedules]
    # torchrun starts each rank with one thread, so there is no second variant.
    distributed = [Contender("distributed", schedule=name) for name in schedules]
    # It has no checkpointing, so each stage is wrapped in torch.utils.checkpoint.
    distributed.append(Contender("distributed", "always", "fill_drain"))
    kept = [one.keeping_memory() for one in (LOOP, TWO_LOOPS, Contender("gpipe"))]
    return [*BASELINES, *ours, *steps, *_in_both_ways(CHECKPOINTS), *distributed, *kept]


def _in_both_ways(modes: Iterable[str]) -> list[Contender]:
    """torchgpipe and fairscale, with torch's default number of threads and with OMP_NUM_THREADS=1.

    In every run they start threads that each use torch's default number: too many on a machine with few cores.
    """
    return [
        Contender(library, mode, threads=threads)
        for library in ("torchgpipe", "fairscale")
        for mode in modes
        for threads in (None, 1)
    ]


def can_run(contender: Contender) -> bool:
    """Return whether the contender's library is installed. Only torchgpipe and fairscale are optional."""
    return contender.library not in ("torchgpipe", "fairscale") or installed(contender.library)


def rivals(ours: Contender, library: str, field: Iterable[Contender]) -> list[Contender]:
    """The contenders of `library` that do what `ours` does, with any number of threads.

    They recompute as much, have the same allocator and, in `torch.distributed.pipelining`, the same schedule.
    """
    schedule = (ours.schedule or "fill_drain") if library == "distributed" else ""
    wanted = replace(ours, library=library, schedule=schedule)
    return [one for one in field if replace(one, threads=ours.threads) == wanted]
