"""A wall clock that jumps by an hour while requests run: no deadline, queue, round or cache knows it."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from coppice.client import Client, Options
from tests.conftest import orchestrator_on_fakes
from tests.fakes import FakeDrafter, FakeVerifier
from tests.faults.deployment import deployed_here
from tests.faults.workload import Load, draw_cases
from tests.toy_target import babble, plain

SHIM = Path(__file__).parent / "clock_shim.c"
COMPILER = shutil.which("cc") or shutil.which("gcc")
HOUR_S = 3600
NUM_JUMPS, GAP_S = 6, 0.5


class Clock:
    """The wall clock of this process, which runs with the shim."""

    def __init__(self, shim: str) -> None:
        library = ctypes.CDLL(shim)
        self._offset_s = ctypes.c_long.in_dll(library, "offset_s")
        self._num_asked = ctypes.c_long.in_dll(library, "num_asked")

    def jump(self, offset_s: int) -> None:
        """Be so far ahead of the machine's."""
        before_s, monotonic_s = time.time() - self._offset_s.value, time.monotonic()
        self._offset_s.value = offset_s
        assert abs(time.time() - offset_s - before_s) < 60
        assert 0 <= time.monotonic() - monotonic_s < 60

    @property
    def num_asked(self) -> int:
        """How often anything in this process has asked it."""
        return self._num_asked.value


async def requests_over_jumps(clock: Clock, offset_s: int) -> dict[str, int]:
    """How requests end, over gRPC and HTTP, while the clock jumps to and fro."""
    async with deployed_here(seed=2) as deployment:
        cases = await draw_cases(deployment.address, 4, random.Random(2))
        load = Load(deployment.address, cases, 6, 2, deployment.http_address)
        running = asyncio.create_task(load.run())
        for number in range(NUM_JUMPS):
            await asyncio.sleep(GAP_S)
            clock.jump(0 if number % 2 else offset_s)
        load.stop()
        async with asyncio.timeout(30):
            await running
    assert not load.ends.violations
    assert load.ends.num_http > 3
    return dict(load.ends.counts)


async def cache_over_jumps(clock: Clock) -> list[int]:
    """Hits of a cache whose time to live is ten minutes, after each of four equal requests."""
    settings = {"cache_drafter": True, "cache_ttl_s": 600.0, "max_queue_wait_s": 5.0, "planner": "adaptive"}
    async with orchestrator_on_fakes(FakeVerifier(), FakeDrafter(), **settings) as (client, one):
        assert one.cache is not None
        hits = []
        for offset_s in (0, 0, HOUR_S, -HOUR_S):
            clock.jump(offset_s)
            hits.append(await _hits(client, one.cache.counts))
    return hits


async def _hits(client: Client, counts: object) -> int:
    options = Options(max_tokens=60, seed=3, temperature=1.0, ignore_eos=True, cache_salt="salt")
    completion = await client.generate((98, 99), options, timeout_s=20)
    assert list(completion.token_ids) == plain(babble, (98, 99), 60, 3)
    # Values are written after the output has ended.
    await asyncio.sleep(0.3)
    hits: int = counts.hits  # type: ignore[attr-defined]
    return hits


async def main(shim: str) -> None:
    """Run with the shim preloaded; prints what happened."""
    clock = Clock(shim)
    ends = [await requests_over_jumps(clock, offset_s) for offset_s in (HOUR_S, -HOUR_S)]
    hits = await cache_over_jumps(clock)
    sys.stdout.write(json.dumps({"ends": ends, "hits": hits, "asked": clock.num_asked}) + "\n")


@pytest.mark.skipif(sys.platform != "linux" or COMPILER is None, reason="needs LD_PRELOAD and a C compiler")
def test_a_jump_of_an_hour_ends_no_request_and_forgets_no_draft(tmp_path: Path) -> None:
    shim = tmp_path / "clock_shim.so"
    subprocess.run([str(COMPILER), "-shared", "-fPIC", "-O1", "-o", shim, SHIM], check=True, timeout=60)
    env = {**os.environ, "LD_PRELOAD": str(shim)}
    command = [sys.executable, "-m", "tests.faults.test_clock", str(shim)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    for ends in told["ends"]:
        assert ends.keys() <= {"completed", "left by its client"}
        assert ends["completed"] > 10
    first, second, later, earlier = told["hits"]
    assert first < second < later < earlier
    # gRPC asks it for deadlines, and logs do: the jumps were seen.
    assert told["asked"] > 100


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
