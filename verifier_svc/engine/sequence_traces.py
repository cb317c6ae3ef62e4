"""One peer's sequences as spans, from the messages that pass the door. Attributes are named as in docs/traces.md."""

from __future__ import annotations

from dataclasses import dataclass

from coppice.net.rpc import status_code_name
from coppice.obs.tracing import Span, Tracer
from coppice.v1 import sampling_pb2, verifier_pb2

# A sequence whose peer is gone or wants no more of it.
_LEFT = "cancelled"
_FAULTS = frozenset({"internal", "unavailable"})


@dataclass
class _Sequence:
    span: Span
    num_prompt: int
    rounds: int = 0
    tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    drafts: int = 0
    stale_drafts: int = 0
    near_ties: int = 0
    forward_us: int = 0
    linger_us: int = 0


class SequenceTraces:
    """A span for each sequence of one stream, with what its rounds add up to."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._open: dict[int, _Sequence] = {}

    def heard(self, message: verifier_pb2.VerifyRequest) -> None:
        """The peer opens, drafts for or closes a sequence."""
        kind = message.WhichOneof("event")
        if kind == "open" and message.sequence_id not in self._open:
            opened = message.open
            span = self._tracer.begin("verify", opened.traceparent, serves=True)
            self._open[message.sequence_id] = _Sequence(span, len(opened.prompt_token_ids))
        elif kind == "draft" and (sequence := self._open.get(message.sequence_id)) is not None:
            sequence.drafts += 1
        elif kind == "close":
            self._end(message.sequence_id, error=_LEFT)

    def told(self, message: verifier_pb2.VerifyResponse) -> None:
        """The peer hears of a sequence's round, or of its end."""
        sequence = self._open.get(message.sequence_id)
        if sequence is None:
            return
        match message.WhichOneof("event"):
            case "outcome":
                _count(sequence, message.outcome)
            case "finished":
                finished = message.finished
                reason = sampling_pb2.FinishReason.Name(finished.reason).removeprefix("FINISH_REASON_").lower()
                self._end(message.sequence_id, reason, finished.queue_us, finished.cached_tokens)
            case "error":
                self._end(message.sequence_id, error=status_code_name(message.error.code).lower())

    def over(self) -> None:
        """The stream has ended, and its sequences with it."""
        for sequence_id in list(self._open):
            self._end(sequence_id, error=_LEFT)

    def _end(
        self, sequence_id: int, reason: str = "", queue_us: int = 0, cached_tokens: int = 0, error: str = ""
    ) -> None:
        sequence = self._open.pop(sequence_id, None)
        if sequence is None:
            return
        end = {"gen_ai.response.finish_reasons": [reason]} if reason else {"error.type": error}
        known = {"coppice.queue_ms": queue_us / 1000, "gen_ai.usage.cache_read.input_tokens": cached_tokens}
        sequence.span.end(
            {
                "gen_ai.usage.input_tokens": sequence.num_prompt,
                "gen_ai.usage.output_tokens": sequence.tokens,
                "coppice.rounds": sequence.rounds,
                "coppice.drafts": sequence.drafts,
                "coppice.draft_tokens": sequence.draft_tokens,
                "coppice.accepted_tokens": sequence.accepted_tokens,
                "coppice.stale_drafts": sequence.stale_drafts,
                "coppice.near_ties": sequence.near_ties,
                "coppice.forward_ms": sequence.forward_us / 1000,
                "coppice.linger_ms": sequence.linger_us / 1000,
                **(known if reason else {}),
                **end,
            },
            failed=error in _FAULTS,
        )


def _count(sequence: _Sequence, outcome: verifier_pb2.Outcome) -> None:
    sequence.rounds += 1
    sequence.tokens += len(outcome.token_ids)
    sequence.draft_tokens += outcome.draft_nodes
    sequence.accepted_tokens += len(outcome.accepted_nodes)
    sequence.stale_drafts += outcome.stale_drafts
    sequence.near_ties += outcome.near_ties
    sequence.forward_us += outcome.pass_us
    sequence.linger_us += outcome.linger_us
