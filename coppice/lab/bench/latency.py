"""One stream: transformers, transformers assisted, and our server with speculation off and on, in turn."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch

from coppice.cli.topology import TopologySpec, running
from coppice.lab.bench import comparison, figures
from coppice.lab.bench.client import (
    ASSISTED,
    OFF,
    ON,
    TRANSFORMERS,
    Contender,
    Mode,
    Policy,
    Server,
    connected,
    model_info,
)
from coppice.lab.bench.comparison import Sample, Setup, by_run, speed_ratios
from coppice.lab.bench.divergences import find_divergences
from coppice.lab.bench.environment import describe_machine
from coppice.lab.bench.forms import TABLE, Form, Kind, delayed, form_ratios, form_remarks
from coppice.lab.bench.harness.experiment import ByRun, Ratios, Samples, at_temperature, known, progress
from coppice.lab.bench.harness.plots import Panel, bars, depths
from coppice.lab.bench.harness.report import Report, Shown, document, shown_path
from coppice.lab.bench.harness.tables import Table
from coppice.lab.bench.precisions import Precision, in_precisions, precision_ratios, served_in
from coppice.lab.bench.services import unless_one_fails
from coppice.lab.bench.transformers_baseline import Generate, load_model, quiet_transformers, top_two_gap

# Forms have no prefix cache: its drafts need no drafter, and would hide how far away that is.
NO_CACHE = {"CACHE_DRAFTER": "false"}

SPEED_RATIOS = {
    "on/off": (ON, OFF),
    "on/transformers": (ON, TRANSFORMERS),
    "on/assisted": (ON, ASSISTED),
    "off/transformers": (OFF, TRANSFORMERS),
}
FORWARD_SHARES = {"forward-share": ON, "forward-share-off": OFF}


def latency_ratios(samples: Samples[Sample]) -> ByRun:
    found: ByRun = {}
    for temperature in samples.each("temperature"):
        for name, pair in SPEED_RATIOS.items():
            found[at_temperature(name, temperature)] = speed_ratios(samples, *pair, temperature)
        for name, contender in FORWARD_SHARES.items():
            shares = by_run(samples, contender, temperature, figures.forward_share)
            found[at_temperature(name, temperature)] = known(shares)
    return found


@dataclass(frozen=True, slots=True)
class LatencySuite:
    """One latency benchmark of a target and its small LM, if it has one, served at `address`."""

    setup: Setup
    small_lm: Path | None
    # Where further forms of the deployment are served.
    forms: Mapping[Form, str] = field(default_factory=dict)
    # Where the target is served in further precisions, without speculation.
    precisions: Mapping[Precision, str] = field(default_factory=dict)

    async def run(self, address: str) -> Report:
        """Measure and return the report. Raises BenchmarkError if a contender failed."""
        machine, plan, threads = describe_machine(), self.setup.plan, self.setup.threads
        quiet_transformers()
        torch.set_num_threads(threads)
        async with contextlib.AsyncExitStack() as stack:
            client = await connected(stack, address)
            info = await model_info(client)
            # In the numbers that the target is served in.
            dtype: torch.dtype = getattr(torch, info.dtype)
            target = load_model(self.setup.target, dtype)
            small_lm = None if self.small_lm is None else load_model(self.small_lm, dtype)
            models = [target] if small_lm is None else [target, small_lm]
            own = (getattr(model.config, "max_position_embeddings", None) for model in models)
            context = min(filter(None, (info.max_context_tokens, *own)))
            prompt_ids, num_cut = self.setup.encoded(context)
            contenders: list[Contender] = [
                Generate(target, threads),
                *([] if small_lm is None else [Generate(target, threads, small_lm)]),
                Server(client, Policy(OFF, Mode.MODE_OFF)),
                Server(client, Policy(ON, Mode.MODE_FORCED)),
            ]
            for form, at in self.forms.items():
                policy = Policy(form.name, form.mode, setting=form.setting)
                contenders.append(Server(await connected(stack, at), policy))
            contenders += await in_precisions(self.setup, stack, self.precisions, info.dtype, context)
            batches = [range(at, at + 1) for at in range(len(prompt_ids))]
            total = len(contenders) * len(batches) * len(plan.temperatures) * plan.num_runs
            with progress("latency", total) as advance:
                samples = await comparison.measure(contenders, prompt_ids, plan, batches, advance)
        forms = {form.name: {"form": form.kind.value, "delay_ms": form.delay_ms} for form in self.forms}
        found = [{**row, **forms.get(row["contender"], {})} for row in comparison.rows(samples, contenders)]
        apart = find_divergences(samples, [OFF, ASSISTED], partial(top_two_gap, target), info.dtype)
        ratios = Ratios.of(
            latency_ratios(samples) | form_ratios(samples, self.forms) | precision_ratios(samples, self.precisions)
        )
        settings = {
            **self.setup.settings(prompt_ids, num_cut),
            "dtype": info.dtype,
            "small_lm": None if self.small_lm is None else shown_path(self.small_lm),
            "forms": [{"contender": name, **form} for name, form in forms.items()],
        }
        notes = [*comparison.remarks(found), *form_remarks(ratios.values, found, self.forms), *map(str, apart)]
        wrong, records = comparison.mismatches(samples), [one.record() for one in apart]
        return document("latency", machine, settings, found, ratios, notes, wrong, divergences=records)


async def measure_latency(
    suite: LatencySuite, spec: TopologySpec, forms: Sequence[Form], precisions: Sequence[Precision]
) -> Report:
    """Start a topology and what forms and precisions need besides, measure, and stop everything.

    Raises BenchmarkError if the measurement cannot go on, ChildError if a process did not start, or ended.
    """
    async with contextlib.AsyncExitStack() as stack:
        topology = await stack.enter_async_context(running(spec))
        # One more drafter of each kind, which drafts ahead, where a form asks for it.
        asked = spec.drafters if any(form.kind is Kind.DRAFT_AHEAD for form in forms) else ()
        ahead = [await topology.add_drafter(f"{one.kind} ahead", one, {"DRAFT_AHEAD": "on"}) for one in asked]
        addresses, topologies = {}, [topology]
        for form in forms:
            if form.kind is Kind.COLOCATED:
                colocated = replace(spec, colocated=True, settings=tuple(NO_CACHE.items()))
                topologies.append(await stack.enter_async_context(running(colocated)))
                addresses[form] = topologies[-1].address
                continue
            drafters = ahead if form.kind is Kind.DRAFT_AHEAD else topology.drafter_addresses
            if form.delay_ms:
                proxies = [delayed(drafter, form.delay_ms / 1000) for drafter in drafters]
                drafters = [await stack.enter_async_context(proxy) for proxy in proxies]
            rounds = {"ROUNDS": form.kind.value} if form.kind is Kind.SYNCHRONOUS else {}
            env = {**NO_CACHE, **rounds, "DRAFTER_ADDRESSES": ",".join(drafters)}
            addresses[form] = await topology.add_orchestrator(form.name, env)
        served = {one: await served_in(topology, one) for one in precisions}
        whole = replace(suite, forms=addresses, precisions=served)
        return await unless_one_fails(whole.run(topology.address), *topologies)


SHOWN = Shown(
    tables=(
        Table(
            "Tokens per second, median of the runs",
            "tokens_per_s speed_over_off mean_acceptance_length forward_share linger_share ttft_ms identical_to "
            "num_identical repeated_4grams",
        ),
        Table("Milliseconds per pass of the target, by rows: passes/mean", "ms_per_pass_by_rows acceptance_by_depth"),
        TABLE,
    ),
    panels=(
        Panel("One stream: median of runs, from min to max", "tokens_per_s", "{contender}", "T={temperature:g}", bars),
        Panel(
            "Rounds that accepted this deep, of those drafted so deep",
            "acceptance_by_depth",
            series="{name}",
            drawing=depths,
            xlabel="depth in the tree",
        ),
    ),
    line="{num_prompts} prompts x {max_tokens} tokens x {num_runs} runs, {threads} threads. "
    "Plain ratios are T=0, those at other temperatures say so.",
)
