"""The spin time of torch's waiting threads before they sleep. To be set before torch is imported.

By default they spin for ever: a second process on the same cores then turns a 4 ms pass into hundreds of
milliseconds, since every barrier waits for a thread that has lost its core. Threads that never spin cost 4 ms more per
pass on a quiet machine. A short spin keeps both within reach (measured on two cores, the bundled target, one row:
endless spin 4.0 ms alone; none 8.2 ms alone; this count 4.1 ms alone and 13 ms beside a busy process, where a count
ten times as high takes 62 ms).
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

SPIN_COUNT = 2000


def set_spin_count(env: MutableMapping[str, str] = os.environ) -> None:
    """Set the spin count unless the environment has one."""
    env.setdefault("GOMP_SPINCOUNT", str(SPIN_COUNT))
