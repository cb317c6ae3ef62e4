"""Ways to complete many tasks at the same time."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import transformers
from transformers import PreTrainedModel

from coppice.client import Client, Options, RequestFailedError
from coppice.lab.bench.contenders import BenchmarkError, Task
from coppice.lab.bench.transformers_baseline import set_aside_generation_config

# transformers' own default for a page of its cache, in tokens.
PAGE_TOKENS = 256
# Tokens of one of its passes: what one of ours takes, a chunk of prompt and every other sequence.
MAX_BATCH_TOKENS = 576

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
