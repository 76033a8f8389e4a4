"""Predict the time of a step under a schedule from the times of its stages, or search one. Nothing is run."""

from .timeline._costs import StageCost as StageCost
from .timeline._costs import stage_costs as stage_costs
from .timeline._hops import Link as Link
from .timeline._search import search as search
from .timeline._simulate import makespan as makespan
from .timeline._simulate import simulate as simulate

__all__ = ["Link", "StageCost", "makespan", "search", "simulate", "stage_costs"]
