"""Memory in huge pages, where the system has them for who asks.

A pass of a model on a CPU reads all of its weights, 58 MB in single precision for the bundled target. In pages of 4 KiB
that is fourteen thousand places to look up, and what is near in one page is anywhere in the next: how long a pass takes
then differs from process to process. glibc's allocator asks for huge pages where `GLIBC_TUNABLES` says so, and reads it
once, when a process starts. Other allocators ignore it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

VARIABLE = "GLIBC_TUNABLES"
SETTING = "glibc.malloc.hugetlb=1"
# Linux's: which of its modes is in brackets is on. Only with `madvise` does it matter who asks.
MODE_FILE = Path("/sys/kernel/mm/transparent_hugepage/enabled")
ASKING = "[madvise]"

Start = Callable[[str, list[str], dict[str, str]], object]


def start_with_huge_pages(
    env: Mapping[str, str] = os.environ, mode_file: Path = MODE_FILE, start: Start = os.execve
) -> None:
    """Start this process anew with the setting, which its children inherit, unless the environment has one of its own.

    For the first lines of a program: nothing that was done so far is kept.
    """
    if VARIABLE in env or not _is_asked_for(mode_file):
        return
    start(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**env, VARIABLE: SETTING})


def _is_asked_for(mode_file: Path) -> bool:
    try:
        return ASKING in mode_file.read_text()
    except OSError:
        return False
