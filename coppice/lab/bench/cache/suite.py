"""The prefix cache: prompts that share beginnings, cold, warm, through Redis, and with Redis gone.

Every setting has its turn with all phases in every run. Rates are of all requests of a run, medians over runs;
latencies are percentiles over all requests of all runs.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from coppice.client import Client
from coppice.lab.bench.cache.services import COUNTERS, Instance, RedisServer, Services
from coppice.lab.bench.cache.workload import (
    AGAIN,
    COLD,
    EDITED,
    EXPLANATIONS,
    FILL,
    KILLED,
    NEW,
    OFF,
    REPEATED,
    SECOND,
    SHIFTED,
    CachePrompt,
    CacheWorkload,
    Phase,
    phases,
)
from coppice.lab.bench.client import Answer, Mode, Policy, Window, connected, model_info
from coppice.lab.bench.comparison import Plan, Setup, is_identical
from coppice.lab.bench.environment import describe_machine
from coppice.lab.bench.figures import (
    LOOPING_SHARE,
    completions,
    mean_acceptance_length,
    median_ttft_s,
    num_tokens,
    repeated_4grams,
)
from coppice.lab.bench.harness.experiment import (
    BenchmarkError,
    ByRun,
    Experiment,
    Ratios,
    Samples,
    known,
    milliseconds,
    percentile,
    progress,
    quotient,
    rounded,
    spread,
)
from coppice.lab.bench.harness.plots import Panel, bars
from coppice.lab.bench.harness.report import Report, Row, Shown, document, unequal
from coppice.lab.bench.harness.tables import Table
from orchestrator.prefix_cache.guesses import SOURCE
from orchestrator.prefix_cache.store import CacheCounts

# Enough for streams, lazy initialisation and the first estimates to be there.
NUM_WARM_UP_PROMPTS = 2
KINDS = (NEW, REPEATED, EDITED)
# A cache that has something to say must not make τ smaller; what is below this is not noise.
LEAST_TAU_RATIO = 0.98
# Phases of which the figure named so is the worst.
WORST_OF = {"warm": (AGAIN, SHIFTED), "warm-second": (SECOND,), "fill": (FILL,), "killed": (KILLED,)}


def settings(kinds: Iterable[str]) -> tuple[Policy, ...]:
    """The cache with each kind of drafter, and alone: which drafters work."""
    pairs = [*((f"{kind}+{SOURCE}", (kind, SOURCE)) for kind in kinds), (SOURCE, (SOURCE,))]
    return tuple(Policy(name, Mode.MODE_FORCED, sources=sources) for name, sources in pairs)


PLAIN = Policy(OFF, Mode.MODE_OFF)


@dataclass(frozen=True, slots=True)
class Sample:
    """One phase of a run under a setting, and what the orchestrator's cache has counted in it.

    Deltas of its answers are rounds that had tokens: the first is the pass that read the prompt's end.
    """

    setting: str
    temperature: float
    run: int
    phase: str
    answers: tuple[Answer, ...]
    counts: CacheCounts


async def measure(
    services: Services,
    prompts: Sequence[Sequence[int]],
    order: Sequence[Phase],
    plan: Plan,
    contenders: Sequence[Policy],
    on_answer: Callable[[], None] = lambda: None,
) -> Samples[Sample]:
    """Speculation off once, and then every phase in order under every setting, whose turns rotate, in every run.

    Raises BenchmarkError if a request without speculation failed, or all of a phase did.
    """
    async with AsyncExitStack() as stack:
        plain = await connected(stack, services.plain)
        instances = [one for one in (services.first, services.second) if one is not None]
        clients = [await connected(stack, one.address) for one in instances]
        bench = _Bench(prompts, plan, on_answer, plain, list(zip(instances, clients, strict=True)), services.redis)
        await bench.warm_up(contenders)
        samples = [await bench.off(temperature) for temperature in plan.temperatures]
        for turn in Experiment(contenders, plan.temperatures, plan.num_runs).turns():
            samples += [await bench.phase(phase, turn.arm, turn.load, turn.run) for phase in order]
    return Samples(samples)


@dataclass(frozen=True, slots=True)
class _Bench:
    prompts: Sequence[Sequence[int]]
    plan: Plan
    on_answer: Callable[[], None]
    plain: Client
    # Those that have a cache.
    instances: Sequence[tuple[Instance, Client]]
    redis: RedisServer | None

    async def ask(self, client: Client, policy: Policy, prompt: int, temperature: float, salt: str) -> Answer:
        [task] = self.plan.tasks(self.prompts, [prompt], temperature)
        return await Window(client, policy).ask(task, salt=salt)

    async def warm_up(self, contenders: Sequence[Policy]) -> None:
        """Let everybody answer the first prompts once, under a salt that is not used later."""
        pairs = [(self.plain, PLAIN), *((client, policy) for _, client in self.instances for policy in contenders)]
        for temperature, prompt in itertools.product(self.plan.temperatures, range(NUM_WARM_UP_PROMPTS)):
            for client, policy in pairs if prompt < len(self.prompts) else ():
                salt = f"warm-up {policy.name} {temperature:g} {client.address}"
                await self.ask(client, policy, prompt, temperature, salt)

    async def off(self, temperature: float) -> Sample:
        """Every prompt without speculation: what all others are compared with."""
        answers = []
        for prompt in range(len(self.prompts)):
            answer = await self.ask(self.plain, PLAIN, prompt, temperature, f"{OFF} {temperature:g} {prompt}")
            if answer.completion is None or len(answer.token_ids) != self.plan.max_tokens:
                error = answer.error or f"it has {len(answer.token_ids)} tokens"
                raise BenchmarkError(f"no output without speculation to compare with: {error}")
            answers.append(answer)
            self.on_answer()
        return Sample(OFF, temperature, 0, OFF, tuple(answers), CacheCounts())

    async def phase(self, phase: Phase, policy: Policy, temperature: float, run: int) -> Sample:
        """One phase of a run; one that kills Redis does so in its middle, and starts it after three quarters."""
        instance, client = self.instances[phase.in_second]
        before, answers = await instance.counts(), []
        redis, size = self.redis if phase.kills_redis else None, len(phase.prompts)
        killed_at, started_at = size // 2, max(3 * size // 4, size // 2 + 1)
        for at, prompt in enumerate(phase.prompts):
            if redis is not None and at == started_at:
                await redis.start()
            salt = phase.salt_of(f"{policy.name} {temperature:g} {run}", prompt)
            asking = asyncio.create_task(self.ask(client, policy, prompt, temperature, salt))
            if redis is not None and at == killed_at:
                await redis.kill()
            answers.append(await asking)
            self.on_answer()
        if redis is not None and started_at >= size:
            await redis.start()
        if not any(answer.completion for answer in answers):
            raise BenchmarkError(f"{policy.name} {phase.name}: no request was completed: {answers[0].error}")
        after = await instance.counts()
        counts = CacheCounts(**{name: getattr(after, name) - getattr(before, name) for name in COUNTERS})
        return Sample(policy.name, temperature, run, phase.name, tuple(answers), counts)


def of(samples: Samples[Sample], setting: str, temperature: float, phase: str) -> Samples[Sample]:
    return samples.where(setting=setting, temperature=temperature, phase=phase)


def groups(samples: Samples[Sample]) -> list[tuple[str, float, str]]:
    """Setting, temperature and phase of every row; speculation off, which is measured first, comes first."""
    settings, phases = samples.each("setting"), samples.each("phase")
    every = itertools.product(sorted(samples.each("temperature")), settings, phases)
    return [(setting, heat, phase) for heat, setting, phase in every if of(samples, setting, heat, phase)]


def cache_rows(samples: Samples[Sample], prompts: Sequence[CachePrompt]) -> list[Row]:
    return [_row(samples, prompts, *group) for group in groups(samples)]


def later_acceptance_length(answers: Iterable[Answer]) -> float | None:
    """τ of the rounds after the first one, of completed requests; None where there was none.

    The first round is the pass that reads the prompt's end, and waits for no draft. The colder the prompt, the longer
    it takes, and the likelier a draft is there by then: that says nothing of what drafts are worth.
    """
    return _tokens_per_round((each, each[0]) for each in _rounds(answers).values())


def later_acceptance_ratio(before: Iterable[Answer], after: Iterable[Answer]) -> float | None:
    """τ after over τ before, of the same prompts, from where the first rounds of both were over; None without rounds.

    A draft that is in time for one's first round is in the second of the other, which ends where that one did: after
    its own first round alone, either would have the other's round for nothing.
    """
    first, second = _rounds(before), _rounds(after)
    starts = {prompt: max(first[prompt][0], second[prompt][0]) for prompt in first.keys() & second.keys()}
    return quotient(
        *(_tokens_per_round((rounds[prompt], start) for prompt, start in starts.items()) for rounds in (second, first))
    )


def _rounds(answers: Iterable[Answer]) -> dict[int, list[int]]:
    """Tokens of each round that had any, by prompt, of completed requests."""
    ended = (answer for answer in answers if answer.completion is not None and answer.deltas)
    return {answer.task.prompt: [delta.num_tokens for delta in answer.deltas] for answer in ended}


def _tokens_per_round(outputs: Iterable[tuple[Sequence[int], int]]) -> float | None:
    """Of outputs, each given by the tokens of its rounds, and from which of its tokens on.

    A round counts by the share of its tokens that lie there.
    """
    tokens, rounds = 0, 0.0
    for sizes, start in outputs:
        for size, end in zip(sizes, itertools.accumulate(sizes), strict=True):
            counted = min(size, max(0, end - start))
            tokens += counted
            rounds += counted / size
    return quotient(tokens, rounds)


def cache_remarks(result: Sequence[Mapping[str, Any]], with_redis: bool) -> list[str]:
    """Failures, loops, and phases that are left out."""
    notes = [f"{row['name']}: {row['num_failed']} requests failed." for row in result if row["num_failed"]]
    looping = {f"{row['temperature']:g}" for row in result if row["repeated_4grams"] >= LOOPING_SHARE}
    if looping:
        notes.append(
            f"Outputs at T={' and T='.join(sorted(looping))} loop: {LOOPING_SHARE:.0%} or more of their 4-grams "
            "occurred before in the same output, which even a cold cache guesses."
        )
    if not with_redis:
        notes.append("No redis-server is installed: the phases through Redis are left out.")
    return notes


def _row(samples: Samples[Sample], prompts: Sequence[CachePrompt], setting: str, temperature: float, phase: str) -> Row:
    group = of(samples, setting, temperature, phase)
    answers = [answer for sample in group for answer in sample.answers]
    [plain] = of(samples, OFF, temperature, OFF)
    reference = {answer.task.prompt: answer.token_ids for answer in plain.answers}
    num_identical = sum(is_identical(answer, reference[answer.task.prompt]) for answer in answers)
    ttfts_s = [answer.ttft_s for answer in answers]
    return {
        "name": f"{setting} T={temperature:g}" + ("" if phase == OFF else f" {phase}"),
        "setting": setting,
        "temperature": temperature,
        "phase": phase,
        **spread("mean_acceptance_length", [mean_acceptance_length(sample.answers) for sample in group]),
        **spread("later_acceptance_length", [later_acceptance_length(sample.answers) for sample in group]),
        # By what prompts' endings are.
        **{
            f"mean_acceptance_length_{kind}": rounded(
                mean_acceptance_length(one for one in answers if prompts[one.task.prompt].kind == kind)
            )
            for kind in KINDS
        },
        "ttft_ms_p50": milliseconds(percentile(ttfts_s, 50)),
        "ttft_ms_p99": milliseconds(percentile(ttfts_s, 99)),
        **spread("tokens_per_s", [_tokens_per_s(sample.answers) for sample in group]),
        **_cache_counts(group, answers),
        "repeated_4grams": round(repeated_4grams(answers), 3),
        "num_requests": len(answers),
        "num_failed": sum(answer.completion is None for answer in answers),
        "num_identical": num_identical,
        "identical": num_identical == len(answers),
        "note": EXPLANATIONS[phase],
    }


def _cache_counts(group: Sequence[Sample], answers: Sequence[Answer]) -> Row:
    """Nodes of the cache's, what it read, and what of the prompts the verifier had computed before."""
    ended = completions(answers)
    sources = [one.speculation.sources[SOURCE] for one in ended if SOURCE in one.speculation.sources]
    cached = sum(one.usage.cached_prompt_tokens for one in ended)
    prompt_tokens = sum(one.usage.prompt_tokens for one in ended)
    return {
        "cache_proposed": sum(one.proposed for one in sources),
        "cache_accepted": sum(one.accepted for one in sources),
        **{f"cache_{name}": sum(getattr(sample.counts, name) for sample in group) for name in COUNTERS},
        "cached_prompt_share": rounded(quotient(cached, prompt_tokens)),
    }


def _tokens_per_s(answers: Iterable[Answer]) -> float | None:
    """All tokens over all time, prompts and transport included."""
    completed = [answer for answer in answers if answer.completion is not None]
    return quotient(num_tokens(completed), sum(answer.e2e_s for answer in completed))


Figure = Callable[[Iterable[Answer]], float | None]
# Of answers to the same prompts, first those of the cold phase.
Ratio = Callable[[Sequence[Answer], Sequence[Answer]], float | None]


def cache_ratios(samples: Samples[Sample]) -> Ratios:
    """The named ratios, each within a run; `failed-requests` is a count, its spread that of the runs."""
    found = Ratios.of(
        {
            **_over_cold(samples, "tau", later_acceptance_ratio, min),
            **_over_cold(samples, "tau-with-first", _ratio_of(mean_acceptance_length), min),
            **_over_cold(samples, "ttft", _ratio_of(median_ttft_s), max),
        }
    )
    failed = [
        float(sum(answer.completion is None for sample in run for answer in sample.answers)) for run in samples.runs()
    ]
    return Ratios(
        {**found.values, "failed-requests": sum(failed)},
        {**found.spread, "failed-requests": [min(failed), max(failed)]},
    )


def broken_rules(ratios: Ratios) -> list[str]:
    """Where the cache has made τ smaller, of the phases in which it knows something from the start."""
    return [
        f"{name}: τ is {1 - value:.1%} below that of a cold cache ({ratios.spread[name][0]:.3f} to "
        f"{ratios.spread[name][1]:.3f} x it over the runs), more than the {1 - LEAST_TAU_RATIO:.0%} that it may be."
        for phase in (AGAIN, SHIFTED, SECOND)
        for name, value in ratios.values.items()
        if name.startswith(f"{phase}/{COLD}.tau.") and value < LEAST_TAU_RATIO
    ]


def _ratio_of(figure: Figure) -> Ratio:
    return lambda before, after: quotient(figure(after), figure(before))


def _over_cold(samples: Samples[Sample], figure_name: str, ratio: Ratio, worst: Callable[..., str]) -> ByRun:
    single: dict[str, ByRun] = {group: {} for group in WORST_OF}
    for setting, temperature, phase in groups(samples):
        for group, worst_of in WORST_OF.items():
            if phase in worst_of and (taken := _within_runs(samples, setting, temperature, phase, ratio)):
                single[group][f"{phase}/{COLD}.{figure_name}.{setting}.T{temperature:g}"] = taken
    found: ByRun = {}
    for group, by_run in single.items():
        if by_run:
            found[f"{group}/{COLD}.{figure_name}"] = by_run[
                worst(by_run, key=lambda name: statistics.median(by_run[name]))
            ]
    return {**found, **{name: taken for by_run in single.values() for name, taken in by_run.items()}}


def _within_runs(samples: Samples[Sample], setting: str, temperature: float, phase: str, ratio: Ratio) -> list[float]:
    """A phase over the run's cold phase, of prompts completed in both; none of runs without any."""
    cold = {sample.run: sample.answers for sample in of(samples, setting, temperature, COLD)}
    return known(
        ratio(*_completed_in_both(cold.get(sample.run, ()), sample.answers))
        for sample in of(samples, setting, temperature, phase)
    )


def _completed_in_both(before: Sequence[Answer], after: Sequence[Answer]) -> tuple[list[Answer], list[Answer]]:
    done = [{answer.task.prompt for answer in answers if answer.completion} for answers in (before, after)]
    both = done[0] & done[1]
    return [one for one in before if one.task.prompt in both], [one for one in after if one.task.prompt in both]


async def measure_cache(
    setup: Setup, workload: CacheWorkload, contenders: Sequence[Policy], services: Services
) -> Report:
    """The report of the prefix cache in front of a target; the setup's prompts are the workload's.

    Raises BenchmarkError if the services failed, or a prompt does not fit the model.
    """
    machine, plan, prompts = describe_machine(), setup.plan, workload.prompts
    async with Client(services.plain) as client:
        context = (await model_info(client)).max_context_tokens
    prompt_ids, num_cut = setup.encoded(context)
    if num_cut:
        # A prompt without its beginning would not share it.
        raise BenchmarkError(f"a prompt and --max-tokens {plan.max_tokens} do not fit a context of {context}")
    with_redis = services.redis is not None
    order = phases(workload, with_redis)
    per_setting = sum(len(phase.prompts) for phase in order) * len(contenders)
    total = len(plan.temperatures) * (len(prompts) + plan.num_runs * per_setting)
    with progress("cache", total) as advance:
        samples = await measure(services, prompt_ids, order, plan, contenders, advance)
    rows, ratios = cache_rows(samples, prompts), cache_ratios(samples)
    notes = [*broken_rules(ratios), *cache_remarks(rows, with_redis)]
    settings = setup.settings(prompt_ids, num_cut)
    settings |= {
        "phases": [one.name for one in order],
        "prompts": [{**one, "kind": prompt.kind} for one, prompt in zip(settings["prompts"], prompts, strict=True)],
        "num_first_prompts": len(workload.first),
        "mean_prompt_tokens": round(statistics.fmean(map(len, prompt_ids)), 1),
    }
    return document("cache", machine, settings, rows, ratios, notes, unequal(rows))


SHOWN = Shown(
    tables=(
        Table(
            "One request at a time, phase by phase; reads and hits of the cache's store, over all runs",
            "mean_acceptance_length later_acceptance_length ttft_ms_p50 ttft_ms_p99 tokens_per_s cache_accepted "
            "cache_proposed cache_reads cache_hits cached_prompt_share num_failed num_identical num_requests",
        ),
    ),
    panels=tuple(
        Panel(title, y, "{phase}", "{setting} T={temperature:g}", bars, where=lambda row: row["phase"] != OFF)
        for title, y in (
            ("τ: median of runs", "mean_acceptance_length"),
            ("Time to the first token: median", "ttft_ms_p50"),
        )
    ),
    line="{num_runs} runs, {num_prompts} prompts of {mean_prompt_tokens:.0f} tokens on average, outputs of "
    "{max_tokens}, {threads} threads.",
)
