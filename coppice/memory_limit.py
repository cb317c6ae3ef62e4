"""The memory that this process may have, and the least with which a model can be loaded at all."""

from __future__ import annotations

import math
import resource
from pathlib import Path

# torch, compiled kernels and threads, before any model. Below it they fail anywhere, with tracebacks or without a word.
LEAST_MIB = 512
_MIB = 1 << 20
# Of a container: cgroup v2 and v1. Without a limit they have "max" and a number near 2^63.
_CGROUPS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
_NO_LIMIT = 1 << 62


def memory_limit_mib() -> float:
    """MiB that the container and RLIMIT_DATA allow; infinite without a limit."""
    limits = [math.inf]
    soft, _ = resource.getrlimit(resource.RLIMIT_DATA)
    if soft != resource.RLIM_INFINITY:
        limits.append(soft / _MIB)
    for file in _CGROUPS:
        try:
            text = file.read_text().strip()
        except OSError:  # another version, or another system
            continue
        if text.isdecimal() and int(text) < _NO_LIMIT:
            limits.append(int(text) / _MIB)
    return min(limits)


def check_memory() -> None:
    """Check that a model may be loaded; for before torch is imported.

    Raises:
        ValueError: less than LEAST_MIB is allowed.
    """
    if (limit := memory_limit_mib()) < LEAST_MIB:
        raise ValueError(f"only {limit:.0f} MiB of memory are allowed here: a model needs at least {LEAST_MIB} MiB")
