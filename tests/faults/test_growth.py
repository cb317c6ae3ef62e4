"""What a fault run says of memory that grows, and of what processes hold at its end."""

from __future__ import annotations

import random
import subprocess
import sys

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


CHILD = """
import os, sys, threading
held = []
print("ready", flush=True)
kind = sys.stdin.readline().strip()
if kind == "files":
    held += [open(os.devnull) for _ in range(9)]
if kind == "threads":
    for _ in range(5):
        threading.Thread(target=threading.Event().wait, daemon=True).start()
print("held", flush=True)
sys.stdin.readline()
"""


class Grown(Service):
    """A child process, as a service: this one also holds what other tests left to the garbage collector."""

    def __init__(self, child: subprocess.Popen[str]) -> None:
        super().__init__("child", "none", {})
        self.child = child
        self.num_tasks = 5.0

    @property
    def pid(self) -> int:
        return self.child.pid

    def told(self) -> str:
        assert self.child.stdout is not None
        return self.child.stdout.readline().strip()

    def hold(self, kind: str) -> None:
        assert self.child.stdin is not None
        self.child.stdin.write(kind + "\n")
        self.child.stdin.flush()
        assert self.told() == "held"

    async def metrics(self) -> dict[str, float]:
        return {"coppice_gateway_event_loop_tasks": self.num_tasks}


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.parametrize("kind", ["files", "threads", "tasks", ""])
async def test_what_is_still_held_at_the_end_is_found(kind: str) -> None:
    command = [sys.executable, "-I", "-c", CHILD]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:  # noqa: ASYNC220
        service = Grown(child)
        assert service.told() == "ready"
        deployment = Deployment({}, lambda: None, {"child": service})
        before = await fault_runs._held(deployment)
        service.hold(kind)
        if kind == "tasks":
            service.num_tasks += 9
        after = await fault_runs._held(deployment)
    report = Report(held={"child": fault_runs._more(before["child"], after["child"])})
    found = fault_runs._process_violations(deployment, report)
    assert bool(found) == bool(kind)
    if kind:
        assert "child holds more than before the first fault" in found[0]
