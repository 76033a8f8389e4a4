"""Plan a pipe: search balance, chunks, schedule and recomputation with measured costs."""

from ._infeasible import Infeasible as Infeasible
from ._make import plan as plan
from ._plan import Plan as Plan
