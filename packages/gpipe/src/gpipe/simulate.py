"""What a schedule would take, from what its stages take; nothing is run."""

from .timeline._simulate import StageCost as StageCost
from .timeline._simulate import simulate as simulate
from .timeline._simulate import stage_costs as stage_costs

__all__ = ["StageCost", "simulate", "stage_costs"]
