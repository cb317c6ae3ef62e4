"""What drafters and verifier take from each other on one machine: both run at once, and each alone."""

from __future__ import annotations

import asyncio
import statistics
from itertools import pairwise

from benchmarks.profile.drafter_peer import DrafterPeer, DraftSeen
from benchmarks.profile.verifier_peer import Known, PassSeen, Shape, VerifierPeer
from simulator.machine import Contention

BESIDE = Shape(4, 7)
BUDGET = 15


async def measure_contention(verifier: VerifierPeer, drafter: DrafterPeer, known: Known, num_rounds: int) -> Contention:
    """Passes alone, drafts alone, and then drafts one after another for as long as passes run."""
    alone = _steps_s(await verifier.run(known, BESIDE, num_rounds))
    drafts = (await drafter.rounds(known, BUDGET))[1:]
    draft_s = statistics.median(one.draft_s for one in drafts)
    running = asyncio.create_task(verifier.run(known, BESIDE, num_rounds))
    beside: list[DraftSeen] = []
    while not running.done():
        beside += (await drafter.rounds(known, BUDGET))[1:]
    together = _steps_s(await running)
    # Drafts asked for one after another: the drafter is busy for so large a share of the time.
    busy = sum(one.draft_s for one in beside) / sum(one.answer_s for one in beside)
    beside_s = statistics.median(one.draft_s for one in beside)
    # In the model a draft counts as long as it would take alone.
    drafting = busy * draft_s / beside_s
    lost = max(0.0, 1 - alone / together)
    return Contention(pass_per_draft=round(lost / drafting, 4), draft_factor=round(max(1.0, beside_s / draft_s), 4))


def _steps_s(passes: list[PassSeen]) -> float:
    return statistics.median(later.came_s - earlier.came_s for earlier, later in pairwise(passes))
