"""The load suite from end to end: services, requests, measurement, report."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from coppice.client import Client, RequestFailedError
from coppice.core.tokenizer import TargetTokenizer, load_tokenizer_json
from coppice.frozen_heap import frozen_heap
from coppice.lab.bench.batch_contenders import BatchedGenerate, ContinuousBatching
from coppice.lab.bench.contenders import BenchmarkError
from coppice.lab.bench.environment import describe_machine, describe_run
from coppice.lab.bench.latency import fit_context
from coppice.lab.bench.latency_suite import progress_bar, shown
from coppice.lab.bench.load.arrivals import Arrival, trace_beginning
from coppice.lab.bench.load.baselines import Baselines
from coppice.lab.bench.load.figures import Targets
from coppice.lab.bench.load.loads import ClosedLoad, Load, PoissonLoad, StepLoad, TraceLoad
from coppice.lab.bench.load.measure import References, measure_loads, reference_outputs
from coppice.lab.bench.load.policies import Policy, policies
from coppice.lab.bench.load.ratios import RATIO_NOTE, ratios
from coppice.lab.bench.load.rows import mismatches, remarks, rows, series
from coppice.lab.bench.load.samples import Samples, saturating_load, saturation
from coppice.lab.bench.load.workload import Workload
from coppice.lab.bench.prompts import Prompt
from coppice.lab.bench.report import machine_remarks
from coppice.lab.bench.transformers_baseline import load_model, quiet_transformers
from coppice.v1 import inference_pb2


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What is measured: `num_runs` windows of `duration_s` for every load under every policy."""

    concurrency: tuple[int, ...] = (1, 4, 16, 64)
    num_runs: int = 3
    duration_s: float = 10.0
    # Arrivals at random, in shares of the requests per second that saturate the server without speculation.
    rates: tuple[float, ...] = (0.6, 0.9, 1.2)
    # Arrivals of a trace that is played `trace_speed` times as fast; empty for none.
    trace: tuple[Arrival, ...] = ()
    trace_speed: float = 1.0
    # The step goes from one request at a time to so many and back; 0 for no step.
    step: int = 64
    targets: Targets = field(default_factory=Targets)
    # Whether transformers has its turn beside the closed loads, too; it does with greedy requests alone.
    transformers: bool = True

    def closed_loads(self) -> list[Load]:
        """So many requests at once."""
        return [ClosedLoad(concurrency, self.duration_s) for concurrency in self.concurrency]

    def other_loads(self, saturation_per_s: float, seed: int) -> list[Load]:
        """Arrivals at shares of so many requests per second, those of the trace, and the step."""
        loads: list[Load] = [PoissonLoad(rate, rate * saturation_per_s, self.duration_s, seed) for rate in self.rates]
        if self.trace:
            arrivals = trace_beginning(self.trace, self.duration_s, self.trace_speed)
            loads.append(TraceLoad(tuple(arrivals), self.duration_s))
        if self.step:
            loads.append(StepLoad(self.step, self.duration_s))
        return loads

    @property
    def num_loads(self) -> int:
        """Of all kinds."""
        return len(self.concurrency) + len(self.rates) + bool(self.trace) + bool(self.step)


@dataclass(frozen=True, slots=True)
class LoadSuite:
    """One load benchmark of a target served at an address."""

    target: Path
    prompts: tuple[Prompt, ...]
    plan: LoadPlan
    threads: int
    min_tokens: int = 32
    max_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0

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
            contenders = policies(info.max_nodes)
            workload, num_cut = self._workload(info.max_context_tokens)
            baselines = self._baselines(workload)
            references = await reference_outputs(client, workload, contenders[0])
            samples = await self._measure(client, workload, contenders, baselines)
        settings = self._settings(workload, num_cut, samples, info)
        return _document(samples, references, baselines, settings, machine)

    def _baselines(self, workload: Workload) -> Baselines:
        """transformers in both of its ways, or nobody."""
        if not self.plan.transformers or self.temperature > 0:
            return Baselines((), workload)
        quiet_transformers()
        target = load_model(self.target)
        longest = max(map(len, workload.prompts)) + self.max_tokens
        both = BatchedGenerate(target, self.threads), ContinuousBatching(target, self.threads, longest)
        return Baselines(both, workload)

    async def _measure(
        self, client: Client, workload: Workload, contenders: Sequence[Policy], baselines: Baselines
    ) -> Samples:
        """Closed loads first: what saturates the server decides how fast requests arrive in the others."""
        plan = self.plan
        with progress_bar() as progress:
            step = progress.add_task("load", total=plan.num_loads * plan.num_runs * len(contenders))
            measure = partial(
                measure_loads,
                client,
                workload,
                policies=contenders,
                num_runs=plan.num_runs,
                seed=self.seed,
                on_sample=partial(progress.advance, step),
            )
            taken = await measure(plan.closed_loads(), baselines=baselines)
            per_s = saturation(Samples(taken, contenders, plan.targets)) / workload.mean_tokens
            if not per_s:
                raise BenchmarkError(f"no token came in any window of {plan.duration_s:g} s with speculation off")
            taken += await measure(plan.other_loads(per_s, self.seed))
        return Samples(taken, contenders, plan.targets)

    def _workload(self, max_context_tokens: int) -> tuple[Workload, int]:
        if self.max_tokens >= max_context_tokens:
            raise BenchmarkError(
                f"--output-tokens {self.max_tokens} leaves no room for a prompt in a context of {max_context_tokens}"
            )
        tokenizer = TargetTokenizer(load_tokenizer_json(self.target))
        encoded = [tokenizer.encode(prompt.text) for prompt in self.prompts]
        prompt_ids, num_cut = fit_context(encoded, self.max_tokens, max_context_tokens)
        fitting = tuple(tuple(ids) for ids in prompt_ids)
        return Workload(fitting, self.min_tokens, self.max_tokens, self.temperature, self.seed), num_cut

    def _settings(
        self, workload: Workload, num_cut: int, samples: Samples, info: inference_pb2.GetModelInfoResponse
    ) -> dict[str, Any]:
        plan = self.plan
        return {
            "target": shown(self.target),
            # Whose drafts there are.
            "sources": sorted(info.sources),
            "threads": self.threads,
            "concurrency": list(plan.concurrency),
            "num_runs": plan.num_runs,
            "duration_s": plan.duration_s,
            "rates": list(plan.rates),
            "trace_speed": plan.trace_speed if plan.trace else None,
            "step": plan.step,
            "ttft_target_ms": 1000 * plan.targets.ttft_s,
            "tpot_target_ms": 1000 * plan.targets.tpot_s,
            # Where that is the largest of `concurrency`, saturation may lie beyond it.
            "saturation_concurrency": saturating_load(samples).concurrency,
            "saturation_tokens_per_s": round(saturation(samples), 3),
            "saturation_requests_per_s": round(saturation(samples) / workload.mean_tokens, 3),
            "server_max_nodes": info.max_nodes,
            "output_tokens": [self.min_tokens, self.max_tokens],
            "temperature": self.temperature,
            "seed": self.seed,
            "num_prompts": len(workload.prompts),
            "num_cut_prompts": num_cut,
            "prompt_tokens": [len(prompt) for prompt in workload.prompts],
            # As `coppice simulate` names them.
            "policies": {policy.name: policy.simulated for policy in samples.policies},
            "mean_prompt_tokens": round(sum(map(len, workload.prompts)) / len(workload.prompts), 1),
        }


def _document(
    samples: Samples,
    references: References,
    baselines: Baselines,
    settings: dict[str, Any],
    machine: dict[str, Any],
) -> dict[str, Any]:
    result = rows(samples, references)
    values, spread = ratios(samples, baselines.ratios(samples))
    return {
        "suite": "load",
        "rows": [*result, *baselines.rows(references)],
        "ratios": values,
        "ratio_spread": spread,
        "ratio_note": RATIO_NOTE,
        "step_series": series(samples),
        "notes": [*remarks(result), *machine_remarks(machine)],
        "mismatches": mismatches(result),
        "settings": settings,
        **describe_run(machine),
    }
