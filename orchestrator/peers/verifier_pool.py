"""All verifiers: replicas of one model, among which sequences are shared out."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Sequence

from coppice.core.errors import IncompatibleError, OverloadedError, UnavailableError
from coppice.core.prefix_digests import prefix_digests
from coppice.net.certificates import Certificates
from coppice.v1 import verifier_pb2
from orchestrator.peers.peer_channel import Dial, dial
from orchestrator.peers.routing import DEFAULT_BLOCK_TOKENS, PrefixMemory, cost
from orchestrator.peers.shared_affinity import SharedAffinity, verifier_digest
from orchestrator.peers.verifier_client import VerifierClient, VerifierHandler, VerifierInfo
from orchestrator.request.rounds import VerifyOpening

logger = logging.getLogger(__name__)

# How long the start waits for the first answers of the other verifiers, once one is connected.
FIRST_ANSWERS_S = 3.0


class VerifierPool:
    """Runs sequences on the verifiers that are connected and serve the same model.

    When a verifier is lost, its sequences are opened again with the tokens that they have by then: on another one at
    once, or on the first that comes back. Those for which that takes longer than `resume_s` fail with UnavailableError.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        resume_s: float,
        certificates: Certificates | None = None,
        dial: Dial = dial,
    ) -> None:
        self._resume_s = resume_s
        self._clients = tuple(VerifierClient(address, self, certificates, dial) for address in addresses)
        self._prefixes = {client: PrefixMemory() for client in self._clients}
        # When each was chosen last: among equals, the one that has waited longest is next.
        self._turns = dict.fromkeys(self._clients, 0)
        self._turn = itertools.count(1)
        # Connected, and of the model that is served here.
        self._usable: list[VerifierClient] = []
        # Sequences for which there is no verifier now, in order.
        self._waiting: dict[VerifierHandler, None] = {}
        self._giving_up: asyncio.TimerHandle | None = None
        self._lost = False
        # Sequences that had to leave a verifier which was lost.
        self.num_rehomed = 0
        self._changed = asyncio.Event()
        self._info: VerifierInfo | None = None
        # What orchestrators tell one another of where sequences went; None where they do not.
        self.affinity: SharedAffinity | None = None
        self.tokenizer = verifier_pb2.GetTokenizerResponse()

    @property
    def clients(self) -> tuple[VerifierClient, ...]:
        """Every verifier, connected or not."""
        return self._clients

    @property
    def info(self) -> VerifierInfo:
        """What is served here; known once a verifier has been connected."""
        if self._info is None:
            raise UnavailableError("no verifier has been connected yet")
        return self._info

    @property
    def num_usable(self) -> int:
        """Verifiers that sequences can go to now."""
        return len(self._usable)

    def is_usable(self, address: str) -> bool:
        """Whether sequences can go to the verifier at this address now."""
        return any(client.address == address for client in self._usable)

    @property
    def num_sequences(self) -> int:
        """Sequences that are open now, or wait for a verifier."""
        return len(self._waiting) + sum(client.num_sequences for client in self._clients)

    def refusals(self) -> list[str]:
        """Which verifiers are refused now, in words for clients: addresses and details are for the log."""
        refused = sum(client.stream.refusal is not None for client in self._clients)
        return ["a verifier: serves something else than the others"] * refused

    async def connect(self, timeout_s: float) -> None:
        """Connect for the first time. What most of the verifiers serve that answer soon is what is served here.

        Raises:
            UnavailableError: no verifier was there within `timeout_s`.
        """
        for client in self._clients:
            client.stream.start()
        try:
            async with asyncio.timeout(timeout_s):
                while not self._usable:
                    await self.changed()
        except TimeoutError as error:
            raise UnavailableError(self._absence(timeout_s)) from error
        try:
            async with asyncio.timeout(FIRST_ANSWERS_S):
                for client in self._clients:
                    await client.stream.settled(patient=False)
        except TimeoutError:
            logger.warning("not every verifier has answered, going on without")
        self._settle_on(_most_common([client for client in self._clients if client.is_known]))

    async def changed(self) -> None:
        """Return after the next change of which verifiers can be used."""
        await self._changed.wait()

    async def close(self) -> None:
        """Close every stream; sequences that are still open fail."""
        self._usable.clear()
        for client in self._clients:
            await client.close()
        self._give_up()
        if self._giving_up is not None:
            self._giving_up.cancel()

    def join(self, handler: VerifierHandler) -> None:
        """Open a sequence, now or as soon as there is a verifier again.

        Raises:
            UnavailableError: all verifiers have been away for too long.
        """
        if not self._lost:
            self._place(handler)
        elif not handler.finish_if_complete():
            raise UnavailableError("no verifier is connected")

    async def recall(self, token_ids: Sequence[int], cache_salt: str) -> None:
        """Before a sequence joins: find out where others sent its beginning, if that may matter and nobody knows here.

        Takes `shared_affinity.WAIT_S` at most, and nothing with one verifier.
        """
        if self.affinity is None or len(self._usable) < 2:
            return
        digests = prefix_digests(token_ids, self.info.shared_block_tokens, cache_salt)
        if not digests or any(self._prefixes[client].num_known(digests) for client in self._usable):
            return

        def on_found(verifier: bytes, num_blocks: int) -> None:
            for client in self._usable:
                if verifier_digest(client.info.instance_id) == verifier:
                    self._prefixes[client].add(digests[:num_blocks])

        await self.affinity.look_up(cache_salt, digests, on_found)

    def leave(self, handler: VerifierHandler) -> None:
        """Let a sequence no longer wait for a verifier."""
        self._waiting.pop(handler, None)

    def check(self, client: VerifierClient, info: VerifierInfo) -> None:
        """Refuse a verifier whose outputs may not be those of the others."""
        if self._info is None or not (differences := _differences(info, self._info)):
            return
        error = IncompatibleError(
            f"the verifier {client.address} does not serve what is served here: {', '.join(differences)}"
        )
        if str(error) != str(client.stream.refusal):
            logger.error("%s", error)
        raise error

    def on_up(self, client: VerifierClient) -> None:
        """Use a verifier, first of all for the sequences that wait."""
        if self._info is not None and _differences(client.info, self._info):
            # What is served here was settled between its handshake and now; its next handshake says why.
            client.stream.drop()
            return
        self._lost = False
        if self._giving_up is not None:
            self._giving_up.cancel()
        self._usable.append(client)
        waiting, self._waiting = list(self._waiting), {}
        for handler in waiting:
            self._place(handler)
        self._announce()

    def on_down(self, client: VerifierClient, handlers: Sequence[VerifierHandler]) -> None:
        """Move a verifier's sequences to others, or keep them for a while."""
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
        """Try another verifier, unless all of them are full, or as many as there are have said so."""
        if handler.refused() >= len(self._usable) or all(client.is_full for client in self._usable):
            handler.on_failed(error)
        else:
            self._place(handler)

    def on_idle(self, client: VerifierClient) -> None:
        """Let go of a verifier that is about to stop, so that it need not wait for us, if there are others."""
        if any(not other.is_draining for other in self._usable):
            client.stream.drop()

    def _settle_on(self, client: VerifierClient) -> None:
        self._info, self.tokenizer = client.info, client.tokenizer
        for other in list(self._usable):
            if _differences(other.info, client.info):
                # Its next handshake says why.
                self._usable.remove(other)
                other.stream.drop()

    def _place(self, handler: VerifierHandler) -> None:
        if not self._usable:
            # What needs no more passes needs no verifier.
            if not handler.finish_if_complete():
                self._waiting[handler] = None
        elif (opening := handler.opening()) is not None:
            self._choose(opening).open(handler, opening)

    def _choose(self, opening: VerifyOpening) -> VerifierClient:
        """The verifier that a sequence is best opened on; one that is about to stop only where there is no other."""
        if len(self._clients) == 1:
            return self._usable[0]
        block_tokens = self.info.shared_block_tokens
        digests = prefix_digests(opening.token_ids, block_tokens, opening.cache_salt)
        num_blocks = -(-len(opening.token_ids) // (block_tokens or DEFAULT_BLOCK_TOKENS))

        def rank(client: VerifierClient) -> tuple[bool, bool, int, int]:
            candidate = client.candidate(self._prefixes[client].num_known(digests))
            return client.is_full, client.is_draining, cost(candidate, num_blocks), self._turns[client]

        best = min(self._usable, key=rank)
        self._prefixes[best].add(digests)
        # One that does not say which process it is could be empty when others read of it.
        if self.affinity is not None and best.info.instance_id:
            self.affinity.note(best.info.instance_id, opening.cache_salt, digests)
        self._turns[best] = next(self._turn)
        return best

    def _give_up(self) -> None:
        self._lost = True
        waiting, self._waiting = list(self._waiting), {}
        for handler in waiting:
            handler.on_failed(UnavailableError("the verifier was lost and did not come back in time"))

    def _absence(self, timeout_s: float) -> str:
        parts = [
            f"the verifier {client.address} was not reached within {timeout_s:g} s "
            f"({client.stream.last_failure or 'no answer'})"
            for client in self._clients
        ]
        return "; ".join(parts)

    def _announce(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _differences(info: VerifierInfo, reference: VerifierInfo) -> list[str]:
    """What of it could make an output another one."""
    names = ("model", "tokenizer_fingerprint", "vocab_size", "max_context_tokens", "eos_token_ids", "exactness")
    different = [
        f"{name} {getattr(info, name)} instead of {getattr(reference, name)}"
        for name in names
        if getattr(info, name) != getattr(reference, name)
    ]
    if missing := set(reference.acceptance_rules) - set(info.acceptance_rules):
        different.append(f"without acceptance_rules {sorted(missing)}")
    return different


def _most_common(clients: Sequence[VerifierClient]) -> VerifierClient:
    """The first of those that serve what most of them do."""
    return max(clients, key=lambda client: sum(not _differences(other.info, client.info) for other in clients))
