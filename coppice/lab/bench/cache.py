"""The prefix cache: prompts that share beginnings, cold, warm, through Redis, and with Redis gone.

Prompts are as users of one assistant send them: few long beginnings, many endings. Every setting has its turn with all
phases in every run, and each phase finds in the cache what those before it have left there.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
import shutil
import statistics
import tempfile
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from coppice.cli.topology import LOCAL, Topology, TopologySpec, running
from coppice.client import Client
from coppice.lab.bench.client import Answer, Meter, Mode, Policy, Window, connected, model_info
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
    Turn,
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
from coppice.lab.bench.prompts import Prompt
from coppice.lab.bench.services import free_port, start_metered, unless_one_fails
from orchestrator.prefix_cache.guesses import SOURCE
from orchestrator.prefix_cache.store import CacheCounts

# Pieces of which a system prompt is made; with prompts of our own it has some 450 tokens.
SYSTEM_PIECES = 2
# Of an ending, so that most of a prompt is its system prompt.
MAX_ENDING_CHARS = 300
# Enough for streams, lazy initialisation and the first estimates to be there.
NUM_WARM_UP_PROMPTS = 2
# A cache that has something to say must not make τ smaller; what is below this is not noise.
LEAST_TAU_RATIO = 0.98
START_S = 10.0
POLL_S = 0.02

OFF, COLD, FILL, AGAIN, SHIFTED = "off", "cold", "fill", "again", "shifted"
SECOND, KILLED = "second", "killed"
EXPLANATIONS = {
    OFF: "speculation off, nothing remembered and nothing shared",
    COLD: "every prompt under a salt of its own: nothing of any other request is known",
    FILL: "the prompts for the first time, all under one salt",
    AGAIN: "the same requests again",
    SHIFTED: "the same system prompts with new endings, and with endings sent after another one",
    SECOND: "all of them in a second orchestrator, which knows of them through Redis alone",
    KILLED: "the prompts for the first time under another salt; Redis is killed in the middle and comes back empty",
}
# Phases of which the figure named so is the worst.
WORST_OF = {"warm": (AGAIN, SHIFTED), "warm-second": (SECOND,), "fill": (FILL,), "killed": (KILLED,)}
PLAIN = Policy(OFF, Mode.MODE_OFF)

UNWRITTEN = "coppice_orchestrator_prefix_cache_unwritten_outputs"
# By field of CacheCounts.
COUNTERS = {
    one.name: f"coppice_orchestrator_prefix_cache_{one.name}_total"
    for one in fields(CacheCounts)
    if one.name != "unwritten_outputs"
}


# Of answers to the same prompts, first those of the cold phase.
Ratio = Callable[[Sequence[Answer], Sequence[Answer]], float | None]


def settings(kinds: Iterable[str]) -> tuple[Policy, ...]:
    """The cache with each kind of drafter, and alone: which drafters work."""
    pairs = [*((f"{kind}+{SOURCE}", (kind, SOURCE)) for kind in kinds), (SOURCE, (SOURCE,))]
    return tuple(Policy(name, Mode.MODE_FORCED, sources=sources) for name, sources in pairs)


@dataclass(frozen=True, slots=True)
class CacheWorkload:
    """Prompts that are sent again and again, and `shifted` ones that have only pieces in common with those."""

    first: tuple[Prompt, ...]
    shifted: tuple[Prompt, ...]

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        return (*self.first, *self.shifted)

    def phases(self, *, with_redis: bool) -> dict[str, range]:
        """Numbers of the prompts of each phase, in order; without a Redis, of those that one orchestrator can show."""
        num_first, num_all = len(self.first), len(self.prompts)
        first, shifted, everything = range(num_first), range(num_first, num_all), range(num_all)
        alone = {COLD: everything, FILL: first, AGAIN: first, SHIFTED: shifted}
        return {**alone, SECOND: everything, KILLED: first} if with_redis else alone


def num_pieces(num_systems: int, num_endings: int) -> int:
    """Prompts that a workload is made of."""
    return num_systems * (SYSTEM_PIECES + num_endings + 1)


def make_workload(prompts: Sequence[Prompt], num_systems: int, num_endings: int) -> CacheWorkload:
    """`num_endings` prompts after each of `num_systems` system prompts; and two shifted ones after each.

    These have an ending that was not sent before, and one that was sent after another system prompt. Raises
    BenchmarkError if there are fewer prompts than `num_pieces` says.
    """
    if len(prompts) < (needed := num_pieces(num_systems, num_endings)):
        raise BenchmarkError(f"{num_systems} system prompts x {num_endings} endings need {needed} prompts")
    pieces = iter(prompts)
    systems = ["".join(f"{next(pieces).text}\n\n\n" for _ in range(SYSTEM_PIECES)) for _ in range(num_systems)]
    endings = [[next(pieces) for _ in range(num_endings)] for _ in range(num_systems)]
    # Of one system prompt alone, the second of a pair is a repeated request.
    shifted = [[next(pieces), endings[(at + 1) % num_systems][0]] for at in range(num_systems)]

    def joined(after: Sequence[Sequence[Prompt]]) -> tuple[Prompt, ...]:
        pairs = zip(systems, after, strict=True)
        return tuple(Prompt(system + ending_of(one.text), one.origin) for system, found in pairs for one in found)

    return CacheWorkload(joined(endings), joined(shifted))


def ending_of(text: str) -> str:
    """The last lines of a text, at most `MAX_ENDING_CHARS`; the end of its last line where that alone is longer."""
    earliest = len(text) - MAX_ENDING_CHARS
    return text if earliest <= 0 else text[text.find("\n", earliest - 1) + 1 or earliest :]


class RedisServer:
    """A Redis that is started, killed, and started again on the same port, empty."""

    def __init__(self, program: str, directory: str, port: int) -> None:
        self.url = f"redis://{LOCAL}:{port}/0"
        self._command = [program, "--port", str(port), "--bind", LOCAL, "--dir", directory]
        self._command += ["--save", "", "--appendonly", "no"]
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start it, and return when it answers. Raises BenchmarkError if it did not within `START_S`."""
        from redis.asyncio import Redis
        from redis.exceptions import RedisError

        silent = asyncio.subprocess.DEVNULL
        self._process = await asyncio.create_subprocess_exec(*self._command, stdin=silent, stdout=silent)
        try:
            async with asyncio.timeout(START_S), Redis.from_url(self.url) as client:
                while True:
                    with contextlib.suppress(RedisError):
                        await client.ping()
                        return
                    await asyncio.sleep(POLL_S)
        except TimeoutError as error:
            raise BenchmarkError(f"redis-server did not answer within {START_S:g} s") from error

    async def kill(self) -> None:
        """End it as a crash does."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()


@dataclass(frozen=True, slots=True)
class Instance:
    """An orchestrator; `counts` is what its prefix cache has counted, once what has ended is remembered."""

    address: str
    counts: Callable[[], Awaitable[CacheCounts]]


@dataclass(frozen=True, slots=True)
class Services:
    """Orchestrators with the same back ends. Without a Redis there is no second one that shares a cache."""

    # For what speculation off gives.
    plain: str
    first: Instance
    second: Instance | None = None
    redis: RedisServer | None = None


async def measure_on_services(
    setup: Setup, workload: CacheWorkload, contenders: Sequence[Policy], spec: TopologySpec
) -> Report:
    """Start everything, measure, and stop everything; a service that dies ends the measurement.

    Raises BenchmarkError if the measurement cannot go on, or Redis does not start, and ChildError if a service did not
    start, or ended.
    """
    async with contextlib.AsyncExitStack() as stack:
        topology = await stack.enter_async_context(running(spec))
        redis = None
        if (program := shutil.which("redis-server")) is not None:
            directory = stack.enter_context(tempfile.TemporaryDirectory())
            redis = RedisServer(program, directory, await free_port())
            stack.push_async_callback(redis.kill)
            await redis.start()
        env = {"CACHE_DRAFTER": "true", "CACHE_SECRET": secrets.token_hex(32), "REDIS_URL": redis.url if redis else ""}
        first = await _instance(topology, "first orchestrator", env)
        second = await _instance(topology, "second orchestrator", env) if redis else None
        services = Services(topology.address, first, second, redis)
        return await unless_one_fails(measure_cache(setup, workload, contenders, services), topology)


async def _instance(topology: Topology, name: str, env: dict[str, str]) -> Instance:
    metered = await start_metered(partial(topology.add_orchestrator, name), env)
    return Instance(
        metered.address, partial(_counts, Meter((metered.metrics_url,), {*COUNTERS.values(), UNWRITTEN}, name))
    )


async def _counts(meter: Meter) -> CacheCounts:
    while True:
        counted = await meter.read()
        if not counted.total(UNWRITTEN):
            return CacheCounts(**{field: int(counted.total(name)) for field, name in COUNTERS.items()})
        await asyncio.sleep(POLL_S)


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


@dataclass(frozen=True, slots=True)
class _Bench:
    prompt_ids: Sequence[Sequence[int]]
    plan: Plan
    on_answer: Callable[[], None]
    redis: RedisServer | None

    async def ask(self, client: Client, policy: Policy, prompt: int, temperature: float, salt: str) -> Answer:
        [task] = self.plan.tasks(self.prompt_ids, [prompt], temperature)
        return await Window(client, policy).ask(task, salt=salt)

    async def off(self, client: Client, temperature: float) -> Sample:
        """Every prompt without speculation: what all others are compared with."""
        answers = []
        for prompt in range(len(self.prompt_ids)):
            answer = await self.ask(client, PLAIN, prompt, temperature, f"{OFF} {temperature:g} {prompt}")
            if answer.completion is None or len(answer.token_ids) != self.plan.max_tokens:
                error = answer.error or f"it has {len(answer.token_ids)} tokens"
                raise BenchmarkError(f"no output without speculation to compare with: {error}")
            answers.append(answer)
            self.on_answer()
        return Sample(OFF, temperature, 0, OFF, tuple(answers), CacheCounts())

    async def phase(
        self, turn: Turn[Policy, float], phase: str, prompts: range, instance: Instance, client: Client
    ) -> Sample:
        """One phase of a run; one that kills Redis does so in its middle, and starts it after three quarters."""
        session = f"{turn.arm.name} {turn.load:g} {turn.run}"
        before, answers, size = await instance.counts(), [], len(prompts)
        redis, started_at = self.redis if phase == KILLED else None, max(3 * size // 4, size // 2 + 1)
        for at, prompt in enumerate(prompts):
            if redis is not None and at == started_at:
                await redis.start()
            salt = f"{session} {prompt if phase == COLD else 'killed' if phase == KILLED else 'shared'}"
            asking = asyncio.create_task(self.ask(client, turn.arm, prompt, turn.load, salt))
            if redis is not None and at == size // 2:
                await redis.kill()
            answers.append(await asking)
            self.on_answer()
        if redis is not None and started_at >= size:
            await redis.start()
        if not any(answer.completion for answer in answers):
            raise BenchmarkError(f"{session} {phase}: no request was completed: {answers[0].error}")
        after = await instance.counts()
        counts = CacheCounts(**{name: getattr(after, name) - getattr(before, name) for name in COUNTERS})
        return Sample(turn.arm.name, turn.load, turn.run, phase, tuple(answers), counts)


async def measure_cache(
    setup: Setup, workload: CacheWorkload, contenders: Sequence[Policy], services: Services
) -> Report:
    """The report of the prefix cache in front of a target; the setup's prompts are the workload's.

    Speculation off once, and then every phase in order under every setting, whose turns rotate, in every run. Raises
    BenchmarkError if a request without speculation failed, all of a phase did, or a prompt does not fit the model.
    """
    machine, plan = describe_machine(), setup.plan
    instances = [one for one in (services.first, services.second) if one is not None]
    phases = workload.phases(with_redis=services.redis is not None)
    per_setting = sum(map(len, phases.values())) * len(contenders)
    total = len(plan.temperatures) * (len(workload.prompts) + plan.num_runs * per_setting)
    async with contextlib.AsyncExitStack() as stack:
        plain = await connected(stack, services.plain)
        clients = [await connected(stack, one.address) for one in instances]
        context = (await model_info(plain)).max_context_tokens
        prompt_ids, num_cut = setup.encoded(context)
        if num_cut:
            # A prompt without its beginning would not share it.
            raise BenchmarkError(f"a prompt and --max-tokens {plan.max_tokens} do not fit a context of {context}")
        bench = _Bench(prompt_ids, plan, stack.enter_context(progress("cache", total)), services.redis)
        pairs = [(plain, PLAIN), *itertools.product(clients, contenders)]
        warm_up = itertools.product(plan.temperatures, range(min(NUM_WARM_UP_PROMPTS, len(prompt_ids))), pairs)
        for temperature, prompt, (client, policy) in warm_up:
            salt = f"warm-up {policy.name} {temperature:g} {client.address}"
            await bench.ask(client, policy, prompt, temperature, salt)
        taken = [await bench.off(plain, temperature) for temperature in plan.temperatures]
        for turn in Experiment(contenders, plan.temperatures, plan.num_runs).turns():
            for phase, prompts in phases.items():
                at = phase == SECOND
                taken.append(await bench.phase(turn, phase, prompts, instances[at], clients[at]))
    samples = Samples(taken)
    rows, ratios = cache_rows(samples), cache_ratios(samples)
    settings = setup.settings(prompt_ids, num_cut) | {
        "phases": list(phases),
        "num_first_prompts": len(workload.first),
        "mean_prompt_tokens": round(statistics.fmean(map(len, prompt_ids)), 1),
    }
    notes = [*broken_rules(ratios), *cache_remarks(rows, with_redis=services.redis is not None)]
    return document("cache", machine, settings, rows, ratios, notes, unequal(rows))


def groups(samples: Samples[Sample]) -> list[Samples[Sample]]:
    """The samples of every row; those of speculation off, which is measured first, come first."""
    every = itertools.product(sorted(samples.each("temperature")), samples.each("setting"), samples.each("phase"))
    found = (samples.where(temperature=heat, setting=setting, phase=phase) for heat, setting, phase in every)
    return [group for group in found if group]


def cache_rows(samples: Samples[Sample]) -> list[Row]:
    """One flat object per setting, temperature and phase."""
    return [_row(samples, group) for group in groups(samples)]


def _row(samples: Samples[Sample], group: Samples[Sample]) -> Row:
    first, answers = group[0], [answer for sample in group for answer in sample.answers]
    [plain] = samples.where(setting=OFF, temperature=first.temperature)
    reference = {answer.task.prompt: answer.token_ids for answer in plain.answers}
    num_identical = sum(is_identical(answer, reference[answer.task.prompt]) for answer in answers)
    ttfts_s, ended = [answer.ttft_s for answer in answers], completions(answers)
    sources = [one.speculation.sources[SOURCE] for one in ended if SOURCE in one.speculation.sources]
    cached = sum(one.usage.cached_prompt_tokens for one in ended)
    return {
        "name": f"{first.setting} T={first.temperature:g}" + ("" if first.phase == OFF else f" {first.phase}"),
        "setting": first.setting,
        "temperature": first.temperature,
        "phase": first.phase,
        **spread("mean_acceptance_length", [mean_acceptance_length(sample.answers) for sample in group]),
        # Without first rounds, see `tau_ratio`.
        **spread("later_acceptance_length", [_later(sample.answers) for sample in group]),
        "ttft_ms_p50": milliseconds(percentile(ttfts_s, 50)),
        "ttft_ms_p99": milliseconds(percentile(ttfts_s, 99)),
        **spread("tokens_per_s", [_tokens_per_s(sample.answers) for sample in group]),
        # Nodes of the cache's, what it read, and what of the prompts the verifier had computed before.
        "cache_proposed": sum(one.proposed for one in sources),
        "cache_accepted": sum(one.accepted for one in sources),
        **{f"cache_{name}": sum(getattr(sample.counts, name) for sample in group) for name in COUNTERS},
        "cached_prompt_share": rounded(quotient(cached, sum(one.usage.prompt_tokens for one in ended))),
        "repeated_4grams": round(repeated_4grams(answers), 3),
        "num_requests": len(answers),
        "num_failed": sum(answer.completion is None for answer in answers),
        "num_identical": num_identical,
        "identical": num_identical == len(answers),
        "note": EXPLANATIONS[first.phase],
    }


def _tokens_per_s(answers: Iterable[Answer]) -> float | None:
    """All tokens over all time, prompts and transport included."""
    completed = [answer for answer in answers if answer.completion is not None]
    return quotient(num_tokens(completed), sum(answer.e2e_s for answer in completed))


def cache_remarks(result: Sequence[Mapping[str, Any]], *, with_redis: bool) -> list[str]:
    """Failures, loops, and phases that are left out."""
    notes = [f"{row['name']}: {row['num_failed']} requests failed." for row in result if row["num_failed"]]
    if looping := {f"{row['temperature']:g}" for row in result if row["repeated_4grams"] >= LOOPING_SHARE}:
        notes.append(
            f"Outputs at T={' and T='.join(sorted(looping))} loop: {LOOPING_SHARE:.0%} or more of their 4-grams "
            "occurred before in the same output, which even a cold cache guesses."
        )
    if not with_redis:
        notes.append("No redis-server is installed: the phases through Redis are left out.")
    return notes


def cache_ratios(samples: Samples[Sample]) -> Ratios:
    """The named ratios, each within a run; `failed-requests` is a count, its spread that of the runs."""
    found = Ratios.of(
        {
            **_over_cold(samples, "tau", tau_ratio, min),
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


def _ratio_of(figure: Callable[[Iterable[Answer]], float | None]) -> Ratio:
    return lambda cold, after: quotient(figure(after), figure(cold))


def broken_rules(ratios: Ratios) -> list[str]:
    """Where the cache has made τ smaller, of the phases in which it knows something from the start."""
    return [
        f"{name}: τ is {1 - value:.1%} below that of a cold cache ({ratios.spread[name][0]:.3f} to "
        f"{ratios.spread[name][1]:.3f} x it over the runs), more than the {1 - LEAST_TAU_RATIO:.0%} that it may be."
        for phase in (AGAIN, SHIFTED, SECOND)
        for name, value in ratios.values.items()
        if name.startswith(f"{phase}/{COLD}.tau.") and value < LEAST_TAU_RATIO
    ]


def tau_ratio(cold: Iterable[Answer], after: Iterable[Answer]) -> float | None:
    """τ after over τ when cold, of the same prompts, once the first rounds of both were over; None without rounds.

    The first round is the pass that reads the prompt's end, and waits for no draft. The colder the prompt, the longer
    it takes, and the likelier a draft is there by then: that says nothing of what drafts are worth. It is in the second
    round of the other, which therefore ends where that one did.
    """
    first, second = _rounds(cold), _rounds(after)
    starts = {prompt: max(first[prompt][0], second[prompt][0]) for prompt in first.keys() & second.keys()}
    return quotient(
        *(_tokens_per_round((rounds[prompt], start) for prompt, start in starts.items()) for rounds in (second, first))
    )


def _rounds(answers: Iterable[Answer]) -> dict[int, list[int]]:
    """Tokens of each round that had any, by prompt, of completed requests."""
    ended = (answer for answer in answers if answer.completion is not None and answer.deltas)
    return {answer.task.prompt: [delta.num_tokens for delta in answer.deltas] for answer in ended}


def _later(answers: Iterable[Answer]) -> float | None:
    return _tokens_per_round((sizes, sizes[0]) for sizes in _rounds(answers).values())


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


def _over_cold(samples: Samples[Sample], figure: str, ratio: Ratio, worst: Callable[..., str]) -> ByRun:
    """A figure of each phase over that of the run's cold phase, of prompts completed in both; the worst ones lead."""
    single: ByRun = {}
    leading: ByRun = {}
    for group in groups(samples):
        one = group[0]
        cold = {
            item.run: item.answers
            for item in samples.where(setting=one.setting, temperature=one.temperature, phase=COLD)
        }
        pairs = (_completed_in_both(cold.get(item.run, ()), item.answers) for item in group)
        if one.phase not in (OFF, COLD) and (taken := known(ratio(*pair) for pair in pairs)):
            single[f"{one.phase}/{COLD}.{figure}.{one.setting}.T{one.temperature:g}"] = taken
    for name, phases in WORST_OF.items():
        if found := [each for each in single if each.partition("/")[0] in phases]:
            leading[f"{name}/{COLD}.{figure}"] = single[worst(found, key=lambda each: statistics.median(single[each]))]
    return leading | single


def _completed_in_both(before: Sequence[Answer], after: Sequence[Answer]) -> tuple[list[Answer], list[Answer]]:
    done = [{answer.task.prompt for answer in answers if answer.completion} for answers in (before, after)]
    both = done[0] & done[1]
    return [one for one in before if one.task.prompt in both], [one for one in after if one.task.prompt in both]


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
