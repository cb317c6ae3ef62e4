"""The in-pass suite from end to end: prompts, groups, measurement, report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc

from coppice.core.tokenizer import TargetTokenizer, load_tokenizer_json
from coppice.lab.bench.coppice_contender import get_model_info
from coppice.lab.bench.environment import describe_machine
from coppice.lab.bench.in_pass.measure import Measured, measure_groups, num_requests
from coppice.lab.bench.in_pass.ratios import RATIO_NOTE, best_space, ratios
from coppice.lab.bench.in_pass.remarks import uneven_trees
from coppice.lab.bench.in_pass.rows import mismatches, rows
from coppice.lab.bench.in_pass.services import Services
from coppice.lab.bench.in_pass.variants import DRAFTING, Group, InPass
from coppice.lab.bench.latency import Plan, fit_context
from coppice.lab.bench.latency_suite import progress_bar, shown
from coppice.lab.bench.prompts import Prompt
from coppice.lab.bench.report import document

NOTES = (
    "Every variant that speculates is forced to, with the sources that it names and the fixed plan; nobody has a "
    "prefix cache. Passes are those between the last first token of a batch and its first end: all its requests are "
    "in them, and no prompt.",
    "Where early pruning is compared, trees are full, each round waits for a drafter's draft, and prompts are known "
    "from before: trees do not depend on the machine, and tokens/s are not what they could be, nor to be compared with "
    "other groups'.",
)


@dataclass(frozen=True, slots=True)
class InPassSuite:
    """One comparison of what the target does in its own passes."""

    target: Path
    what: InPass
    groups: tuple[Group, ...]
    prompts: tuple[Prompt, ...]
    # Of those, how many requests that are alone have; batches take as many as they need.
    num_prompts: int
    plan: Plan
    threads: int
    # What is not compared, and why.
    left_out: tuple[str, ...] = ()

    @property
    def num_requests(self) -> int:
        """Completions that are measured."""
        return num_requests(self.groups, self.num_prompts, self.plan)

    def run(self, services: Services) -> dict[str, Any]:
        """Measure and return the report.

        Raises:
            BenchmarkError: the services failed, or a prompt does not fit the model.
        """
        machine = describe_machine()
        prompt_ids, num_cut = self._encode(services.address(self.groups[0].variants[0]))
        with progress_bar() as progress:
            step = progress.add_task("in-pass", total=self.num_requests)
            advance = partial(progress.advance, step)
            taken = measure_groups(services, self.groups, prompt_ids, self.num_prompts, self.plan, advance)
        settings = self._settings(prompt_ids, num_cut)
        report = document("in-pass", rows(taken), ratios(taken, self.what), settings, machine, mismatches(taken))
        report["ratio_note"] = RATIO_NOTE
        report["notes"] += [*NOTES, *self._best(taken), *uneven_trees(report["rows"]), *self.left_out]
        return report

    def _encode(self, address: str) -> tuple[list[list[int]], int]:
        tokenizer = TargetTokenizer(load_tokenizer_json(self.target))
        with grpc.insecure_channel(address) as channel:
            context = get_model_info(channel).max_context_tokens
        return fit_context([tokenizer.encode(prompt.text) for prompt in self.prompts], self.plan.max_tokens, context)

    def _best(self, taken: Sequence[Measured]) -> Iterator[str]:
        """Which row `space.best/off` is of."""
        if self.what.space and self.what.drafting:
            [drafting] = [one for one in taken if one.group.name == DRAFTING]
            for temperature in drafting.temperatures:
                yield f"At T={temperature:g} space.best/off is that of {best_space(drafting, self.what, temperature)}."

    def _settings(self, prompt_ids: Sequence[Sequence[int]], num_cut: int) -> dict[str, Any]:
        what = self.what
        return {
            "target": shown(self.target),
            "drafter": {what.drafter.kind: shown(Path(what.drafter.model))},
            "space": shown(Path(what.space)) if what.space else None,
            "early_head": shown(Path(what.early_head)) if what.early_head else None,
            "masks_and_groups": [list(shape) for shape in what.grid],
            "tree_sizes": list(what.tree_sizes),
            "batch_sizes": list(what.batch_sizes),
            "drafting": what.drafting,
            "threads": self.threads,
            "num_runs": self.plan.num_runs,
            "num_prompts": self.num_prompts,
            "max_tokens": self.plan.max_tokens,
            "temperatures": list(self.plan.temperatures),
            "seed": self.plan.seed,
            "prompts": [
                {"origin": prompt.origin, "tokens": len(token_ids)}
                for prompt, token_ids in zip(self.prompts, prompt_ids, strict=True)
            ],
            "num_cut_prompts": num_cut,
        }
