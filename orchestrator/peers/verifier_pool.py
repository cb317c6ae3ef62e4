"""Pool of verifiers: replicas of one model."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
import math
from collections.abc import Sequence

from coppice.core.errors import IncompatibleError, OverloadedError, UnavailableError
from coppice.core.prefix_digests import prefix_digests
from coppice.net.certificates import Certificates
from coppice.v1 import verifier_pb2
from orchestrator.peers.peer_channel import Dial, dial
from orchestrator.peers.routing import DEFAULT_BLOCK_TOKENS, PrefixMemory, cost
from orchestrator.peers.verifier_client import VerifierClient, VerifierHandler, VerifierInfo
from orchestrator.request.rounds import VerifyOpening

logger = logging.getLogger(__name__)

# Seconds to wait for the other verifiers' first answers, once one is connected.
FIRST_ANSWERS_S = 3.0
# How long there is none but refused verifiers until the target counts as replaced, and how often that is looked at.
REPLACED_S, LOOK_S = 10.0, 1.0


class VerifierPool:
    """Distributes sequences over connected verifiers of the same model.

    Sequences of a lost verifier are reopened with their committed tokens, on another one at once or on the first that
    returns. After `resume_s` seconds without one they fail with UnavailableError.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        resume_s: float,
        certificates: Certificates | None = None,
        dial: Dial = dial,
        revision: str = "",
    ) -> None:
        """With a `revision` the model served here is that of verifiers with this TARGET_REVISION."""
        self._resume_s = resume_s
        self._revision = revision
        # Every verifier, connected or not.
        self.clients = tuple(VerifierClient(address, self, certificates, dial) for address in addresses)
        self._prefixes = {client: PrefixMemory() for client in self.clients}
        # Number of the last choice of each: among equals, the one chosen longest ago is next.
        self._turns = dict.fromkeys(self.clients, 0)
        self._turn = itertools.count(1)
        # Connected, with the model served here; and the most of these at once.
        self._usable: list[VerifierClient] = []
        self._most_usable = 0
        # Sequences that wait for a verifier, in order.
        self._waiting: dict[VerifierHandler, None] = {}
        self._giving_up: asyncio.TimerHandle | None = None
        self._lost = False
        # Set once `replaced` has returned.
        self.is_replaced = False
        # Sequences moved off lost verifiers.
        self.num_rehomed = 0
        self._changed = asyncio.Event()
        self._info: VerifierInfo | None = None
        self.tokenizer = verifier_pb2.GetTokenizerResponse()

    @property
    def info(self) -> VerifierInfo:
        """Model and limits served here; available after the first connection."""
        if self._info is None:
            raise UnavailableError("no verifier has been connected yet")
        return self._info

    @property
    def num_usable(self) -> int:
        """Usable verifiers."""
        return len(self._usable)

    def is_usable(self, address: str) -> bool:
        """Whether the verifier at this address is usable."""
        return any(client.address == address for client in self._usable)

    @property
    def num_sequences(self) -> int:
        """Sequences that are open or wait for a verifier."""
        return len(self._waiting) + sum(client.num_sequences for client in self.clients)

    def refusals(self) -> list[str]:
        """Verifiers that are refused, in words for clients: addresses and details are only logged."""
        refused = sum(client.stream.refusal is not None for client in self.clients)
        return ["a verifier: serves something else than the others"] * refused

    async def connect(self, timeout_s: float) -> None:
        """Connect for the first time. The target is that of most verifiers of the revision which answer soon.

        Raises:
            UnavailableError: no verifier connected within `timeout_s`.
        """
        for client in self.clients:
            client.stream.start()
        try:
            async with asyncio.timeout(timeout_s):
                while not self._usable:
                    await self.changed()
        except TimeoutError as error:
            raise UnavailableError(self._absence(timeout_s)) from error
        try:
            async with asyncio.timeout(FIRST_ANSWERS_S):
                for client in self.clients:
                    await client.stream.settled(patient=False)
        except TimeoutError:
            logger.warning("not every verifier has answered, continuing without them")
        self._settle_on(_most_common([client for client in self.clients if client.is_known]))

    async def changed(self) -> None:
        """Wait for the next change of the usable verifiers."""
        await self._changed.wait()

    async def replaced(self) -> None:
        """Wait until the target has been replaced: none serves it, and as many as ever did at once serve another one.

        A single odd verifier does not replace others that are away for a while.
        """
        since_s, now_s = math.inf, asyncio.get_running_loop().time
        while now_s() - since_s < REPLACED_S:
            await asyncio.sleep(LOOK_S)
            is_replaced = self._lost and len(self.refusals()) >= self._most_usable
            since_s = min(since_s, now_s()) if is_replaced else math.inf
        self.is_replaced = True

    async def close(self) -> None:
        """Close all streams; open sequences fail."""
        self._usable.clear()
        for client in self.clients:
            await client.close()
        self._give_up()
        if self._giving_up is not None:
            self._giving_up.cancel()

    def join(self, handler: VerifierHandler) -> None:
        """Open a sequence, now or once a verifier is connected.

        Raises:
            UnavailableError: all verifiers have been gone for longer than `resume_s`.
        """
        if not self._lost:
            self._place(handler)
        elif not handler.finish_if_complete():
            raise UnavailableError("no verifier is connected")

    def leave(self, handler: VerifierHandler) -> None:
        """Remove a sequence from those that wait for a verifier."""
        self._waiting.pop(handler, None)

    def check(self, client: VerifierClient, info: VerifierInfo) -> None:
        """Refuse a verifier whose outputs may differ from the others'; the first one, if it has another revision."""
        if self._info is None:
            if self._revision in ("", info.target_revision):
                return
            error = IncompatibleError(
                f"the verifier {client.address} has the target revision {info.target_revision!r}, and "
                f"{self._revision!r} is wanted"
            )
        elif differences := _differences(info, self._info):
            error = IncompatibleError(
                f"the verifier {client.address} does not serve what is served here: {', '.join(differences)}"
            )
        else:
            return
        if str(error) != str(client.stream.refusal):
            logger.error("%s", error)
        raise error

    def on_up(self, client: VerifierClient) -> None:
        """Use a verifier, first for the sequences that wait."""
        if self._info is not None and _differences(client.info, self._info):
            # The reference was settled after its handshake; the next handshake reports the difference.
            client.stream.drop()
            return
        self._lost = False
        if self._giving_up is not None:
            self._giving_up.cancel()
        self._usable.append(client)
        if self._info is not None:
            self._most_usable = max(self._most_usable, len(self._usable))
        waiting, self._waiting = list(self._waiting), {}
        for handler in waiting:
            self._place(handler)
        self._announce()

    def on_down(self, client: VerifierClient, handlers: Sequence[VerifierHandler]) -> None:
        """Move a verifier's sequences to others, or keep them for `resume_s`."""
        self._prefixes[client].clear()
        if client in self._usable:
            self._usable.remove(client)
            if not self._usable:
                self._giving_up = asyncio.get_running_loop().call_later(self._resume_s, self._give_up)
        if handlers:
            logger.warning("the verifier %s is lost with %d sequences running", client.address, len(handlers))
        self.num_rehomed += len(handlers)
        for handler in handlers:
            self._place(handler)
        self._announce()

    def on_refused(self, handler: VerifierHandler, error: OverloadedError) -> None:
        """Try another verifier, unless all are full or each has refused."""
        if handler.refused() >= len(self._usable) or all(client.is_full for client in self._usable):
            handler.on_failed(error)
        else:
            self._place(handler)

    def on_idle(self, client: VerifierClient) -> None:
        """Disconnect from a draining verifier, so that it need not wait, if another one is available."""
        if any(not other.is_draining for other in self._usable):
            client.stream.drop()

    def _settle_on(self, client: VerifierClient) -> None:
        self._info, self.tokenizer = client.info, client.tokenizer
        for other in list(self._usable):
            if _differences(other.info, client.info):
                # The next handshake reports the difference.
                self._usable.remove(other)
                other.stream.drop()
        self._most_usable = len(self._usable)

    def _place(self, handler: VerifierHandler) -> None:
        if not self._usable:
            # Complete sequences need no verifier.
            if not handler.finish_if_complete():
                self._waiting[handler] = None
        elif (opening := handler.opening()) is not None:
            self._choose(opening).open(handler, opening)

    def _choose(self, opening: VerifyOpening) -> VerifierClient:
        """Best verifier for a sequence; a draining one only if there is no other."""
        if len(self.clients) == 1:
            return self._usable[0]
        block_tokens = self.info.shared_block_tokens
        digests = prefix_digests(opening.token_ids, block_tokens, opening.cache_salt)
        num_blocks = -(-len(opening.token_ids) // (block_tokens or DEFAULT_BLOCK_TOKENS))

        def rank(client: VerifierClient) -> tuple[bool, bool, int, bytes, int]:
            blocks_cost = cost(client.candidate(self._prefixes[client].num_known(digests)), num_blocks)
            preference = _preference(client.info.instance_id, digests)
            return client.is_full, client.is_draining, blocks_cost, preference, self._turns[client]

        best = min(self._usable, key=rank)
        self._prefixes[best].add(digests)
        self._turns[best] = next(self._turn)
        return best

    def _give_up(self) -> None:
        self._lost = True
        waiting, self._waiting = list(self._waiting), {}
        for handler in waiting:
            handler.on_failed(UnavailableError("the verifier was lost and did not come back in time"))

    def _absence(self, timeout_s: float) -> str:
        parts = []
        for client in self.clients:
            reason = client.stream.last_failure or "no answer"
            missed = f"the verifier {client.address} was not reached within {timeout_s:g} s ({reason})"
            parts.append(str(client.stream.refusal or missed))
        return "; ".join(parts)

    def _announce(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _preference(instance_id: str, digests: Sequence[bytes]) -> bytes:
    """Rank of a verifier for prompts with this first block (rendezvous hashing), the same in every orchestrator.

    Empty, so that equals take turns, without a whole block or an id.
    """
    return (
        hashlib.blake2b(digests[0] + instance_id.encode(), digest_size=8).digest() if digests and instance_id else b""
    )


def _differences(info: VerifierInfo, reference: VerifierInfo) -> list[str]:
    """Differences that could change outputs or end them early, in words."""
    names = (
        "model",
        "tokenizer_fingerprint",
        "vocab_size",
        "eos_token_ids",
        "exactness",
        "dtype",
        "quantization",
        "serving_fingerprint",
    )
    different = [
        f"{name} {getattr(info, name)} instead of {getattr(reference, name)}"
        for name in names
        if getattr(info, name) != getattr(reference, name)
    ]
    if info.max_context_tokens < reference.max_context_tokens:
        different.append(f"max_context_tokens {info.max_context_tokens} instead of {reference.max_context_tokens}")
    if missing := set(reference.acceptance_rules) - set(info.acceptance_rules):
        different.append(f"without acceptance_rules {sorted(missing)}")
    return different


def _most_common(clients: Sequence[VerifierClient]) -> VerifierClient:
    """The first verifier that agrees with most others."""

    def num_alike(client: VerifierClient) -> int:
        infos = [other.info for other in clients]
        return sum(not (_differences(info, client.info) or _differences(client.info, info)) for info in infos)

    return max(clients, key=num_alike)
