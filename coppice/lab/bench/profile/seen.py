"""What services saw of a load, in figures that a simulation has too. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from coppice.lab.bench.profile.records import Records


def seen(records: Records, spans: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Passes, rounds and drafts per second, the share of rounds with a draft, and the mean time of a pass."""
    parts = [records.within(*span) for span in spans]
    seconds = sum(end - start for start, end in spans)
    passes = [one for part in parts for one in part.passes]
    rounds = [each for one in passes for each in one.rounds]
    return {
        "passes_per_s": round(len(passes) / seconds, 3),
        "pass_ms": round(1000 * sum(one.pass_s for one in passes) / max(1, len(passes)), 3),
        "rounds_per_s": round(len(rounds) / seconds, 3),
        "drafted_share": round(sum(each.num_nodes > 0 for each in rounds) / max(1, len(rounds)), 4),
        "drafts_per_s": round(sum(len(part.drafts) for part in parts) / seconds, 3),
    }
