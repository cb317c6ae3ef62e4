"""What an orchestrator's messages to a drafter may take."""

from __future__ import annotations

from coppice.v1 import drafter_pb2
from coppice.wire.message_sizes import SAMPLING_BYTES, TREE_BYTES, MessageSizes

# A drafter takes prompts of any length, and features of as many tokens as a round commits: two and a half million
# tokens, or the features of a thousand tokens of 8,192 numbers.
MAX_REQUEST_BYTES = 16 * 1024 * 1024
# Lists are packed.
REQUEST_SIZES = MessageSizes(drafter_pb2.DraftRequest, {"open.sampling": SAMPLING_BYTES, "expect.tree": TREE_BYTES})
