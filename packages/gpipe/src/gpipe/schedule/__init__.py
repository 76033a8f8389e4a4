"""Schedules as plain data: which actions each stage performs, and in which order. Nothing here runs anything.

A **program** lists the actions of one stage in order; a **schedule** holds the program of every stage, for
:meth:`gpipe.GPipe.step`. In text, an action is written as a letter and its micro-batch::

    F forward   R recompute   B backward   I backward for the inputs   W backward for the weights

``C`` (the criterion) computes the loss of the full mini-batch from all micro-batches. If the parameters of a stage are
on the host, ``L`` loads them onto its device, and ``U`` unloads them; the number counts the loads of the stage. ``O``
moves the saved tensors of a micro-batch to the host, and ``P`` moves them back (prefetches) before its backward.
"""

from ._actions import LOSS_OF_ALL, Action, Kind, Program, Step, WorkerSteps, dependencies_of
from ._builders import (
    clock_cycles,
    dualpipev,
    fill_drain,
    interleaved,
    interleaved_zero_bubble,
    looped_bfs,
    one_forward_one_backward,
    split_forward_backward,
    zbv,
    zero_bubble,
)
from ._choice import CHOICE_TOLERANCE, SPLIT_SECONDS, Choice, Seconds, choose, worth_splitting
from ._modes import CHECKPOINT_MODES, Stops, checkpoint_stops
from ._named import SCHEDULES, SPLITTING, looped_placement, named
from ._replay import Span, replay
from ._schedule import Schedule
from ._search import search
from ._v_shaped import v_placement
from ._validate import in_flight, validate

__all__ = [
    "CHECKPOINT_MODES",
    "CHOICE_TOLERANCE",
    "LOSS_OF_ALL",
    "SCHEDULES",
    "SPLITTING",
    "SPLIT_SECONDS",
    "Action",
    "Choice",
    "Kind",
    "Program",
    "Schedule",
    "Seconds",
    "Span",
    "Step",
    "Stops",
    "WorkerSteps",
    "checkpoint_stops",
    "choose",
    "clock_cycles",
    "dependencies_of",
    "dualpipev",
    "fill_drain",
    "in_flight",
    "interleaved",
    "interleaved_zero_bubble",
    "looped_bfs",
    "looped_placement",
    "named",
    "one_forward_one_backward",
    "replay",
    "search",
    "split_forward_backward",
    "v_placement",
    "validate",
    "worth_splitting",
    "zbv",
    "zero_bubble",
]
