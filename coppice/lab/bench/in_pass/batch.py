"""Many requests at once under one policy, and what the verifier counted while all of them were decoding."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from coppice.client import Client, Options, RequestFailedError, build_request
from coppice.completion import Completion
from coppice.lab.bench.contenders import BenchmarkError, Task
from coppice.lab.bench.coppice_contender import DEADLINE_S, Mode
from coppice.lab.bench.in_pass.passes import PassCounts, read_passes
from coppice.lab.bench.in_pass.variants import Variant
from coppice.v1 import inference_pb2


@dataclass(frozen=True, slots=True)
class BatchOutcome:
    """The completion of each task, the seconds until the last was done, and passes that had all of them."""

    completions: tuple[Completion, ...]
    wall_s: float
    # From the last first token to the first end; nothing where requests had no time together.
    passes: PassCounts


class BatchContender:
    """One variant as it is served, asked for several completions at once."""

    def __init__(self, variant: Variant, address: str, metrics_url: str, *, knows_prompts: bool = False) -> None:
        """Where prompts are known, calls share one salt: a prompt is computed in its first call only."""
        self.variant = variant
        self._address = address
        self._metrics_url = metrics_url
        self._salt = "known" if knows_prompts else ""
        mode = Mode.MODE_FORCED if variant.sources else Mode.MODE_OFF
        self._policy = inference_pb2.SpeculationPolicy(mode=mode, max_nodes=variant.max_nodes, sources=variant.sources)

    @property
    def name(self) -> str:
        """Unique within a group."""
        return self.variant.contender

    @property
    def note(self) -> str:
        """How it is set up, for the reader of the result."""
        sources = f"sources {'+'.join(self.variant.sources)}" if self.variant.sources else "speculation off"
        rounds = "synchronous rounds" if self.variant.synchronous else ""
        nodes = f"node budget {self.variant.max_nodes}" if self.variant.max_nodes else ""
        return ", ".join(filter(None, (str(self.variant.verifier), sources, nodes, rounds)))

    def complete(self, tasks: Sequence[Task]) -> BatchOutcome:
        """Complete tasks, all at once.

        Raises:
            BenchmarkError: a call failed, gave another length, or the verifier's metrics cannot be had.
        """
        try:
            return asyncio.run(self._complete(tasks))
        except RequestFailedError as error:
            raise BenchmarkError(f"{self.name}: {error}") from error

    async def _complete(self, tasks: Sequence[Task]) -> BatchOutcome:
        window = _Window(self._metrics_url, len(tasks))
        async with Client(self._address) as client:
            # So that connecting is no part of the time.
            await client.model_info()
            start = time.perf_counter()
            completions = await asyncio.gather(*[self._ask(client, task, window) for task in tasks])
            wall_s = time.perf_counter() - start
        return BatchOutcome(tuple(completions), wall_s, window.passes)

    async def _ask(self, client: Client, task: Task, window: _Window) -> Completion:
        stream = client.stream_request(self._request(task), DEADLINE_S)
        has_token = False
        async for chunk in stream:
            if chunk.token_ids and not has_token:
                has_token = True
                await window.one_began()
        await window.one_ended()
        completion = stream.result()
        if len(completion.token_ids) != task.max_tokens:
            raise BenchmarkError(
                f"{self.name} gave {len(completion.token_ids)} tokens where {task.max_tokens} were asked for"
            )
        return completion

    def _request(self, task: Task) -> inference_pb2.GenerateRequest:
        options = Options(
            max_tokens=task.max_tokens,
            temperature=task.temperature,
            seed=task.seed,
            ignore_eos=True,
            cache_salt=self._salt or uuid.uuid4().hex,
        )
        message = build_request(task.prompt_ids, options)
        message.speculation.CopyFrom(self._policy)
        return message


class _Window:
    """The time in which all requests of a batch have a token and none has ended."""

    def __init__(self, url: str, num_requests: int) -> None:
        self._url = url
        self._num_left = num_requests
        self._has_ended = False
        self._before: PassCounts | None = None
        self.passes = PassCounts()

    async def one_began(self) -> None:
        """A request has its first token."""
        self._num_left -= 1
        if not self._num_left and not self._has_ended:
            self._before = await asyncio.to_thread(read_passes, self._url)

    async def one_ended(self) -> None:
        """A request has all its tokens."""
        is_first, self._has_ended = not self._has_ended, True
        if is_first and self._before is not None:
            self.passes = (await asyncio.to_thread(read_passes, self._url)).plus(self._before, -1)
