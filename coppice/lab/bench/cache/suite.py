"""The cache suite from end to end: prompts, measurement, report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from coppice.client import Client, RequestFailedError
from coppice.core.tokenizer import TargetTokenizer, load_tokenizer_json
from coppice.lab.bench.cache.measure import CachePlan, measure
from coppice.lab.bench.cache.phases import Phase, phases
from coppice.lab.bench.cache.ratios import RATIO_NOTE, broken_rules, ratios
from coppice.lab.bench.cache.rows import Samples, mismatches, remarks, rows
from coppice.lab.bench.cache.services import Services
from coppice.lab.bench.cache.workload import CachePrompt, CacheWorkload
from coppice.lab.bench.contenders import BenchmarkError
from coppice.lab.bench.environment import describe_machine, describe_run
from coppice.lab.bench.latency_suite import progress_bar, shown
from coppice.lab.bench.report import machine_remarks


@dataclass(frozen=True, slots=True)
class CacheSuite:
    """One benchmark of the prefix cache in front of a target."""

    target: Path
    workload: CacheWorkload
    plan: CachePlan
    threads: int

    @property
    def prompts(self) -> tuple[CachePrompt, ...]:
        """All of the workload's, as their numbers go."""
        return (*self.workload.first, *self.workload.shifted)

    async def run(self, services: Services) -> dict[str, Any]:
        """Measure and return the report.

        Raises:
            BenchmarkError: the services failed, or a prompt does not fit the model.
        """
        machine = describe_machine()
        prompt_ids = self._encode(await _max_context(services.plain))
        order = phases(self.workload, with_redis=services.redis is not None)
        with progress_bar() as progress:
            step = progress.add_task("cache", total=self._num_answers(order))
            taken = await measure(services, prompt_ids, order, self.plan, partial(progress.advance, step))
        samples = Samples(taken, self.prompts)
        settings = self._settings(prompt_ids, order)
        return _document(samples, settings, machine, with_redis=services.redis is not None)

    def _encode(self, max_context_tokens: int) -> list[tuple[int, ...]]:
        tokenizer = TargetTokenizer(load_tokenizer_json(self.target))
        encoded = [tuple(tokenizer.encode(prompt.text)) for prompt in self.prompts]
        # A prompt without its beginning would not share it.
        longest = max(map(len, encoded))
        if longest + self.plan.max_tokens > max_context_tokens:
            raise BenchmarkError(
                f"a prompt of {longest} tokens and --max-tokens {self.plan.max_tokens} do not fit a context of "
                f"{max_context_tokens}"
            )
        return encoded

    def _num_answers(self, order: Sequence[Phase]) -> int:
        plan = self.plan
        per_setting = sum(len(phase.prompts) for phase in order)
        return len(plan.temperatures) * (len(self.prompts) + plan.num_runs * len(plan.settings) * per_setting)

    def _settings(self, prompt_ids: Sequence[Sequence[int]], order: Sequence[Phase]) -> dict[str, Any]:
        return {
            "target": shown(self.target),
            "threads": self.threads,
            "num_runs": self.plan.num_runs,
            "max_tokens": self.plan.max_tokens,
            "seed": self.plan.seed,
            "phases": [phase.name for phase in order],
            "prompts": [
                {"origin": prompt.origin, "kind": prompt.kind, "tokens": len(token_ids)}
                for prompt, token_ids in zip(self.prompts, prompt_ids, strict=True)
            ],
            "num_first_prompts": len(self.workload.first),
        }


async def _max_context(address: str) -> int:
    async with Client(address) as client:
        try:
            return (await client.model_info()).max_context_tokens
        except RequestFailedError as error:
            raise BenchmarkError(f"GetModelInfo: {error}") from error


def _document(samples: Samples, settings: dict[str, Any], machine: dict[str, Any], with_redis: bool) -> dict[str, Any]:
    result = rows(samples)
    values, spread = ratios(samples)
    return {
        "suite": "cache",
        "rows": result,
        "ratios": values,
        "ratio_spread": spread,
        "ratio_note": RATIO_NOTE,
        "notes": [*broken_rules(values, spread), *remarks(result, with_redis), *machine_remarks(machine)],
        "mismatches": mismatches(result),
        "settings": settings,
        **describe_run(machine),
    }
