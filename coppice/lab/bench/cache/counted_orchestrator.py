"""An orchestrator that also says what its prefix cache has counted, which is no part of the public API.

`COUNTS_PORT`: who connects there gets one line of JSON, once every output that has ended is remembered.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from dataclasses import asdict

from coppice.cli.topology import LOCAL
from coppice.net.rpc import run, stop_signal
from orchestrator.app import running
from orchestrator.config import Config
from orchestrator.prefix_cache.cache import PrefixCache
from orchestrator.prefix_cache.store import CacheCounts

PORT_VARIABLE = "COUNTS_PORT"


async def read_counts(port: int) -> CacheCounts:
    """What an orchestrator has counted since it started, all that it has to remember being written.

    Raises OSError if there is none.
    """
    reader, writer = await asyncio.open_connection(LOCAL, port)
    try:
        return CacheCounts(**json.loads(await reader.readline()))
    finally:
        writer.close()


async def serve(config: Config, counts_port: int) -> None:
    """Serve until the process is asked to stop."""
    async with running(config) as orchestrator:
        cache = orchestrator.cache
        if cache is None:
            raise ValueError("CACHE_DRAFTER must be on")

        async def tell(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await _tell(cache, writer)

        async with await asyncio.start_server(tell, LOCAL, counts_port):
            sys.stdout.write(f"ready {orchestrator.address}\n")
            sys.stdout.flush()
            await stop_signal()


async def _tell(cache: PrefixCache, writer: asyncio.StreamWriter) -> None:
    await cache.flushed()
    writer.write(json.dumps(asdict(cache.counts)).encode() + b"\n")
    await writer.drain()
    writer.close()


if __name__ == "__main__":
    run(lambda: serve(Config.from_env(os.environ), int(os.environ[PORT_VARIABLE])))
