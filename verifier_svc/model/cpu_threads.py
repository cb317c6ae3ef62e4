"""CPU threads of a pass: few for a few rows, all cores for a prompt.

A pass over a few rows is hundreds of short steps with barriers; a thread that loses its core to an event loop or a
drafter delays all others. A prompt's steps are long enough to use every core. So are compiled layers, which wait at few
barriers: on two cores that the other services share, both serve a request 1.1 times as fast, and sixteen 1.5 times.
"""

from __future__ import annotations

import threading

import torch

from coppice.usable_cores import usable_cores

# Rows from which a step's work outweighs its barrier.
WIDE_PASS_ROWS = 64


class CpuThreads:
    """Sets torch's threads for each pass. For the model's thread: the number applies per thread.

    `requested` threads serve every pass; 0 means half of the cores for a few rows and all of them for many.
    """

    def __init__(self, requested: int) -> None:
        cores = usable_cores()
        self._few_rows = requested or max(1, cores // 2)
        self._many_rows = requested or cores
        # Per thread that runs passes: the loading thread runs probes.
        self._here = threading.local()

    def use_all_cores(self) -> None:
        """Use as many threads for a few rows as for many."""
        self._few_rows = self._many_rows

    def set_for(self, num_rows: int) -> None:
        """Set the threads for a pass of this many rows."""
        wanted = self._many_rows if num_rows >= WIDE_PASS_ROWS else self._few_rows
        if wanted != getattr(self._here, "current", 0):
            torch.set_num_threads(wanted)
            self._here.current = wanted
