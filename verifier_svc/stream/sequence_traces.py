"""A sequence's span: attributes of its rounds."""

from __future__ import annotations

from dataclasses import dataclass, field

from coppice.obs.sequence_spans import SequenceSpans
from coppice.obs.tracing import Attributes, Tracer
from coppice.v1 import sampling_pb2, verifier_pb2


def sequence_traces(tracer: Tracer) -> SequenceSpans:
    """Spans of one stream's sequences; those left open by the peer are cancelled."""
    return SequenceSpans(tracer, "verify", lambda opened: _Rounds(len(opened.prompt_token_ids)), left="cancelled")


@dataclass
class _Rounds:
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
    # Set at the end.
    end: Attributes = field(default_factory=dict)

    def heard(self, message: verifier_pb2.VerifyRequest) -> None:
        self.drafts += message.HasField("draft")

    def told(self, message: verifier_pb2.VerifyResponse) -> None:
        if message.HasField("outcome"):
            outcome = message.outcome
            self.rounds += 1
            self.tokens += len(outcome.token_ids)
            self.draft_tokens += outcome.draft_nodes
            self.accepted_tokens += len(outcome.accepted_nodes)
            self.stale_drafts += outcome.stale_drafts
            self.near_ties += outcome.near_ties
            self.forward_us += outcome.pass_us
            self.linger_us += outcome.linger_us
        elif message.HasField("finished"):
            finished = message.finished
            reason = sampling_pb2.FinishReason.Name(finished.reason).removeprefix("FINISH_REASON_").lower()
            self.end = {
                "coppice.queue_ms": finished.queue_us / 1000,
                "gen_ai.usage.cache_read.input_tokens": finished.cached_tokens,
                "gen_ai.response.finish_reasons": [reason],
            }

    def attributes(self) -> Attributes:
        return {
            "gen_ai.usage.input_tokens": self.num_prompt,
            "gen_ai.usage.output_tokens": self.tokens,
            "coppice.rounds": self.rounds,
            "coppice.drafts": self.drafts,
            "coppice.draft_tokens": self.draft_tokens,
            "coppice.accepted_tokens": self.accepted_tokens,
            "coppice.stale_drafts": self.stale_drafts,
            "coppice.near_ties": self.near_ties,
            "coppice.forward_ms": self.forward_us / 1000,
            "coppice.linger_ms": self.linger_us / 1000,
            **self.end,
        }
