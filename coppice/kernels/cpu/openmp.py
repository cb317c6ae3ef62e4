"""Spin time of torch's waiting threads. Set it before torch is imported.

By default they spin forever: a second process on the same cores turns a 4 ms pass into hundreds of milliseconds, since
every barrier waits for a thread without a core. Without any spinning a pass costs 4 ms more on a quiet machine. A
short spin is close to the best of both (measured on two cores, bundled target, one row: endless spin 4.0 ms alone;
none 8.2 ms alone; this count 4.1 ms alone and 13 ms with a busy process, where ten times the count takes 62 ms).
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

SPIN_COUNT = 2000


def set_spin_count(env: MutableMapping[str, str] = os.environ) -> None:
    """Set the spin count unless the environment has one."""
    env.setdefault("GOMP_SPINCOUNT", str(SPIN_COUNT))
