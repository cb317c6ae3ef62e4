"""Overload: more requests than the server can do, which wait for no answer.

Latencies are those of completed requests of attentive clients.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from coppice.cli.topology import LOCAL, TopologySpec
from coppice.client import Client
from coppice.completion import Timing
from coppice.frozen_heap import frozen_heap
from coppice.lab.bench.client import ATTENTIVE, Answer, Fate, Manner, Meter, Mode, Policy, Window, model_info, watching
from coppice.lab.bench.comparison import Setup
from coppice.lab.bench.environment import describe_machine
from coppice.lab.bench.harness.experiment import BenchmarkError, Ratios, Samples, percentile, progress, quotient
from coppice.lab.bench.harness.plots import Panel, stacked
from coppice.lab.bench.harness.report import Report, Row, Shown, document, unequal
from coppice.lab.bench.harness.tables import Table
from coppice.lab.bench.load import figures as load_figures
from coppice.lab.bench.load import suite as load_suite
from coppice.lab.bench.load.figures import Targets, num_good
from coppice.lab.bench.load.loads import (
    DRAIN_S,
    LEAVE_WITHIN_S,
    Arrival,
    ClosedLoad,
    Workload,
    lognormal_length,
    open_loop,
    poisson_arrivals,
)
from coppice.lab.bench.load.suite import References, counts, lag_ms, percentiles
from coppice.lab.bench.services import free_port, measure_on, start_all

# How long a slow reader rests after each delta.
SLOW_PAUSE_S = 0.05


@dataclass(frozen=True, slots=True)
class Visitors:
    """Shares of requests whose clients leave early, and of those whose clients read slowly."""

    leaving: float = 0.05
    slow: float = 0.05

    def arrivals(self, rate_per_s: float, begin_s: float, duration_s: float, seed: str) -> list[Arrival]:
        """Poisson arrivals of such clients for so long from `begin_s` on."""
        rng = random.Random(f"{seed} manners")

        def manner() -> Manner:
            chance = rng.random()
            if chance < self.leaving:
                return Manner(leave_after_s=rng.uniform(0.0, LEAVE_WITHIN_S))
            return Manner(pause_s=SLOW_PAUSE_S) if chance < self.leaving + self.slow else ATTENTIVE

        arrivals = poisson_arrivals(rate_per_s, duration_s, seed)
        return [replace(one, at_s=begin_s + one.at_s, manner=manner()) for one in arrivals]


# A shorter prompt says too little to go on with.
MIN_PROMPT_TOKENS = 16
INTERVAL_S = 0.2
RUNNING = "coppice_orchestrator_num_requests_running"
WAITING = "coppice_orchestrator_num_requests_waiting"


# What the server itself chooses is what its users get.
POLICY = Policy(load_suite.PLANNER, Mode.MODE_AUTO)
# The load with which all others are compared, as a share of saturation.
CALM = 0.7
# It lasts longer: its percentiles are in every ratio.
CALM_WINDOWS = 2


@dataclass(frozen=True, slots=True)
class OverloadPlan:
    """What is measured in each run: the calm load, then each of `factors` times saturation for `duration_s`.

    After each overload the calm load goes on for `recovery_s`.
    """

    factors: tuple[float, ...] = (1.0, 2.0, 4.0)
    duration_s: float = 20.0
    recovery_s: float = 10.0
    # Requests at once that find out what saturates the server.
    concurrency: int = 32
    visitors: Visitors = field(default_factory=Visitors)
    # Outputs have lognormal lengths from here to the setup's most.
    min_tokens: int = 16
    targets: Targets = field(default_factory=Targets)
    # Bounds of the orchestrator, 0 for none; without the first, so many times what a request alone takes per token.
    max_token_ms: float | None = None
    token_ratio: float = 3.0
    max_queue_wait_s: float = 0.15


@dataclass(frozen=True, slots=True)
class OverloadSample:
    """One window: arrivals at `factor` times saturation until `end_s`, and calm ones after it."""

    factor: float
    run: int
    end_s: float
    answers: tuple[Answer, ...]
    # Outputs that ran and that waited.
    crowds: tuple[tuple[int, int], ...]

    @property
    def during(self) -> list[Answer]:
        """Of requests that were to be sent before the end."""
        return [answer for answer in self.answers if answer.intended_s < self.end_s]

    @property
    def after(self) -> list[Answer]:
        """Of those that came when it was over, in order."""
        late = (answer for answer in self.answers if answer.intended_s >= self.end_s)
        return sorted(late, key=lambda one: one.intended_s)


# So many requests in a row as quick as those of the calm load are no luck, when they are among so many that come: a
# server with bounds refuses some in calm times, too.
NUM_QUICK = 5
NUM_LOOKED_AT = 10

# By name, what is measured of one answer, seconds.
LATENCIES: dict[str, Callable[[Answer], float | None]] = {
    "ttft": lambda answer: answer.ttft_s,
    "tpot": lambda answer: answer.tpot_s,
    "e2e": lambda answer: answer.e2e_s,
    "token": lambda answer: answer.e2e_s / len(answer.token_ids) if answer.token_ids else None,
}


def accepted(samples: Iterable[OverloadSample]) -> list[Answer]:
    """What came during the load and was completed, for clients that read at once and to the end."""
    return [
        answer
        for sample in samples
        for answer in sample.during
        if answer.fate is Fate.COMPLETED and answer.manner == ATTENTIVE
    ]


def latency(answers: Iterable[Answer], name: str, percent: float) -> float | None:
    """A percentile of one of LATENCIES, seconds; None of nothing."""
    return percentile((LATENCIES[name](answer) for answer in answers), percent)


def recovery_s(sample: OverloadSample, reference: Sequence[Answer]) -> float | None:
    """How long after the overload a request has to come to be served as in calm times.

    The first that gets in from which on NUM_QUICK in a row do, of NUM_LOOKED_AT that come at most, all with first
    tokens and a time per token within the reference's 99th percentiles. None where there are none.
    """
    limits = {name: latency(reference, name, 99) or 0.0 for name in ("ttft", "token")}

    def is_quick(answer: Answer) -> bool:
        values = {name: LATENCIES[name](answer) for name in limits}
        return all(value is not None and value <= limits[name] for name, value in values.items())

    came = [answer for answer in sample.after if answer.manner == ATTENTIVE]
    for number, first in enumerate(came):
        served = [one for one in came[number : number + NUM_LOOKED_AT] if one.fate is Fate.COMPLETED][:NUM_QUICK]
        if first.fate is Fate.COMPLETED and len(served) == NUM_QUICK and all(map(is_quick, served)):
            return first.intended_s - sample.end_s
    return None


# So large a share of a load's requests, the slowest to their first token, is looked at one by one.
SHARE = 0.01
# What the time to a first token consists of, in order; `outside` is what the client saw and the server did not.
PARTS = ("door", "before_verifier", "verifier_queue", "other_passes", "first_pass", "outside")


def slowest(samples: Samples[OverloadSample]) -> list[Row]:
    """One object for each of the slowest first tokens of a load, the slowest first; all of its samples are given.

    When they came says whether they had one cause: `at_s` is the intended arrival in its run. The parts, in
    milliseconds, are together the time to the first token.
    """
    found = [
        (one.ttft_s, one, sample.run) for sample in samples for one in accepted([sample]) if one.ttft_s is not None
    ]
    found.sort(key=lambda one: -one[0])
    rows = []
    for ttft_s, answer, run in found[: math.ceil(SHARE * len(found))]:
        timing = answer.completion.timing if answer.completion is not None else Timing()
        before = timing.ttft_ms - timing.queue_ms - timing.prompt_ms
        queue, other = timing.queue_ms - timing.door_ms, timing.prompt_ms - timing.first_pass_ms
        parts = timing.door_ms, before, queue, other, timing.first_pass_ms, 1000 * ttft_s - timing.ttft_ms
        row = {
            "name": f"x{samples[0].factor:g}",
            "run": run,
            "at_s": round(answer.intended_s, 3),
            "prompt_tokens": len(answer.task.prompt_ids),
            "ttft_ms": round(1000 * ttft_s, 1),
            **{f"{part}_ms": round(value, 1) for part, value in zip(PARTS, parts, strict=True)},
        }
        rows.append(row)
    return rows


def overload_rows(samples: Samples[OverloadSample], targets: Targets, references: References) -> list[Row]:
    return [_row(group, targets, references) for group in by_load(samples)]


def overload_ratios(samples: Samples[OverloadSample], targets: Targets) -> Ratios:
    """The named ratios over all runs, and the least and most of one run."""
    values, by_run = _ratios(samples, targets), [_ratios(run, targets) for run in samples.runs()]
    each = {name: [one[name] for one in by_run if name in one] for name in values}
    return Ratios(values, {name: [min(found), max(found)] for name, found in each.items() if found})


def problems(result: Sequence[Row]) -> list[str]:
    """What no overload excuses: other tokens, other errors, refusals that do not say when to come again."""
    return [
        problem
        for row in result
        for problem in (
            *unequal([row], "num_compared"),
            f"{row['name']}: {row['num_failed']} requests failed: {row['first_error']}" if row["num_failed"] else "",
            f"{row['name']}: {row['num_refused_without_delay']} refusals had no RetryInfo"
            if row["num_refused_without_delay"]
            else "",
        )
        if problem
    ]


def overload_remarks(result: Sequence[Row]) -> list[str]:
    cut = [row for row in result if row["num_cut"]]
    return load_suite.late_remarks(result) + [
        f"{row['name']}: {row['num_cut']} requests had not ended a minute after the last arrival." for row in cut
    ]


def _row(group: Samples[OverloadSample], targets: Targets, references: References) -> Row:
    during = [answer for sample in group for answer in sample.during]
    # Those after an overload too.
    answers = [answer for sample in group for answer in sample.answers]
    length_s = sum(sample.end_s for sample in group)
    taken = accepted(group)
    tokens = sum(delta.num_tokens for one in during for delta in one.deltas)
    crowds = [crowd for sample in group for crowd in sample.crowds]
    found: Row = {
        "name": f"x{group[0].factor:g}",
        "factor": group[0].factor,
        "offered_per_s": round(len(during) / length_s, 3),
        "completed_per_s": round(len([one for one in during if one.fate is Fate.COMPLETED]) / length_s, 3),
        "tokens_per_s": round(tokens / length_s, 3),
        "goodput_per_s": round(_goodput(group, targets), 3),
        "num_measured": len(taken),
    }
    for name, figure in LATENCIES.items():
        found |= percentiles(name, map(figure, taken), (50, 90, 99))
    return {
        **found,
        "most_waiting": max((waiting for _, waiting in crowds), default=None),
        "most_running": max((running for running, _ in crowds), default=None),
        **counts(answers, references),
        "lag_ms_p99": lag_ms(during),
        "num_refused_without_delay": sum(one.retry_after_s is None for one in answers if one.fate is Fate.REFUSED),
        "first_error": next((one.error for one in answers if one.fate is Fate.FAILED), ""),
    }


def _ratios(samples: Samples[OverloadSample], targets: Targets) -> dict[str, float]:
    calm, *loaded = by_load(samples)
    found: dict[str, float] = {}
    for group in loaded:
        name = f"x{group[0].factor:g}"
        for kind in LATENCIES:
            suffix = "" if kind == "token" else f".{kind}"
            for percent in (50, 99):
                ratio = quotient(*(latency(accepted(one), kind, percent) for one in (group, calm)))
                if ratio is not None:
                    found[f"overload.p{percent}.{name}/x{CALM:g}{suffix}"] = round(ratio, 4)
        found[f"overload.recovery_s.{name}"] = round(max(_recoveries(group, calm)), 3)
        if calm_good := _goodput(calm, targets):
            found[f"overload.goodput.{name}/x{CALM:g}"] = round(_goodput(group, targets) / calm_good, 4)
    return found


def _recoveries(group: Samples[OverloadSample], calm: Samples[OverloadSample]) -> list[float]:
    """By run; one that never recovers counts as long as it was looked at."""
    reference = accepted(calm)
    times = [recovery_s(sample, reference) for sample in group]
    return [
        max((one.intended_s - sample.end_s for one in sample.after), default=0.0) if time is None else time
        for sample, time in zip(group, times, strict=True)
    ]


def _goodput(group: Samples[OverloadSample], targets: Targets) -> float:
    return sum(num_good(sample.during, targets) for sample in group) / sum(sample.end_s for sample in group)


def by_load(samples: Samples[OverloadSample]) -> list[Samples[OverloadSample]]:
    """The samples of each load in the order measured, the calm one first."""
    return [samples.where(factor=factor) for factor in samples.each("factor")]


async def measure_overload(setup: Setup, plan: OverloadPlan, spec: TopologySpec) -> Report:
    """The report of a target behind an orchestrator with the plan's bounds.

    Raises BenchmarkError if the server failed, ChildError if a service did not start, or ended.
    """
    suite = OverloadSuite(setup, plan)
    if plan.max_token_ms is None:
        alone_ms = await measure_on(spec, start_all, lambda topology: suite.alone(topology.address))
        plan = replace(plan, max_token_ms=round(plan.token_ratio * alone_ms, 3))
        suite = OverloadSuite(setup, plan, alone_ms)
    port = await free_port()
    bounds = {"MAX_TOKEN_MS": f"{plan.max_token_ms:g}", "MAX_QUEUE_WAIT_S": f"{plan.max_queue_wait_s:g}"}
    spec = replace(spec, settings=tuple({**bounds, "METRICS_PORT": str(port)}.items()))
    metered = replace(suite, metrics_url=f"http://{LOCAL}:{port}/metrics")
    return await measure_on(spec, start_all, lambda topology: metered.run(topology.address))


@dataclass(frozen=True, slots=True)
class OverloadSuite:
    """One overload benchmark of a target served at an address."""

    setup: Setup
    plan: OverloadPlan
    # What one request alone took on this machine, where that gave the bound.
    alone_token_ms: float | None = None
    # Of the orchestrator.
    metrics_url: str = ""

    async def alone(self, address: str) -> float:
        """The median milliseconds per token of one request at a time, for half a window after the first.

        Raises BenchmarkError if the server failed, or no request ended.
        """
        async with Client(address) as client:
            workload, _ = await self._workload(client)
            window, duration_s = Window(client, POLICY), self.plan.duration_s / 2
            span = await ClosedLoad(1, duration_s).drive(window, workload, 0)
        # The first was the warm-up.
        ended = [one for one in window.answers() if one.fate is Fate.COMPLETED and one.ended_s in span]
        token_s = latency(ended, "token", 50)
        if token_s is None:
            why = next((one.error for one in window.answers() if one.error), f"within {duration_s:g} s")
            raise BenchmarkError(f"no request alone was completed: {why}")
        return round(1000 * token_s, 3)

    async def run(self, address: str) -> Report:
        """Measure and return the report. Raises BenchmarkError if the server failed."""
        machine, plan, num_runs, taken = describe_machine(), self.plan, self.setup.plan.num_runs, []
        # The generator must not be late because it looks for garbage.
        with frozen_heap():
            async with Client(address) as client:
                workload, num_cut = await self._workload(client)
                references = await load_suite.reference_outputs(client, workload, load_suite.policies(1)[0])
                rate_per_s = await self._saturating_rate(client, workload)
                with progress("overload", num_runs * (1 + len(plan.factors))) as advance:
                    for run in range(num_runs):
                        for factor in (CALM, *plan.factors):
                            taken.append(await self._measured(client, workload, rate_per_s, factor, run))
                            advance()
        samples = Samples(taken)
        rows = overload_rows(samples, plan.targets, references)
        return document(
            "overload",
            machine,
            self._settings(workload, num_cut, rate_per_s),
            rows,
            overload_ratios(samples, plan.targets),
            overload_remarks(rows),
            problems(rows),
            slowest_first_tokens=[one for group in by_load(samples) for one in slowest(group)],
        )

    async def _workload(self, client: Client) -> tuple[Workload, int]:
        """Requests that fit the context, each prompt the end of a given one, and how many were too long for it."""
        context, common = (await model_info(client)).max_context_tokens, self.setup.plan
        if common.max_tokens + MIN_PROMPT_TOKENS > context:
            raise BenchmarkError(
                f"--output-tokens {common.max_tokens} leaves no room for a prompt in a context of {context}"
            )
        fitting, num_cut = self.setup.encoded(context)
        longest = max(map(len, fitting))
        rng = random.Random(common.seed)
        lengths = [lognormal_length(rng, min(MIN_PROMPT_TOKENS, longest), longest) for _ in fitting]
        cut = tuple(tuple(ids[-length:]) for ids, length in zip(fitting, lengths, strict=True))
        return Workload(cut, self.plan.min_tokens, common.max_tokens, 0.0, common.seed, lognormal=True), num_cut

    async def _saturating_rate(self, client: Client, workload: Workload) -> float:
        """Requests per second that the server does with so many at once."""
        plan, window = self.plan, Window(client, POLICY)
        span = await ClosedLoad(plan.concurrency, plan.duration_s).drive(window, workload, 0)
        rate_per_s = load_figures.tokens_per_s(window.answers(), span) / workload.mean_tokens
        if not rate_per_s:
            error = next((answer.error for answer in window.answers() if answer.error), f"in {plan.duration_s:g} s")
            raise BenchmarkError(f"no token came with {plan.concurrency} requests at once: {error}")
        return rate_per_s

    async def _measured(
        self, client: Client, workload: Workload, rate_per_s: float, factor: float, run: int
    ) -> OverloadSample:
        plan, seed = self.plan, f"{workload.seed} {factor:g} {run}"
        end_s = plan.duration_s * (CALM_WINDOWS if factor == CALM else 1)
        arrivals = plan.visitors.arrivals(factor * rate_per_s, 0.0, end_s, seed)
        if factor != CALM:
            arrivals += plan.visitors.arrivals(CALM * rate_per_s, end_s, plan.recovery_s, f"{seed} after")
        window = Window(client, POLICY)
        meter = Meter((self.metrics_url,), (RUNNING, WAITING), "the orchestrator")
        async with watching(meter, INTERVAL_S) as seen:
            await open_loop(window, workload, arrivals, DRAIN_S)
        load_suite.require_completed(window.answers(), f"x{factor:g}")
        crowds = tuple((int(one.total(RUNNING)), int(one.total(WAITING))) for _, one in seen)
        return OverloadSample(factor, run, end_s, window.answers(), crowds)

    def _settings(self, workload: Workload, num_cut: int, rate_per_s: float) -> Row:
        plan = self.plan
        return {
            **self.setup.settings(workload.prompts, num_cut),
            **{name: getattr(plan, name) for name in ("duration_s", "recovery_s", "concurrency")},
            "factors": list(plan.factors),
            "share_leaving": plan.visitors.leaving,
            "share_slow": plan.visitors.slow,
            "max_token_ms": plan.max_token_ms,
            "alone_token_ms": self.alone_token_ms,
            "max_queue_wait_s": plan.max_queue_wait_s,
            "saturation_requests_per_s": round(rate_per_s, 3),
            "ttft_target_ms": 1000 * plan.targets.ttft_s,
            "tpot_target_ms": 1000 * plan.targets.tpot_s,
            "output_tokens": [plan.min_tokens, workload.max_tokens],
            "mean_output_tokens": round(workload.mean_tokens, 1),
            "prompt_tokens": [len(prompt) for prompt in workload.prompts],
        }


_LOAD = "load, of saturation"
SHOWN = Shown(
    tables=(
        Table(
            "Requests by load, in multiples of what saturates the server",
            "offered_per_s completed_per_s goodput_per_s num_refused num_failed num_left most_running most_waiting",
        ),
        Table(
            "Milliseconds of accepted requests; tpot is the inter-token latency",
            " ".join(f"{name}_ms_p{percent}" for name in LATENCIES for percent in (50, 99)),
        ),
        Table(
            f"The slowest {100 * SHARE:g} % of first tokens: when they came, and milliseconds where they waited",
            "run at_s prompt_tokens ttft_ms " + " ".join(f"{part}_ms" for part in PARTS),
            source="slowest_first_tokens",
        ),
    ),
    panels=(
        Panel("Time per token of accepted requests", "token_ms_p50,token_ms_p99", "name", xlabel=_LOAD, ylabel="ms"),
        Panel("Time to first token", "ttft_ms_p50,ttft_ms_p99", "name", xlabel=_LOAD, ylabel="ms"),
        Panel(
            "What became of requests",
            "num_completed,num_refused,num_left,num_failed,num_cut",
            "{name}",
            drawing=stacked,
            xlabel=_LOAD,
            ylabel="requests",
        ),
    ),
    line="Saturated by {saturation_requests_per_s:.2f} requests/s; {alone_token_ms} ms per token alone; "
    "MAX_TOKEN_MS={max_token_ms:g} "
    "MAX_QUEUE_WAIT_S={max_queue_wait_s:g}; {num_runs} runs of {duration_s:g} s.",
    panels_per_row=2,
    ratio_title="Over all runs, and the least and most of one run; recovery in seconds",
)
