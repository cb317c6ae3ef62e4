"""One request, from its opening at the back ends to its last token.

    outcome from the verifier ─▶ drafters, at once ─▶ text and statistics ─▶ client
    tree from a drafter       ─▶ merge, plan, prune ─▶ verifier

Both happen in callbacks of the streams' readers: there is no task and no queue on a round's path.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import TracebackType

from coppice.errors import CoppiceError, UnavailableError
from coppice.tree import TokenTree
from coppice.v1 import sampling_pb2
from orchestrator.drafting import Drafting
from orchestrator.output import Delta, Output
from orchestrator.rounds import Finish, Opening, Outcome
from orchestrator.statistics import Clock, Statistics
from orchestrator.transcript import Transcript
from orchestrator.validation import GenerationRequest
from orchestrator.verifier_client import VerifierClient

# A sequence that takes the verifier down each time it is opened must not go on for ever.
MAX_OPENINGS_WITHOUT_OUTCOME = 4


class Generation:
    """Runs one request while it is entered; leaving it frees everything at the verifier and at the drafters."""

    def __init__(
        self,
        request: GenerationRequest,
        transcript: Transcript,
        output: Output,
        drafting: Drafting,
        verifier: VerifierClient,
        clock: Clock,
    ) -> None:
        self._request = request
        self._transcript = transcript
        self._output = output
        self._drafting = drafting
        self._verifier = verifier
        self._sequence_id = 0
        self._wake = asyncio.Event()
        self._error: CoppiceError | None = None
        self._openings = 0
        self.finish: Finish | None = None
        self.statistics = Statistics()
        self.clock = clock

    def __enter__(self) -> Generation:
        self._drafting.open()
        try:
            self._sequence_id = self._verifier.join(self)
        except CoppiceError:
            self._drafting.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._release()

    async def deltas(self) -> AsyncIterator[Delta]:
        """What is new, as it comes, until the output has ended; the last delta is left to `last_delta`.

        Raises:
            CoppiceError: the request failed; everything before it has been delivered.
        """
        while self.finish is None:
            await self._wake.wait()
            self._wake.clear()
            if self.finish is None and (delta := self._output.take()):
                yield delta
            if self._error is not None:
                raise self._error

    def last_delta(self) -> Delta:
        """What is left to deliver once the output has ended."""
        return self._output.take()

    def fail(self, error: CoppiceError) -> None:
        """End the request with an error, unless it has ended already."""
        if self.finish is None and self._error is None:
            self._error = error
            self._release()
            self._wake.set()

    def opening(self) -> Opening | None:
        """The sequence as it is now; None when it needs no more passes or has failed too often."""
        if (finish := self._local_finish()) is not None:
            self._end(finish)
            return None
        self._openings += 1
        if self._openings > MAX_OPENINGS_WITHOUT_OUTCOME:
            self.fail(UnavailableError("the verifier was lost again and again"))
            return None
        return Opening(
            token_ids=tuple(self._transcript.tokens),
            resumed_tokens=self._transcript.num_output,
            sampling=self._request.sampling,
            stopping=self._request.stopping,
            acceptance=self._request.acceptance,
            exactness=self._request.exactness,
            linger_us=self._drafting.opening_linger_us(),
            priority=self._request.priority,
            cache_salt=self._request.cache_salt,
            top_log_probs=self._request.top_log_probs,
            want_features=self._drafting.wants_features,
        )

    def on_opened(self, sequence_id: int) -> None:
        """Drafts may be sent from here on."""

        def send(base_length: int, tree: TokenTree, budget: int, linger_us: int | None) -> None:
            self._verifier.draft(sequence_id, base_length, tree, budget, linger_us)

        self._drafting.opened(send)

    def on_outcome(self, outcome: Outcome) -> None:
        """Commit a round. The drafters hear of it first: they are what the next round waits for.

        Raises:
            CoppiceError: the outcome does not follow the committed tokens.
        """
        if outcome.base_length != self._transcript.length:
            raise CoppiceError(
                f"the verifier sent an outcome for {outcome.base_length} committed tokens, not for "
                f"{self._transcript.length}"
            )
        if self._request.top_log_probs is not None and len(outcome.log_probs) != len(outcome.token_ids):
            raise CoppiceError("the verifier sent no log-probabilities")
        self._openings = 0
        self._transcript.append(outcome.token_ids)
        self._drafting.load = self._verifier.load
        ended = self._transcript.end() is not None
        sent = self._drafting.round_ended() if ended else self._drafting.round_done(outcome)
        if outcome.token_ids:
            self.clock.first_token()
        self._output.push(outcome.token_ids, outcome.log_probs)
        self._wake.set()
        self.statistics.record(outcome, sent)

    def on_finished(self, finish: Finish) -> None:
        """The verifier has ended the output."""
        self.clock.queue_ms = finish.queue_us / 1000
        self._end(finish)

    def on_failed(self, error: CoppiceError) -> None:
        """The verifier cannot go on."""
        self.fail(error)

    def _local_finish(self) -> Finish | None:
        """The finish that the verifier would send, where the tokens that are here already reach it."""
        if self._output.stop_match is not None:
            return Finish(sampling_pb2.FINISH_REASON_STOP, self._output.stop_match)
        reason = self._transcript.end()
        if reason is None:
            return None
        is_stop = reason == sampling_pb2.FINISH_REASON_STOP
        return Finish(reason, self._output.last_token_text() if is_stop else None)

    def _end(self, finish: Finish) -> None:
        self.finish = finish
        self.statistics.stale_drafts += self._drafting.stale_drafts
        self._output.finish()
        self._drafting.close()
        self._wake.set()

    def _release(self) -> None:
        self._drafting.close()
        self._verifier.leave(self._sequence_id)
