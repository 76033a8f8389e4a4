"""torchgpipe's module path of layers that stash and pop: ``from gpipe.skip.skippable import ...``.

The attribute ``skippable`` of :mod:`gpipe.skip` is the function of that name.
"""

from ._skippable import Skippable as Skippable
from ._skippable import pop as pop
from ._skippable import skippable as skippable
from ._skippable import stash as stash
from ._verify import verify_skippables as verify_skippables
