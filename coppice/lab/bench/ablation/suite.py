"""The ablation suite from end to end: prompts, groups, measurement, report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc

from coppice.cli.topology import DrafterSpec
from coppice.core.tokenizer import TargetTokenizer, load_tokenizer_json
from coppice.lab.bench.ablation.measure import measure_groups, num_samples
from coppice.lab.bench.ablation.ratios import RATIO_NOTE, broken_promises, ratios
from coppice.lab.bench.ablation.rows import differing_offs, mismatches, rows
from coppice.lab.bench.ablation.services import Services
from coppice.lab.bench.ablation.variants import Group
from coppice.lab.bench.coppice_contender import get_model_info
from coppice.lab.bench.environment import describe_machine
from coppice.lab.bench.latency import Plan, fit_context
from coppice.lab.bench.latency_suite import progress_bar, shown
from coppice.lab.bench.prompts import Prompt
from coppice.lab.bench.report import document

NOTES = (
    "One request at a time, each forced to speculate with the sources that it names and the fixed plan, but for those "
    "of the planner, which force nothing. Every call has a cache_salt of its own: the cache knows no more than the "
    "request's own text.",
    "draft_ms: of a variant's drafters together, a tree each, prompts included. What a drafter has learned about its "
    "acceptance it keeps from group to group, as it would in service.",
)


@dataclass(frozen=True, slots=True)
class AblationSuite:
    """One ablation of drafters, a checkpoint of each kind, in front of a target."""

    target: Path
    drafters: tuple[DrafterSpec, ...]
    groups: tuple[Group, ...]
    prompts: tuple[Prompt, ...]
    plan: Plan
    num_nodes: int
    rounds: str
    threads: int

    def run(self, services: Services) -> dict[str, Any]:
        """Measure and return the report.

        Raises:
            BenchmarkError: the services failed, or a prompt does not fit the model.
        """
        machine = describe_machine()
        prompt_ids, num_cut = self._encode(services.plain)
        with progress_bar() as progress:
            step = progress.add_task("ablation", total=num_samples(self.groups, len(self.prompts), self.plan))
            taken = measure_groups(services, self.groups, prompt_ids, self.plan, partial(progress.advance, step))
        named = ratios(taken, [one.kind for one in self.drafters])
        wrong = [*mismatches(taken), *differing_offs(taken)]
        report = document("ablation", rows(taken), named, self._settings(prompt_ids, num_cut), machine, wrong)
        report["ratio_note"] = RATIO_NOTE
        report["notes"] += [*NOTES, *broken_promises(named[0])]
        return report

    def _encode(self, address: str) -> tuple[list[list[int]], int]:
        tokenizer = TargetTokenizer(load_tokenizer_json(self.target))
        with grpc.insecure_channel(address) as channel:
            context = get_model_info(channel).max_context_tokens
        return fit_context([tokenizer.encode(prompt.text) for prompt in self.prompts], self.plan.max_tokens, context)

    def _settings(self, prompt_ids: Sequence[Sequence[int]], num_cut: int) -> dict[str, Any]:
        return {
            "target": shown(self.target),
            "drafters": {one.kind: shown(Path(one.model)) for one in self.drafters},
            "rounds": self.rounds,
            "threads": self.threads,
            "num_runs": self.plan.num_runs,
            "max_tokens": self.plan.max_tokens,
            "temperatures": list(self.plan.temperatures),
            "seed": self.plan.seed,
            "repetition_penalty": self.plan.repetition_penalty,
            # Of a round's tree, or chain, at most.
            "num_nodes": self.num_nodes,
            "prompts": [
                {"origin": prompt.origin, "tokens": len(token_ids)}
                for prompt, token_ids in zip(self.prompts, prompt_ids, strict=True)
            ],
            "num_cut_prompts": num_cut,
        }
