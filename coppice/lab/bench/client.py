"""The client of every suite: requests under a policy, what became of each, and our server as a contender."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

import grpc

from coppice.client import Chunk, Client, Options, RequestFailedError, build_request
from coppice.completion import Completion
from coppice.core.denoising import LEFT_TO_DRAFTER, Denoising
from coppice.lab.bench.counters import Counters, read_counters
from coppice.lab.bench.harness.experiment import BenchmarkError
from coppice.v1 import inference_pb2, sampling_pb2
from coppice.wire.convert import denoising_to_proto

# Contenders: transformers plain and assisted, our server with speculation off and on.
TRANSFORMERS = "transformers"
ASSISTED = "transformers-assisted"
OFF = "coppice-off"
ON = "coppice-on"

# Generous: a completion takes seconds. It only keeps a hung server from hanging the benchmark.
DEADLINE_S = 600.0

Mode = inference_pb2.SpeculationPolicy.Mode
AcceptanceRule = sampling_pb2.AcceptanceRule


@dataclass(frozen=True, slots=True)
class Task:
    """One completion to make. The length is exact: EOS counts as any other token."""

    prompt_ids: tuple[int, ...]
    max_tokens: int
    temperature: float
    seed: int
    repetition_penalty: float = 1.0
    # Its number in the suite's workload.
    prompt: int = 0


@dataclass(frozen=True, slots=True)
class Manner:
    """A client that goes `leave_after_s` after it has sent its request, or rests for `pause_s` after each delta."""

    leave_after_s: float | None = None
    pause_s: float = 0.0


# It reads at once, and to the end.
ATTENTIVE = Manner()


@dataclass(frozen=True, slots=True)
class Policy:
    """How requests are drafted for; what is None or empty is left to the server."""

    name: str
    mode: Mode
    max_nodes: int | None = None
    # Those that may draft; without any, all may.
    sources: tuple[str, ...] = ()
    acceptance: AcceptanceRule | None = None
    denoising: Denoising = LEFT_TO_DRAFTER
    # What else a reader of the result has to know of it.
    setting: str = ""

    @property
    def note(self) -> str:
        """How it is set up, for the reader of the result."""
        budget = "the server's own" if self.max_nodes is None else self.max_nodes
        text = f"coppice, {Mode.Name(self.mode)}, node budget: {budget}"
        return f"{text}, {self.setting}" if self.setting else text

    @property
    def simulated(self) -> str:
        """The name that `coppice simulate` knows it by."""
        return self.name if self.max_nodes is None else f"fixed={self.max_nodes}"

    def message(self, task: Task, salt: str = "") -> inference_pb2.GenerateRequest:
        """The request for a task. Without a salt it finds nothing that an earlier call has computed."""
        options = Options(
            max_tokens=task.max_tokens,
            temperature=task.temperature,
            seed=task.seed,
            ignore_eos=True,
            cache_salt=salt or uuid.uuid4().hex,
        )
        message = build_request(task.prompt_ids, options)
        message.sampling.repetition_penalty = task.repetition_penalty
        message.speculation.CopyFrom(
            inference_pb2.SpeculationPolicy(
                mode=self.mode,
                max_nodes=self.max_nodes,
                sources=self.sources,
                acceptance=self.acceptance,
                denoising=denoising_to_proto(self.denoising),
            )
        )
        return message


class Fate(Enum):
    """How a request ended."""

    COMPLETED = "completed"
    # Cancelled by us, because its window was over.
    CUT = "cut"
    # Turned away with RESOURCE_EXHAUSTED.
    REFUSED = "refused"
    FAILED = "failed"
    # Its client left early, as it was to.
    LEFT = "left"


@dataclass(frozen=True, slots=True)
class Delta:
    """One message with tokens."""

    at_s: float
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of one request. Times are seconds since its window began."""

    task: Task
    # When it was to be sent, and when it was.
    intended_s: float
    sent_s: float
    ended_s: float
    fate: Fate
    token_ids: tuple[int, ...]
    deltas: tuple[Delta, ...] = ()
    # What was counted; of completed requests only.
    completion: Completion | None = None
    error: str = ""
    manner: Manner = ATTENTIVE
    # When to try again, as the server said where it refused.
    retry_after_s: float | None = None
    # Whether the completion says who drafted; transformers do not.
    counts_drafts: bool = True

    @property
    def ttft_s(self) -> float | None:
        """From the intended beginning to the first token; None where none came."""
        return self.deltas[0].at_s - self.intended_s if self.deltas else None

    @property
    def tpot_s(self) -> float | None:
        """Seconds per token after the first; None of fewer than two tokens."""
        if len(self.token_ids) < 2:
            return None
        return (self.deltas[-1].at_s - self.deltas[0].at_s) / (len(self.token_ids) - 1)

    @property
    def e2e_s(self) -> float:
        """From the intended beginning to the end."""
        return self.ended_s - self.intended_s


class TokenStream(Protocol):
    """One request's chunks as they come; iteration raises RequestFailedError."""

    def __aiter__(self) -> AsyncIterator[Chunk]: ...

    def cancel(self) -> None:
        """Give the request up."""

    def result(self) -> Completion:
        """The completion, after the last chunk."""
        ...


class Requester(Protocol):
    """A client over gRPC or HTTP."""

    def stream_request(self, request: inference_pb2.GenerateRequest, timeout_s: float) -> TokenStream:
        """Send a request."""
        ...


async def _nothing() -> None: ...


class Window:
    """Sends requests under one policy and keeps what comes back; its clock starts when it is made.

    `on_first` is awaited after each request's first token, `on_end` after its last one.
    """

    def __init__(
        self,
        client: Requester,
        policy: Policy,
        on_first: Callable[[], Awaitable[None]] = _nothing,
        on_end: Callable[[], Awaitable[None]] = _nothing,
    ) -> None:
        self.policy = policy
        # Of requests that share prefixes with others of this window, and with no others.
        self.salt = uuid.uuid4().hex
        self._client = client
        self._on_first, self._on_end = on_first, on_end
        self._num_sent = 0
        # By number, of requests that have ended.
        self._answers: dict[int, Answer] = {}
        # Released by every request that has ended.
        self._ended = asyncio.Semaphore(0)
        self._start = time.perf_counter()

    def now(self) -> float:
        """Seconds since the window began."""
        return time.perf_counter() - self._start

    async def wait_until(self, at_s: float) -> None:
        """Return at a time of the window's clock, or at once where it is past."""
        await asyncio.sleep(max(at_s - self.now(), 0))

    async def wait_for_ended(self, num_requests: int, limit_s: float) -> None:
        """Return when so many requests more have ended, whatever their fate, or at the limit."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                for _ in range(num_requests):
                    await self._ended.acquire()

    async def ask(
        self, task: Task, intended_s: float | None = None, manner: Manner = ATTENTIVE, salt: str = ""
    ) -> Answer:
        """Send a request and read its answer to the end; errors of the server are a fate like any other."""
        number, sent_s = self._num_sent, self.now()
        self._num_sent += 1
        deltas: list[Delta] = []
        token_ids: list[int] = []
        # What is cancelled before it has another fate is cut.
        fate, completion, error, retry_after_s = Fate.CUT, None, "", None
        stream = self._client.stream_request(self.policy.message(task, salt), DEADLINE_S)
        try:
            async with asyncio.timeout(manner.leave_after_s):
                async for chunk in stream:
                    if chunk.token_ids:
                        deltas.append(Delta(self.now(), len(chunk.token_ids)))
                        token_ids.extend(chunk.token_ids)
                        if len(deltas) == 1:
                            await self._on_first()
                    if manner.pause_s:
                        await asyncio.sleep(manner.pause_s)
            completion, fate = stream.result(), Fate.COMPLETED
        except TimeoutError:
            stream.cancel()
            fate = Fate.LEFT
        except RequestFailedError as failure:
            error, retry_after_s = str(failure), failure.retry_after_s
            fate = Fate.REFUSED if failure.code is grpc.StatusCode.RESOURCE_EXHAUSTED else Fate.FAILED
        finally:
            # Of a request that is cancelled, too.
            begin_s = sent_s if intended_s is None else intended_s
            outcome = fate, tuple(token_ids), tuple(deltas), completion, error, manner, retry_after_s
            self._answers[number] = Answer(task, begin_s, sent_s, self.now(), *outcome)
            self._ended.release()
        await self._on_end()
        return self._answers[number]

    def answers(self) -> tuple[Answer, ...]:
        """Every request that has ended, in the order sent."""
        return tuple(answer for _, answer in sorted(self._answers.items()))


@dataclass(frozen=True, slots=True)
class Batch:
    """Answers to tasks that were sent at once."""

    answers: tuple[Answer, ...]
    # What services counted meanwhile, where it is read.
    counted: Counters = field(default_factory=Counters)

    @property
    def wall_s(self) -> float:
        """From the first request to the last end."""
        return max(one.ended_s for one in self.answers) - min(one.sent_s for one in self.answers)


class Contender(Protocol):
    """One way to complete tasks."""

    @property
    def name(self) -> str:
        """Short and unique within a benchmark."""
        ...

    @property
    def note(self) -> str:
        """How it is set up, for the reader of the result."""
        ...

    async def complete(self, tasks: Sequence[Task]) -> Batch:
        """Complete tasks that arrive at the same time. Raises BenchmarkError if it cannot."""
        ...


@dataclass(frozen=True, slots=True)
class Meter:
    """Counters of services to read, outside of the time of requests.

    With `decoding_only` they are read when the last request of a batch has its first token, and when the first ends:
    all requests are in the passes between, and no prompt.
    """

    urls: tuple[str, ...]
    names: Collection[str]
    whose: str
    decoding_only: bool = False

    async def read(self) -> Counters:
        """What they have counted until now. Raises BenchmarkError if the metrics cannot be had."""
        total = Counters()
        for url in self.urls:
            total = total.plus(Counters(await asyncio.to_thread(read_counters, url, self.names, self.whose)))
        return total


@contextlib.asynccontextmanager
async def watching(meter: Meter, interval_s: float) -> AsyncIterator[list[tuple[float, Counters]]]:
    """Monotonic times and counters, read again and again while the context is open.

    Raises BenchmarkError if the metrics cannot be had, or have none of these counters.
    """
    seen: list[tuple[float, Counters]] = []

    async def watch() -> None:
        while True:
            counted = await meter.read()
            if not counted.values:
                raise BenchmarkError(f"no metrics of {meter.whose} at {', '.join(meter.urls)}")
            seen.append((time.monotonic(), counted))
            await asyncio.sleep(interval_s)

    task = asyncio.create_task(watch())
    try:
        yield seen
    finally:
        task.cancel()
        await asyncio.wait({task})
    if not task.cancelled() and (error := task.exception()):
        raise error


class _Reading:
    """What a meter's services count during one batch."""

    def __init__(self, meter: Meter, num_requests: int) -> None:
        self._meter = meter
        self._num_left = num_requests
        self._before: Counters | None = None
        self._has_ended = False
        self.counted = Counters()

    async def begin(self) -> None:
        if not self._meter.decoding_only:
            self._before = await self._meter.read()

    async def one_began(self) -> None:
        self._num_left -= 1
        if self._meter.decoding_only and not self._num_left and not self._has_ended:
            self._before = await self._meter.read()

    async def one_ended(self) -> None:
        is_first, self._has_ended = not self._has_ended, True
        if is_first and self._meter.decoding_only:
            await self._take()

    async def end(self) -> None:
        if not self._meter.decoding_only:
            await self._take()

    async def _take(self) -> None:
        if self._before is not None:
            self.counted = (await self._meter.read()).plus(self._before, -1)


NO_METER = Meter((), (), "")


class Server:
    """Our own server as a contender, one streamed call per task."""

    def __init__(self, client: Client, policy: Policy, meter: Meter = NO_METER, salt: str = "") -> None:
        """Calls share `salt`; without one each has its own, and finds nothing that was computed before."""
        self.name, self.note = policy.name, policy.note
        self._client, self._policy, self._meter, self._salt = client, policy, meter, salt

    async def complete(self, tasks: Sequence[Task]) -> Batch:
        """Complete tasks, all at once. Raises BenchmarkError if a call failed, or the metrics cannot be had."""
        reading = _Reading(self._meter, len(tasks))
        await reading.begin()
        window = Window(self._client, self._policy, reading.one_began, reading.one_ended)
        answers = await asyncio.gather(*[window.ask(task, salt=self._salt) for task in tasks])
        await reading.end()
        if error := next((answer.error for answer in answers if answer.fate is not Fate.COMPLETED), ""):
            raise BenchmarkError(f"{self.name}: {error}")
        return Batch(tuple(answers), reading.counted)


async def connected(stack: contextlib.AsyncExitStack, address: str) -> Client:
    """A client that is closed with the stack; connecting is no part of what is measured later.

    Raises BenchmarkError if there is no server.
    """
    client = await stack.enter_async_context(Client(address))
    await model_info(client)
    return client


async def model_info(client: Client) -> inference_pb2.GetModelInfoResponse:
    """What a server serves. Raises BenchmarkError if the call failed."""
    try:
        return await client.model_info()
    except RequestFailedError as error:
        raise BenchmarkError(f"GetModelInfo: {error}") from error
