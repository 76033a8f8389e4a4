"""Timelines: the actions of a run, recorded or predicted, and their times."""

from ._costs import StageCost as StageCost
from ._costs import stage_costs as stage_costs
from ._events import Event as Event
from ._record import record as record
from ._simulate import simulate as simulate
from ._timeline import Timeline as Timeline

__all__ = ["Event", "StageCost", "Timeline", "record", "simulate", "stage_costs"]
