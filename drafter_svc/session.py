"""State of one sequence in the service, and its events."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import grpc

from coppice.core.denoising import LEFT_TO_DRAFTER, Denoising
from coppice.core.errors import CoppiceError, InvalidRequestError
from coppice.core.sampling import SamplingParams, check_token_ids
from coppice.core.tree import TokenTree
from coppice.obs.logs import check_request_id
from drafter_svc.acceptance_map import AcceptanceMap, SentTree
from drafter_svc.drafters.base import (
    AheadDraft,
    AheadSequence,
    DenoisingDrafter,
    Drafter,
    DrafterInfo,
    DraftSequence,
    PromptReader,
    SamplingDrafter,
)
from drafter_svc.model.cache_budget import CacheBudget


class UnknownSequenceError(CoppiceError):
    """A message for a sequence that is not open."""

    status = grpc.StatusCode.NOT_FOUND


class DuplicateSequenceError(CoppiceError):
    """A sequence is opened under an id in use."""

    status = grpc.StatusCode.ALREADY_EXISTS


@dataclass(frozen=True, slots=True)
class SessionOpening:
    """Start of a sequence: prompt, sampling, and most nodes of a tree (0: no drafts).

    The target pads rows to multiples of `row_multiple`. With `is_sampled` trees must be sampled; the drafter is then a
    `SamplingDrafter`.
    """

    prompt: tuple[int, ...]
    sampling: SamplingParams
    max_nodes: int
    row_multiple: int = 1
    is_sampled: bool = False
    # For logs.
    request_id: str = ""
    # Cached prefixes are only shared with sequences of the same salt.
    cache_salt: str = ""
    # No drafting ahead.
    is_synchronous: bool = False
    # For drafters that denoise blocks of masks.
    denoising: Denoising = LEFT_TO_DRAFTER

    def check(self, info: DrafterInfo) -> None:
        """Raise InvalidRequestError, which names the field, if the drafter cannot take this."""
        check_request_id(self.request_id)
        if not self.prompt:
            raise InvalidRequestError("open.prompt_token_ids", "must not be empty")
        if 0 < info.max_length < len(self.prompt):
            raise InvalidRequestError(
                "open.prompt_token_ids", f"{len(self.prompt)} tokens, more than the context of {info.max_length}"
            )
        check_token_ids("open.prompt_token_ids", self.prompt, info.vocab_size)
        for name, token_ids in self.sampling.named_token_ids().items():
            check_token_ids(f"open.{name}", token_ids, info.vocab_size)


@dataclass(frozen=True, slots=True)
class SessionOutcome:
    """Tokens committed by a round. `max_nodes` and `row_multiple` replace the opening's, unless None."""

    base_length: int
    token_ids: tuple[int, ...]
    features: bytes
    max_nodes: int | None
    row_multiple: int | None = None


@dataclass(frozen=True, slots=True)
class SessionPrompt:
    """Features of the prompt's tokens from number `first_token` on."""

    first_token: int
    features: bytes


@dataclass(frozen=True, slots=True)
class SessionDraft:
    """A tree after the first `base_length` committed tokens."""

    base_length: int
    tree: TokenTree


@dataclass(frozen=True, slots=True)
class AheadDrafts:
    """Trees after likely outcomes of the round at `base_length`, likeliest outcome first."""

    base_length: int
    drafts: tuple[AheadDraft, ...]

    @property
    def num_nodes(self) -> int:
        """Nodes of all trees."""
        return sum(len(draft.tree) for draft in self.drafts)


class Session:
    """One sequence. The event loop posts outcomes; the model thread applies them and drafts."""

    def __init__(
        self, drafter: Drafter, opening: SessionOpening, acceptance: AcceptanceMap, caches: CacheBudget | None = None
    ) -> None:
        """`acceptance` calibrates sent trees and learns from outcomes; `caches` limits cached tokens."""
        self._drafter = drafter
        self._caches = caches or CacheBudget()
        self._acceptance = acceptance
        # The last tree sent.
        self._sent: SentTree | None = None
        self.request_id = opening.request_id
        self._opening = opening
        self._sequence: DraftSequence | None = None
        self._length = len(opening.prompt)
        self._max_nodes = opening.max_nodes
        self._row_multiple = opening.row_multiple
        self._inbox: deque[SessionOutcome | SessionPrompt] = deque()
        self._scheduled = False
        # Whether there are changes without a draft since.
        self._has_news = False
        # Set when the sequence has ended or failed; the model thread then ignores it.
        self.closed = False
        # Whether idle work is queued. For the model thread.
        self.preparing = False

    def post(self, news: SessionOutcome | SessionPrompt) -> None:
        """Queue an outcome or features of the prompt for the model thread."""
        self._inbox.append(news)

    def schedule(self) -> bool:
        """Whether a job must be submitted; False while a waiting one will see all queued outcomes."""
        if self._scheduled:
            return False
        self._scheduled = True
        return True

    def read(self, max_pieces: int) -> int:
        """Apply queued outcomes and read at most `max_pieces` pieces. On the model thread.

        Returns the pieces left to read before `advance` is a short job; 0 if no tree is wanted.

        Raises:
            InvalidRequestError: an outcome does not fit the sequence, which is then unusable.
        """
        sequence = self._take_in()
        if not self._max_nodes:
            return 0
        if num_left := sequence.read(max_pieces):
            # Otherwise a draft follows, which records the use.
            self._caches.note(sequence)
        return num_left

    def advance(self) -> SessionDraft | None:
        """Apply queued outcomes and draft once, for the newest state. On the model thread.

        None if no tree is wanted or nothing is new.

        Raises:
            InvalidRequestError: an outcome does not fit the sequence, which is then unusable.
        """
        # Before reading the queue: outcomes posted later submit a new job.
        self._scheduled = False
        sequence = self._take_in()
        has_news, self._has_news = self._has_news, False
        if not has_news or self._max_nodes == 0:
            return None
        tree = sequence.draft(self._max_nodes, self._row_multiple)
        self._caches.note(sequence)
        return self._calibrated(tree)

    def expect(self, base_length: int, tree: TokenTree) -> bool:
        """Draft ahead after this tree's outcomes; returns whether it will. On the model thread.

        It will not if more was committed meanwhile or drafting ahead is off: an expectation is a hint.
        """
        sequence = self._sequence
        if self.closed or self._inbox or base_length != self._length or not isinstance(sequence, AheadSequence):
            return False
        if self._opening.is_synchronous or not sequence.drafts_ahead:
            return False
        sequence.expect(tree)
        return True

    def ahead(self) -> AheadDrafts | None:
        """Trees after likely outcomes, when ready. On the model thread."""
        if self.closed or self._inbox or not isinstance(self._sequence, AheadSequence):
            return None
        drafts = self._sequence.ahead()
        return AheadDrafts(self._length, drafts) if drafts else None

    def prepare(self) -> bool:
        """Do a piece of work for the next outcome; returns whether there is more. On the model thread, while idle.

        Nothing is done while no tree is wanted, nor for a sequence whose cache was dropped until it drafts again: idle
        sequences must not evict each other in turn.
        """
        sequence = self._sequence
        if self.closed or sequence is None or not self._max_nodes or self._caches.has_forgotten(sequence):
            return False
        has_more = sequence.prepare()
        self._caches.note(sequence)
        return has_more

    def _calibrated(self, tree: TokenTree) -> SessionDraft:
        """Draft to send. Sampled trees are sent unchanged: their tokens and distributions decide commits."""
        if self._opening.is_sampled:
            return SessionDraft(self._length, tree)
        self._sent = self._acceptance.calibrated(tree, self._opening.sampling.temperature)
        return SessionDraft(self._length, self._sent.tree)

    def _take_in(self) -> DraftSequence:
        if self._sequence is None:
            self._sequence = self._open()
            self._has_news = True
        while self._inbox:
            news = self._inbox.popleft()
            if isinstance(news, SessionOutcome):
                self._apply(self._sequence, news)
                self._has_news = True
            elif isinstance(self._sequence, PromptReader):
                # Worth no draft of its own.
                self._sequence.see_prompt(news.first_token, news.features)
        return self._sequence

    def _open(self) -> DraftSequence:
        opening = self._opening
        if not opening.is_sampled:
            if opening.denoising != LEFT_TO_DRAFTER and isinstance(self._drafter, DenoisingDrafter):
                return self._drafter.open_denoising(
                    opening.prompt, opening.sampling, opening.denoising, opening.cache_salt
                )
            return self._drafter.open(opening.prompt, opening.sampling, opening.cache_salt)
        assert isinstance(self._drafter, SamplingDrafter), "checked before the session was made"
        return self._drafter.open_sampled(opening.prompt, opening.sampling, opening.cache_salt)

    def _apply(self, sequence: DraftSequence, outcome: SessionOutcome) -> None:
        if outcome.base_length != self._length:
            raise InvalidRequestError(
                "outcome.base_length", f"is {outcome.base_length}, but {self._length} tokens are committed"
            )
        check_token_ids("outcome.token_ids", outcome.token_ids, self._drafter.info.vocab_size)
        if self._sent is not None:
            self._sent.follow(outcome.token_ids)
        sequence.extend(outcome.token_ids, outcome.features)
        self._length += len(outcome.token_ids)
        if outcome.max_nodes is not None:
            self._max_nodes = outcome.max_nodes
        if outcome.row_multiple is not None:
            self._row_multiple = outcome.row_multiple
