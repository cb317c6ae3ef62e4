"""The throughput suite from end to end: model, services, contenders, measurement, report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc

from coppice.core.tokenizer import TargetTokenizer, load_tokenizer_json
from coppice.lab.bench.batch_contenders import BatchContender, BatchedGenerate, ContinuousBatching, CoppiceBatch
from coppice.lab.bench.coppice_contender import get_model_info
from coppice.lab.bench.environment import describe_machine, describe_run
from coppice.lab.bench.latency import fit_context
from coppice.lab.bench.latency_suite import progress_bar, shown
from coppice.lab.bench.prompts import Prompt
from coppice.lab.bench.report import machine_remarks
from coppice.lab.bench.throughput import (
    OFF,
    ON,
    ThroughputPlan,
    measure_batches,
    throughput_ratios,
    throughput_rows,
    unequal,
)
from coppice.lab.bench.transformers_baseline import load_model, quiet_transformers


@dataclass(frozen=True, slots=True)
class ThroughputSuite:
    """One throughput benchmark of a target served at an address."""

    target: Path
    prompts: tuple[Prompt, ...]
    plan: ThroughputPlan
    threads: int

    def run(self, address: str) -> dict[str, Any]:
        """Measure and return the report.

        Raises:
            BenchmarkError: a contender failed.
        """
        machine = describe_machine()
        quiet_transformers()
        target = load_model(self.target)
        with grpc.insecure_channel(address) as channel:
            context = get_model_info(channel).max_context_tokens
        tokenizer = TargetTokenizer(load_tokenizer_json(self.target))
        encoded = [tokenizer.encode(prompt.text) for prompt in self.prompts]
        prompt_ids, num_cut = fit_context(encoded, self.plan.max_tokens, context)
        contenders: Sequence[BatchContender] = [
            BatchedGenerate(target, self.threads),
            ContinuousBatching(target, self.threads, max(map(len, prompt_ids)) + self.plan.max_tokens),
            CoppiceBatch(OFF, address, "off"),
            CoppiceBatch(ON, address, "auto"),
        ]
        with progress_bar() as progress:
            total = len(contenders) * len(self.plan.concurrency) * self.plan.num_runs
            step = progress.add_task("throughput", total=total)
            samples = measure_batches(contenders, prompt_ids, self.plan, partial(progress.advance, step))
        rows = throughput_rows(samples, contenders)
        return {
            "suite": "throughput",
            "rows": rows,
            "ratios": throughput_ratios(samples),
            "notes": machine_remarks(machine),
            "mismatches": unequal(rows),
            "settings": {
                "target": shown(self.target),
                "threads": self.threads,
                "concurrency": list(self.plan.concurrency),
                "num_runs": self.plan.num_runs,
                "max_tokens": self.plan.max_tokens,
                "num_prompts": len(prompt_ids),
                "num_cut_prompts": num_cut,
                "mean_prompt_tokens": round(sum(map(len, prompt_ids)) / len(prompt_ids), 1),
            },
            **describe_run(machine),
        }
