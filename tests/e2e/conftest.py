"""One topology of the bundled pair for all tests of this folder: starting one takes longer than most of them."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from coppice.cli.topology import Topology, TopologySpec, running
from coppice.client import Client


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run all tests here on the loop that reads what the topology's services say."""
    for item in items:
        if pytest_asyncio.is_async_test(item) and item.path.parent.name == "e2e":
            item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def topology() -> AsyncIterator[Topology]:
    """The bundled models, in processes of their own, and in the precision of the oracles."""
    async with running(TopologySpec(device="cpu", threads=1, env={"DTYPE": "float32"})) as topology:
        yield topology


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def bundled(topology: Topology) -> AsyncIterator[Client]:
    """A client of the bundled models."""
    async with Client(topology.address) as client:
        yield client
