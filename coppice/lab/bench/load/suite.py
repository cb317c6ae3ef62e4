"""Load through the public API: closed and open loops and a step, under several speculation policies in turn.

Speeds are medians over runs; latencies are percentiles over all requests of all runs, not means of percentiles.
"""

from __future__ import annotations

import asyncio
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import NDArray

from coppice.client import Client
from coppice.frozen_heap import frozen_heap
from coppice.lab.bench import comparison
from coppice.lab.bench.client import Answer, Contender, Fate, Mode, Policy, Requester, Task, Window, model_info
from coppice.lab.bench.comparison import Setup, answers_of, is_identical
from coppice.lab.bench.environment import describe_machine
from coppice.lab.bench.figures import mean_acceptance_length, nodes_per_round, rows_per_pass
from coppice.lab.bench.harness.experiment import (
    BenchmarkError,
    ByRun,
    Experiment,
    Ratios,
    Samples,
    in_turn,
    milliseconds,
    over,
    percentile,
    progress,
    quotient,
    rounded,
    spread,
)
from coppice.lab.bench.harness.plots import Panel
from coppice.lab.bench.harness.report import Report, Row, Shown, document, unequal
from coppice.lab.bench.harness.tables import Table
from coppice.lab.bench.http_client import GatewayClient
from coppice.lab.bench.load import figures
from coppice.lab.bench.load.chats import Ask, Chats
from coppice.lab.bench.load.figures import Span, Targets
from coppice.lab.bench.load.loads import (
    PAUSE_S,
    Arrival,
    ClosedLoad,
    Load,
    PoissonLoad,
    StepLoad,
    TraceLoad,
    Workload,
    trace_beginning,
)
from coppice.lab.bench.load.page import load_page
from coppice.lab.bench.throughput import measure_batches
from coppice.lab.bench.transformers_baseline import BatchedGenerate, ContinuousBatching, load_model, quiet_transformers
from coppice.v1 import inference_pb2

OFF = "off"
FIXED = ("fixed-small", "fixed-large")
PLANNER = "planner"
SMALL_NODES, LARGE_NODES = 4, 32

# Outputs to compare with are made so many at once.
REFERENCE_CONCURRENCY = 8
# A server with a short queue may refuse some of them for as long as others run.
REFERENCE_PATIENCE_S = 120.0
# A generator that is later than this with one request in a hundred measures itself.
MAX_LAG_MS = 50.0
# The better of transformers' two ways in each run.
BEST = "transformers"
References = tuple[tuple[int, ...], ...]


def policies(server_max_nodes: int) -> tuple[Policy, ...]:
    """Off, two fixed budgets within the server's limit, and the server's planner."""
    small, large = (min(nodes, server_max_nodes) for nodes in (SMALL_NODES, LARGE_NODES))
    return (
        Policy(OFF, Mode.MODE_OFF),
        Policy(FIXED[0], Mode.MODE_FORCED, small),
        Policy(FIXED[1], Mode.MODE_FORCED, large),
        Policy(PLANNER, Mode.MODE_AUTO),
    )


@dataclass(frozen=True, slots=True)
class Sample:
    """One window within the benchmark, and the part of it that counts."""

    load: Load
    policy: str
    run: int
    span: Span
    answers: tuple[Answer, ...]


async def reference_outputs(client: Client, workload: Workload, off: Policy) -> References:
    """Every prompt's longest output with speculation off, which all outputs of the benchmark begin.

    Raises BenchmarkError if a request failed.
    """
    output = _asker(client, off)
    return tuple(await asyncio.gather(*(output(workload.longest(prompt)) for prompt in range(len(workload.prompts)))))


def _asker(client: Client, off: Policy) -> Ask:
    """A function that makes the output of a task; it raises BenchmarkError if the request failed."""
    window, room = Window(client, off), asyncio.Semaphore(REFERENCE_CONCURRENCY)

    async def output(task: Task) -> tuple[int, ...]:
        async with room:
            # A server may run fewer at once than we ask for.
            give_up_s = time.monotonic() + REFERENCE_PATIENCE_S
            answer = await window.ask(task)
            while answer.fate is Fate.REFUSED and time.monotonic() < give_up_s:
                await asyncio.sleep(PAUSE_S)
                answer = await window.ask(task)
        if answer.fate is not Fate.COMPLETED or len(answer.token_ids) != task.max_tokens:
            raise BenchmarkError(f"no output of {OFF} to compare with: {answer.error or 'it is too short'}")
        return answer.token_ids

    return output


async def measure_loads(
    client: Requester,
    workload: Workload,
    loads: Sequence[Load],
    contenders: Sequence[Policy],
    num_runs: int,
    seed: int,
    on_sample: Callable[[], None] = lambda: None,
    baselines: Baselines | None = None,
) -> Samples[Sample]:
    """Every load under every policy, `num_runs` times, in a seeded order.

    In each run `baselines` have their turn before. Raises BenchmarkError if requests failed in
    some window, and none was completed.
    """
    taken = []
    for number, turn in enumerate(Experiment(contenders, loads, num_runs, seed, by_load=True).turns()):
        if baselines is not None and number % len(contenders) == 0:
            await baselines.measure(turn.load, turn.run)
        window = Window(client, turn.arm)
        span = await turn.load.drive(window, workload, turn.run)
        sample = Sample(turn.load, turn.arm.name, turn.run, span, window.answers())
        require_completed(sample.answers, f"{sample.policy} {sample.load.name}")
        taken.append(sample)
        on_sample()
    return Samples(taken)


def counts(answers: Sequence[Answer], references: References) -> Row:
    """What became of requests, and how many outputs are those of speculation off."""
    fates = Counter(answer.fate for answer in answers)
    compared = [answer for answer in answers if answer.token_ids or answer.fate is Fate.COMPLETED]
    num_identical = sum(
        is_identical(answer, references[answer.task.prompt][: answer.task.max_tokens]) for answer in compared
    )
    return {
        "num_requests": len(answers),
        **{f"num_{fate.value}": fates[fate] for fate in Fate},
        "num_compared": len(compared),
        "num_identical": num_identical,
        "identical": num_identical == len(compared),
        "lag_ms_p99": lag_ms(answers),
    }


def lag_ms(answers: Iterable[Answer]) -> float | None:
    """How late the generator itself sent requests, at the 99th percentile."""
    return milliseconds(percentile((one.sent_s - one.intended_s for one in answers), 99))


def late_remarks(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    return [
        f"{row['name']}: the load generator itself was late by up to {row['lag_ms_p99']:.0f} ms (p99); that is in "
        "the latencies."
        for row in rows
        if (row["lag_ms_p99"] or 0) > MAX_LAG_MS
    ]


def failures(results: Results) -> list[str]:
    """Loads with requests that failed, and the first error of each."""
    found = []
    for load in results.loads(object):
        for policy in results.policies:
            errors = [
                answer.error
                for sample in results.of(load, policy.name)
                for answer in sample.answers
                if answer.fate is Fate.FAILED
            ]
            if errors:
                found.append(f"{policy.name} {load.name}: {len(errors)} requests failed, the first: {errors[0]}")
    return found


def require_completed(answers: Iterable[Answer], name: str) -> None:
    """A server that is gone must end the benchmark, not fill it with failures.

    Raises BenchmarkError if requests failed, and none was completed.
    """
    errors = {answer.fate: answer.error for answer in answers}
    if Fate.FAILED in errors and Fate.COMPLETED not in errors:
        raise BenchmarkError(f"{name}: no request was completed: {errors[Fate.FAILED]}")


@dataclass(frozen=True, slots=True)
class Results:
    """All samples of a benchmark, its policies in order, and the targets of goodput."""

    samples: Samples[Sample]
    policies: tuple[Policy, ...]
    targets: Targets = field(default_factory=Targets)

    def of(self, load: Load, policy: str) -> Samples[Sample]:
        return self.samples.where(load=load, policy=policy)

    def loads(self, *kinds: type) -> list[Any]:
        """The loads of some kinds, in the order measured."""
        return [load for load in self.samples.each("load") if isinstance(load, kinds)]


def speed(sample: Sample) -> float:
    return figures.tokens_per_s(sample.answers, sample.span)


def saturating_load(results: Results) -> ClosedLoad:
    """Under which the server without speculation gives the most tokens per second, by the median of runs."""
    loads: list[ClosedLoad] = results.loads(ClosedLoad)
    return max(loads, key=lambda load: statistics.median(map(speed, results.of(load, OFF))))


def saturation(results: Results) -> float:
    """Tokens per second under that load, without speculation."""
    return statistics.median(map(speed, results.of(saturating_load(results), OFF)))


class Baselines:
    """transformers by itself under closed loads: as many requests at once in one batch, by each of its two ways.

    Outputs of a batch have the workload's mean length, all alike, so that none of its rows is idle: what a batch of
    different lengths would lose is given to it.
    """

    def __init__(self, contenders: Sequence[Contender], workload: Workload) -> None:
        self._contenders = tuple(contenders)
        self._prompts = workload.prompts
        self._plan = comparison.Plan(1, round(workload.mean_tokens), (0.0,), workload.seed)
        self.samples: list[comparison.Sample] = []

    async def measure(self, load: Load, run: int) -> None:
        """One batch by each contender, while the services rest; nothing with other loads than closed ones.

        Raises BenchmarkError if a contender failed.
        """
        if self._contenders and isinstance(load, ClosedLoad):
            arms = in_turn(self._contenders, run)
            self.samples += await measure_batches(arms, self._prompts, self._plan, load.concurrency, [run])

    def rows(self, references: References) -> list[Row]:
        """One flat object per contender and number of requests at once, in the order measured."""
        known = {tokens[: self._plan.max_tokens] for tokens in references}
        every = Samples(self.samples)
        found: list[Row] = []
        for count in every.each("size"):
            for contender in self._contenders:
                group = every.where(contender=contender.name, size=count)
                answers = answers_of(group)
                row = {
                    "name": f"{contender.name} c{count}",
                    "contender": contender.name,
                    "part": "baseline",
                    "concurrency": count,
                    **spread("tokens_per_s", group.by_run(comparison.tokens_per_s)),
                    "num_requests": len(answers),
                    "num_identical_to_off": sum(answer.token_ids in known for answer in answers),
                    "note": contender.note,
                }
                found.append(row)
        return found

    def ratios(self, results: Results) -> ByRun:
        """Plain decoding's tokens per second over each contender's and over the better one's, within runs."""
        found: ByRun = {}
        for load in results.loads(ClosedLoad):
            for sample in results.of(load, OFF):
                group = Samples(self.samples).where(size=load.concurrency, run=sample.run)
                theirs = {one.contender: comparison.tokens_per_s([one]) or 0.0 for one in group}
                if theirs:
                    theirs[BEST] = max(theirs.values())
                for name, tokens_per_s in theirs.items():
                    found.setdefault(f"{OFF}/{name}.{load.name}", []).append(speed(sample) / tokens_per_s)
        return found


def step_bins(load: StepLoad, sample: Sample) -> list[list[float]]:
    """Tokens per second by bins, of each level."""
    return [figures.token_bins(sample.answers, level.span) for level in load.levels]


def settle_tolerances(results: Results, load: StepLoad) -> list[float]:
    """How far from its lasting speed each level may be and have settled.

    With speculation off there is nothing to settle in a level's second half. How far seconds of that stray all the
    same, by prompts and by lumps of tokens, is no unrest of any policy's; by the median of runs.
    """
    by_level = zip(*(step_bins(load, one) for one in results.of(load, OFF)), strict=True)
    return [max(figures.TOLERANCE, statistics.median(map(figures.strays, bins))) for bins in by_level]


@dataclass(frozen=True, slots=True)
class Steps:
    """Of the levels after the steps up and down, seconds by run: until they settled and that they lost.

    `never` [2] is what a level counts that never settled, or gave nothing in its second half; until then it is NaN.
    `lowest` [runs] are the fewest tokens per second, over two seconds, with many requests at once.
    """

    settle_s: NDArray[np.float64]
    lost_s: NDArray[np.float64]
    never: NDArray[np.float64]
    lowest: NDArray[np.float64]

    @classmethod
    def of(cls, load: StepLoad, group: Iterable[Sample], tolerances: Sequence[float]) -> Steps:
        runs = [step_bins(load, sample) for sample in group]
        settle = [list(map(figures.settle_s, bins[1:], tolerances[1:])) for bins in runs]
        lost = [list(map(figures.lost_s, bins[1:])) for bins in runs]
        means = [figures.running_mean(bins[1], min(len(bins[1]), figures.COLLAPSE_BINS)) for bins in runs]
        lengths = [level.span.length_s for level in load.levels[1:]]
        return cls(
            np.array(settle, float), np.array(lost, float), np.array(lengths), np.array([min(one) for one in means])
        )

    def settled(self) -> NDArray[np.float64]:
        """Seconds until both levels settled [runs, 2]; a level that never does counts its length."""
        return np.where(np.isnan(self.settle_s), self.never, self.settle_s)

    def lost(self) -> NDArray[np.float64]:
        """Seconds that both levels lost [runs, 2]; a level without a second half to compare with counts its half."""
        return np.where(np.isnan(self.lost_s), self.never / 2, self.lost_s)


def load_rows(results: Results, references: References) -> list[Row]:
    found = []
    for load in results.loads(object):
        for policy in results.policies:
            group = results.of(load, policy.name)
            row = {
                "name": f"{policy.name} {load.name}",
                "policy": policy.name,
                "load": load.name,
                **_load_figures(results, load, group),
                **spread("tokens_per_s", map(speed, group)),
                **_latencies(group),
                **counts([answer for sample in group for answer in sample.answers], references),
                "note": policy.note,
            }
            found.append(row)
    return found


def series(results: Results) -> list[Row]:
    """Tokens per second and draft nodes per round over the time of each step, by bins."""
    return [
        {
            "policy": policy.name,
            "run": sample.run,
            "bin_s": figures.BIN_S,
            "tokens_per_s": figures.token_bins(sample.answers, sample.span),
            "nodes_per_round": [rounded(value) for value in figures.node_bins(sample.answers, sample.span)],
        }
        for load in results.loads(StepLoad)
        for policy in results.policies
        for sample in results.of(load, policy.name)
    ]


def load_remarks(result: Sequence[Mapping[str, Any]]) -> list[str]:
    notes = [
        f"{row['name']}: {row['num_refused']} requests were refused and {row['num_failed']} failed."
        for row in result
        if row["num_refused"] or row["num_failed"]
    ]
    return notes + late_remarks(result)


def _load_figures(results: Results, load: Load, group: Sequence[Sample]) -> Row:
    if isinstance(load, ClosedLoad):
        warm_up_s = statistics.median(sample.span.start_s for sample in group)
        return {"part": "closed", "concurrency": load.concurrency, "warm_up_s": rounded(warm_up_s)}
    if isinstance(load, StepLoad):
        return {
            "part": "step",
            "concurrency": load.concurrency,
            **_step_figures(load, group, settle_tolerances(results, load)),
        }
    offered = [len(sample.answers) for sample in group]
    good = [figures.num_good(sample.answers, results.targets) for sample in group]
    return {
        "part": "open",
        "rate": load.rate if isinstance(load, PoissonLoad) else None,
        "offered_per_s": rounded(statistics.median(offered) / load.duration_s),
        **spread("goodput_per_s", (number / load.duration_s for number in good)),
        "good_share": rounded(quotient(sum(good), sum(offered))),
    }


def _step_figures(load: StepLoad, group: Sequence[Sample], tolerances: Sequence[float]) -> Row:
    """Speeds and settle times of the levels, and what their beginnings cost, medians over runs.

    None where half of the runs or more never settled, or gave nothing in the second half.
    """
    found: Row = {}
    for level, name in zip(load.levels, ("before", "at", "after"), strict=True):
        speeds = [figures.tokens_per_s(sample.answers, level.span) for sample in group]
        found[f"tokens_per_s_{name}"] = rounded(statistics.median(speeds))
    steps = Steps.of(load, group, tolerances)
    for number, name in enumerate(("up", "down")):
        # NaN, which is never, comes last.
        settle_s, lost_s = (
            float(np.sort(times[:, number])[len(group) // 2]) for times in (steps.settle_s, steps.lost_s)
        )
        found[f"settle_{name}_s"] = None if math.isnan(settle_s) else rounded(settle_s)
        found[f"settle_tolerance_{name}"] = rounded(tolerances[1 + number])
        found[f"lost_{name}_s"] = None if math.isnan(lost_s) else rounded(lost_s)
    found["lowest_tokens_per_s_at"] = rounded(float(np.median(steps.lowest)))
    return found


def _latencies(group: Sequence[Sample]) -> Row:
    """Percentiles over the events of all runs, milliseconds, and what rounds were like."""
    ended = [answer for sample in group for answer in figures.completed(sample.answers, sample.span)]
    gaps = [gap for sample in group for gap in figures.gaps_s(sample.answers, sample.span)]
    deltas = [delta for answer in ended for delta in answer.deltas]
    return {
        **percentiles("ttft", [time for sample in group for time in figures.ttfts_s(sample.answers, sample.span)]),
        **percentiles("itl", gaps),
        **percentiles("tpot", figures.tpots_s(ended)),
        **percentiles("e2e", [answer.e2e_s for answer in ended]),
        "tokens_per_delta": rounded(quotient(sum(delta.num_tokens for delta in deltas), len(deltas))),
        "rows_per_pass": rounded(rows_per_pass(ended)),
        "mean_acceptance_length": rounded(mean_acceptance_length(ended)),
        "nodes_per_round": rounded(nodes_per_round(ended)),
    }


def percentiles(name: str, times_s: Iterable[float | None], percents: Sequence[int] = (50, 99)) -> Row:
    """Fields of a row, in milliseconds."""
    known = list(times_s)
    return {f"{name}_ms_p{percent}": milliseconds(percentile(known, percent)) for percent in percents}


def load_ratios(results: Results, baselines: ByRun | None = None) -> Ratios:
    """The named ratios, and those of the `baselines`, which were measured in the same runs."""
    closed = {name: _within_runs(results, *terms, speed) for name, terms in _closed_terms(results).items()}
    by_run = {**_with_least({**closed, **(baselines or {})}), **_open_ratios(results), **_step_ratios(results)}
    return Ratios.of(by_run)


def _closed_terms(results: Results) -> dict[str, tuple[ClosedLoad, str, str]]:
    """For each ratio of speeds: the load, whose speed, and over whose."""
    terms = {}
    for load in results.loads(ClosedLoad):
        for policy in results.policies:
            if policy.name != OFF:
                terms[f"{policy.name}/{OFF}.{load.name}"] = (load, policy.name, OFF)
        medians = {name: statistics.median(map(speed, results.of(load, name))) for name in FIXED}
        best = max(medians, key=medians.__getitem__)
        terms[f"{PLANNER}/best-fixed.{load.name}"] = (load, PLANNER, best)
    return terms


def _with_least(by_run: ByRun) -> ByRun:
    """Each ratio under `.min` as well, as it is where its median over runs is least."""
    least: ByRun = {}
    for name, values in by_run.items():
        key = f"{name.rpartition('.')[0]}.min"
        if values and (key not in least or statistics.median(values) < statistics.median(least[key])):
            least[key] = values
    return {**by_run, **least}


def _open_ratios(results: Results) -> ByRun:
    def num_good(sample: Sample) -> float:
        return figures.num_good(sample.answers, results.targets)

    # Arrivals take the same time under every policy.
    return {
        f"{policy.name}/{OFF}.goodput.{load.name}": _within_runs(results, load, policy.name, OFF, num_good)
        for load in results.loads(PoissonLoad, TraceLoad)
        for policy in results.policies
        if policy.name != OFF
    }


def _step_ratios(results: Results) -> ByRun:
    """Of the planner and of speculation off: when levels had settled, what steps cost, the lowest speed."""
    found: ByRun = {}
    for load in results.loads(StepLoad):
        tolerances = settle_tolerances(results, load)
        planner, off = (Steps.of(load, results.of(load, name), tolerances) for name in (PLANNER, OFF))
        for whose, settled in (("", planner.settled()), (f".{OFF}", off.settled())):
            found[f"step.settle_up_s{whose}"] = settled[:, 0].tolist()
            found[f"step.settle_down_s{whose}"] = settled[:, 1].tolist()
            found[f"step.settle_s{whose}"] = settled.max(1).tolist()
        found["step.settle_beyond_off_s"] = (planner.settled() - off.settled()).max(1).tolist()
        found["step.lost_s"] = planner.lost().max(1).tolist()
        found["step.lost_beyond_off_s"] = (planner.lost() - off.lost()).max(1).tolist()
        found[f"step.lowest/{OFF}"] = over(planner.lowest.tolist(), off.lowest.tolist())
    return found


def _within_runs(
    results: Results, load: Load, first: str, second: str, figure: Callable[[Sample], float]
) -> list[float]:
    """The ratio of a figure of two policies in each run; none of runs that have nothing to divide by."""
    mine, theirs = ([figure(sample) for sample in results.of(load, name)] for name in (first, second))
    return over(mine, theirs)


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What is measured: windows of `duration_s` for every load under every policy."""

    concurrency: tuple[int, ...] = (1, 4, 16, 64)
    duration_s: float = 10.0
    # Arrivals at random, in shares of the requests per second that saturate the server without speculation.
    rates: tuple[float, ...] = (0.6, 0.9, 1.2)
    # Arrivals of a trace that is played `trace_speed` times as fast; empty for none.
    trace: tuple[Arrival, ...] = ()
    trace_speed: float = 1.0
    # The step goes from one request at a time to so many and back; 0 for no step.
    step: int = 64
    targets: Targets = field(default_factory=Targets)
    # Whether transformers has its turn with the closed loads, too; it does with greedy requests alone.
    transformers: bool = True
    # Of a conversation; its requests follow each other, and arrivals are those of conversations.
    num_turns: int = 1
    # Share of the requests whose clients leave early.
    leaving: float = 0.0
    # Outputs of lognormal lengths, instead of evenly drawn ones.
    lognormal: bool = False

    def other_loads(self, saturation_per_s: float, seed: int) -> list[Load]:
        """Arrivals at shares of so many requests per second, those of the trace, and the step."""
        loads: list[Load] = [PoissonLoad(rate, rate * saturation_per_s, self.duration_s, seed) for rate in self.rates]
        if self.trace:
            arrivals = trace_beginning(self.trace, self.duration_s, self.trace_speed)
            loads.append(TraceLoad(tuple(arrivals), self.duration_s))
        return [*loads, StepLoad(self.step, self.duration_s)] if self.step else loads


@dataclass(frozen=True, slots=True)
class LoadSuite:
    """One load benchmark of a target served at an address, by the first temperature of the setup's plan."""

    setup: Setup
    plan: LoadPlan
    min_tokens: int = 32

    async def run(self, address: str, http_address: str = "") -> Report:
        """Measure and return the report; with `http_address`, the HOST:PORT of a gateway, over HTTP.

        What all tokens are compared with comes over gRPC. Raises BenchmarkError if the server failed.
        """
        machine, common, plan = describe_machine(), self.setup.plan, self.plan
        # The generator must not be late because it looks for garbage.
        with frozen_heap():
            async with Client(address) as client:
                info = await model_info(client)
                prompt_ids, num_cut = self.setup.encoded(info.max_context_tokens)
                heat = common.temperatures[0]
                workload, references = await self._workload(client, info, tuple(map(tuple, prompt_ids)), heat)
                baselines = self._baselines(workload)
                requester = GatewayClient(http_address, info.model) if http_address else client
                results = await self._measure(requester, workload, policies(info.max_nodes), baselines)
        rows = load_rows(results, references)
        settings = {
            **self.setup.settings(prompt_ids, num_cut),
            # Whose drafts there are.
            "sources": sorted(info.sources),
            "concurrency": list(plan.concurrency),
            "duration_s": plan.duration_s,
            "rates": list(plan.rates),
            "trace_speed": plan.trace_speed if plan.trace else None,
            "step": plan.step,
            "protocol": "http" if http_address else "grpc",
            "turns": plan.num_turns,
            "leaving": plan.leaving,
            "lognormal": plan.lognormal,
            "ttft_target_ms": 1000 * plan.targets.ttft_s,
            "tpot_target_ms": 1000 * plan.targets.tpot_s,
            # Where that is the largest of `concurrency`, saturation may lie beyond it.
            "saturation_concurrency": saturating_load(results).concurrency,
            "saturation_tokens_per_s": round(saturation(results), 3),
            "saturation_requests_per_s": round(saturation(results) / workload.mean_tokens, 3),
            "num_conversations": len(workload.prompts) // plan.num_turns,
            "server_max_nodes": info.max_nodes,
            "output_tokens": [self.min_tokens, common.max_tokens],
            "temperature": heat,
            "prompt_tokens": [len(prompt) for prompt in workload.prompts],
            # As `coppice simulate` names them.
            "policies": {policy.name: policy.simulated for policy in results.policies},
            "mean_prompt_tokens": round(statistics.fmean(map(len, workload.prompts)), 1),
        }
        return document(
            "load",
            machine,
            settings,
            [*rows, *baselines.rows(references)],
            load_ratios(results, baselines.ratios(results)),
            load_remarks(rows),
            [*unequal(rows, "num_compared"), *failures(results)],
            step_series=series(results),
        )

    async def _workload(
        self, client: Client, info: inference_pb2.GetModelInfoResponse, prompts: References, heat: float
    ) -> tuple[Workload, References]:
        """The requests, and the longest output of each prompt."""
        plan, common, off = self.plan, self.setup.plan, policies(info.max_nodes)[0]
        more = plan.lognormal, plan.num_turns, plan.leaving
        workload = Workload(prompts, self.min_tokens, common.max_tokens, heat, common.seed, *more)
        if plan.num_turns == 1:
            return workload, await reference_outputs(client, workload, off)
        texts = [prompt.text for prompt in self.setup.prompts]
        chats = Chats(self.setup.target, texts, plan.num_turns, info.max_context_tokens)
        return await chats.workload(workload, _asker(client, off))

    def _baselines(self, workload: Workload) -> Baselines:
        """transformers in both of its ways, or not at all."""
        if not self.plan.transformers or workload.temperature > 0:
            return Baselines((), workload)
        quiet_transformers()
        target, threads = load_model(self.setup.target), self.setup.threads
        longest = max(map(len, workload.prompts)) + workload.max_tokens
        both = BatchedGenerate(target, threads), ContinuousBatching(target, threads, longest)
        return Baselines(both, workload)

    async def _measure(
        self, client: Requester, workload: Workload, contenders: tuple[Policy, ...], baselines: Baselines
    ) -> Results:
        """Closed loads first: what saturates the server decides how fast requests arrive in the others."""
        plan, runs, seed = self.plan, self.setup.plan.num_runs, self.setup.plan.seed
        closed: list[Load] = [ClosedLoad(concurrency, plan.duration_s) for concurrency in plan.concurrency]
        num_loads = len(closed) + len(plan.other_loads(1.0, seed))
        with progress("load", num_loads * runs * len(contenders)) as advance:
            taken = await measure_loads(client, workload, closed, contenders, runs, seed, advance, baselines)
            per_s = saturation(Results(taken, contenders)) / workload.mean_tokens / plan.num_turns
            if not per_s:
                raise BenchmarkError(f"no token came in any window of {plan.duration_s:g} s with speculation off")
            loads = plan.other_loads(per_s, seed)
            more = await measure_loads(client, workload, loads, contenders, runs, seed, advance)
        return Results(Samples((*taken, *more)), contenders, plan.targets)


def _draw_step(axes: Axes, report: Mapping[str, Any]) -> None:
    """The first run of each policy; dotted, on the right, draft nodes per round."""
    nodes = axes.twinx()
    for item in [item for item in report["step_series"] if item["run"] == 0]:
        times = [item["bin_s"] * index for index in range(len(item["tokens_per_s"]))]
        [line] = axes.plot(times, item["tokens_per_s"], label=item["policy"], linewidth=1)
        drawn = [float("nan") if value is None else value for value in item["nodes_per_round"]]
        nodes.plot(times, drawn, color=line.get_color(), linestyle=":")
    axes.set_ylim(bottom=0)
    nodes.set_ylim(bottom=0)
    if axes.lines:
        axes.legend(fontsize="small")


def _of_part(part: str) -> Callable[[Mapping[str, Any]], bool]:
    return lambda row: bool(row["part"] == part)


_POISSON = "rate, of saturation without speculation"


def _is_poisson(row: Mapping[str, Any]) -> bool:
    return row["part"] == "open" and row["rate"] is not None


def _by_policy(part: str, title: str, columns: str) -> Table:
    return Table(title, columns, "{load}", where=_of_part(part), across="policy")


SHOWN = Shown(
    tables=(
        _by_policy("closed", "Tokens per second, so many requests at once", "tokens_per_s"),
        _by_policy("closed", "Milliseconds", "ttft_ms_p50 ttft_ms_p99 tpot_ms_p50 tpot_ms_p99"),
        _by_policy("closed", "Milliseconds between deltas", "itl_ms_p50 itl_ms_p99 tokens_per_delta"),
        _by_policy("closed", "Rounds", "rows_per_pass mean_acceptance_length nodes_per_round"),
        _by_policy(
            "open",
            "Requests per second within TTFT {ttft_target_ms:g} ms and {tpot_target_ms:g} ms per token",
            "goodput_per_s good_share",
        ),
        _by_policy("open", "Milliseconds from the intended time", "ttft_ms_p50 ttft_ms_p99 tpot_ms_p50 tpot_ms_p99"),
        _by_policy(
            "step",
            "1 to {step} requests at once and back",
            "tokens_per_s_before tokens_per_s_at tokens_per_s_after lost_up_s lost_down_s lowest_tokens_per_s_at",
        ),
        Table(
            "transformers by itself, one batch of as many requests",
            "tokens_per_s num_identical_to_off num_requests",
            where=_of_part("baseline"),
        ),
    ),
    panels=(
        Panel(
            "Closed loop: median of runs",
            "tokens_per_s",
            "concurrency",
            "{policy}",
            where=_of_part("closed"),
            log_x=True,
        ),
        Panel("Goodput", "goodput_per_s", "rate", "{policy}", where=_is_poisson, xlabel=_POISSON),
        Panel("TTFT p99, open loop", "ttft_ms_p99", "rate", "{policy}", where=_is_poisson, xlabel=_POISSON),
        Panel(
            "One request, many, one; dotted: draft nodes per round",
            xlabel="s",
            ylabel="tokens/s in 250 ms",
            custom=_draw_step,
        ),
    ),
    line="{num_runs} runs of {duration_s:g} s windows over {protocol}, {num_prompts} prompts of "
    "{mean_prompt_tokens:.0f} tokens on average, T={temperature:g}, {threads} threads. Without speculation the server "
    "gives at most {saturation_tokens_per_s:.0f} tokens/s, {saturation_requests_per_s:.2f} requests/s, "
    "with {saturation_concurrency} at once.",
    panels_per_row=2,
    ratio_title="Ratios within a run, over runs; settle times in seconds",
    page=load_page,
)
