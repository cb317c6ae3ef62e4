"""One window of measurement: requests under one policy, and what became of each of them."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from dataclasses import dataclass, field
from enum import Enum

import grpc

from coppice.client import Client, Options, RequestFailedError, build_request
from coppice.completion import Completion
from coppice.lab.bench.load.manner import ATTENTIVE, Manner
from coppice.lab.bench.load.policies import Policy
from coppice.lab.bench.load.workload import LoadRequest
from coppice.v1 import inference_pb2

# Generous: windows are bounded by themselves. It only keeps the server from cutting a request before its default.
DEADLINE_S = 600.0


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

    request: LoadRequest
    # When it was to be sent, and when it was.
    intended_s: float
    sent_s: float
    ended_s: float
    fate: Fate
    token_ids: tuple[int, ...]
    deltas: tuple[Delta, ...]
    # What the server counted; of completed requests only.
    completion: Completion | None = None
    error: str = ""
    manner: Manner = ATTENTIVE
    # When to try again, as the server said where it refused.
    retry_after_s: float | None = None

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


@dataclass(slots=True)
class _Recording:
    """A request that is under way, or was; what is cancelled before it has a fate is cut."""

    request: LoadRequest
    intended_s: float
    sent_s: float
    manner: Manner
    token_ids: list[int] = field(default_factory=list)
    deltas: list[Delta] = field(default_factory=list)
    fate: Fate = Fate.CUT
    ended_s: float = 0.0
    completion: Completion | None = None
    error: str = ""
    retry_after_s: float | None = None


class Window:
    """Sends requests under one policy and keeps what comes back; its clock starts when it is made."""

    def __init__(self, client: Client, policy: Policy) -> None:
        self.policy = policy
        self._client = client
        self._recordings: list[_Recording] = []
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

    async def ask(self, request: LoadRequest, intended_s: float | None = None, manner: Manner = ATTENTIVE) -> Fate:
        """Send a request and read its answer to the end; errors of the server are a fate like any other."""
        sent_s = self.now()
        recording = _Recording(request, sent_s if intended_s is None else intended_s, sent_s, manner)
        self._recordings.append(recording)
        stream = self._client.stream_request(self._message(request), DEADLINE_S)
        try:
            async with asyncio.timeout(manner.leave_after_s):
                async for chunk in stream:
                    if chunk.token_ids:
                        recording.deltas.append(Delta(self.now(), len(chunk.token_ids)))
                        recording.token_ids.extend(chunk.token_ids)
                    if manner.pause_s:
                        await asyncio.sleep(manner.pause_s)
            recording.completion, recording.fate = stream.result(), Fate.COMPLETED
        except TimeoutError:
            stream.cancel()
            recording.fate = Fate.LEFT
        except RequestFailedError as error:
            recording.retry_after_s = error.retry_after_s
            is_refused = error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
            recording.error, recording.fate = str(error), Fate.REFUSED if is_refused else Fate.FAILED
        finally:
            # Of a request that is cancelled, too.
            recording.ended_s = self.now()
            self._ended.release()
        return recording.fate

    def answers(self) -> tuple[Answer, ...]:
        """Every request in the order sent, once none is under way."""
        return tuple(
            Answer(
                one.request,
                one.intended_s,
                one.sent_s,
                one.ended_s,
                one.fate,
                tuple(one.token_ids),
                tuple(one.deltas),
                one.completion,
                one.error,
                one.manner,
                one.retry_after_s,
            )
            for one in self._recordings
        )

    def _message(self, request: LoadRequest) -> inference_pb2.GenerateRequest:
        task = request.task
        options = Options(
            max_tokens=task.max_tokens,
            temperature=task.temperature,
            seed=task.seed,
            ignore_eos=True,
            # Prompts come again, window after window: none may find what an earlier call has computed for it.
            cache_salt=uuid.uuid4().hex,
        )
        message = build_request(task.prompt_ids, options)
        policy = inference_pb2.SpeculationPolicy(mode=self.policy.mode, max_nodes=self.policy.max_nodes)
        message.speculation.CopyFrom(policy)
        return message
