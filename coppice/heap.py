"""Memory that the process no longer needs, given back to the system."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import os
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

logger = logging.getLogger(__name__)

# glibc's numbers of it, and as many arenas as threads that allocate at once: Python's, and one of gRPC's.
_M_ARENA_MAX, _MOST_ARENAS = -8, 2
_LIBRARY = re.compile(r"\.so(\.\d+)*$")
_SMAPS = Path("/proc/self/smaps")
# Linux's number of it.
_MADV_DONTNEED = 4
# 5 to 30 ms each time: below a thousandth.
_GIVE_BACK_S = 60.0
# Set for a process that has taken the place of one that compiled.
_STARTED_AGAIN = "COPPICE_STARTED_AGAIN"
# `coppice up` and other commands start services by this module.
_OF_A_COMMAND = "coppice.cli.tied_process"


def limit_arenas() -> None:
    """Bound the arenas of the C allocator, each of which keeps what its busiest moment took; a no-op elsewhere.

    To be called before there are threads, which get arenas of their own.
    """
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            mallopt(_M_ARENA_MAX, _MOST_ARENAS)


def release_memory() -> None:
    """Return the C allocator's free memory, which glibc does not do by itself; a no-op elsewhere."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


async def give_memory_back() -> None:
    """Collect garbage and release free memory once a minute, until cancelled.

    A service with few requests makes too little garbage in half an hour for Python to collect it, whatever each piece
    holds; and under load free memory is scattered, more from hour to hour.
    """
    while True:
        await asyncio.sleep(_GIVE_BACK_S)
        gc.collect()
        await asyncio.to_thread(release_memory)


def release_library_pages(smaps: Path = _SMAPS) -> int:
    """Unmap pages of libraries' files, which the system keeps as long as it has room; returns the bytes unmapped.

    To be called after loading, which reads most of torch and LLVM once. What is needed later is mapped again, usually
    without reading the disk. Returns 0 where the system has no such file.
    """
    try:
        lines = smaps.read_text().splitlines()
    except OSError:
        return 0
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int]
    num_kib = 0
    for start, end, resident in _clean_library_parts(lines):
        if libc.madvise(start, end - start, _MADV_DONTNEED) == 0:
            num_kib += resident
    return num_kib * 1024


def _clean_library_parts(lines: Iterable[str]) -> Iterator[tuple[int, int, int]]:
    """Address, end and resident KiB of mapped parts of libraries that nobody can or did change."""
    part: tuple[int, int] | None = None
    resident = 0
    for line in lines:
        key, *values = line.split()
        if key.endswith(":"):
            if key == "Rss:":
                resident = int(values[0])
            # Addresses that the dynamic linker has entered are lost with their page.
            if key == "Anonymous:" and part is not None and resident and values[0] == "0":
                yield (*part, resident)
        else:
            is_clean = values[0] in ("r--p", "r-xp") and _LIBRARY.search(values[-1])
            start, _, end = key.partition("-")
            part = (int(start, 16), int(end, 16)) if is_clean else None


def start_again_if_compiled(num_compiled: int) -> None:
    """Replace a process that has compiled functions by one that reads them from disk; to be called before it serves.

    LLVM keeps hundreds of MiB of what it has compiled, which a pod would hold to its end. A process replaces itself
    once, and not as part of a command, whose first start should not take longer.
    """
    if not num_compiled or os.environ.get(_STARTED_AGAIN) or _OF_A_COMMAND in sys.orig_argv:
        return
    logger.info("%d functions are compiled: starting again without the compiler's memory", num_compiled)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.environ[_STARTED_AGAIN] = "1"
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
