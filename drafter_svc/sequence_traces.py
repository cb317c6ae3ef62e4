"""Spans of a drafter's sequences."""

from __future__ import annotations

from dataclasses import dataclass

from coppice.obs.sequence_spans import SequenceSpans
from coppice.obs.tracing import Attributes, Tracer
from coppice.v1 import drafter_pb2


def sequence_traces(tracer: Tracer, kind: str) -> SequenceSpans:
    """Spans of one stream's sequences at a drafter of this kind."""
    return SequenceSpans(tracer, "draft", lambda opened: _Drafts(kind, len(opened.prompt_token_ids)))


@dataclass
class _Drafts:
    kind: str
    num_prompt: int
    outcomes: int = 0
    tokens: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    draft_us: int = 0

    def heard(self, message: drafter_pb2.DraftRequest) -> None:
        if message.HasField("outcome"):
            self.outcomes += 1
            self.tokens += len(message.outcome.token_ids)

    def told(self, message: drafter_pb2.DraftResponse) -> None:
        if message.HasField("tree"):
            self.drafts += 1
            self.draft_tokens += len(message.tree.tree.token_ids)
            self.draft_us += message.tree.draft_us

    def attributes(self) -> Attributes:
        return {
            "coppice.source": self.kind,
            "gen_ai.usage.input_tokens": self.num_prompt,
            "coppice.outcomes": self.outcomes,
            "coppice.committed_tokens": self.tokens,
            "coppice.drafts": self.drafts,
            "coppice.draft_tokens": self.draft_tokens,
            "coppice.draft_ms": self.draft_us / 1000,
        }
