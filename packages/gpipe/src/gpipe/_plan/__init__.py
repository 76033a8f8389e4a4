"""Plans: search balance, number of chunks, schedule and recomputation, with measured costs and predictions."""

from ._infeasible import Infeasible as Infeasible
from ._make import plan as plan
from ._plan import Plan as Plan
