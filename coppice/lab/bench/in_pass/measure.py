"""The measurement: group by group, every variant and plain decoding in turn on the same batches of prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from coppice.lab.bench.contenders import Task
from coppice.lab.bench.in_pass.batch import BatchContender, BatchOutcome
from coppice.lab.bench.in_pass.services import Services
from coppice.lab.bench.in_pass.variants import Group
from coppice.lab.bench.latency import Plan

# Enough for lazy initialisation, and for a verifier to know what its passes cost.
MAX_WARM_UP_TOKENS = 16

OnRequests = Callable[[int], None]


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
    """What became of a group."""

    group: Group
    samples: tuple[BatchSample, ...]
    # How each contender was set up, in the order of the group's variants.
    notes: tuple[str, ...]

    @property
    def temperatures(self) -> tuple[float, ...]:
        """In the order measured."""
        return tuple(dict.fromkeys(sample.temperature for sample in self.samples))

    def of(self, contender: str, temperature: float, run: int | None = None) -> list[BatchSample]:
        """A contender's samples at a temperature, of all runs or of one."""
        return [
            sample
            for sample in self.samples
            if (sample.contender, sample.temperature) == (contender, temperature) and run in (None, sample.run)
        ]

    def runs(self) -> list[int]:
        """The numbers of the runs, in order."""
        return sorted({sample.run for sample in self.samples})


def batches_of(num_prompts: int, batch_size: int) -> list[range]:
    """Numbers of the requests of each batch: as many as there are prompts, and at least one full batch."""
    return [range(batch_size * at, batch_size * (at + 1)) for at in range(max(1, num_prompts // batch_size))]


def num_requests(groups: Iterable[Group], num_prompts: int, plan: Plan) -> int:
    """Requests that are measured, those of plain decoding included."""
    return sum(len(group.variants) * sum(map(len, batches_of(num_prompts, group.batch_size))) for group in groups) * (
        len(plan.temperatures) * plan.num_runs
    )


def measure_groups(
    services: Services,
    groups: Sequence[Group],
    prompts: Sequence[Sequence[int]],
    num_prompts: int,
    plan: Plan,
    on_requests: OnRequests = lambda count: None,
) -> list[Measured]:
    """Measure one group after another, on `num_prompts` prompts or on a full batch of them if that is more.

    Raises:
        BenchmarkError: a completion failed or had another length, or a verifier's metrics were not there.
    """
    return [_measure_group(services, group, prompts, num_prompts, plan, on_requests) for group in groups]


def _measure_group(
    services: Services,
    group: Group,
    prompts: Sequence[Sequence[int]],
    num_prompts: int,
    plan: Plan,
    on_requests: OnRequests,
) -> Measured:
    contenders = [
        BatchContender(
            variant, services.address(variant), services.metrics_url(variant), knows_prompts=group.knows_prompts
        )
        for variant in group.variants
    ]
    batches = batches_of(num_prompts, group.batch_size)
    for temperature in plan.temperatures:
        # Prompts that are to be known are so once they have been sent.
        meets_all = group.knows_prompts and temperature == plan.temperatures[0]
        for batch in batches if meets_all else batches[:1]:
            _warm_up(contenders, _tasks(prompts, batch, temperature, plan))
    samples = []
    for run in range(plan.num_runs):
        for temperature in plan.temperatures:
            for number, batch in enumerate(batches):
                tasks = _tasks(prompts, batch, temperature, plan)
                for contender in _rotated(contenders, run + number):
                    outcome = contender.complete(tasks)
                    samples.append(BatchSample(contender.name, temperature, run, batch[0], outcome))
                    on_requests(len(tasks))
    return Measured(group, tuple(samples), tuple(contender.note for contender in contenders))


def _tasks(prompts: Sequence[Sequence[int]], batch: Iterable[int], temperature: float, plan: Plan) -> list[Task]:
    """The same tasks in every run. Where prompts are fewer than a batch they come again, with other seeds."""
    return [plan.task(prompts[number % len(prompts)], number, temperature) for number in batch]


def _warm_up(contenders: Sequence[BatchContender], tasks: Sequence[Task]) -> None:
    for contender in contenders:
        contender.complete([replace(task, max_tokens=min(task.max_tokens, MAX_WARM_UP_TOKENS)) for task in tasks])


def _rotated(contenders: Sequence[BatchContender], shift: int) -> list[BatchContender]:
    shift %= len(contenders)
    return [*contenders[shift:], *contenders[:shift]]
