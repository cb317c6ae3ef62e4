"""The throughput benchmark: so many requests at once, every contender in turn, several runs."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coppice.lab.bench.batch_contenders import BatchCompletion, BatchContender
from coppice.lab.bench.contenders import BenchmarkError, Task

OFF = "coppice-off"
ON = "coppice-on"
MAX_WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True)
class ThroughputPlan:
    """What is measured: `num_runs` times, at every level of concurrency, one batch of so many requests."""

    concurrency: tuple[int, ...] = (1, 4, 16, 64)
    num_runs: int = 3
    max_tokens: int = 64

    def tasks(self, prompts: Sequence[Sequence[int]], concurrency: int, run: int) -> list[Task]:
        """The requests of one batch; runs begin at different prompts."""
        chosen = [prompts[(run * concurrency + number) % len(prompts)] for number in range(concurrency)]
        return [Task(tuple(prompt), self.max_tokens, 0.0, 0) for prompt in chosen]


@dataclass(frozen=True, slots=True)
class BatchSample:
    """One batch within the benchmark."""

    contender: str
    concurrency: int
    run: int
    completion: BatchCompletion

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens of all requests over the time until the last was done."""
        return sum(map(len, self.completion.token_ids)) / self.completion.wall_s


def measure_batches(
    contenders: Sequence[BatchContender],
    prompts: Sequence[Sequence[int]],
    plan: ThroughputPlan,
    on_sample: Callable[[], None] = lambda: None,
) -> list[BatchSample]:
    """Complete every batch with every contender in turn; who begins rotates.

    Raises:
        BenchmarkError: a contender failed or did not produce the length asked for.
    """
    samples = []
    for concurrency in plan.concurrency:
        warm_up = [Task(task.prompt_ids, MAX_WARM_UP_TOKENS, 0.0, 0) for task in plan.tasks(prompts, concurrency, 0)]
        for contender in contenders:
            contender.complete(warm_up)
        for run in range(plan.num_runs):
            tasks = plan.tasks(prompts, concurrency, run)
            first = run % len(contenders)
            for contender in (*contenders[first:], *contenders[:first]):
                completion = contender.complete(tasks)
                if any(len(token_ids) != plan.max_tokens for token_ids in completion.token_ids):
                    raise BenchmarkError(f"{contender.name} did not give {plan.max_tokens} tokens to every request")
                samples.append(BatchSample(contender.name, concurrency, run, completion))
                on_sample()
    return samples


def throughput_rows(samples: Sequence[BatchSample], contenders: Sequence[BatchContender]) -> list[dict[str, Any]]:
    """One flat object per contender and concurrency, in the order measured."""
    rows = []
    for concurrency in dict.fromkeys(sample.concurrency for sample in samples):
        for contender in contenders:
            taken = _of(samples, contender.name, concurrency)
            speeds = [sample.tokens_per_s for sample in taken]
            same = sum(
                _num_equal(sample.completion, other.completion)
                for sample, other in zip(taken, _of(samples, OFF, concurrency), strict=True)
            )
            rows.append(
                {
                    "name": f"{contender.name} x{concurrency}",
                    "contender": contender.name,
                    "concurrency": concurrency,
                    "tokens_per_s": round(statistics.median(speeds), 3),
                    "tokens_per_s_min": round(min(speeds), 3),
                    "tokens_per_s_max": round(max(speeds), 3),
                    "num_requests": concurrency * len(taken),
                    f"num_identical_to_{OFF}": same,
                    "note": contender.note,
                }
            )
    return rows


def throughput_ratios(samples: Sequence[BatchSample]) -> dict[str, float]:
    """Medians over runs of ratios within a run, by concurrency: ours off over each baseline, and on over off."""
    ratios = {}
    names = dict.fromkeys(sample.contender for sample in samples)
    for concurrency in dict.fromkeys(sample.concurrency for sample in samples):
        for name in names:
            mine, theirs = (name, OFF) if name == ON else (OFF, name)
            if mine == theirs:
                continue
            pairs = zip(_of(samples, mine, concurrency), _of(samples, theirs, concurrency), strict=True)
            label = f"{mine.removeprefix('coppice-')}/{theirs.removeprefix('coppice-')}"
            ratios[f"{label}.x{concurrency}"] = statistics.median(
                one.tokens_per_s / other.tokens_per_s for one, other in pairs
            )
    return ratios


def unequal(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What breaks the promise: our output with speculation on is not what it is with speculation off."""
    return [
        f"{row['name']}: {row['num_requests'] - row[f'num_identical_to_{OFF}']} of {row['num_requests']} outputs differ"
        for row in rows
        if row["contender"] == ON and row[f"num_identical_to_{OFF}"] != row["num_requests"]
    ]


def _of(samples: Sequence[BatchSample], contender: str, concurrency: int) -> list[BatchSample]:
    """The samples of a contender at a concurrency, by run."""
    chosen = [sample for sample in samples if (sample.contender, sample.concurrency) == (contender, concurrency)]
    return sorted(chosen, key=lambda sample: sample.run)


def _num_equal(one: BatchCompletion, other: BatchCompletion) -> int:
    return sum(mine == theirs for mine, theirs in zip(one.token_ids, other.token_ids, strict=True))
