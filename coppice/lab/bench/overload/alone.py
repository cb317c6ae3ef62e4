"""How long a token of this server takes for a request that has it to itself: what a bound of the server goes by."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from coppice.client import Client, RequestFailedError
from coppice.lab.bench.contenders import BenchmarkError
from coppice.lab.bench.load.loads import ClosedLoad
from coppice.lab.bench.load.window import Fate, Window
from coppice.lab.bench.overload.figures import latency
from coppice.lab.bench.overload.measure import POLICY
from coppice.lab.bench.overload.sizes import Sizes


@dataclass(frozen=True, slots=True)
class AloneSuite:
    """One request at a time, for `duration_s` after the first."""

    sizes: Sizes
    duration_s: float

    def run(self, address: str) -> dict[str, Any]:
        """The median time per token, milliseconds, and of how many requests it is.

        Raises:
            BenchmarkError: the server failed, or no request ended.
        """
        return asyncio.run(self._run(address))

    async def _run(self, address: str) -> dict[str, Any]:
        async with Client(address) as client:
            try:
                info = await client.model_info()
            except RequestFailedError as error:
                raise BenchmarkError(f"GetModelInfo: {error}") from error
            window = Window(client, POLICY)
            load = ClosedLoad(1, self.duration_s)
            span = await load.drive(window, self.sizes.workload(info.max_context_tokens), 0)
        # The first was the warm-up.
        ended = [one for one in window.answers() if one.fate is Fate.COMPLETED and one.ended_s in span]
        token_s = latency(ended, "token", 50)
        if token_s is None:
            why = next((one.error for one in window.answers() if one.error), f"within {self.duration_s:g} s")
            raise BenchmarkError(f"no request alone was completed: {why}")
        return {"token_ms": round(1000 * token_s, 3), "num_requests": len(ended)}
