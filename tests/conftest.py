"""Fixtures for every test: the fakes as running servers."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from coppice.client import Client
from orchestrator.app import Orchestrator, running
from orchestrator.config import Config
from tests.fakes import FakeDrafter, FakeVerifier, serving

# The first example may have to wait for the compiler.
hypothesis.settings.register_profile("suite", deadline=None)
hypothesis.settings.load_profile("suite")

StartFakes = Callable[..., Any]
TESTS = Path(__file__).parent
# Everything there needs the machine, or its accelerator, for itself.
ALONE = ("e2e", "gpu")
# Where tests are that have the mark: the second run of `make test` collects no others.
MARKED = (*ALONE, "faults", "attacks")
# Begun last, one of these files would run on by itself. The first two compile what the others find compiled.
LONG = (
    "unit/drafter_svc/model/test_tree_search.py",
    "integration/test_redraft_warm_up.py",
    "unit/orchestrator/planner/test_adaptive_planner.py",
    "unit/verifier_svc/test_tree_passes.py",
    "integration/test_redraft_deployment.py",
    "integration/test_tensor_parallel.py",
    "integration/test_topology_commands.py",
    "integration/test_conformance_command.py",
    "unit/verifier_svc/test_preemption.py",
    "repo/test_wheel.py",
    "families/test_families.py",
    "integration/test_conformance.py",
    "integration/test_verifier_process.py",
    "unit/verifier_svc/model/test_rope_regimes.py",
    "unit/coppice/lab/bench/test_throughput.py",
    "fuzz/test_exactness.py",
    "unit/verifier_svc/test_engine_memory.py",
    "unit/verifier_svc/engine/test_engine.py",
    "integration/test_broken_promises.py",
    "unit/verifier_svc/test_fast_mode.py",
    "unit/verifier_svc/test_prompts_before_trees.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is not to run beside other tests (`make test`), and begin with what takes long."""
    for item in items:
        folder = item.path.relative_to(TESTS).parts[0]
        if folder in ALONE:
            item.add_marker(pytest.mark.processes)
        if folder not in MARKED and item.get_closest_marker("processes"):
            raise pytest.UsageError(f"{item.nodeid} is marked `processes`; `make test` looks in {', '.join(MARKED)}")
    places = {TESTS / name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: places.get(item.path, len(LONG)))


def pytest_runtest_setup() -> None:
    """Begin with one thread of torch, whatever an earlier test has set: waiting threads take the other test's core."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


@contextlib.asynccontextmanager
async def orchestrator_on_fakes(
    verifier: FakeVerifier | Sequence[FakeVerifier], *drafters: FakeDrafter, **settings: Any
) -> AsyncIterator[tuple[Client, Orchestrator]]:
    """An orchestrator on real servers of the given fakes, and a client of it."""
    async with contextlib.AsyncExitStack() as stack:
        verifiers = [verifier] if isinstance(verifier, FakeVerifier) else verifier
        verifier_addresses = [await stack.enter_async_context(serving(one)) for one in verifiers]
        drafter_addresses = [await stack.enter_async_context(serving(drafter)) for drafter in drafters]
        config = Config(
            verifier_address=",".join(verifier_addresses),
            drafter_addresses=tuple(drafter_addresses),
            # Most tests are about drafters, and know what these propose and when.
            **{"connect_timeout_s": 10.0, "grace_s": 0.0, "cache_drafter": False, "planner": "fixed", **settings},
        )
        orchestrator = await stack.enter_async_context(running(config))
        client = await stack.enter_async_context(Client(orchestrator.address))
        yield client, orchestrator


@pytest.fixture
def start_fakes() -> StartFakes:
    """`async with start_fakes(verifier, *drafters, **settings) as (client, orchestrator)`."""
    return orchestrator_on_fakes
