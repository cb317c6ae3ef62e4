"""Times the orchestrator's rounds from inside: from a message's arrival to the leaving of what follows from it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from coppice.v1 import drafter_pb2, verifier_pb2
from orchestrator.peers.drafter_client import DrafterClient
from orchestrator.peers.verifier_client import VerifierClient


class Probe:
    """Listens to one verifier's and one drafter's messages.

    A round's time is that from an outcome's arrival until the drafter's message has been written, and from the tree's
    arrival until the draft for the verifier has been. Everything between happens within these two calls.
    """

    def __init__(self, verifier: VerifierClient, drafter: DrafterClient) -> None:
        self.round_us: list[float] = []
        # When the message that is being handled came.
        self._came_s = 0.0
        # By the drafter's sequence: the first half of a round.
        self._first_half_s: dict[int, float] = {}
        # The drafter's sequence whose tree is being handled.
        self._tree_of: int | None = None
        _wrap(verifier, "on_message", before=self._on_outcome)
        _wrap(drafter, "on_message", before=self._on_tree)
        _wrap(drafter.stream, "send", after=self._told_drafter)
        _wrap(verifier.stream, "send", after=self._sent_draft)

    def reset(self) -> None:
        """Begin anew."""
        self.round_us.clear()

    def _on_outcome(self, message: verifier_pb2.VerifyResponse) -> None:
        self._came_s, self._tree_of = time.perf_counter(), None

    def _told_drafter(self, message: drafter_pb2.DraftRequest) -> None:
        if message.HasField("outcome"):
            self._first_half_s[message.sequence_id] = time.perf_counter() - self._came_s

    def _on_tree(self, message: drafter_pb2.DraftResponse) -> None:
        self._came_s, self._tree_of = time.perf_counter(), message.sequence_id

    def _sent_draft(self, message: verifier_pb2.VerifyRequest) -> None:
        if self._tree_of is None or not message.HasField("draft"):
            return
        first_s = self._first_half_s.pop(self._tree_of, None)
        if first_s is not None:
            self.round_us.append(1e6 * (first_s + time.perf_counter() - self._came_s))


def _wrap(
    owner: object, name: str, before: Callable[[Any], None] | None = None, after: Callable[[Any], None] | None = None
) -> None:
    inner: Callable[[Any], None] = getattr(owner, name)

    def outer(message: Any) -> None:
        if before is not None:
            before(message)
        inner(message)
        if after is not None:
            after(message)

    setattr(owner, name, outer)
