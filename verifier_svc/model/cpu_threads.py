"""The CPU threads of a pass: few for a few rows, all cores for a prompt.

A pass over a few rows is hundreds of short steps; its threads meet after each, and one of them that has lost its core
to an event loop or a drafter holds up all. A prompt's steps are long enough to use every core.
"""

from __future__ import annotations

import os
import threading

import torch

# From here on a step's work outweighs the meeting of its threads.
WIDE_PASS_ROWS = 64


class CpuThreads:
    """Sets torch's threads for each pass. Used by the thread that runs the model, for which alone the number counts.

    `requested` threads serve every pass; 0 means half of the cores for a few rows and all of them for many.
    """

    def __init__(self, requested: int) -> None:
        cores = os.cpu_count() or 1
        self._few_rows = requested or max(1, cores // 2)
        self._many_rows = requested or cores
        # Of each thread that has run a pass: whoever loads the model tries it, too.
        self._here = threading.local()

    def set_for(self, num_rows: int) -> None:
        """The next pass has this many rows."""
        wanted = self._many_rows if num_rows >= WIDE_PASS_ROWS else self._few_rows
        if wanted != getattr(self._here, "current", 0):
            torch.set_num_threads(wanted)
            self._here.current = wanted
