"""The measurement: one request at a time, phase by phase, under every setting, several runs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass

from coppice.client import Client, Options, RequestFailedError
from coppice.completion import Completion
from coppice.lab.bench.cache.phases import OFF, Phase
from coppice.lab.bench.cache.services import Instance, Services
from coppice.lab.bench.contenders import BenchmarkError, Task
from orchestrator.prefix_cache.guesses import SOURCE
from orchestrator.prefix_cache.store import CacheCounts

# Enough for streams, lazy initialisation and the first estimates to be there.
NUM_WARM_UP_PROMPTS = 2
DEADLINE_S = 600.0


@dataclass(frozen=True, slots=True)
class Setting:
    """Which drafters work, as `Options.speculation` names them."""

    name: str
    speculation: str


def settings(kinds: Iterable[str]) -> tuple[Setting, ...]:
    """The cache beside each kind of drafter, and alone."""
    return (*(Setting(f"{kind}+{SOURCE}", f"{kind},{SOURCE}") for kind in kinds), Setting(SOURCE, SOURCE))


@dataclass(frozen=True, slots=True)
class CachePlan:
    """What is measured; the tokens of a prompt are of one seed in every run."""

    settings: tuple[Setting, ...]
    temperatures: tuple[float, ...]
    num_runs: int
    max_tokens: int
    seed: int

    def task(self, prompt_ids: tuple[int, ...], prompt: int, temperature: float) -> Task:
        """The request of a prompt, save for its salt."""
        return Task(prompt_ids, self.max_tokens, temperature, self.seed + prompt)


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of one request; without a completion it has failed."""

    prompt: int
    token_ids: tuple[int, ...]
    wall_s: float
    # None where no token came.
    ttft_s: float | None
    completion: Completion | None
    # Tokens of each round that had any: the first is the pass that read the prompt's end.
    round_tokens: tuple[int, ...] = ()
    error: str = ""


@dataclass(frozen=True, slots=True)
class Sample:
    """One phase of a run under a setting, and what the orchestrator's cache has counted in it."""

    setting: str
    temperature: float
    run: int
    phase: str
    answers: tuple[Answer, ...]
    counts: CacheCounts


async def measure(
    services: Services,
    prompts: Sequence[tuple[int, ...]],
    order: Sequence[Phase],
    plan: CachePlan,
    on_answer: Callable[[], None] = lambda: None,
) -> list[Sample]:
    """Speculation off once, and then every phase in order under every setting, whose turns rotate, in every run.

    Raises:
        BenchmarkError: a request without speculation failed, or all of a phase did.
    """
    async with AsyncExitStack() as stack:
        bench = _Bench(services, prompts, plan, on_answer)
        plain = await stack.enter_async_context(Client(services.plain))
        for instance in filter(None, (services.first, services.second)):
            bench.clients[instance.address] = await stack.enter_async_context(Client(instance.address))
        await bench.warm_up(plain)
        samples = [await bench.off(plain, temperature) for temperature in plan.temperatures]
        for run in range(plan.num_runs):
            for temperature in plan.temperatures:
                for at in range(len(plan.settings)):
                    setting = plan.settings[(at + run) % len(plan.settings)]
                    samples += [await bench.phase(phase, setting, temperature, run) for phase in order]
    return samples


class _Bench:
    def __init__(
        self,
        services: Services,
        prompts: Sequence[tuple[int, ...]],
        plan: CachePlan,
        on_answer: Callable[[], None],
    ) -> None:
        self._services = services
        self._prompts = prompts
        self._plan = plan
        self._on_answer = on_answer
        # By address, of the orchestrators that have a cache.
        self.clients: dict[str, Client] = {}

    async def warm_up(self, plain: Client) -> None:
        """Let everybody answer the first prompts once, under a salt that nobody uses later."""
        for temperature in self._plan.temperatures:
            for prompt in range(min(NUM_WARM_UP_PROMPTS, len(self._prompts))):
                await self._ask(plain, prompt, temperature, OFF, f"warm-up {OFF} {temperature:g}")
                for client in self.clients.values():
                    for setting in self._plan.settings:
                        salt = f"warm-up {setting.name} {temperature:g} {client.address}"
                        await self._ask(client, prompt, temperature, setting.speculation, salt)

    async def off(self, plain: Client, temperature: float) -> Sample:
        """Every prompt without speculation: what all others are compared with."""
        answers = []
        for prompt in range(len(self._prompts)):
            answer = await self._ask(plain, prompt, temperature, OFF, f"{OFF} {temperature:g} {prompt}")
            if answer.completion is None or len(answer.token_ids) != self._plan.max_tokens:
                error = answer.error or f"it has {len(answer.token_ids)} tokens"
                raise BenchmarkError(f"no output without speculation to compare with: {error}")
            answers.append(answer)
            self._on_answer()
        return Sample(OFF, temperature, 0, OFF, tuple(answers), CacheCounts())

    async def phase(self, phase: Phase, setting: Setting, temperature: float, run: int) -> Sample:
        """One phase of a run."""
        instance = self._instance(phase)
        session = f"{setting.name} {temperature:g} {run}"
        before = await instance.counts()
        answers = []
        is_down = False
        for at, prompt in enumerate(phase.prompts):
            if is_down and at >= 3 * len(phase.prompts) // 4:
                is_down = await self._restart_redis()
            salt = phase.salt_of(session, prompt)
            asking = self._ask(self.clients[instance.address], prompt, temperature, setting.speculation, salt)
            if phase.kills_redis and at == len(phase.prompts) // 2:
                answer, is_down = await asyncio.gather(asking, self._kill_redis())
            else:
                answer = await asking
            answers.append(answer)
            self._on_answer()
        if is_down:
            await self._restart_redis()
        if not any(answer.completion for answer in answers):
            raise BenchmarkError(f"{setting.name} {phase.name}: no request was completed: {answers[0].error}")
        counts = _difference(await instance.counts(), before)
        return Sample(setting.name, temperature, run, phase.name, tuple(answers), counts)

    def _instance(self, phase: Phase) -> Instance:
        if not phase.in_second:
            return self._services.first
        if self._services.second is None:
            raise BenchmarkError(f"{phase.name} needs a second orchestrator")
        return self._services.second

    async def _kill_redis(self) -> bool:
        if self._services.redis is not None:
            await self._services.redis.kill()
        return True

    async def _restart_redis(self) -> bool:
        if self._services.redis is not None:
            await self._services.redis.start()
        return False

    async def _ask(self, client: Client, prompt: int, temperature: float, speculation: str, salt: str) -> Answer:
        task = self._plan.task(self._prompts[prompt], prompt, temperature)
        options = Options(
            max_tokens=task.max_tokens,
            temperature=task.temperature,
            seed=task.seed,
            ignore_eos=True,
            speculation=speculation,
            cache_salt=salt,
        )
        token_ids: list[int] = []
        ttft_s, completion, error = None, None, ""
        round_tokens: list[int] = []
        start = time.perf_counter()
        stream = client.stream(task.prompt_ids, options, DEADLINE_S)
        try:
            async for chunk in stream:
                if chunk.token_ids:
                    ttft_s = ttft_s or time.perf_counter() - start
                    round_tokens.append(len(chunk.token_ids))
                    token_ids.extend(chunk.token_ids)
            completion = stream.result()
        except RequestFailedError as failure:
            error = str(failure)
        wall_s = time.perf_counter() - start
        return Answer(prompt, tuple(token_ids), wall_s, ttft_s, completion, tuple(round_tokens), error)


def _difference(after: CacheCounts, before: CacheCounts) -> CacheCounts:
    return CacheCounts(**{name: value - getattr(before, name) for name, value in asdict(after).items()})
