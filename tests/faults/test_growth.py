"""What a fault run says of memory that grows, and of what processes hold at its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import sys
import threading
from pathlib import Path

import pytest

from tests.faults import run as fault_runs
from tests.faults.deployment import Deployment, Service
from tests.faults.run import Report, growth


def walk(slope: float, seed: int, number: int = 400) -> list[tuple[float, float]]:
    """A sample a second of memory that grows by so many MiB a minute, with noise of which neighbours are alike."""
    chance, noise, samples = random.Random(seed), 0.0, []
    for second in range(number):
        noise = 0.9 * noise + chance.gauss(0, 0.3)
        samples.append((1000.0 + second, 500.0 + slope * second / 60 + noise))
    return samples


@pytest.mark.parametrize("slope", [0.0, 0.5, 6.0])
def test_the_interval_of_the_slope_holds_the_true_one_in_about_95_of_100_runs(slope: float) -> None:
    found = [growth(walk(slope, seed)) for seed in range(200)]
    inside = [abs(one["mib_per_minute"] - slope) <= one["error_mib_per_minute"] + 5e-4 for one in found]
    assert 0.88 < sum(inside) / len(inside) <= 1.0
    # It is narrow enough to tell a leak of a request's size from none.
    assert max(one["error_mib_per_minute"] for one in found) < 0.6
    assert abs(found[0]["last_mib"] - found[0]["first_mib"] - 0.9 * slope * 400 / 60) < 2


class Grown(Service):
    """This process, as a service."""

    def __init__(self) -> None:
        super().__init__("itself", "none", {})
        self.num_tasks = 5.0

    @property
    def pid(self) -> int:
        return os.getpid()

    async def metrics(self) -> dict[str, float]:
        return {"coppice_gateway_event_loop_tasks": self.num_tasks}


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.parametrize("kind", ["files", "threads", "tasks", ""])
async def test_what_is_still_held_at_the_end_is_found(kind: str) -> None:
    service = Grown()
    deployment = Deployment({}, lambda: None, {"itself": service})
    before = await fault_runs._held(deployment)
    done = threading.Event()
    with contextlib.ExitStack() as stack:
        if kind == "files":
            for _ in range(9):
                stack.enter_context(Path(os.devnull).open())  # noqa: ASYNC230
        if kind == "threads":
            stack.callback(done.set)
            for _ in range(5):
                threading.Thread(target=done.wait, daemon=True).start()
        if kind == "tasks":
            service.num_tasks += 9
        await asyncio.sleep(0)
        after = await fault_runs._held(deployment)
    report = Report(held={"itself": fault_runs._more(before["itself"], after["itself"])})
    found = fault_runs._process_violations(deployment, report)
    assert bool(found) == bool(kind)
    if kind:
        assert "itself holds more than before the first fault" in found[0]
