"""Drafter clients: one stream per drafter for all sequences; losing one only costs speed."""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from coppice.core.errors import IncompatibleError, InvalidTreeError
from coppice.core.prefix_digests import prefix_digests
from coppice.core.tree import TokenTree
from coppice.net.certificates import Certificates
from coppice.net.rpc import status_code_name
from coppice.obs.logs import of_request
from coppice.v1 import drafter_pb2, drafter_pb2_grpc, sampling_pb2
from coppice.wire import convert as wire
from coppice.wire.unreadable import received
from orchestrator.peers.peer_channel import Dial, PeerChannel, dial
from orchestrator.peers.peer_stream import PeerStream
from orchestrator.peers.routing import PrefixMemory
from orchestrator.peers.verifier_client import VerifierInfo
from orchestrator.request.ahead import MOST_TREES, ExpectedDraft
from orchestrator.request.rounds import DraftOpening, Outcome

logger = logging.getLogger(__name__)

HANDSHAKE_TIMEOUT_S = 5.0
# bfloat16.
BYTES_PER_NUMBER = 2
# Answers that a drafter may give to a message about a sequence (ours give one); most that it may catch up on, of one
# sequence or of all that have ended, where each 64 KiB count as one; and how long a drafter that sends more is refused.
MOST_ANSWERS = 8
MOST_OWED = 1024
_STRAY_BYTES = 65_536
FLOOD_PAUSE_S = 60.0
# Kinds name sources in requests, messages and metrics. Models are named in logs, that much of it.
_KIND = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_MODEL_CHARACTERS = 200


class DraftHandler(Protocol):
    """Owner of a sequence. Calls come from the event loop and must be quick."""

    @property
    def request_id(self) -> str: ...

    def draft_opening(self) -> DraftOpening:
        """Current state of the sequence."""

    def on_tree(self, source: str, base_length: int, assumed: tuple[int, ...], tree: TokenTree) -> None: ...

    def on_ahead(self, source: str, base_length: int, drafts: Sequence[ExpectedDraft]) -> None:
        """Receive trees after likely outcomes of the round that starts at `base_length`."""

    def on_drafters_changed(self) -> None:
        """A drafter of this sequence connected or disconnected."""

    def on_drafter_replaced(self, gone: DrafterClient, other: DrafterClient) -> None:
        """A drafter of this sequence was lost; another of its kind takes over."""


@dataclass(frozen=True, slots=True)
class DraftedTarget:
    """Properties of a target that drafters may depend on, besides its tokenizer.

    Features have `feature_size` numbers per token, of the states of `feature_layers`; 0 and none if the verifier sends
    none. An empty fingerprint is unknown.
    """

    feature_size: int = 0
    feature_layers: tuple[int, ...] = ()
    weights_fingerprint: str = ""

    @classmethod
    def of(cls, info: VerifierInfo) -> DraftedTarget:
        """Properties of a verifier's target."""
        return cls(info.feature_size, info.feature_layers, info.weights_fingerprint)

    def lack(self, described: drafter_pb2.DrafterServiceDescribeResponse) -> str:
        """Features that a drafter needs, and those offered, in words; empty if they are the same."""
        needed, offered = tuple(described.feature_layers), self.feature_layers
        if 0 < described.feature_size == self.feature_size and needed == offered:
            return ""
        given = f"{self.feature_size} of layers {_listed(offered)}" if self.feature_size else "none"
        return f"{described.feature_size} numbers per token of layers {_listed(needed)}, and the verifier gives {given}"


def _listed(layers: Sequence[int]) -> str:
    return ", ".join(map(str, layers))


NO_FEATURES = DraftedTarget()


class DrafterClient:
    """Follows sequences on one drafter, which must match the target's tokenizer and features."""

    def __init__(
        self,
        address: str,
        tokenizer_fingerprint: str,
        certificates: Certificates | None = None,
        dial: Dial = dial,
        target: DraftedTarget = NO_FEATURES,
    ) -> None:
        self.address = address
        self._fingerprint = tokenizer_fingerprint
        self._target = target
        self._channel = PeerChannel(address, drafter_pb2_grpc.DrafterServiceStub, certificates, dial)
        self._ids = itertools.count(1)
        self._handlers: dict[int, DraftHandler] = {}
        # Other drafters, possible replicas.
        self.others: Sequence[DrafterClient] = ()
        # By sequence: tokens that the drafter has, and its limits (most nodes, row multiple).
        self._lengths: dict[int, int] = {}
        self._limits: dict[int, tuple[int, int]] = {}
        # Answers that it may still give: by sequence, and for those that have ended.
        self._owed: dict[int, int] = {}
        self._strays_left = MOST_OWED
        # When it may connect again after a flood (`time.monotonic`).
        self._refused_until_s = 0.0
        # Set by the handshake.
        self.kind = ""
        # Reason of the refusal, in words for clients.
        self.refusal = ""
        self.needs_features = False
        self.feature_size = 0
        self.max_prompt_features = 0
        self.samples_trees = False
        self.drafts_ahead = False
        # Block size of its prefix cache in tokens, and prefixes of sequences sent to it.
        self.shared_block_tokens = 0
        self.prefixes = PrefixMemory()
        # Sequences moved to a replica, and sequences dropped after an error.
        self.num_handed_over = 0
        self.num_dropped = 0
        # Calibrated probability that its likeliest child is right; 0 if not measured.
        self.acceptance = 0.0
        self.stream: PeerStream[drafter_pb2.DraftRequest, drafter_pb2.DraftResponse] = PeerStream(
            f"drafter {address}", lambda: self._channel.stub.Draft(), self
        )

    @property
    def connected(self) -> bool:
        """Whether drafts can be requested."""
        return self.stream.connected

    @property
    def num_sequences(self) -> int:
        """Sequences open there."""
        return len(self._handlers)

    def follows(self, sequence_id: int) -> bool:
        """Whether a sequence gets drafts from here."""
        return self.connected and sequence_id in self._handlers

    async def close(self) -> None:
        """Close the stream."""
        await self.stream.stop()
        await self._channel.close()

    def join(self, handler: DraftHandler) -> int:
        """Follow a sequence, now or once the drafter is connected; returns its id."""
        sequence_id = next(self._ids)
        self._handlers[sequence_id] = handler
        if self.connected:
            self._open(sequence_id, handler)
        return sequence_id

    def outcome(self, sequence_id: int, outcome: Outcome, max_nodes: int, row_multiple: int) -> None:
        """Report committed tokens and, if changed, the next round's limits.

        The outcome may cover several rounds; tokens that the drafter already has are left out.
        """
        if sequence_id in self._lengths:
            known = self._lengths[sequence_id] - outcome.base_length
            self._lengths[sequence_id] = outcome.base_length + len(outcome.token_ids)
            token_ids = outcome.token_ids[known:]
            known_nodes, known_multiple = self._limits[sequence_id]
            self._limits[sequence_id] = max_nodes, row_multiple
            message = drafter_pb2.DraftOutcome(
                base_length=outcome.base_length + known,
                token_ids=token_ids,
                features=self._features_of_last(len(token_ids), outcome.features),
                max_nodes=max_nodes if max_nodes != known_nodes else None,
                row_multiple=row_multiple if row_multiple != known_multiple else None,
            )
            self._send(drafter_pb2.DraftRequest(sequence_id=sequence_id, outcome=message))

    def show_prompt(self, sequence_id: int, first_token: int, features: bytes) -> None:
        """Send features of the prompt's tokens from `first_token` on, if the drafter reads them."""
        if self.max_prompt_features and sequence_id in self._lengths:
            request = drafter_pb2.DraftRequest(sequence_id=sequence_id)
            request.prompt_features.first_token = first_token
            request.prompt_features.features = features
            self._send(request)

    def expect(self, sequence_id: int, base_length: int, tree: TokenTree) -> None:
        """Send the tree under verification, if it follows what the drafter has."""
        if self._lengths.get(sequence_id) == base_length:
            request = drafter_pb2.DraftRequest(sequence_id=sequence_id)
            request.expect.base_length = base_length
            # Without log-probabilities: the drafter has its own.
            request.expect.tree.token_ids.extend(tree.token_ids)
            request.expect.tree.parents.extend(tree.parents)
            self._send(request)

    def leave(self, sequence_id: int) -> None:
        """Stop following a sequence."""
        self._lengths.pop(sequence_id, None)
        self._limits.pop(sequence_id, None)
        self._strays_left = min(MOST_OWED, self._strays_left + self._owed.pop(sequence_id, 0))
        if self._handlers.pop(sequence_id, None) is not None and not self.stream.withdraw(sequence_id):
            close = drafter_pb2.CloseDraft()
            self.stream.send(drafter_pb2.DraftRequest(sequence_id=sequence_id, close=close), sequence_id)

    async def handshake(self) -> None:
        """Check that the drafter matches the target's tokenizer and features, and has not flooded of late."""
        if time.monotonic() < self._refused_until_s:
            self.refusal = f"drafter {self.kind}: sends trees that nobody asked for"
            raise IncompatibleError(
                f"drafter {self.kind} at {self.address} has sent more trees than it was asked for; it is refused for "
                f"{FLOOD_PAUSE_S:.0f} s"
            )
        await self._channel.renew()
        stub = self._channel.stub
        described = await stub.Describe(drafter_pb2.DrafterServiceDescribeRequest(), timeout=HANDSHAKE_TIMEOUT_S)
        if not _KIND.fullmatch(received(described).kind):
            self.refusal = "a drafter: its kind is no name"
            raise IncompatibleError(
                f"the drafter at {self.address} calls itself {described.kind[:64]!a}: kinds are up to 64 "
                "letters, digits, dots, dashes and underscores"
            )
        who = f"drafter {described.kind} ({described.model[:_MODEL_CHARACTERS]!a}) at {self.address}"
        if described.tokenizer_fingerprint != self._fingerprint:
            self.refusal = f"drafter {described.kind}: has another tokenizer than the target"
            raise IncompatibleError(
                f"{who} has another tokenizer than the "
                f"target: its fingerprint is {described.tokenizer_fingerprint[:64]!a}, the target's is "
                f"{self._fingerprint}. Token ids would mean different text, also where the vocabularies have the "
                "same size"
            )
        if described.needs_features and (lack := self._target.lack(described)):
            self.refusal = f"drafter {described.kind}: needs other features than the target's"
            raise IncompatibleError(f"{who} needs the target's hidden states, {lack}")
        made_for, own = described.target_weights_fingerprint, self._target.weights_fingerprint
        if made_for and own and made_for != own:
            self.refusal = f"drafter {described.kind}: was made for another target"
            raise IncompatibleError(
                f"{who} was made for a target with the weights {made_for[:64]!a}, and the target's weights are {own}"
            )
        self.kind = described.kind
        self.needs_features = described.needs_features
        self.feature_size = described.feature_size if described.needs_features else 0
        self.max_prompt_features = described.max_prompt_features if described.needs_features else 0
        self.samples_trees = sampling_pb2.ACCEPTANCE_RULE_TRAVERSAL in described.acceptance_rules
        self.drafts_ahead = described.drafts_ahead
        self.shared_block_tokens = described.shared_block_tokens
        self.acceptance = described.acceptance_by_rank[0] if described.acceptance_by_rank else 0.0

    def on_up(self) -> None:
        """Open all sequences, and take over those of disconnected replicas."""
        self._channel.reached()
        self._owed.clear()
        self._strays_left = MOST_OWED
        for sequence_id, handler in list(self._handlers.items()):
            self._open(sequence_id, handler)
            handler.on_drafters_changed()
        for other in self.others:
            if not other.connected and other._can_be_replaced_by(self):
                other._hand_over()

    def on_down(self) -> None:
        """Move the sequences to a replica, or tell their owners that no drafts will come."""
        self.prefixes.clear()
        if self._handlers:
            logger.warning("drafter %s at %s lost with %d sequences", self.kind, self.address, len(self._handlers))
        self._hand_over()
        for handler in list(self._handlers.values()):
            handler.on_drafters_changed()

    def on_message(self, message: drafter_pb2.DraftResponse) -> None:
        """Dispatch a message to its sequence. A drafter that errs in a sequence or floods it is dropped from it."""
        handler = self._handlers.get(message.sequence_id)
        if handler is None:
            self._on_stray(message)
            return
        owed = self._owed[message.sequence_id] = self._owed.get(message.sequence_id, MOST_ANSWERS) - 1
        if owed < 0:
            self._drop(message.sequence_id, f"more than {MOST_ANSWERS} answers to a message")
            return
        if message.WhichOneof("event") == "error":
            code = status_code_name(message.error.code)
            self._drop(message.sequence_id, f"{code}: {message.error.message}")
            return
        try:
            if message.WhichOneof("event") == "ahead":
                self._on_ahead(handler, message.ahead.trees[:MOST_TREES])
                return
            tree = wire.tree_from_proto(message.tree.tree)
            assumed = tuple(message.tree.assumed_token_ids)
            handler.on_tree(self.kind, message.tree.base_length, assumed, tree)
        except InvalidTreeError as error:
            self._drop(message.sequence_id, str(error))
        except Exception:  # a bug of ours costs this sequence its drafts, not the stream of all
            logger.exception("a tree of drafter %s could not be used", self.kind, extra=of_request(handler.request_id))
            self._drop(message.sequence_id, "internal error")

    def _on_stray(self, message: drafter_pb2.DraftResponse) -> None:
        """Discard a message for no open sequence; a drafter that goes on sending them is refused for a while."""
        self._strays_left -= 1 + message.ByteSize() // _STRAY_BYTES
        if self._strays_left < 0:
            self._refused_until_s = time.monotonic() + FLOOD_PAUSE_S
            self.stream.drop()

    def _send(self, request: drafter_pb2.DraftRequest, opening_bytes: int = 0) -> None:
        """Send a message about a sequence, which permits answers."""
        owed = self._owed.get(request.sequence_id, MOST_ANSWERS) + MOST_ANSWERS
        self._owed[request.sequence_id] = min(MOST_OWED, owed)
        self.stream.send(request, request.sequence_id, opening_bytes)

    def _on_ahead(self, handler: DraftHandler, messages: Sequence[drafter_pb2.DraftTree]) -> None:
        drafts: dict[int, list[ExpectedDraft]] = {}
        for one in messages:
            draft = ExpectedDraft(tuple(one.assumed_token_ids), one.outcome_log_prob, wire.tree_from_proto(one.tree))
            drafts.setdefault(one.base_length, []).append(draft)
        for base_length, of_a_round in drafts.items():
            handler.on_ahead(self.kind, base_length, of_a_round)

    def _hand_over(self) -> None:
        """Move each sequence to the least busy connected replica, if any."""
        replicas = [other for other in self.others if other.connected and self._can_be_replaced_by(other)]
        if replicas:
            self.num_handed_over += len(self._handlers)
            for handler in list(self._handlers.values()):
                handler.on_drafter_replaced(self, min(replicas, key=lambda replica: replica.num_sequences))

    def _features_of_last(self, num_tokens: int, features: bytes) -> bytes:
        """Features of the last `num_tokens` tokens, if the drafter needs any; it may have the earlier ones."""
        size = BYTES_PER_NUMBER * self.feature_size * num_tokens
        return features[max(0, len(features) - size) :] if self.needs_features else b""

    def _can_be_replaced_by(self, other: DrafterClient) -> bool:
        return (other.kind, other.needs_features, other.samples_trees) == (
            self.kind,
            self.needs_features,
            self.samples_trees,
        )

    def _drop(self, sequence_id: int, reason: str) -> None:
        handler = self._handlers.get(sequence_id)
        extra = of_request(handler.request_id if handler is not None else "")
        logger.warning("drafter %s is dropped from a sequence: %s", self.kind, reason, extra=extra)
        self.num_dropped += 1
        self.leave(sequence_id)
        if handler is not None:
            handler.on_drafters_changed()

    def _open(self, sequence_id: int, handler: DraftHandler) -> None:
        opening = handler.draft_opening()
        self._lengths[sequence_id] = len(opening.token_ids)
        self._limits[sequence_id] = opening.max_nodes, opening.row_multiple
        message = drafter_pb2.OpenDraft(
            prompt_token_ids=opening.token_ids,
            sampling=wire.sampling_to_proto(opening.sampling),
            max_nodes=opening.max_nodes,
            row_multiple=opening.row_multiple,
            acceptance=opening.acceptance,
            request_id=opening.request_id,
            cache_salt=opening.cache_salt,
            traceparent=opening.traceparent,
            synchronous=opening.synchronous,
            denoising=wire.denoising_to_proto(opening.denoising),
        )
        request = drafter_pb2.DraftRequest(sequence_id=sequence_id, open=message)
        self._send(request, request.ByteSize())


class DrafterPool:
    """All drafters, by kind; drafters of one kind are replicas."""

    def __init__(self, clients: Sequence[DrafterClient]) -> None:
        # Every drafter, connected or not.
        self.clients = tuple(clients)
        for client in self.clients:
            client.others = [other for other in self.clients if other is not client]

    def connected_kinds(self) -> tuple[str, ...]:
        """Kinds with a connected drafter."""
        return tuple(sorted({client.kind for client in self.clients if client.connected}))

    def known_kinds(self) -> frozenset[str]:
        """Kinds that have been connected at some time."""
        return frozenset(client.kind for client in self.clients if client.kind)

    def refusals(self) -> list[str]:
        """Drafters that are refused, in words for clients: addresses and details are only logged."""
        return [client.refusal for client in self.clients if client.stream.refusal is not None]

    def choose(
        self, kinds: Sequence[str], token_ids: Sequence[int] = (), cache_salt: str = ""
    ) -> tuple[DrafterClient, ...]:
        """Best replica of each given kind, or of every kind, for a sequence with these tokens.

        Connected ones first, then the least busy (a request needs many drafts, each of which costs about as much as
        reading a block), then the one whose cache has the longest prefix.
        """
        replicas: dict[str, list[DrafterClient]] = {}
        for client in self.clients:
            if client.kind and (not kinds or client.kind in kinds):
                replicas.setdefault(client.kind, []).append(client)
        return tuple(_best(of_a_kind, token_ids, cache_salt) for of_a_kind in replicas.values())

    def choose_sampling(
        self, kinds: Sequence[str], token_ids: Sequence[int] = (), cache_salt: str = ""
    ) -> tuple[DrafterClient, ...]:
        """The drafter, if any, whose sampled trees the request gets, out of those of `choose`.

        Sampled trees must not be merged or selected by content, so one drafter is chosen in advance: connected, then by
        acceptance.
        """
        sampling = [client for client in self.choose(kinds, token_ids, cache_salt) if client.samples_trees]
        best = max(sampling, key=lambda client: (client.connected, client.acceptance), default=None)
        return () if best is None else (best,)

    async def start(self, timeout_s: float, require_all: bool) -> None:
        """Connect to every drafter; unreachable ones are retried in the background.

        Raises:
            IncompatibleError: `require_all`, and a drafter does not match or did not connect within `timeout_s`.
        """
        for client in self.clients:
            client.stream.start()
        for client in self.clients:
            try:
                async with asyncio.timeout(timeout_s):
                    await client.stream.settled(patient=require_all)
            except TimeoutError:
                logger.warning("drafter %s has not answered, continuing without it", client.address)
            if client.stream.refusal is not None:
                if require_all:
                    raise client.stream.refusal
                logger.error("%s", client.stream.refusal)
            elif require_all and not client.connected:
                reason = client.stream.last_failure or "no answer"
                raise IncompatibleError(f"the drafter {client.address} is required but not connected ({reason})")

    async def close(self) -> None:
        """Close every stream."""
        for client in self.clients:
            await client.close()


def _best(replicas: Sequence[DrafterClient], token_ids: Sequence[int], cache_salt: str) -> DrafterClient:
    if len(replicas) == 1:
        return replicas[0]
    lengths = {client.shared_block_tokens for client in replicas}
    digests = {length: prefix_digests(token_ids, length, cache_salt) for length in lengths}

    def rank(client: DrafterClient) -> tuple[bool, int, int]:
        num_known = client.prefixes.num_known(digests[client.shared_block_tokens])
        return not client.connected, client.num_sequences, -num_known

    best = min(replicas, key=rank)
    best.prefixes.add(digests[best.shared_block_tokens])
    return best
