"""The path of torchgpipe to layers that stash and pop.

The function :func:`gpipe.skip.skippable` hides this module where both could be meant; ``from gpipe.skip.skippable
import ...`` finds it.
"""

from ._skippable import Skippable as Skippable
from ._skippable import pop as pop
from ._skippable import skippable as skippable
from ._skippable import stash as stash
from ._verify import verify_skippables as verify_skippables
