"""torchgpipe's module path of layers that stash and pop.

As an attribute of :mod:`gpipe.skip`, ``skippable`` is the function :func:`gpipe.skip.skippable`, which hides this
module; ``from gpipe.skip.skippable import ...`` finds the module.
"""

from ._skippable import Skippable as Skippable
from ._skippable import pop as pop
from ._skippable import skippable as skippable
from ._skippable import stash as stash
from ._verify import verify_skippables as verify_skippables
