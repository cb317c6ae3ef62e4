"""What an orchestrator's messages to a verifier may take."""

from __future__ import annotations

from coppice.v1 import verifier_pb2
from coppice.wire.message_sizes import LISTED_ID_BYTES, SAMPLING_BYTES, STOPPING_BYTES, TREE_BYTES, MessageSizes

# Of what has no limit of its own: ids, traces, numbers.
_OTHER_BYTES = 16 * 1024


def request_sizes(max_context: int) -> MessageSizes:
    """What the fields of a VerifyRequest may take with a context of `max_context` tokens, lists packed."""
    most_bytes = {
        "open.prompt_token_ids": LISTED_ID_BYTES * max_context,
        "open.sampling": SAMPLING_BYTES,
        "open.stopping": STOPPING_BYTES,
        "draft.tree": TREE_BYTES,
    }
    return MessageSizes(verifier_pb2.VerifyRequest, most_bytes)


def max_request_bytes(max_context: int) -> int:
    """The most bytes of a VerifyRequest with a context of `max_context` tokens: an opening, or a draft."""
    opening = LISTED_ID_BYTES * max_context + SAMPLING_BYTES + STOPPING_BYTES
    return max(opening, TREE_BYTES) + _OTHER_BYTES
