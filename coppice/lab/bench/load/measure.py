"""The load benchmark: every load under every policy in turn, several runs."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from coppice.client import Client
from coppice.lab.bench.contenders import BenchmarkError
from coppice.lab.bench.load.figures import Span
from coppice.lab.bench.load.loads import Load
from coppice.lab.bench.load.loops import PAUSE_S
from coppice.lab.bench.load.policies import OFF, Policy
from coppice.lab.bench.load.window import Answer, Fate, Window
from coppice.lab.bench.load.workload import Workload

# Outputs to compare with are made so many at once.
REFERENCE_CONCURRENCY = 8
# A server with a short queue may refuse some of them for as long as others run.
REFERENCE_PATIENCE_S = 120.0

References = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Sample:
    """One window within the benchmark, and the part of it that counts."""

    load: Load
    policy: str
    run: int
    span: Span
    answers: tuple[Answer, ...]


class Baseline(Protocol):
    """What is measured beside the server."""

    async def measure(self, load: Load, run: int) -> None:
        """Do what such a load asks for, while the server rests."""
        ...


async def reference_outputs(client: Client, workload: Workload, off: Policy) -> References:
    """Every prompt's longest output with speculation off, which all outputs of the benchmark begin.

    Raises:
        BenchmarkError: a request failed.
    """
    window = Window(client, off)
    room = asyncio.Semaphore(REFERENCE_CONCURRENCY)

    async def ask(prompt: int) -> None:
        async with room:
            # A server may run fewer at once than we ask for.
            give_up_s = time.monotonic() + REFERENCE_PATIENCE_S
            while time.monotonic() < give_up_s:
                if await window.ask(workload.longest(prompt)) is not Fate.REFUSED:
                    return
                await asyncio.sleep(PAUSE_S)

    await asyncio.gather(*map(ask, range(len(workload.prompts))))
    outputs = {answer.request.prompt: answer.token_ids for answer in window.answers() if _is_whole(answer)}
    failed = next((answer.error for answer in window.answers() if answer.error), "it is too short")
    if len(outputs) < len(workload.prompts):
        raise BenchmarkError(f"no output of {OFF} to compare with: {failed}")
    return tuple(outputs[prompt] for prompt in range(len(workload.prompts)))


async def measure_loads(
    client: Client,
    workload: Workload,
    loads: Sequence[Load],
    policies: Sequence[Policy],
    num_runs: int,
    seed: int,
    on_sample: Callable[[], None] = lambda: None,
    baselines: Baseline | None = None,
) -> list[Sample]:
    """Every load under every policy, `num_runs` times; whose turn comes first rotates from a seeded order.

    In each run `baselines` have their turn before.

    Raises:
        BenchmarkError: in some window requests failed, and none was completed.
    """
    order = list(policies)
    random.Random(seed).shuffle(order)
    samples = []
    for number, load in enumerate(loads):
        for run in range(num_runs):
            if baselines is not None:
                await baselines.measure(load, run)
            first = (number + run) % len(order)
            for policy in (*order[first:], *order[:first]):
                window = Window(client, policy)
                span = await load.drive(window, workload, run)
                samples.append(Sample(load, policy.name, run, span, window.answers()))
                _check(samples[-1])
                on_sample()
    return samples


def _check(sample: Sample) -> None:
    """A server that is gone must end the benchmark, not fill it with failures."""
    fates = {answer.fate for answer in sample.answers}
    if Fate.FAILED in fates and Fate.COMPLETED not in fates:
        error = next(answer.error for answer in sample.answers if answer.fate is Fate.FAILED)
        raise BenchmarkError(f"{sample.policy} {sample.load.name}: no request was completed: {error}")


def _is_whole(answer: Answer) -> bool:
    return answer.fate is Fate.COMPLETED and len(answer.token_ids) == answer.request.task.max_tokens
