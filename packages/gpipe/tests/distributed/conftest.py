"""Skip these tests if torch was built without ``torch.distributed``."""

import torch.distributed as dist

collect_ignore_glob = [] if dist.is_available() else ["test_*.py"]
