"""When what planners have learned is written: seldom, in one call, and only what is worth it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from coppice.lab.simulator.policies import Policy
from orchestrator.planner.adaptive import AdaptivePlanner
from orchestrator.planner.knowledge import decode_knowledge
from orchestrator.planner.shared_knowledge import LEAST_PASSES, PlannerSnapshotTarget, SharedKnowledge
from orchestrator.prefix_cache.store import CacheCounts
from tests.fakes import eventually
from tests.unit.orchestrator.planner.drawn_text import Predictability
from tests.unit.orchestrator.planner.endless_load import EndlessLoad

PLANNER = Policy("planner")


class Store:
    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}
        self.writes: list[tuple[dict[bytes, bytes], float]] = []
        self.fails = False
        self.is_closed = False

    async def read(self, keys: Sequence[bytes]) -> list[bytes | None]:
        return [self.values.get(key) for key in keys]

    async def write(self, values: Mapping[bytes, bytes], ttl_s: float) -> None:
        if self.fails:
            raise RuntimeError("a bug")
        self.writes.append((dict(values), ttl_s))
        self.values.update(values)

    async def close(self) -> None:
        self.is_closed = True


def deployment() -> EndlessLoad:
    made = EndlessLoad(PLANNER.planner(), PLANNER, Predictability())
    made.set_load(2)
    return made


def target(of: EndlessLoad, key: bytes) -> PlannerSnapshotTarget:
    assert isinstance(of.planner, AdaptivePlanner)
    return PlannerSnapshotTarget(of.planner, lambda: key)


async def test_every_interval_has_one_write_of_those_that_have_learned_something() -> None:
    store, models = Store(), [deployment() for _ in range(3)]
    targets = [target(model, str(number).encode()) for number, model in enumerate(models)]
    shared = SharedKnowledge(store, CacheCounts(), targets, ttl_s=60.0, write_every_s=0.02)
    await shared.start()
    assert shared.counts.misses == 3
    for model in models[:2]:
        model.run(2.0)
    await eventually(lambda: bool(store.writes))
    await asyncio.sleep(0.1)
    [(written, ttl_s)] = store.writes
    assert (sorted(written), ttl_s) == ([b"0", b"1"], 60.0)
    assert decode_knowledge(written[b"0"]).costs[0].weight > LEAST_PASSES
    models[1].run(2.0)
    await eventually(lambda: len(store.writes) == 2)
    assert list(store.writes[1][0]) == [b"1"]
    await shared.close()
    assert len(store.writes) == 2
    assert store.is_closed


async def test_what_was_learned_since_is_written_at_the_end_and_read_at_the_next_start() -> None:
    store, model = Store(), deployment()
    shared = SharedKnowledge(store, CacheCounts(), [target(model, b"key")], ttl_s=60.0)
    await shared.start()
    model.run(2.0)
    assert not store.writes
    await shared.close()
    counts = CacheCounts()
    other = AdaptivePlanner(15, 40_000)
    again = SharedKnowledge(
        store,
        counts,
        [PlannerSnapshotTarget(other, lambda: b"key"), PlannerSnapshotTarget(other, lambda: b"none")],
        ttl_s=60.0,
    )
    await again.start()
    assert (counts.reads, counts.hits, counts.misses) == (1, 1, 1)
    assert other.knowledge() is not None
    # It has learned nothing of its own.
    await again.close()
    assert len(store.writes) == 1


async def test_a_write_that_raises_is_not_the_end_of_writing() -> None:
    store, model = Store(), deployment()
    shared = SharedKnowledge(store, CacheCounts(), [target(model, b"key")], ttl_s=60.0, write_every_s=0.01)
    store.fails = True
    await shared.start()
    model.run(2.0)
    await asyncio.sleep(0.05)
    store.fails = False
    model.run(2.0)
    await eventually(lambda: bool(store.writes))
    store.fails = True
    model.run(2.0)
    await shared.close()
    assert store.is_closed
