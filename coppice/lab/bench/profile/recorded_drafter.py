"""A drafter that also keeps what its drafts took, and writes it to `RECORDS_DIRECTORY` when it stops."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import ClassVar

from coppice.lab.bench.profile.records import DIRECTORY_VARIABLE, DRAFTER_FILE, DraftRecord, now_s, write_records
from drafter_svc.__main__ import main as run_drafter
from drafter_svc.acceptance_map import AcceptanceMap
from drafter_svc.drafters.base import Drafter
from drafter_svc.service import DrafterService
from drafter_svc.session import Session, SessionDraft, SessionOpening


class RecordedSession(Session):
    """A sequence whose drafts are written down."""

    def __init__(
        self, drafter: Drafter, opening: SessionOpening, acceptance: AcceptanceMap, kept: list[DraftRecord]
    ) -> None:
        super().__init__(drafter, opening, acceptance)
        self._kept = kept
        self._num_known = 0
        self._asked_s = 0.0
        # What reading has taken since the last draft.
        self._read_s = 0.0

    def schedule(self) -> bool:
        """Whether a job must be submitted."""
        if not super().schedule():
            return False
        self._asked_s = now_s()
        return True

    def read(self, max_pieces: int) -> int:
        """Take in everything posted and read some of it."""
        started_s = now_s()
        num_left = super().read(max_pieces)
        self._read_s += now_s() - started_s
        return num_left

    def advance(self) -> SessionDraft | None:
        """Take in everything posted and draft once. What was read before counts as if it had been read just now."""
        asked_s, started_s, self._read_s = self._asked_s, now_s() - self._read_s, 0.0
        draft = super().advance()
        if draft is not None:
            length = draft.base_length
            times = asked_s, started_s, now_s()
            self._kept.append(DraftRecord(self.request_id, length, length - self._num_known, *times, len(draft.tree)))
            self._num_known = length
        return draft


class RecordedService(DrafterService):
    """Serves sequences whose drafts are written down."""

    # Outlives the service, which is made and stopped out of reach.
    kept: ClassVar[list[DraftRecord]] = []

    def new_session(self, opening: SessionOpening) -> Session:
        """A session that counts against the limit until `release`."""
        super().new_session(opening)
        return RecordedSession(self.drafter, opening, self.acceptance, self.kept)


def main() -> int:
    """Run the drafter, then write."""
    status = run_drafter(RecordedService)
    write_records(Path(os.environ[DIRECTORY_VARIABLE]) / DRAFTER_FILE, drafts=RecordedService.kept)
    return status


if __name__ == "__main__":
    sys.exit(main())
