"""Where remembered values are kept: a protocol with several forms, none of which ever raises."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass
class CacheCounts:
    """What has happened to the prefix cache since the process started."""

    reads: int = 0
    hits: int = 0
    misses: int = 0
    # Values that were none of ours, or not whole.
    invalid_values: int = 0
    # Calls of the store that failed or took too long, and those that were not made since others just had.
    errors: int = 0
    skipped: int = 0
    # Finished outputs that came faster than they could be written.
    dropped_outputs: int = 0
    # Changes of a value that others had changed meanwhile, and of these the ones that were given up.
    conflicts: int = 0
    lost_changes: int = 0


class PrefixStore(Protocol):
    """Remembers bytes for a while. What goes wrong is counted and looks like something forgotten."""

    async def read(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """The values of keys, in their order, in one round trip; None for what is not there."""

    async def replace(self, before: Mapping[bytes, bytes | None], after: Mapping[bytes, bytes]) -> list[bytes]:
        """Put the values of `after` in place of those of `before`, which has the same keys, in one round trip.

        Returns the keys that had another value by then: these keep it, and the next read tells it.
        """

    async def close(self) -> None:
        """Let go of connections."""
