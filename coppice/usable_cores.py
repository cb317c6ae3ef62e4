"""The processor cores that this process may keep busy."""

from __future__ import annotations

import os
from pathlib import Path

# A container's microseconds of processor time, and of how many: cgroup v2, where it may be "max", and v1, where it may
# be -1.
_QUOTA = Path("/sys/fs/cgroup/cpu.max")
_QUOTA_V1 = Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"), Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us")


def usable_cores() -> int:
    """The machine's cores as far as affinity and the container's quota allow; a part of a core is not counted.

    A thread more than that waits for its turn while the others wait for it at the next barrier of a pass.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, period = _quota()
    return max(1, min(cores, quota // period)) if quota > 0 and period > 0 else cores


def _quota() -> tuple[int, int]:
    """Quota and period; zeros without a quota."""
    for files in ((_QUOTA,), _QUOTA_V1):
        try:
            quota, period = (int(word) for file in files for word in file.read_text().split())
        except (OSError, ValueError):  # another version or another system, or "max"
            continue
        return quota, period
    return 0, 0
