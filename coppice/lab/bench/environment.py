"""The environment of a benchmark: machine, versions, command line and commit."""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from coppice.usable_cores import usable_cores
from coppice.version import VERSION

REPOSITORY = Path(__file__).resolve().parents[3]
GIT_TIMEOUT_S = 10
UNKNOWN = "unknown"


def describe_machine() -> dict[str, Any]:
    """Processor, cores, memory and system, and how busy the machine was."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "usable_cores": usable_cores(),
        "memory_gib": _memory_gib(),
        "os": platform.platform(),
        # A benchmark started next to other work measures that work too.
        "load_average_1m": round(os.getloadavg()[0], 2),
    }


def describe_run(machine: Mapping[str, Any]) -> dict[str, Any]:
    """What ends every report: `machine`, described before anything was measured, versions, command, commit and day."""
    commit = describe_commit()
    packages = {name: _package_version(name) for name in ("torch", "transformers", "grpcio", "numpy")}
    return {
        "machine": dict(machine),
        "versions": {"python": platform.python_version(), **packages, "coppice": VERSION},
        "command": "coppice " + shlex.join(sys.argv[1:]),
        "commit": commit["revision"],
        "dirty": commit["dirty"],
        "date": datetime.now(UTC).date().isoformat(),
    }


def describe_commit(root: Path = REPOSITORY) -> dict[str, Any]:
    """Revision of the working tree at `root`, and whether it holds changes; unknown outside of one."""
    top_level = _git(root, "rev-parse", "--show-toplevel")
    # Installed into an environment that lies in another repository, its revision is not ours.
    if top_level is None or Path(top_level) != root:
        return {"revision": UNKNOWN, "dirty": None}
    revision = _git(root, "rev-parse", "HEAD")
    status = _git(root, "status", "--porcelain")
    return {"revision": revision or UNKNOWN, "dirty": None if status is None else bool(status)}


def _git(root: Path, *arguments: str) -> str | None:
    git = shutil.which("git")
    if git is None:
        return None
    try:
        done = subprocess.run(
            [git, "-C", str(root), *arguments], capture_output=True, text=True, check=True, timeout=GIT_TIMEOUT_S
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (ValueError, OSError):  # a system that does not say
        return None


def _package_version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return UNKNOWN
