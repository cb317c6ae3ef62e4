"""Many requests at once: transformers' batched and continuous batching, and our server, in turn on the same batches."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import transformers
from transformers import PreTrainedModel

from coppice.client import Client, Options, RequestFailedError
from coppice.lab.bench.contenders import OFF, ON, Task, max_context
from coppice.lab.bench.environment import describe_machine
from coppice.lab.bench.harness.experiment import BenchmarkError, Experiment, Ratios, Samples, over, progress, spread
from coppice.lab.bench.harness.plots import Panel
from coppice.lab.bench.harness.report import Report, Row, Shown, document, shown_path
from coppice.lab.bench.harness.tables import Table
from coppice.lab.bench.prompts import Prompt, encoded_prompts
from coppice.lab.bench.transformers_baseline import load_model, quiet_transformers, set_aside_generation_config

# transformers' own default for a page of its cache, in tokens.
PAGE_TOKENS = 256
# Tokens of one of its passes: what one of ours takes, a chunk of prompt and every other sequence.
MAX_BATCH_TOKENS = 576
MAX_WARM_UP_TOKENS = 8

SHOWN = Shown(
    tables=(
        Table(
            "Tokens per second of so many requests at once: median (min to max)",
            {"tokens/s": "{tokens_per_s:.0f} ({tokens_per_s_min:.0f} to {tokens_per_s_max:.0f})"},
            label="{contender}",
            across="concurrency",
        ),
    ),
    panels=(
        Panel(
            "Median of runs",
            x="concurrency",
            y="tokens_per_s",
            series="{contender}",
            xlabel="requests at once",
            ylabel="tokens/s",
            log_x=True,
        ),
    ),
    line="{max_tokens} tokens each after {mean_prompt_tokens:.0f} on average, {num_runs} runs, {threads} threads, T=0; "
    "the time of prompts is in it.",
)

_library: Any = transformers


@dataclass(frozen=True, slots=True)
class BatchCompletion:
    """The tokens of each task, and the seconds until the last of them was done."""

    token_ids: tuple[tuple[int, ...], ...]
    wall_s: float


class BatchContender(Protocol):
    """One way to complete several tasks together."""

    @property
    def name(self) -> str:
        """Short and unique within a benchmark."""
        ...

    @property
    def note(self) -> str:
        """How it is set up, for the reader of the result."""
        ...

    def complete(self, tasks: Sequence[Task]) -> BatchCompletion:
        """Complete tasks that arrive at the same time, greedily."""
        ...


class BatchedGenerate:
    """transformers `generate` over one batch, prompts padded on the left."""

    name = "transformers-batched"
    note = "transformers generate, one padded batch, float32, dynamic cache, sdpa attention"

    def __init__(self, target: PreTrainedModel, threads: int) -> None:
        set_aside_generation_config(target)
        self._target = target
        self._threads = threads

    def complete(self, tasks: Sequence[Task]) -> BatchCompletion:
        """Complete tasks of the same length."""
        torch.set_num_threads(self._threads)
        start = time.perf_counter()
        width = max(len(task.prompt_ids) for task in tasks)
        input_ids = torch.zeros(len(tasks), width, dtype=torch.long)
        mask = torch.zeros_like(input_ids)
        for row, task in enumerate(tasks):
            input_ids[row, width - len(task.prompt_ids) :] = torch.tensor(task.prompt_ids)
            mask[row, width - len(task.prompt_ids) :] = 1
        with torch.inference_mode():
            output: Any = self._target.generate(  # type: ignore[operator]
                input_ids, attention_mask=mask, generation_config=_greedy(tasks[0].max_tokens)
            )
        token_ids = tuple(tuple(row) for row in output[:, width:].tolist())
        return BatchCompletion(token_ids, time.perf_counter() - start)


class ContinuousBatching:
    """transformers' own continuous batching."""

    name = "transformers-continuous"
    note = (
        f"transformers generate_batch, float32, paged cache with room for all requests, "
        f"at most {MAX_BATCH_TOKENS} tokens a pass"
    )

    def __init__(self, target: PreTrainedModel, threads: int, longest: int) -> None:
        """`longest` is the most tokens that a prompt and its completion have together."""
        set_aside_generation_config(target)
        self._target: Any = target
        self._threads = threads
        self._pages = -(-longest // PAGE_TOKENS)
        self._concurrency = 0

    def complete(self, tasks: Sequence[Task]) -> BatchCompletion:
        """Complete tasks of the same length; the first call for a number of tasks sets the cache up.

        Raises:
            BenchmarkError: the library lost a request.
        """
        torch.set_num_threads(self._threads)
        if len(tasks) != self._concurrency:
            if self._concurrency:
                self._target.destroy_cached_continuous_batching_manager()
            self._concurrency = len(tasks)
        config = _library.ContinuousBatchingConfig(
            num_blocks=self._pages * len(tasks) + 1,
            max_batch_tokens=MAX_BATCH_TOKENS,
            page_size=PAGE_TOKENS,
            # Prompts come again, run after run.
            allow_block_sharing=False,
        )
        start = time.perf_counter()
        outputs: dict[str, Any] = self._target.generate_batch(
            [list(task.prompt_ids) for task in tasks],
            generation_config=_greedy(tasks[0].max_tokens),
            continuous_batching_config=config,
            persistent_manager=True,
        )
        wall_s = time.perf_counter() - start
        if len(outputs) != len(tasks):
            raise BenchmarkError(f"{self.name}: {len(outputs)} of {len(tasks)} requests came back")
        return BatchCompletion(tuple(tuple(output.generated_tokens) for output in outputs.values()), wall_s)


class CoppiceBatch:
    """Our own server, one streamed call per task, all at once."""

    def __init__(self, name: str, address: str, speculation: str) -> None:
        self.name = name
        self.note = f"coppice, speculation {speculation}"
        self._address = address
        self._speculation = speculation

    def complete(self, tasks: Sequence[Task]) -> BatchCompletion:
        """Complete tasks.

        Raises:
            BenchmarkError: a call failed.
        """
        try:
            return asyncio.run(self._complete(tasks))
        except RequestFailedError as error:
            raise BenchmarkError(f"{self.name}: {error}") from error

    async def _complete(self, tasks: Sequence[Task]) -> BatchCompletion:
        async with Client(self._address) as client:
            start = time.perf_counter()
            completions = await asyncio.gather(
                *[client.generate(task.prompt_ids, self._options(task)) for task in tasks]
            )
            wall_s = time.perf_counter() - start
        return BatchCompletion(tuple(completion.token_ids for completion in completions), wall_s)

    def _options(self, task: Task) -> Options:
        return Options(
            max_tokens=task.max_tokens,
            temperature=0.0,
            ignore_eos=True,
            speculation=self._speculation,
            # Prompts come again, run after run: none may find what an earlier call has computed for it.
            cache_salt=uuid.uuid4().hex,
        )


def _greedy(max_tokens: int) -> Any:
    # No end of sequence: the length is exact. The padding is masked, so that any token will do.
    return _library.GenerationConfig(max_new_tokens=max_tokens, do_sample=False, eos_token_id=None, pad_token_id=0)


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
    concurrency: Sequence[int],
    num_runs: int,
    max_tokens: int,
    on_sample: Callable[[], None] = lambda: None,
    first_run: int = 0,
) -> Samples[BatchSample]:
    """Complete every batch with every contender in turn, after a warm-up at each concurrency.

    Runs begin at different prompts.

    Raises:
        BenchmarkError: a contender failed or did not produce the length asked for.
    """
    taken = []
    for level in concurrency:
        for contender in contenders:
            contender.complete(_tasks(prompts, level, first_run, MAX_WARM_UP_TOKENS))
        for turn in Experiment(contenders, [level], num_runs).turns():
            tasks = _tasks(prompts, level, first_run + turn.run, max_tokens)
            completion = turn.arm.complete(tasks)
            if any(len(token_ids) != max_tokens for token_ids in completion.token_ids):
                raise BenchmarkError(f"{turn.arm.name} did not give {max_tokens} tokens to every request")
            taken.append(BatchSample(turn.arm.name, level, first_run + turn.run, completion))
            on_sample()
    return Samples(taken)


@dataclass(frozen=True, slots=True)
class ThroughputSuite:
    """One throughput benchmark of a target: `num_runs` batches of `max_tokens` each at every level of concurrency."""

    target: Path
    prompts: tuple[Prompt, ...]
    threads: int
    concurrency: tuple[int, ...] = (1, 4, 16, 64)
    num_runs: int = 3
    max_tokens: int = 64

    def run(self, address: str) -> Report:
        """Measure and return the report.

        Raises:
            BenchmarkError: a contender failed.
        """
        machine = describe_machine()
        quiet_transformers()
        target = load_model(self.target)
        prompt_ids, num_cut = encoded_prompts(self.target, self.prompts, self.max_tokens, max_context(address))
        longest = max(map(len, prompt_ids)) + self.max_tokens
        contenders: Sequence[BatchContender] = [
            BatchedGenerate(target, self.threads),
            ContinuousBatching(target, self.threads, longest),
            CoppiceBatch(OFF, address, "off"),
            CoppiceBatch(ON, address, "auto"),
        ]
        with progress("throughput", len(contenders) * len(self.concurrency) * self.num_runs) as advance:
            samples = measure_batches(contenders, prompt_ids, self.concurrency, self.num_runs, self.max_tokens, advance)
        rows = throughput_rows(samples, contenders)
        settings = {
            "target": shown_path(self.target),
            "threads": self.threads,
            "concurrency": list(self.concurrency),
            "num_runs": self.num_runs,
            "max_tokens": self.max_tokens,
            "num_prompts": len(prompt_ids),
            "num_cut_prompts": num_cut,
            "mean_prompt_tokens": round(sum(map(len, prompt_ids)) / len(prompt_ids), 1),
        }
        return document("throughput", machine, settings, rows, throughput_ratios(samples), mismatches=unequal(rows))


def throughput_rows(samples: Samples[BatchSample], contenders: Sequence[BatchContender]) -> list[Row]:
    """One flat object per contender and concurrency, in the order measured."""
    return [
        {
            "name": f"{contender.name} x{level}",
            "contender": contender.name,
            "concurrency": level,
            **spread("tokens_per_s", [one.tokens_per_s for one in taken]),
            "num_requests": level * len(taken),
            f"num_identical_to_{OFF}": _num_equal(taken, samples.where(contender=OFF, concurrency=level)),
            "note": contender.note,
        }
        for level in samples.each("concurrency")
        for contender in contenders
        if (taken := samples.where(contender=contender.name, concurrency=level))
    ]


def throughput_ratios(samples: Samples[BatchSample]) -> Ratios:
    """Ratios of tokens/s within a run, by concurrency: ours off over each baseline, and on over off."""
    found = {}
    for level in samples.each("concurrency"):
        at_level = samples.where(concurrency=level)
        for name in samples.each("contender"):
            mine, theirs = (name, OFF) if name == ON else (OFF, name)
            if mine != theirs:
                label = f"{mine.removeprefix('coppice-')}/{theirs.removeprefix('coppice-')}"
                speeds = [at_level.where(contender=one).by_run(_speed) for one in (mine, theirs)]
                found[f"{label}.x{level}"] = over(*speeds)
    return Ratios.of(found)


def unequal(rows: Sequence[Row]) -> list[str]:
    """Rows whose output with speculation on is not what it is with speculation off."""
    return [
        f"{row['name']}: {row['num_requests'] - row[f'num_identical_to_{OFF}']} of {row['num_requests']} outputs differ"
        for row in rows
        if row["contender"] == ON and row[f"num_identical_to_{OFF}"] != row["num_requests"]
    ]


def _tasks(prompts: Sequence[Sequence[int]], concurrency: int, run: int, max_tokens: int) -> list[Task]:
    chosen = [prompts[(run * concurrency + number) % len(prompts)] for number in range(concurrency)]
    return [Task(tuple(prompt), max_tokens, 0.0, 0) for prompt in chosen]


def _speed(samples: Samples[BatchSample]) -> float:
    [sample] = samples
    return sample.tokens_per_s


def _num_equal(some: Samples[BatchSample], others: Samples[BatchSample]) -> int:
    """Requests whose tokens are the same in both, run by run."""
    expected = {(one.run, at): ids for one in others for at, ids in enumerate(one.completion.token_ids)}
    return sum(expected.get((one.run, at)) == ids for one in some for at, ids in enumerate(one.completion.token_ids))
