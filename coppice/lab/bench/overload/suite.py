"""The overload suite from end to end: requests, measurement, report."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from coppice.client import Client, RequestFailedError
from coppice.frozen_heap import frozen_heap
from coppice.lab.bench.contenders import BenchmarkError
from coppice.lab.bench.environment import describe_machine, describe_run
from coppice.lab.bench.latency_suite import progress_bar, shown
from coppice.lab.bench.load.figures import Targets
from coppice.lab.bench.load.measure import reference_outputs
from coppice.lab.bench.load.policies import OFF, Mode, Policy
from coppice.lab.bench.load.workload import Workload
from coppice.lab.bench.overload.crowd_watch import CrowdWatch
from coppice.lab.bench.overload.figures import LATENCIES, accepted
from coppice.lab.bench.overload.measure import OverloadPlan, OverloadSample, measure_overload, saturating_rate
from coppice.lab.bench.overload.rows import RATIO_NOTE, problems, ratios, remarks, rows, slowest_first_tokens
from coppice.lab.bench.overload.sizes import Sizes
from coppice.lab.bench.report import machine_remarks


@dataclass(frozen=True, slots=True)
class OverloadSuite:
    """One overload benchmark of a target served at an address, by an orchestrator with such bounds."""

    sizes: Sizes
    plan: OverloadPlan
    threads: int
    max_token_ms: float
    max_queue_wait_s: float
    # What one request alone took on this machine, where that gave the bound.
    alone_token_ms: float | None = None
    # Of the orchestrator; without it, nobody sees how many wait.
    metrics_url: str | None = None
    targets: Targets = field(default_factory=Targets)

    def run(self, address: str) -> dict[str, Any]:
        """Measure and return the report.

        Raises:
            BenchmarkError: the server failed.
        """
        # The generator must not be late because it looks for garbage.
        with frozen_heap():
            return asyncio.run(self._run(address))

    async def _run(self, address: str) -> dict[str, Any]:
        machine = describe_machine()
        async with Client(address) as client:
            try:
                info = await client.model_info()
            except RequestFailedError as error:
                raise BenchmarkError(f"GetModelInfo: {error}") from error
            workload = self.sizes.workload(info.max_context_tokens)
            references = await reference_outputs(client, workload, Policy(OFF, Mode.MODE_OFF))
            rate_per_s = await saturating_rate(client, workload, self.plan)
            with progress_bar() as progress:
                step = progress.add_task("overload", total=self.plan.num_runs * (1 + len(self.plan.factors)))
                samples = await measure_overload(
                    client,
                    workload,
                    self.plan,
                    rate_per_s,
                    CrowdWatch(self.metrics_url),
                    partial(progress.advance, step),
                )
        result = rows(samples, self.targets, references)
        values, spread = ratios(samples, self.targets)
        return {
            "suite": "overload",
            "rows": result,
            "ratios": values,
            "ratio_spread": spread,
            "ratio_note": RATIO_NOTE,
            "slowest_first_tokens": slowest_first_tokens(samples),
            "course": _course(samples),
            "notes": [*remarks(result), *machine_remarks(machine)],
            "mismatches": problems(result),
            "settings": self._settings(workload, rate_per_s),
            **describe_run(machine),
        }

    def _settings(self, workload: Workload, rate_per_s: float) -> dict[str, Any]:
        plan = self.plan
        return {
            "target": shown(self.sizes.target),
            "threads": self.threads,
            "factors": list(plan.factors),
            "num_runs": plan.num_runs,
            "duration_s": plan.duration_s,
            "recovery_s": plan.recovery_s,
            "concurrency": plan.concurrency,
            "share_leaving": plan.visitors.leaving,
            "share_slow": plan.visitors.slow,
            "max_token_ms": self.max_token_ms,
            "alone_token_ms": self.alone_token_ms,
            "max_queue_wait_s": self.max_queue_wait_s,
            "saturation_requests_per_s": round(rate_per_s, 3),
            "ttft_target_ms": 1000 * self.targets.ttft_s,
            "tpot_target_ms": 1000 * self.targets.tpot_s,
            "output_tokens": [self.sizes.min_tokens, self.sizes.max_tokens],
            "mean_output_tokens": round(workload.mean_tokens, 1),
            "prompt_tokens": [len(prompt) for prompt in workload.prompts],
            "seed": self.sizes.seed,
        }


def _course(samples: list[OverloadSample]) -> dict[str, Any]:
    """Time per token over the time of the first run of the largest load, of those who got in, then and after."""
    sample = max((one for one in samples if one.run == 0), key=lambda one: one.factor)
    whole = OverloadSample(sample.factor, 0, float("inf"), sample.answers, ())
    points = [(answer.intended_s, LATENCIES["token"](answer)) for answer in accepted([whole])]
    return {
        "load": f"x{sample.factor:g}",
        "end_s": sample.end_s,
        "at_s": [round(at_s, 3) for at_s, token_s in points if token_s is not None],
        "token_ms": [round(1000 * token_s, 3) for _, token_s in points if token_s is not None],
    }
