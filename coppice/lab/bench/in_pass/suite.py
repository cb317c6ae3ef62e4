"""What the target does in its own passes: its own drafts and early pruning, in turn with plain decoding.

`RATIO_NOTE` says what each named ratio is. A ratio that has no value in any run is left out.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from coppice.cli.topology import Topology
from coppice.client import Client, Options, RequestFailedError, build_request
from coppice.completion import Completion
from coppice.lab.bench.ablation.suite import short_name
from coppice.lab.bench.ablation.variants import DrafterSetting
from coppice.lab.bench.contenders import DEADLINE_S, OFF, ON, Mode, Task, max_context
from coppice.lab.bench.counters import Counters, read_counters
from coppice.lab.bench.environment import describe_machine
from coppice.lab.bench.figures import repeated_4grams
from coppice.lab.bench.harness.experiment import (
    BenchmarkError,
    ByRun,
    Experiment,
    Ratios,
    Samples,
    at_temperature,
    known,
    over,
    progress,
    quotient,
    rounded,
    spread,
)
from coppice.lab.bench.harness.plots import Panel, bars
from coppice.lab.bench.harness.report import Report, Row, Shown, document, shown_path
from coppice.lab.bench.harness.tables import Table
from coppice.lab.bench.in_pass.variants import (
    COMPARE,
    DRAFTING,
    SPACE,
    SWITCHES,
    Group,
    InPass,
    Variant,
    VerifierSetting,
    merged_name,
    pruning_group,
    pruning_name,
    space_names,
    tree_sources,
)
from coppice.lab.bench.latency import Mismatch, Plan, prompt_settings, remarks
from coppice.lab.bench.prompts import Prompt, encoded_prompts
from coppice.lab.bench.services import Metered, start_metered
from coppice.v1 import inference_pb2
from orchestrator.request.rounds import REDRAFT

# Enough for lazy initialisation, and for a verifier to know what its passes cost.
MAX_WARM_UP_TOKENS = 16
# Passes whose rows differ by more are not the same trees.
MOST_DIFFERENCE = 0.05
RATIO_NOTE = (
    "medians over runs; plain names are T=0, '@T1' marks temperature 1. space/off: tokens/s of the target that drafts "
    "for itself, alone and as a verifier serves by default, over plain decoding; space.tau: its tokens per round; "
    "space.best/off: the same of the best shape of masks (chosen by these very figures, so that chance flatters it); "
    "space+KIND/KIND: tokens/s with the target's own drafts merged in over without. "
    "Early pruning of the target's own trees ('.KIND': of a drafter's, where there are both), on over off with the "
    "same budgets, all sizes of trees: rows-saved: share of tree nodes that it removes; tau-kept: τ with over without; "
    "pruning.time-gain.bN: of passes that are run both ways, one after the other, N requests at once, the time without "
    "over that with; pruning.auto-gain.bN: time of a pass with pruning off over that with "
    "EARLY_PRUNING=auto, in turn request by request"
)
NOTES = (
    "Every variant that speculates is forced to, with the sources that it names and the fixed plan; none has a "
    "prefix cache. Passes are those between the last first token of a batch and its first end: all its requests are "
    "in them, and no prompt.",
    "Where early pruning is compared, trees are full, each round waits for a drafter's draft, and prompts are known "
    "from before: trees do not depend on the machine, and tokens/s are not what they could be, nor to be compared with "
    "other groups'.",
)

# What an orchestrator is in front of, and whether its rounds wait for their drafts.
Front = tuple[VerifierSetting, DrafterSetting | None, bool]


# Passes, as a verifier counts them.

_PREFIX = "coppice_verifier_"
PASSES = f"{_PREFIX}pass_seconds_count"
PASS_S = f"{_PREFIX}pass_seconds_sum"
ROWS = f"{_PREFIX}pass_rows_sum"
# The passes that these rows were of: one may end between the reading of its seconds and that of its rows.
ROW_PASSES = f"{_PREFIX}pass_rows_count"
NODES = f"{_PREFIX}spec_decode_num_draft_tokens_total"
MASKS = f"{_PREFIX}masks_total"
# Only there where the verifier has a head.
PRUNED_NODES = f"{_PREFIX}early_pruned_nodes_total"
PRUNED_PASSES = f"{_PREFIX}early_pruned_passes_total"
# Of passes that could be pruned, by whether they were.
PRUNABLE_ROWS = f"{_PREFIX}prunable_pass_rows_total"
PRUNABLE_S = f"{_PREFIX}prunable_pass_seconds_total"
_NAMES = (PASSES, PASS_S, ROWS, ROW_PASSES, NODES, MASKS, PRUNED_NODES, PRUNED_PASSES, PRUNABLE_ROWS, PRUNABLE_S)


def read_passes(url: str) -> Counters:
    """What a verifier has counted until now.

    Raises:
        BenchmarkError: its metrics cannot be had.
    """
    return Counters(read_counters(url, _NAMES, "a verifier"))


def ms_per_pass(counted: Counters) -> float | None:
    """Milliseconds of a pass."""
    return quotient(1000 * counted.total(PASS_S), counted.total(PASSES))


def ms_per_row(counted: Counters, *, pruned: bool) -> float | None:
    """Milliseconds, for each row that they began with, of the passes that could be pruned and were, or were not."""
    label = (("pruned", "yes" if pruned else "no"),)
    rows = counted.values.get((PRUNABLE_ROWS, label), 0.0)
    return quotient(1000 * counted.values.get((PRUNABLE_S, label), 0.0), rows)


def removed_share(counted: Counters) -> float | None:
    """Share of the tree nodes that early pruning removed."""
    return quotient(counted.total(PRUNED_NODES), counted.total(NODES))


def pass_fields(counted: Counters) -> Row:
    """What passes were like, as a row has it; rows left are those after the layer that prunes."""
    passes = counted.total(PASSES)
    return {
        "passes": round(passes),
        "ms_per_pass": rounded(ms_per_pass(counted), 4),
        "rows_per_pass": rounded(quotient(counted.total(ROWS), counted.total(ROW_PASSES)), 4),
        "rows_left_per_pass": rounded(quotient(counted.total(ROWS) - counted.total(PRUNED_NODES), passes), 4),
        "masks_per_pass": rounded(quotient(counted.total(MASKS), passes), 4),
        "pruned_passes": round(counted.total(PRUNED_PASSES)),
        "removed_share": rounded(removed_share(counted), 4),
        "ms_per_whole_row": rounded(ms_per_row(counted, pruned=False), 4),
        "ms_per_pruned_row": rounded(ms_per_row(counted, pruned=True), 4),
    }


# Services.


@dataclass(frozen=True, slots=True)
class Services:
    """A verifier process for every setting, and an orchestrator for every pair of verifier and drafter.

    All run at once, so that all can take turns: a process without requests waits on a socket and costs memory.
    """

    fronts: Mapping[Front, str]
    verifiers: Mapping[VerifierSetting, Metered]

    def address(self, variant: Variant) -> str:
        """Where a variant is served."""
        return self.fronts[front_of(variant)]


def front_of(variant: Variant) -> Front:
    """The orchestrator that a variant needs."""
    return (variant.verifier, variant.drafter, variant.synchronous)


def variants_of(groups: Iterable[Group]) -> list[Variant]:
    """All variants of all groups, each once."""
    return list(dict.fromkeys(variant for group in groups for variant in group.variants))


async def start_services(topology: Topology, groups: Sequence[Group]) -> Services:
    """Start what the groups need, one after the other: each verifier and drafter compiles and warms up on its own."""
    variants = variants_of(groups)
    verifiers: dict[VerifierSetting, Metered] = {}
    for setting in dict.fromkeys(variant.verifier for variant in variants):
        name = str(setting)
        verifiers[setting] = await start_metered(
            lambda own, name=name: topology.add_verifier(name, own),  # type: ignore[misc]
            dict(setting.settings),
        )
    drafters: dict[DrafterSetting, str] = {}
    for drafter in dict.fromkeys(variant.drafter for variant in variants if variant.drafter is not None):
        drafters[drafter] = await topology.add_drafter(str(drafter.spec), drafter.spec, dict(drafter.settings))
    max_nodes = max((variant.max_nodes or 0 for variant in variants), default=0)
    fronts: dict[Front, str] = {}
    for front in dict.fromkeys(map(front_of, variants)):
        verifier, of_front, synchronous = front
        env = {
            "VERIFIER_ADDRESS": verifiers[verifier].address,
            "DRAFTER_ADDRESSES": "" if of_front is None else drafters[of_front],
            "CACHE_DRAFTER": "false",
            "ROUNDS": "synchronous" if synchronous else "asynchronous",
            **({"MAX_NODES": str(max_nodes)} if synchronous else {}),
        }
        fronts[front] = await topology.add_orchestrator(f"orchestrator {len(fronts) + 1}", env)
    return Services(fronts, verifiers)


# Batches.


@dataclass(frozen=True, slots=True)
class BatchOutcome:
    """The completion of each task, the seconds until the last was done, and passes that had all of them."""

    completions: tuple[Completion, ...]
    wall_s: float
    # From the last first token to the first end; nothing where requests had no time together.
    passes: Counters


class BatchContender:
    """One variant as it is served, asked for several completions at once."""

    def __init__(self, variant: Variant, address: str, metrics_url: str, *, knows_prompts: bool = False) -> None:
        """Where prompts are known, calls share one salt: a prompt is computed in its first call only."""
        self.variant, self.name = variant, variant.contender
        self._address, self._metrics_url = address, metrics_url
        self._salt = "known" if knows_prompts else ""
        mode = Mode.MODE_FORCED if variant.sources else Mode.MODE_OFF
        self._policy = inference_pb2.SpeculationPolicy(mode=mode, max_nodes=variant.max_nodes, sources=variant.sources)

    @property
    def note(self) -> str:
        """How it is set up, for the reader of the result."""
        sources = f"sources {'+'.join(self.variant.sources)}" if self.variant.sources else "speculation off"
        rounds = "synchronous rounds" if self.variant.synchronous else ""
        nodes = f"node budget {self.variant.max_nodes}" if self.variant.max_nodes else ""
        return ", ".join(filter(None, (str(self.variant.verifier), sources, nodes, rounds)))

    def complete(self, tasks: Sequence[Task]) -> BatchOutcome:
        """Complete tasks, all at once.

        Raises:
            BenchmarkError: a call failed, gave another length, or the verifier's metrics cannot be had.
        """
        try:
            return asyncio.run(self._complete(tasks))
        except RequestFailedError as error:
            raise BenchmarkError(f"{self.name}: {error}") from error

    async def _complete(self, tasks: Sequence[Task]) -> BatchOutcome:
        window = _Window(self._metrics_url, len(tasks))
        async with Client(self._address) as client:
            # So that connecting is no part of the time.
            await client.model_info()
            start = time.perf_counter()
            completions = await asyncio.gather(*[self._ask(client, task, window) for task in tasks])
            wall_s = time.perf_counter() - start
        return BatchOutcome(tuple(completions), wall_s, window.passes)

    async def _ask(self, client: Client, task: Task, window: _Window) -> Completion:
        options = Options(
            max_tokens=task.max_tokens,
            temperature=task.temperature,
            seed=task.seed,
            ignore_eos=True,
            cache_salt=self._salt or uuid.uuid4().hex,
        )
        message = build_request(task.prompt_ids, options)
        message.speculation.CopyFrom(self._policy)
        stream = client.stream_request(message, DEADLINE_S)
        has_token = False
        async for chunk in stream:
            if chunk.token_ids and not has_token:
                has_token = True
                await window.one_began()
        await window.one_ended()
        completion = stream.result()
        if len(completion.token_ids) != task.max_tokens:
            raise BenchmarkError(
                f"{self.name} gave {len(completion.token_ids)} tokens where {task.max_tokens} were asked for"
            )
        return completion


class _Window:
    """The time in which all requests of a batch have a token and none has ended."""

    def __init__(self, url: str, num_requests: int) -> None:
        self._url = url
        self._num_left = num_requests
        self._has_ended = False
        self._before: Counters | None = None
        self.passes = Counters()

    async def one_began(self) -> None:
        """A request has its first token."""
        self._num_left -= 1
        if not self._num_left and not self._has_ended:
            self._before = await asyncio.to_thread(read_passes, self._url)

    async def one_ended(self) -> None:
        """A request has all its tokens."""
        is_first, self._has_ended = not self._has_ended, True
        if is_first and self._before is not None:
            self.passes = (await asyncio.to_thread(read_passes, self._url)).plus(self._before, -1)


# The measurement.


@dataclass(frozen=True, slots=True)
class BatchSample:
    """One batch within the benchmark; `first` is the number of its first prompt."""

    contender: str
    temperature: float
    run: int
    first: int
    outcome: BatchOutcome


@dataclass(frozen=True, slots=True)
class Measured:
    """A group, its samples, and how each contender was set up."""

    group: Group
    samples: Samples[BatchSample]
    notes: tuple[str, ...]

    @property
    def temperatures(self) -> list[float]:
        """In the order measured."""
        return self.samples.each("temperature")

    def of(self, contender: str, temperature: float) -> Samples[BatchSample]:
        """A contender's samples at a temperature."""
        return self.samples.where(contender=contender, temperature=temperature)


def batches_of(num_prompts: int, batch_size: int) -> list[range]:
    """Numbers of the requests of each batch: as many as there are prompts, and at least one full batch."""
    return [range(batch_size * at, batch_size * (at + 1)) for at in range(max(1, num_prompts // batch_size))]


def measure_group(
    services: Services,
    group: Group,
    prompts: Sequence[Sequence[int]],
    num_prompts: int,
    plan: Plan,
    on_requests: Callable[[int], None] = lambda count: None,
) -> Measured:
    """Measure a group on `num_prompts` prompts or on a full batch of them if that is more.

    The tasks are the same in every run. Where prompts are fewer than a batch they come again, with other seeds.

    Raises:
        BenchmarkError: a completion failed or had another length, or a verifier's metrics were not there.
    """
    contenders = [
        BatchContender(
            variant,
            services.address(variant),
            services.verifiers[variant.verifier].metrics_url,
            knows_prompts=group.knows_prompts,
        )
        for variant in group.variants
    ]

    def tasks(batch: Iterable[int], temperature: float) -> list[Task]:
        return [plan.task(prompts[number % len(prompts)], number, temperature) for number in batch]

    batches = batches_of(num_prompts, group.batch_size)
    for temperature in plan.temperatures:
        # Prompts that are to be known are so once they have been sent.
        meets_all = group.knows_prompts and temperature == plan.temperatures[0]
        for batch in batches if meets_all else batches[:1]:
            short = [
                replace(one, max_tokens=min(one.max_tokens, MAX_WARM_UP_TOKENS)) for one in tasks(batch, temperature)
            ]
            for contender in contenders:
                contender.complete(short)
    loads = [(temperature, batch) for temperature in plan.temperatures for batch in batches]
    taken = []
    for turn in Experiment(contenders, loads, plan.num_runs).turns():
        temperature, batch = turn.load
        outcome = turn.arm.complete(tasks(batch, temperature))
        taken.append(BatchSample(turn.arm.name, temperature, turn.run, batch[0], outcome))
        on_requests(len(batch))
    return Measured(group, Samples(taken), tuple(contender.note for contender in contenders))


# Figures of batches.

Batches = Sequence[BatchSample]


def completions_of(samples: Batches) -> list[Completion]:
    """All completions, batch by batch."""
    return [completion for sample in samples for completion in sample.outcome.completions]


def tokens_per_s(samples: Batches) -> float | None:
    """All tokens over the time of all batches, each until its last request was done."""
    tokens = sum(len(one.token_ids) for one in completions_of(samples))
    return quotient(tokens, sum(sample.outcome.wall_s for sample in samples))


def num_rounds(samples: Batches) -> int:
    """Rounds of all requests."""
    return sum(one.speculation.rounds for one in completions_of(samples))


def mean_acceptance_length(samples: Batches) -> float | None:
    """Tokens committed per round, the target's own token included."""
    return quotient(sum(len(one.token_ids) for one in completions_of(samples)), num_rounds(samples))


def passes_of(samples: Batches) -> Counters:
    """What the verifier counted while all requests of a batch decoded, over all batches."""
    total = Counters()
    for sample in samples:
        total = total.plus(sample.outcome.passes)
    return total


# Rows and ratios.


def in_pass_rows(measured: Sequence[Measured]) -> list[Row]:
    """A row per group, variant and temperature; names are unique with the group's in front."""
    expected = plain_outputs(measured)
    return [
        _row(one, variant, note, temperature, expected)
        for one in measured
        for temperature in one.temperatures
        for variant, note in zip(one.group.variants, one.notes, strict=True)
    ]


def plain_outputs(measured: Iterable[Measured]) -> dict[tuple[float, int], tuple[int, ...]]:
    """What plain decoding said first to each request, by temperature and number; runs and groups have the same ones."""
    found: dict[tuple[float, int], tuple[int, ...]] = {}
    for one in measured:
        for sample in one.samples.where(contender=OFF):
            for number, completion in enumerate(sample.outcome.completions, sample.first):
                found.setdefault((sample.temperature, number), completion.token_ids)
    return found


def wrong_outputs(measured: Sequence[Measured]) -> list[Mismatch]:
    """Every output that is not that of plain decoding, later ones of plain decoding included."""
    expected = plain_outputs(measured)
    return [
        Mismatch(sample.contender, OFF, sample.temperature, sample.run, number)
        for one in measured
        for sample in one.samples
        for number in _differing(sample, expected)
    ]


def _differing(sample: BatchSample, expected: Mapping[tuple[float, int], tuple[int, ...]]) -> list[int]:
    numbered = enumerate(sample.outcome.completions, sample.first)
    return [number for number, one in numbered if one.token_ids != expected.get((sample.temperature, number))]


def _row(
    measured: Measured,
    variant: Variant,
    note: str,
    temperature: float,
    expected: Mapping[tuple[float, int], tuple[int, ...]],
) -> Row:
    name, group = variant.contender, measured.group
    samples = measured.of(name, temperature)
    speeds = samples.by_run(tokens_per_s)
    over_off = over(speeds, measured.of(OFF, temperature).by_run(tokens_per_s))
    completions = completions_of(samples)
    speculation = [one.speculation for one in completions]
    differing = [number for sample in samples for number in _differing(sample, expected)]
    redrafts = (one.origins.get(REDRAFT) for one in speculation)
    return {
        "name": f"{group.name}: {name} T={temperature:g}",
        "group": group.name,
        "contender": name,
        "temperature": temperature,
        "batch_size": group.batch_size,
        "max_nodes": variant.max_nodes,
        **spread("tokens_per_s", speeds),
        "speed_over_off": spread("over", over_off, 4)["over"],
        "mean_acceptance_length": rounded(mean_acceptance_length(samples), 4),
        "drafted_share": rounded(
            quotient(sum(sum(one.rounds_drafted_by_depth[:1]) for one in speculation), num_rounds(samples)), 4
        ),
        "rounds": num_rounds(samples),
        # Those that verified the target's own draft as it was: nothing better had arrived.
        "redraft_rounds": sum(counts.rounds for counts in redrafts if counts is not None),
        **{
            field: sum(getattr(one, field) for one in speculation)
            for field in ("redraft_tokens", "draft_tokens", "accepted_tokens")
        },
        **pass_fields(passes_of(samples)),
        "identical": not differing,
        "num_identical": len(completions) - len(differing),
        "num_requests": len(completions),
        "repeated_4grams": round(repeated_4grams(one.token_ids for one in completions), 4),
        "note": note,
    }


def in_pass_ratios(measured: Sequence[Measured], what: InPass) -> ByRun:
    """The named ratios of each run."""
    groups = {one.group.name: one for one in measured}
    found: ByRun = {}
    for temperature in groups[DRAFTING].temperatures if what.space and DRAFTING in groups else ():
        found |= _space(groups[DRAFTING], what, temperature)
    pruned = [groups[name] for name in map(pruning_group, what.batch_sizes) if name in groups]
    for temperature in pruned[0].temperatures if pruned else ():
        for source in tree_sources(what):
            found |= _saved(pruned, what, source, temperature)
            for one in pruned:
                found |= _gains(one, what, source, temperature)
    return found


def best_space(measured: Measured, what: InPass, temperature: float) -> str:
    """The name of the fastest variant whose target drafts for itself, alone."""

    def speed(name: str) -> float:
        values = measured.of(f"{ON} {name}", temperature).by_run(tokens_per_s)
        return fmean(value or 0.0 for value in values)

    return max(space_names(what), key=speed)


def _space(measured: Measured, what: InPass, temperature: float) -> ByRun:
    kind = what.drafter.kind
    names = {
        "off": OFF,
        "usual": f"{ON} {SPACE}",
        "best": f"{ON} {best_space(measured, what, temperature)}",
        "merged": f"{ON} {merged_name(kind)}",
        "alone": f"{ON} {kind}",
    }
    speeds = {label: measured.of(name, temperature).by_run(tokens_per_s) for label, name in names.items()}
    found = {
        "space/off": over(speeds["usual"], speeds["off"]),
        "space.best/off": over(speeds["best"], speeds["off"]),
        "space.tau": known(measured.of(names["usual"], temperature).by_run(mean_acceptance_length)),
        f"{merged_name(kind)}/{kind}": over(speeds["merged"], speeds["alone"]),
    }
    return {at_temperature(name, temperature): values for name, values in found.items()}


def _saved(pruned: Sequence[Measured], what: InPass, source: str, temperature: float) -> ByRun:
    """Over all sizes of trees and numbers of requests."""

    def together(switch: str) -> Samples[BatchSample]:
        names = [f"{ON} {pruning_name(source, size, switch)}" for size in what.tree_sizes]
        return Samples(sample for one in pruned for name in names for sample in one.of(name, temperature))

    on, off = together("on"), together("off")
    of = _of_source(source, what)
    return {
        at_temperature(f"rows-saved{of}", temperature): known(on.by_run(lambda run: removed_share(passes_of(run)))),
        at_temperature(f"tau-kept{of}", temperature): over(
            on.by_run(mean_acceptance_length), off.by_run(mean_acceptance_length)
        ),
    }


def _gains(measured: Measured, what: InPass, source: str, temperature: float) -> ByRun:
    """Times are added up over the sizes of trees, one of each; no run in which a size has no pass that all shared."""

    def times(switch: str, figure: Callable[[Counters], float | None]) -> list[float | None]:
        names = [f"{ON} {pruning_name(source, size, switch)}" for size in what.tree_sizes]
        by_size = [measured.of(name, temperature).by_run(lambda run: figure(passes_of(run))) for name in names]
        runs = zip(*by_size, strict=True)
        return [sum(found) if len(found := [value for value in run if value]) == len(run) else None for run in runs]

    whole = times(COMPARE, lambda counted: ms_per_row(counted, pruned=False))
    pruned = times(COMPARE, lambda counted: ms_per_row(counted, pruned=True))
    batch = f"b{measured.group.batch_size}{_of_source(source, what)}"
    return {
        at_temperature(f"pruning.time-gain.{batch}", temperature): over(whole, pruned),
        at_temperature(f"pruning.auto-gain.{batch}", temperature): over(
            times("off", ms_per_pass), times("auto", ms_per_pass)
        ),
    }


def _of_source(source: str, what: InPass) -> str:
    """What the names of ratios say of whose trees they are about."""
    return "" if source == tree_sources(what)[0] else f".{source}"


def uneven_trees(rows: Sequence[Row]) -> Iterator[str]:
    """Where passes with pruning began with other rows than those without.

    With many requests at once the verifier cuts their trees to the rows that its passes make cheap, and it learns these
    from its own passes.
    """
    found = {(row["group"], row["temperature"], row["contender"]): row for row in rows}
    without, *switches = SWITCHES
    for row in rows:
        name: str = row["contender"]
        if row["max_nodes"] is None or not name.endswith(without):
            continue
        for switch in switches:
            other = found[row["group"], row["temperature"], name.removesuffix(without) + switch]
            pair = row["rows_per_pass"], other["rows_per_pass"]
            if all(pair) and abs(pair[1] / pair[0] - 1) > MOST_DIFFERENCE:
                yield (
                    f"{other['name']}: passes begin with {pair[1]:.1f} rows, those without pruning with {pair[0]:.1f}: "
                    "their times compare other trees, too."
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
        """Completions that are measured, those of plain decoding included."""
        batches = (sum(map(len, batches_of(self.num_prompts, group.batch_size))) for group in self.groups)
        each = sum(len(group.variants) * size for group, size in zip(self.groups, batches, strict=True))
        return each * len(self.plan.temperatures) * self.plan.num_runs

    async def start(self, topology: Topology) -> Services:
        """Start the services."""
        return await start_services(topology, self.groups)

    def run(self, services: Services) -> Report:
        """Measure and return the report.

        Raises:
            BenchmarkError: the services failed, or a prompt does not fit the model.
        """
        machine = describe_machine()
        context = max_context(services.address(self.groups[0].variants[0]))
        prompt_ids, num_cut = encoded_prompts(self.target, self.prompts, self.plan.max_tokens, context)
        with progress("in-pass", self.num_requests) as advance:
            taken = [
                measure_group(services, group, prompt_ids, self.num_prompts, self.plan, advance)
                for group in self.groups
            ]
        rows = in_pass_rows(taken)
        notes = [*remarks(rows), *NOTES, *self._best(taken), *uneven_trees(rows), *self.left_out]
        return document(
            "in-pass",
            machine,
            self._settings(prompt_ids, num_cut),
            rows,
            Ratios.of(in_pass_ratios(taken, self.what)),
            RATIO_NOTE,
            notes,
            wrong_outputs(taken),
            divergences=[],
        )

    def _best(self, taken: Sequence[Measured]) -> Iterator[str]:
        """Which row `space.best/off` is of."""
        for one in taken if self.what.space else ():
            for temperature in one.temperatures if one.group.name == DRAFTING else ():
                yield f"At T={temperature:g} space.best/off is that of {best_space(one, self.what, temperature)}."

    def _settings(self, prompt_ids: Sequence[Sequence[int]], num_cut: int) -> Row:
        what = self.what
        return {
            "target": shown_path(self.target),
            "drafter": {what.drafter.kind: shown_path(Path(what.drafter.model))},
            "space": shown_path(Path(what.space)) if what.space else None,
            "early_head": shown_path(Path(what.early_head)) if what.early_head else None,
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
            "prompts": prompt_settings(self.prompts, prompt_ids),
            "num_cut_prompts": num_cut,
        }


def shown(report: Report) -> Shown:
    """Tables of all groups; pictures of drafting, and of pruning with the most requests at once."""
    most = max(row["batch_size"] for row in report["rows"])

    def is_drafting(row: Mapping[str, Any]) -> bool:
        return bool(row["group"] == DRAFTING and row["contender"] != OFF)

    def is_pruning(row: Mapping[str, Any]) -> bool:
        return bool(row["max_nodes"]) and row["batch_size"] == most

    speed = Panel("One request", bars, short_name, "speed_over_off", "T={temperature:g}", ylabel="tokens/s over off")
    passes = Panel(
        f"Early pruning, {most} requests at once",
        bars,
        short_name,
        "ms_per_pass",
        "T={temperature:g}",
        ylabel="ms per pass",
    )
    return Shown(
        tables=(
            Table(
                "in turn with plain decoding",
                {
                    "T": "{temperature:g}",
                    "tokens/s": "{tokens_per_s:.0f}",
                    "x off": "{speed_over_off:.2f}",
                    "τ": "{mean_acceptance_length:.2f}",
                    "rows/pass": "{rows_per_pass:.1f}",
                    "left": "{rows_left_per_pass:.1f}",
                    "ms/pass": "{ms_per_pass:.2f}",
                    "nodes removed": "{removed_share:.0%}",
                    "re-draft rounds": "{redraft_rounds}/{rounds}",
                    "identical": "{num_identical}/{num_requests}",
                },
                label=short_name,
                by="group",
            ),
        ),
        panels=(replace(speed, where=is_drafting, has_base=True), replace(passes, where=is_pruning)),
        line="{num_prompts} prompts x {max_tokens} tokens x {num_runs} runs, {threads} threads; "
        "left: rows after the layer that prunes.",
    )
