"""What the system tells of processes: memory, open files and threads, from /proc."""

from __future__ import annotations

import os
from pathlib import Path

_MIB = 1024 * 1024


def resident_mib(pid: int = 0) -> float:
    """Memory of a process that is in use; 0 means our own."""
    pages = int(Path(f"/proc/{pid or os.getpid()}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / _MIB


def open_files(pid: int) -> int:
    """Files, sockets and pipes that a process has open."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def num_threads(pid: int) -> int:
    """Threads of a process."""
    return len(list(Path(f"/proc/{pid}/task").iterdir()))
