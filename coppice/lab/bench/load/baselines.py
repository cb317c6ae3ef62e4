"""transformers by itself beside a closed load: as many requests at once in one batch, by each of its two ways."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence
from typing import Any

from coppice.lab.bench.batch_contenders import BatchContender
from coppice.lab.bench.load.loads import ClosedLoad, Load
from coppice.lab.bench.load.measure import References
from coppice.lab.bench.load.policies import OFF
from coppice.lab.bench.load.samples import Samples, speed
from coppice.lab.bench.load.workload import Workload
from coppice.lab.bench.throughput import BatchSample, ThroughputPlan, measure_batches

# The better of both in each run.
BEST = "transformers"

# By ratio, a value for each run.
ByRun = dict[str, list[float]]


class Baselines:
    """Batches beside the windows of closed loads: each run has its turn with every contender.

    Outputs of a batch have the workload's mean length, all alike, so that none of its rows is idle: what a batch of
    different lengths would lose is given to it.
    """

    def __init__(self, contenders: Sequence[BatchContender], workload: Workload) -> None:
        self._contenders = tuple(contenders)
        self._prompts = workload.prompts
        self._num_tokens = round(workload.mean_tokens)
        self.samples: list[BatchSample] = []

    async def measure(self, load: Load, run: int) -> None:
        """One batch by each contender, while the services rest; nothing beside other loads than closed ones.

        Raises:
            BenchmarkError: a contender failed.
        """
        if not self._contenders or not isinstance(load, ClosedLoad):
            return
        # Runs begin at different prompts, and so do whoever comes first.
        count = load.concurrency
        prompts = [self._prompts[(run * count + number) % len(self._prompts)] for number in range(count)]
        first = run % len(self._contenders)
        order = (*self._contenders[first:], *self._contenders[:first])
        plan = ThroughputPlan((count,), 1, self._num_tokens)
        for sample in await asyncio.to_thread(measure_batches, order, prompts, plan):
            self.samples.append(BatchSample(sample.contender, count, run, sample.completion))

    def rows(self, references: References) -> list[dict[str, Any]]:
        """One flat object per contender and number of requests at once, in the order measured."""
        known = {tokens[: self._num_tokens] for tokens in references}
        found = []
        for count in dict.fromkeys(sample.concurrency for sample in self.samples):
            for contender in self._contenders:
                group = [one for one in self.samples if (one.contender, one.concurrency) == (contender.name, count)]
                speeds = [sample.tokens_per_s for sample in group]
                outputs = [tokens for sample in group for tokens in sample.completion.token_ids]
                row = {
                    "name": f"{contender.name} c{count}",
                    "contender": contender.name,
                    "part": "baseline",
                    "concurrency": count,
                    "tokens_per_s": round(statistics.median(speeds), 3),
                    "tokens_per_s_min": round(min(speeds), 3),
                    "tokens_per_s_max": round(max(speeds), 3),
                    "num_requests": len(outputs),
                    "num_identical_to_off": sum(tokens in known for tokens in outputs),
                    "note": contender.note,
                }
                found.append(row)
        return found

    def ratios(self, samples: Samples) -> ByRun:
        """Plain decoding's tokens per second over each contender's and over the better one's, within runs."""
        found: ByRun = {}
        for load in samples.loads(ClosedLoad):
            for sample in samples.of(load, OFF):
                theirs = {
                    one.contender: one.tokens_per_s
                    for one in self.samples
                    if (one.concurrency, one.run) == (load.concurrency, sample.run)
                }
                if theirs:
                    theirs[BEST] = max(theirs.values())
                for name, tokens_per_s in theirs.items():
                    found.setdefault(f"{OFF}/{name}.{load.name}", []).append(speed(sample) / tokens_per_s)
        return found
