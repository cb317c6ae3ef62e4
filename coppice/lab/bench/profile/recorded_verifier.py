"""A verifier that also keeps what its passes were, and writes it to `RECORDS_DIRECTORY` when it stops."""

from __future__ import annotations

import os
from pathlib import Path

from coppice.kernels.cpu.openmp import set_spin_count
from verifier_svc.__main__ import read_settings


def main() -> None:
    """Run the verifier, then write."""
    # Before torch is imported, as in `verifier_svc/__main__.py`.
    config, certificates = read_settings()
    set_spin_count()
    from coppice.lab.bench.profile.recorded_engine import RecordedEngine
    from coppice.lab.bench.profile.records import DIRECTORY_VARIABLE, VERIFIER_FILE, write_records
    from verifier_svc.app import run_verifier

    run_verifier(config, certificates, RecordedEngine)
    kept = RecordedEngine.kept
    path = Path(os.environ[DIRECTORY_VARIABLE]) / VERIFIER_FILE
    write_records(path, passes=kept.passes, openings=kept.openings, trees=kept.trees)


if __name__ == "__main__":
    main()
