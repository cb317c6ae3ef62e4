"""An orchestrator that also keeps how much CPU time it takes, and writes it to `RECORDS_DIRECTORY` when it stops."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

from coppice.lab.bench.profile.records import DIRECTORY_VARIABLE, ORCHESTRATOR_FILE, CpuRecord, now_s, write_records
from orchestrator.__main__ import main as run_orchestrator

# Between two looks at the clock of the process.
INTERVAL_S = 0.05


def main() -> int:
    """Run the orchestrator, then write."""
    kept: list[CpuRecord] = []
    stop = threading.Event()

    def look() -> None:
        while not stop.wait(INTERVAL_S):
            kept.append(CpuRecord(now_s(), time.process_time()))

    thread = threading.Thread(target=look, name="cpu", daemon=True)
    thread.start()
    try:
        return run_orchestrator()
    finally:
        stop.set()
        thread.join()
        write_records(Path(os.environ[DIRECTORY_VARIABLE]) / ORCHESTRATOR_FILE, cpu=kept)


if __name__ == "__main__":
    sys.exit(main())
