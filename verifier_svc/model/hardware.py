"""What the target's passes run on, in words that are the same wherever passes take about the same time."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch

_CPU_INFO = Path("/proc/cpuinfo")


def hardware(device: torch.device, threads: int, num_processes: int) -> str:
    """Kind of processor, the threads that it may use (0: as it sees fit), and how many processes share a pass."""
    if device.type == "cuda":
        return f"cuda {torch.cuda.get_device_name(device)}, {num_processes} processes"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{device.type} {_cpu_model()}, {cores} cores, {threads} threads, {num_processes} processes"


def _cpu_model() -> str:
    if _CPU_INFO.exists():
        for line in _CPU_INFO.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
