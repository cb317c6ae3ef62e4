"""The latency suite from end to end: models, services, contenders, measurement, report."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import torch
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress
from transformers import PreTrainedModel

from coppice.checkpoints.bundled import MODELS
from coppice.core.tokenizer import TargetTokenizer, load_tokenizer_json
from coppice.lab.bench import summary
from coppice.lab.bench.contenders import BenchmarkError, Contender
from coppice.lab.bench.coppice_contender import CoppiceContender, Mode, get_model_info
from coppice.lab.bench.divergence import find_divergences
from coppice.lab.bench.environment import describe_machine
from coppice.lab.bench.forms.form import Form
from coppice.lab.bench.forms.ratios import form_ratios, form_remarks
from coppice.lab.bench.latency import Plan, fit_context, measure
from coppice.lab.bench.prompts import Prompt
from coppice.lab.bench.report import document
from coppice.lab.bench.transformers_baseline import TransformersContender, load_model, quiet_transformers, top_two_gap


@dataclass(frozen=True, slots=True)
class LatencySuite:
    """One latency benchmark of a target and its small LM, served at `address`."""

    target: Path
    small_lm: Path
    prompts: tuple[Prompt, ...]
    plan: Plan
    threads: int
    # Node budget of plain `coppice-on`; None leaves it to the server.
    default_nodes: int | None = None
    sweep_nodes: tuple[int, ...] = ()
    # Where further forms of the deployment are served.
    forms: Mapping[Form, str] = field(default_factory=dict)

    def run(self, address: str) -> dict[str, Any]:
        """Measure and return the report.

        Raises:
            BenchmarkError: a contender failed.
        """
        machine = describe_machine()
        quiet_transformers()
        # Here, because the setting belongs to the thread that computes.
        torch.set_num_threads(self.threads)
        target, small_lm = load_model(self.target), load_model(self.small_lm)
        with contextlib.ExitStack() as channels:
            channel = channels.enter_context(grpc.insecure_channel(address))
            info = get_model_info(channel)
            self._check_budgets(info.max_nodes)
            prompt_ids, num_cut = self._encode([info.max_context_tokens, *map(_context_of, (target, small_lm))])
            contenders = [*self._contenders(channel, target, small_lm), *self._form_contenders(channels)]
            with progress_bar() as progress:
                step = progress.add_task("latency", total=self._num_samples(contenders))
                taken = measure(contenders, prompt_ids, self.plan, partial(progress.advance, step))
        samples = summary.Samples(taken)
        unlike_generate = [summary.OFF, summary.ASSISTED]
        (medians, spreads), (more, more_spreads) = summary.ratios(samples), form_ratios(samples, self.forms)
        report = document(
            "latency",
            summary.rows(samples, contenders),
            ({**medians, **more}, {**spreads, **more_spreads}),
            self._settings(prompt_ids, num_cut),
            machine,
            summary.mismatches(samples),
            find_divergences(samples, unlike_generate, prompt_ids, partial(top_two_gap, target)),
        )
        report["notes"] += form_remarks(samples, list(self.forms))
        return report

    def _check_budgets(self, limit: int) -> None:
        """A budget above the server's limit would be cut to it, and the row would carry the wrong name."""
        for nodes in self.sweep_nodes:
            if nodes > limit:
                raise BenchmarkError(f"--sweep-nodes: {nodes} is above the server's limit of {limit} nodes")

    def _encode(self, context_limits: Sequence[int | None]) -> tuple[list[list[int]], int]:
        """The prompts as the same token ids for everybody, within everybody's context."""
        tokenizer = TargetTokenizer(load_tokenizer_json(self.target))
        context = min(limit for limit in context_limits if limit)
        encoded = [tokenizer.encode(prompt.text) for prompt in self.prompts]
        return fit_context(encoded, self.plan.max_tokens, context)

    def _contenders(self, channel: grpc.Channel, target: PreTrainedModel, small_lm: PreTrainedModel) -> list[Contender]:
        forced = Mode.MODE_FORCED
        sweep = (CoppiceContender(f"{summary.ON} nodes={nodes}", channel, forced, nodes) for nodes in self.sweep_nodes)
        return [
            TransformersContender(summary.TRANSFORMERS, target),
            TransformersContender(summary.ASSISTED, target, small_lm),
            CoppiceContender(summary.OFF, channel, Mode.MODE_OFF),
            CoppiceContender(summary.ON, channel, forced, self.default_nodes),
            *sweep,
        ]

    def _form_contenders(self, channels: contextlib.ExitStack) -> Iterator[Contender]:
        for form, address in self.forms.items():
            channel = channels.enter_context(grpc.insecure_channel(address))
            setting = f"{form.kind.value} rounds" if form.up_option != "--colocated" else "one process"
            delay = f"{form.delay_ms} ms each way between orchestrator and drafter" if form.delay_ms else ""
            settings = ", ".join(filter(None, (setting, delay, "no prefix cache")))
            yield CoppiceContender(form.name, channel, form.mode, self.default_nodes, settings)

    def _num_samples(self, contenders: Sequence[Contender]) -> int:
        return len(contenders) * len(self.prompts) * len(self.plan.temperatures) * self.plan.num_runs

    def _settings(self, prompt_ids: Sequence[Sequence[int]], num_cut: int) -> dict[str, Any]:
        return {
            "target": shown(self.target),
            "small_lm": shown(self.small_lm),
            # Of each model, save that the drafter takes one by itself unless --threads names a number.
            "threads": self.threads,
            "num_runs": self.plan.num_runs,
            "max_tokens": self.plan.max_tokens,
            "seed": self.plan.seed,
            "prompts": [
                {"origin": prompt.origin, "tokens": len(token_ids)}
                for prompt, token_ids in zip(self.prompts, prompt_ids, strict=True)
            ],
            "forms": [
                {"contender": form.name, "form": form.kind.value, "delay_ms": form.delay_ms} for form in self.forms
            ],
            # Prompts that lost their beginning because the context has no room for all of it.
            "num_cut_prompts": num_cut,
        }


def _context_of(model: PreTrainedModel) -> int | None:
    return getattr(model.config, "max_position_embeddings", None)


def progress_bar() -> Progress:
    """On stderr, so that what is printed at the end can be piped."""
    columns = (*Progress.get_default_columns(), MofNCompleteColumn())
    return Progress(*columns, console=Console(stderr=True))


def shown(path: Path) -> str:
    """A path as a report shows it: from the repository or the current folder, so that it names no one's machine."""
    for base in (MODELS.parent, Path.cwd()):
        if path.resolve().is_relative_to(base.resolve()):
            return path.resolve().relative_to(base.resolve()).as_posix()
    return path.name
