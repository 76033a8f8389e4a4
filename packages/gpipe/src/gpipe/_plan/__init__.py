"""Which balance, how many chunks, which schedule, and who recomputes: measured, searched, and predicted."""

from ._infeasible import Infeasible as Infeasible
from ._make import plan as plan
from ._plan import Plan as Plan
