"""One window of measurement: requests under one speculation policy, and what became of each of them."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from dataclasses import dataclass
from enum import Enum

import grpc

from coppice.client import Client, Options, RequestFailedError, build_request
from coppice.completion import Completion
from coppice.lab.bench.load.workload import ATTENTIVE, LoadRequest, Manner
from coppice.v1 import inference_pb2

OFF = "off"
FIXED_SMALL = "fixed-small"
FIXED_LARGE = "fixed-large"
FIXED = (FIXED_SMALL, FIXED_LARGE)
PLANNER = "planner"

SMALL_NODES = 4
LARGE_NODES = 32

Mode = inference_pb2.SpeculationPolicy.Mode


@dataclass(frozen=True, slots=True)
class Policy:
    """A name for a mode and, where it is fixed, the most draft nodes of a round."""

    name: str
    mode: Mode
    max_nodes: int | None = None

    @property
    def note(self) -> str:
        """How it is set up, for the reader of the result."""
        budget = "the server's own" if self.max_nodes is None else self.max_nodes
        return f"{Mode.Name(self.mode)}, node budget: {budget}"

    @property
    def simulated(self) -> str:
        """The name that `coppice simulate` knows it by."""
        return self.name if self.max_nodes is None else f"fixed={self.max_nodes}"


def policies(server_max_nodes: int) -> tuple[Policy, ...]:
    """Off, two fixed budgets within the server's limit, and the server's planner."""
    return (
        Policy(OFF, Mode.MODE_OFF),
        Policy(FIXED_SMALL, Mode.MODE_FORCED, min(SMALL_NODES, server_max_nodes)),
        Policy(FIXED_LARGE, Mode.MODE_FORCED, min(LARGE_NODES, server_max_nodes)),
        Policy(PLANNER, Mode.MODE_AUTO),
    )


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


class Window:
    """Sends requests under one policy and keeps what comes back; its clock starts when it is made."""

    def __init__(self, client: Client, policy: Policy) -> None:
        self.policy = policy
        self._client = client
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

    async def ask(self, request: LoadRequest, intended_s: float | None = None, manner: Manner = ATTENTIVE) -> Fate:
        """Send a request and read its answer to the end; errors of the server are a fate like any other."""
        number, sent_s = self._num_sent, self.now()
        self._num_sent += 1
        deltas: list[Delta] = []
        token_ids: list[int] = []
        # What is cancelled before it has another fate is cut.
        fate, completion, error, retry_after_s = Fate.CUT, None, "", None
        stream = self._client.stream_request(self._message(request), DEADLINE_S)
        try:
            async with asyncio.timeout(manner.leave_after_s):
                async for chunk in stream:
                    if chunk.token_ids:
                        deltas.append(Delta(self.now(), len(chunk.token_ids)))
                        token_ids.extend(chunk.token_ids)
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
            self._answers[number] = Answer(
                request,
                sent_s if intended_s is None else intended_s,
                sent_s,
                self.now(),
                fate,
                tuple(token_ids),
                tuple(deltas),
                completion,
                error,
                manner,
                retry_after_s,
            )
            self._ended.release()
        return fate

    def answers(self) -> tuple[Answer, ...]:
        """Every request that has ended, in the order sent."""
        return tuple(answer for _, answer in sorted(self._answers.items()))

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
