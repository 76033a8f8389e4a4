"""Plan a pipe: search balance, chunks, schedule and recomputation with measured costs.

:mod:`._make` runs these steps. The result of each is plain data:

1. ``_request``: what is asked, from ``_arguments``, ``_fake_devices``, ``_links``, ``_host``, ``_loss``,
   ``_optimizer``, ``_planned`` (the layers or blocks) and ``_without_weights``.
2. ``_measure``: seconds and bytes of layers (``_blocks``, ``_speeds``). A ``SearchSpace`` for each order of the devices
   (``_orders``) and each placement of stages holds them, together with the choices.
3. ``_search``: the fastest ``_candidate`` that fits. ``_costs`` gives the seconds and ``_bytes`` the memory of its
   stages, and ``_options`` the modes that a stage can have. ``_ordered`` then searches the order of actions.
4. ``_dry_run``: a step of that candidate on fake tensors, for its bytes; if it does not fit, the search is repeated.
5. ``_calibrate``: a few steps of the best candidates.
6. ``_plan``: the result (``_data``), which prints as a report (``_table``), builds the pipe, and is compared with
   measurements (``_verify``). If nothing fits, ``_infeasible`` says what would.
"""

from ._infeasible import Infeasible as Infeasible
from ._make import plan as plan
from ._plan import Plan as Plan
