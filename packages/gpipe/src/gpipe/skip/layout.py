"""torchgpipe's module path of :class:`gpipe.skip.SkipLayout`."""

from ._layout import SkipLayout as SkipLayout
from ._layout import inspect_skip_layout as inspect_skip_layout
