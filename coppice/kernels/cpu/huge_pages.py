"""Memory in huge pages, where the system offers them on request.

A pass on a CPU reads all weights, 58 MB in single precision for the bundled target: fourteen thousand pages of 4 KiB.
Page table lookups and physical placement then make the duration of a pass differ between processes. glibc's allocator
requests huge pages if `GLIBC_TUNABLES` says so, which it reads at process start. Other allocators ignore it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

VARIABLE = "GLIBC_TUNABLES"
SETTING = "glibc.malloc.hugetlb=1"
# The active mode is in brackets. Requests only matter with `madvise`.
MODE_FILE = Path("/sys/kernel/mm/transparent_hugepage/enabled")
ASKING = "[madvise]"

Start = Callable[[str, list[str], dict[str, str]], object]


def start_with_huge_pages(
    env: Mapping[str, str] = os.environ, mode_file: Path = MODE_FILE, start: Start = os.execve
) -> None:
    """Restart this process with the setting, which children inherit, unless the environment has one.

    For the first lines of a program: all state is lost.
    """
    if VARIABLE in env or not _is_asked_for(mode_file):
        return
    start(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**env, VARIABLE: SETTING})


def _is_asked_for(mode_file: Path) -> bool:
    try:
        return ASKING in mode_file.read_text()
    except OSError:
        return False
