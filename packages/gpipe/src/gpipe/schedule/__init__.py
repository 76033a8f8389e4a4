"""Schedules: which actions each stage does, and in which order, as plain data.

A **program** lists the actions of one stage in order; a **schedule** holds the program of every stage. Nothing here
runs anything: schedules can be printed, parsed, compared, and checked for deadlocks in milliseconds.
:meth:`gpipe.GPipe.step` executes them.

In text an action is a letter and its micro-batch::

    F forward   R recompute   B backward   I backward for the inputs   W backward for the weights
"""

from ._actions import Action as Action
from ._actions import Kind as Kind
from ._actions import Program as Program
from ._actions import Step as Step
from ._actions import Walk as Walk
from ._actions import requirement as requirement
from ._builders import clock_cycles as clock_cycles
from ._builders import dualpipev as dualpipev
from ._builders import fill_drain as fill_drain
from ._builders import halves as halves
from ._builders import interleaved as interleaved
from ._builders import interleaved_zero_bubble as interleaved_zero_bubble
from ._builders import looped_bfs as looped_bfs
from ._builders import one_forward_one_backward as one_forward_one_backward
from ._builders import zbv as zbv
from ._builders import zero_bubble as zero_bubble
from ._choice import SPLIT_SECONDS as SPLIT_SECONDS
from ._choice import TIE as TIE
from ._choice import Choice as Choice
from ._choice import Seconds as Seconds
from ._choice import choose as choose
from ._choice import worth_splitting as worth_splitting
from ._modes import CHECKPOINT_MODES as CHECKPOINT_MODES
from ._modes import Stops as Stops
from ._modes import checkpoint_stops as checkpoint_stops
from ._named import SCHEDULES as SCHEDULES
from ._named import SPLITTING as SPLITTING
from ._named import looped_placement as looped_placement
from ._named import named as named
from ._replay import Span as Span
from ._replay import replay as replay
from ._schedule import Schedule as Schedule
from ._v_shaped import v_placement as v_placement
from ._validate import in_flight as in_flight
from ._validate import validate as validate

__all__ = [
    "CHECKPOINT_MODES",
    "SCHEDULES",
    "SPLITTING",
    "SPLIT_SECONDS",
    "TIE",
    "Action",
    "Choice",
    "Kind",
    "Program",
    "Schedule",
    "Seconds",
    "Span",
    "Step",
    "Stops",
    "Walk",
    "checkpoint_stops",
    "choose",
    "clock_cycles",
    "dualpipev",
    "fill_drain",
    "halves",
    "in_flight",
    "interleaved",
    "interleaved_zero_bubble",
    "looped_bfs",
    "looped_placement",
    "named",
    "one_forward_one_backward",
    "replay",
    "requirement",
    "v_placement",
    "validate",
    "worth_splitting",
    "zbv",
    "zero_bubble",
]
